"""Offline, semi-online and online DPO, and GRPO, on mathematics: Table 1 of arXiv 2506.21495 at its scale.

The numbers are those of the presets' published layers (Table 4). Ours: the number of steps, how often is evaluated, the
seeds, the claims' effects. MATH500 and AMC23, which the table has beside NuminaMath's test problems, are evaluations of
their own.
"""

from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

METRIC = "eval/test/avg@50"

BASE = apply(
    RunConfig(),
    {
        "model.path": "meta-llama/Llama-3.1-8B-Instruct",  # set-up
        "model.dtype": "bfloat16",  # the code's default
        "task.name": "numina_math",  # set-up
        "task.chat": True,  # Figure 4
        "train.steps": 1000,  # ours: not reported; s = 100 then gives ten loads
        "train.checkpoint_every": 100,
        "eval.every": 100,  # ours
        "eval.validation_problems": 200,  # ours, of 1,980
        "eval.test_problems": 0,  # all 1,980
        "eval.num_samples": 50,  # evaluation: N = 50 solutions a problem
        "eval.temperature": 0.6,  # evaluation
        "eval.top_p": 0.9,  # evaluation
    },
)
"""What every arm shares."""

STUDY = Study(
    name="paper_verifiable",
    question="How often must the generator be synchronised with the learner, and does GRPO do better than DPO?",
    base=BASE,
    arms=(
        Arm("online", preset("dpo_online", published=True), "online DPO (s=1)"),
        Arm("offline", preset("dpo_offline", published=True), "offline DPO (s=∞)"),
        Arm(
            "semi_online_100",
            preset("dpo_semi_online", published=True, rollout={"sync_period": 100}),
            "semi-online DPO (s=100)",
        ),
        Arm("semi_online_10", preset("dpo_semi_online", published=True), "semi-online DPO (s=10)"),
        Arm("grpo", preset("grpo_text", published=True), "GRPO"),
    ),
    seeds=(0, 1, 2),  # ours: the paper's spread is over the solutions of one run
    claims=(
        Claim("online beats offline", "better", "online", "offline", smallest_effect=0.01, metric=METRIC),
        Claim("offline beats the seed model", "better", "offline", SEED_MODEL, smallest_effect=0.01, metric=METRIC),
        Claim("s=100 equals online", "equivalent", "semi_online_100", "online", smallest_effect=0.015, metric=METRIC),
        Claim("s=10 equals online", "equivalent", "semi_online_10", "online", smallest_effect=0.015, metric=METRIC),
        Claim("GRPO differs from online DPO", "different", "grpo", "online", smallest_effect=0.01, metric=METRIC),
    ),
    metric=METRIC,
)
