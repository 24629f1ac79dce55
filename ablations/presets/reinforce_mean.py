"""REINFORCE with the mean reward of the group as the baseline."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="reinforce_mean",
    title="REINFORCE, group mean",
    paper="Lanchantin et al. 2025, arXiv 2506.21495, and surveys of the field",
    parent="grpo_text",
    slots={
        "objective.kl": ours("reward", "PPO's place for it; what tells this variant from Dr. GRPO"),
        "objective.kl_estimator": Value("k1", "Ouyang et al. 2022, arXiv 2203.02155, eq. 2"),
    },
    note="Its advantages equal those of Dr. GRPO as long as the KL coefficient is 0.",
)
