"""Offline, semi-online and online DPO, and GRPO, on conversations: Table 2 of arXiv 2506.21495 at its scale.

The numbers are those of Table 4, rows of non-verifiable tasks. Ours: how often is evaluated, the seeds, the claims'
effects, and what decides: the reward on held-out prompts, as AlpacaEval and Arena-Hard are evaluations of their own.
The paper picks checkpoints by length-normalised reward; here the last one counts.
"""

from typing import Any

from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

METRIC = "eval/test/reward"

BASE = apply(
    RunConfig(),
    {
        "model.path": "meta-llama/Llama-3.1-8B-Instruct",  # set-up
        "model.dtype": "bfloat16",  # the code's default
        "task.name": "wildchat",  # set-up
        "task.wildchat_prompts": 1000,  # set-up
        "task.reward_model": "Nexusflow/Athene-RM-8B",  # set-up
        "task.chat": True,  # Figure 5
        "train.steps": 1500,  # set-up
        "train.checkpoint_every": 100,
        "eval.every": 50,  # the code's preset for WildChat
        "eval.validation_problems": 0,  # all 470
        "eval.test_problems": 0,
        "eval.num_samples": 1,  # the code: one sample a prompt
        "eval.temperature": 0.6,  # evaluation
        "eval.top_p": 0.9,  # evaluation
    },
)
"""What every arm shares."""

ROW: dict[str, Any] = {
    "rollout.num_prompts": 32,
    "rollout.max_completion_length": 1024,
    "rollout.reference_sync": "none",
    "optim.lr": 1e-6,
    "optim.eps": 1e-8,
    "optim.max_grad_norm": 0.1,
}
"""Table 4, what its rows of non-verifiable tasks have in common."""


def dpo(name: str, **rollout: Any) -> dict[str, Any]:
    """A preset of the DPO family with Table 4's numbers for non-verifiable tasks and best-against-worst pairs."""
    own = {"objective.beta": 0.01, "objective.pair_rule": "best_worst"}  # Table 4; section 3
    return {**preset(name, published=True), **ROW, **own, **{f"rollout.{key}": value for key, value in rollout.items()}}


STUDY = Study(
    name="paper_nonverifiable",
    question="How often must the generator be synchronised when a reward model judges, and does GRPO do better?",
    base=BASE,
    arms=(
        Arm("online", dpo("dpo_online"), "online DPO (s=1)"),
        Arm("offline", dpo("dpo_offline"), "offline DPO (s=∞)"),
        Arm("semi_online_10", dpo("dpo_semi_online"), "semi-online DPO (s=10)"),
        Arm("semi_online_5", dpo("dpo_semi_online", sync_period=5), "semi-online DPO (s=5)"),
        Arm("grpo", {**preset("grpo_text", published=True), **ROW}, "GRPO"),
    ),
    seeds=(0, 1, 2),  # ours
    claims=(
        Claim("online beats offline", "better", "online", "offline", smallest_effect=0.1, metric=METRIC),
        Claim("offline beats the seed model", "better", "offline", SEED_MODEL, smallest_effect=0.1, metric=METRIC),
        Claim("s=10 equals online", "equivalent", "semi_online_10", "online", smallest_effect=0.2, metric=METRIC),
        Claim("online DPO beats GRPO", "better", "online", "grpo", smallest_effect=0.1, metric=METRIC),
    ),
    metric=METRIC,
)
