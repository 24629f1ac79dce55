"""DAPO's own table at its own scale: from GRPO without KL to DAPO, one technique after the other.

Every number is the preset's published one. Ours: the model (Qwen2.5-32B there) with a dialogue's length to match its
context, the prompt, the number of steps, the seeds, and what is held out (AIME 2024 there).
"""

from ablations.parts import Ablation, Part
from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import Claim, Study

PARTS = (
    Part("overlong_filtering", "overlong filtering", ("rollout.mask_truncated_completions",)),
    Part("clip_higher", "clip-higher", ("objective.epsilon_high",)),
    Part("soft_punishment", "soft overlong punishment", ("reward.shaping", "reward.shaping_coef")),
    Part("token_loss", "token-level loss", ("objective.loss_agg_mode",)),
    Part("dynamic_sampling", "dynamic sampling", ("rollout.dynamic_sampling",)),
)
"""Table 1 (2503.14476), in its order: naive 30, 36, 38, 41, 42, DAPO 50 (AIME 2024, avg@32)."""


def taken_apart(overrides: dict[str, object], *, published: bool) -> Ablation:
    """DAPO and its parts under further overrides. Overlong filtering is on, as in Table 1."""
    # the preset has it off, as the authors' best runs do
    dapo = {**preset("dapo", published=published), "rollout.mask_truncated_completions": True}
    return Ablation(apply(RunConfig(), {**dapo, **overrides}), RunConfig(), PARTS, "GRPO without KL", "DAPO")


_TABLE = taken_apart(
    {
        "model.path": "meta-llama/Llama-3.1-8B-Instruct",  # ours
        "model.dtype": "bfloat16",
        "task.name": "hub",
        "task.source": "open-r1/DAPO-Math-17k-Processed",  # DAPO-Math-17K, section 3.5, in plain columns
        "task.problem_column": "prompt",
        "task.answer_column": "solution",
        "task.template": "{problem}\n\nReason step by step, and put the final answer within \\boxed{}.",  # ours
        "task.chat": True,
        "train.steps": 4800,  # ours: 300 rollout batches of 16 updates
        "eval.every": 480,
        "eval.validation_problems": 100,
        "eval.test_problems": 0,
    },
    published=True,
)

STUDY = Study(
    name="dapo_ablation",
    question="What does each technique of DAPO add to GRPO?",
    base=_TABLE.base,
    arms=_TABLE.cumulative(),
    seeds=(0, 1, 2),
    claims=(
        Claim("DAPO beats GRPO", "better", "full", "plain", smallest_effect=0.05, metric="eval/test/avg@32"),
        Claim(
            "dynamic sampling helps",
            "better",
            "full",
            "plus_token_loss",
            smallest_effect=0.02,
            metric="eval/test/avg@32",
        ),
    ),
    metric="eval/test/avg@32",
)
