"""REINFORCE whose per-token returns are whitened over the batch, under PPO's clip."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="reinforce_pp",
    title="REINFORCE++",
    paper="Hu et al. 2025, arXiv 2501.03262",
    slots={
        "objective.name": Value("policy_gradient", "eq. 1 of v9"),
        "objective.advantage": Value("reinforce_pp", "eq. 4 and 5 of v9: r less the KL from the token on, whitened"),
        "objective.gamma": Value(1.0, "eq. 4 of v9: undiscounted"),
        "objective.trust_region": Value("clip", "PPO's surrogate"),
        "objective.epsilon_low": ours(0.2, "PPO's (1707.06347)"),
        "objective.epsilon_high": ours(0.2, "PPO's (1707.06347)"),
        "objective.loss_agg_mode": ours("token-mean", "as the whitening, which is over tokens"),
        "objective.kl": Value("reward", "eq. 4 of v9"),
        "objective.kl_estimator": Value("k1", "eq. 4 of v9"),
        "objective.kl_coef": ours(0.01, "not in the text we read"),
    },
    published={
        "rollout.num_generations": Value(1, "k = 1, its comparison with GRPO"),
    },
)
