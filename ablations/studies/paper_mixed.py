"""Mathematics and conversations, alone, mixed, and one after the other: Table 3 of arXiv 2506.21495 at its scale.

Online DPO throughout, with Table 4's numbers of the row that an arm belongs to. Every arm is evaluated on held-out
problems of both tasks. Conversations after mathematics is not in the table; the arXiv version's text has it, and finds
it much worse than the other order. Ours: steps where the paper gives none, how often is evaluated, the seeds, the
claims' effects.
"""

from typing import Any

from ablations.preset import preset
from ablations.studies.paper_nonverifiable import BASE as WILDCHAT
from ablations.studies.paper_nonverifiable import dpo
from ablations.studies.paper_verifiable import BASE as NUMINA
from suite.config import FROM_ARM, apply
from suite.study import Arm, Claim, Study

MATHEMATICS, CONVERSATIONS = "eval/numina_math-test/avg@4", "eval/wildchat-test/reward"

BASE = apply(
    NUMINA,
    {
        "task.name": "mixture",
        "task.pair_rules": "numina_math=random,wildchat=best_worst",  # section 3, per task
        "task.reward_model": WILDCHAT.task.reward_model,
        "eval.num_samples": 4,  # ours
        "eval.validation_problems": 100,  # ours
    },
)
"""What every arm shares."""

_PROMPTS = {"numina_math=1,wildchat=0": 1000, "numina_math=0,wildchat=1": 1000, "numina_math=2,wildchat=1": 50_000}
"""WildChat prompts by mixture: 1,000 alone; 50,000 beside the 100,000 of NuminaMath, two to one in every batch."""


def _on(mixture: str, overrides: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An arm's overrides, trained on a mixture."""
    own = {"task.mixture": mixture, "task.wildchat_prompts": _PROMPTS[mixture], "objective.pair_rule": "random"}
    return {**overrides, **own, **more}


_NUMINA, _WILDCHAT, _BOTH = _PROMPTS
_MATH_ROW = preset("dpo_online", published=True)
_CHAT_ROW = dpo("dpo_online")
_CHAT_STEPS = WILDCHAT.train.steps

STUDY = Study(
    name="paper_mixed",
    question="Do verifiable and non-verifiable data help or hurt each other, mixed or one after the other?",
    base=BASE,
    arms=(
        Arm("mixed", _on(_BOTH, _CHAT_ROW), "NuminaMath + WildChat"),
        Arm("numina_only", _on(_NUMINA, _MATH_ROW), "NuminaMath only"),
        Arm("wildchat_only", _on(_WILDCHAT, _CHAT_ROW, **{"train.steps": _CHAT_STEPS}), "WildChat only"),
        Arm(
            "wildchat_first",
            _on(_NUMINA, _MATH_ROW, **{"model.path": f"{FROM_ARM}wildchat_only"}),
            "WildChat, then NuminaMath",
        ),
        Arm(
            "numina_first",
            _on(_WILDCHAT, _CHAT_ROW, **{"model.path": f"{FROM_ARM}numina_only", "train.steps": _CHAT_STEPS}),
            "NuminaMath, then WildChat",
        ),
    ),
    seeds=(0, 1, 2),  # ours
    claims=(
        Claim("mathematics alone is better at it", "better", "numina_only", "mixed", 0.01, MATHEMATICS),
        Claim("conversations alone are better at them", "better", "wildchat_only", "mixed", 0.1, CONVERSATIONS),
        Claim("conversations come first", "better", "wildchat_first", "numina_first", 0.02, MATHEMATICS),
        Claim("they survive mathematics", "equivalent", "wildchat_first", "wildchat_only", 0.2, CONVERSATIONS),
    ),
    metric=MATHEMATICS,
)
