"""Whether the reference model moves with the generator."""

from suite.study import Arm, Axis

AXIS = Axis(
    name="reference_sync",
    question="Should the reference take the learner's weights whenever the generator does?",
    arms=(
        Arm("control", label="fixed reference"),
        Arm("reference_moves", {"rollout.reference_sync": "with_generator"}, "reference moves with the generator"),
    ),
    sources=("Lanchantin et al. 2025, arXiv 2506.21495, Table 4 (yes for semi-online and online DPO on mathematics)",),
    needs={"rollout.reference_sync": "none"},
)
