"""An entropy bonus in the loss."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="entropy_coef",
    question="Does an entropy bonus keep the policy from collapsing, and what does it cost?",
    arms=(
        Arm("control", label="no entropy bonus"),
        Arm("entropy_1e-4", {"objective.entropy_coef": 0.0001}, "entropy 0.0001"),
        Arm("entropy_2e-4", {"objective.entropy_coef": 0.0002}, "entropy 0.0002"),
        Arm("entropy_3e-4", {"objective.entropy_coef": 0.0003}, "entropy 0.0003"),
        Arm("entropy_5e-4", {"objective.entropy_coef": 0.0005}, "entropy 0.0005"),
        # a model of 0.3M parameters on short answers needs larger ones before anything moves
        Arm("entropy_1e-2", {"objective.entropy_coef": 0.01}, "entropy 0.01"),
        Arm("entropy_1e-1", {"objective.entropy_coef": 0.1}, "entropy 0.1"),
    ),
    sources=("Lanchantin et al. 2025, arXiv 2506.21495, Figure 6 (0.0001, 0.0002, 0.0003, 0.0005)",),
    needs={"objective.entropy_coef": 0.0},
)
