"""A wider clip above than below; live only where a rollout batch is used for several updates or is stale."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="clip_higher",
    question="Does more room for unlikely tokens to grow keep exploration alive?",
    arms=(
        Arm("control", label="epsilon_high as in the base"),
        Arm("clip_higher", {"objective.epsilon_high": 0.28}, "epsilon_high 0.28"),
    ),
    sources=("Yu et al. 2025 (DAPO), arXiv 2503.14476, section 3.1: epsilon_low 0.2, epsilon_high 0.28",),
    needs={"objective.name": "policy_gradient", "objective.trust_region": "clip"},
)
