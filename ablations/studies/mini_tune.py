"""Online DPO against GRPO, each at its best: learning rate and beta (DPO) or KL coefficient (GRPO) are searched."""

from ablations.axes.objective import GRPO
from suite.config import RunConfig, apply
from suite.search import LogFloat, Search
from suite.study import Arm, Claim, Study

STUDY = Study(
    name="mini_tune",
    question="Does GRPO differ from online DPO when both are tuned with the same budget?",
    base=apply(
        RunConfig(),
        {"model.path": "seed:addition/{seed}", "train.steps": 80, "eval.every": 20, "eval.num_samples": 0},
    ),
    arms=(
        Arm("dpo", label="online DPO"),
        Arm("grpo", {"objective": GRPO}, "GRPO"),
    ),
    seeds=(10, 11, 12, 13, 14),
    claims=(Claim("GRPO differs from online DPO, both tuned", "different", "grpo", "dpo", smallest_effect=0.03),),
    search=Search(
        ranges={
            "dpo": {"optim.lr": LogFloat(1e-5, 3e-4), "objective.beta": LogFloat(0.05, 2.0)},
            "grpo": {"optim.lr": LogFloat(1e-5, 3e-4), "objective.kl_coef": LogFloat(1e-4, 1e-1)},
        },
        trials=6,
        seeds=(0, 1),
        batch=2,
        startup=4,
    ),
)
