"""Verifiable and non-verifiable data, alone, mixed, and one after the other: the paper's Table 3 in miniature.

Additions are verified, replies are scored by a reward model that has learnt a hidden preference (which is measured, so
that over-optimisation shows). Online DPO throughout, as in the table. Every arm is evaluated on both tasks. An arm that
goes on where another one ended has had twice the steps, as in the paper. Ours: beta 0.7 (see LOG.md), the rate, the
steps.
"""

from ablations.preset import preset
from suite.config import FROM_ARM, RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

ADDITION, REPLIES = "eval/addition-test/accuracy", "eval/replies-test/hidden_reward"

_ADDITION_ONLY = {"task.mixture": "addition=1,replies=0"}
_REPLIES_ONLY = {"task.mixture": "addition=0,replies=1"}

STUDY = Study(
    name="mini_mix",
    question="Do verifiable and non-verifiable data help or hurt each other, mixed or one after the other?",
    base=apply(
        RunConfig(),
        {
            **preset("dpo_online", objective={"beta": 0.7}),
            "model.path": "seed:mixed/{seed}",
            "task.name": "mixture",
            "task.mixture": "addition=1,replies=1",
            "task.pair_rules": "addition=random,replies=best_worst",
            "train.steps": 120,
            "eval.every": 20,
            "eval.num_samples": 1,
        },
    ),
    arms=(
        Arm("mixed", {}, "mixed"),
        Arm("verifiable", _ADDITION_ONLY, "verifiable only"),
        Arm("nonverifiable", _REPLIES_ONLY, "non-verifiable only"),
        Arm(
            "nonverifiable_first",
            {"model.path": f"{FROM_ARM}nonverifiable", **_ADDITION_ONLY},
            "non-verifiable, then verifiable",
        ),
        Arm(
            "verifiable_first",
            {"model.path": f"{FROM_ARM}verifiable", **_REPLIES_ONLY},
            "verifiable, then non-verifiable",
        ),
    ),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("a mixture improves additions", "better", "mixed", SEED_MODEL, 0.03, ADDITION),
        Claim("a mixture improves replies", "better", "mixed", SEED_MODEL, 0.1, REPLIES),
        Claim("additions alone are better at additions", "better", "verifiable", "mixed", 0.02, ADDITION),
        Claim("replies alone are better at replies", "better", "nonverifiable", "mixed", 0.1, REPLIES),
        Claim("replies alone change additions", "different", "nonverifiable", SEED_MODEL, 0.03, ADDITION),
        Claim("replies come first", "better", "nonverifiable_first", "verifiable_first", 0.03, ADDITION),
        Claim("replies survive additions", "equivalent", "nonverifiable_first", "nonverifiable", 0.2, REPLIES),
    ),
    metric=ADDITION,
)
