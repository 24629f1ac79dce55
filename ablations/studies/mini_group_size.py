"""How many rollouts a prompt GRPO needs: the paper's Table 5 in miniature, with the number of prompts held."""

from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import Arm, Claim, Study

STUDY = Study(
    name="mini_group_size",
    question="How many rollouts per prompt does GRPO need?",
    base=apply(
        RunConfig(),
        {
            **preset("grpo_text"),
            "model.path": "seed:addition/{seed}",
            "train.steps": 120,
            "eval.every": 20,
            "eval.num_samples": 1,
        },
    ),
    arms=(
        Arm("n8", {}, "n=8"),
        Arm("n2", {"rollout.num_generations": 2}, "n=2"),  # ours
        Arm("n4", {"rollout.num_generations": 4}, "n=4"),
        Arm("n12", {"rollout.num_generations": 12}, "n=12"),
        Arm("n32", {"rollout.num_generations": 32}, "n=32"),  # ours
    ),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("8 beat 4", "better", "n8", "n4", smallest_effect=0.02),
        Claim("12 are no better than 8", "equivalent", "n12", "n8", smallest_effect=0.02),
    ),
)
