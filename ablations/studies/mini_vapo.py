"""VAPO taken apart in miniature: its parts added one by one to PPO, and each left out once.

Four updates a rollout batch, so that clipping acts; a batch has 256 samples with and without groups. The other numbers
are ours.
"""

from ablations.studies.vapo_ablation import PARTS, taken_apart
from suite.study import Claim, Study

_TABLE = taken_apart(
    {
        "objective.num_minibatches": 4,
        "rollout.sync_period": 4,
        "critic.pretrain_steps": 12,
        "model.path": "seed:addition/{seed}",
        "train.steps": 120,
        "eval.every": 20,
        "eval.num_samples": 1,
    },
    {"rollout.num_prompts": 256, "rollout.num_generations": 1},
    published=False,
)

STUDY = Study(
    name="mini_vapo",
    question="What does each part of VAPO add to PPO, and what is lost without it?",
    base=_TABLE.base,
    arms=_TABLE.both(),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("VAPO beats PPO", "better", "full", "plain", smallest_effect=0.03),
        *(
            Claim(f"VAPO needs {part.label}", "better", "full", _TABLE.without(part.name), smallest_effect=0.03)
            for part in PARTS
        ),
    ),
)
