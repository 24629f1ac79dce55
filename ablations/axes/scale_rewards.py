"""Whether a standard deviation divides the advantage, and whose."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="scale_rewards",
    question="Does dividing the advantage by a standard deviation help, or favour very easy and very hard prompts?",
    arms=(
        Arm("control", label="std of the group"),
        Arm("std_batch", {"objective.scale_rewards": "batch"}, "std of the batch"),
        Arm("std_none", {"objective.scale_rewards": "none"}, "no std"),
    ),
    sources=(
        "Shao et al. 2024, arXiv 2402.03300 (std of the group)",
        "Liu et al. 2025, arXiv 2503.20783 (none: the std biases by difficulty)",
        "Liu et al. 2025, arXiv 2508.08221 (std of the batch)",
    ),
    needs={"objective.name": "policy_gradient", "objective.scale_rewards": "group"},
)
