"""GRPO's group size on mathematics: Table 5 of arXiv 2506.21495 at its scale."""

from ablations.preset import preset
from ablations.studies.paper_verifiable import BASE, METRIC
from suite.config import apply
from suite.study import Arm, Claim, Study

STUDY = Study(
    name="paper_group_size",
    question="How many rollouts per prompt does GRPO need?",
    base=apply(BASE, preset("grpo_text", published=True)),
    arms=(
        Arm("n8", {}, "GRPO n=8"),
        Arm("n4", {"rollout.num_generations": 4}, "GRPO n=4"),
        Arm("n12", {"rollout.num_generations": 12}, "GRPO n=12"),
    ),
    seeds=(0, 1, 2),  # ours
    claims=(
        Claim("8 beat 4", "better", "n8", "n4", smallest_effect=0.01, metric=METRIC),
        Claim("12 are no better than 8", "equivalent", "n12", "n8", smallest_effect=0.01, metric=METRIC),
    ),
    metric=METRIC,
)
