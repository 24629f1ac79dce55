"""DAPO taken apart in miniature: its techniques added one by one, and each left out once.

Four updates a rollout batch, so that clipping acts. The other numbers are ours.
"""

from ablations.studies.dapo_ablation import PARTS, taken_apart
from suite.study import Claim, Study

_TABLE = taken_apart(
    {
        "objective.num_minibatches": 4,
        "rollout.sync_period": 4,
        "model.path": "seed:addition/{seed}",
        "train.steps": 120,
        "eval.every": 20,
        "eval.num_samples": 1,
    },
    published=False,
)

STUDY = Study(
    name="mini_dapo",
    question="What does each technique of DAPO add to GRPO, and what is lost without it?",
    base=_TABLE.base,
    arms=_TABLE.both(),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("DAPO beats GRPO", "better", "full", "plain", smallest_effect=0.03),
        *(
            Claim(f"DAPO needs {part.label}", "better", "full", _TABLE.without(part.name), smallest_effect=0.03)
            for part in PARTS
        ),
    ),
)
