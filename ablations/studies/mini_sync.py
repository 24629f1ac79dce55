"""The paper's comparison in miniature: offline, semi-online and online DPO, and GRPO.

A replicate is a seed model with a training seed of its own, since seed models differ more than training seeds do.
Recipe, margins and the number of replicates come from pilots on replicates 100 to 109: LOG.md, "the recipe of
mini_sync".
"""

from ablations.axes.objective import GRPO
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

STUDY = Study(
    name="mini_sync",
    question="How often must the generator be synchronised with the learner, and does GRPO do better than DPO?",
    base=apply(
        RunConfig(),
        {
            "model.path": "seed:addition/{seed}",
            "objective.beta": 0.5,
            "optim.lr": 3e-5,
            "train.steps": 80,
            "eval.every": 20,
            "eval.num_samples": 0,
        },
    ),
    arms=(
        Arm("online", {}, "online DPO, s=1"),
        Arm("grpo", {"objective": GRPO}, "GRPO, s=1"),
        Arm("semi_online", {"rollout.sync_period": 10}, "semi-online DPO, s=10"),
        Arm("offline", {"rollout.sync_period": "inf"}, "offline DPO, s=∞"),
    ),
    seeds=(0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    claims=(
        Claim("online beats offline", "better", "online", "offline", smallest_effect=0.08),
        Claim("semi-online equals online", "equivalent", "semi_online", "online", smallest_effect=0.03),
        Claim("offline beats the seed model", "better", "offline", SEED_MODEL, smallest_effect=0.08),
        Claim("GRPO differs from online DPO", "different", "grpo", "online", smallest_effect=0.03),
    ),
)
