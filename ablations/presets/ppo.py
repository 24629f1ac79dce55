"""PPO with a critic and generalized advantage estimation."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="ppo",
    title="PPO",
    paper="Schulman et al. 2017, arXiv 1707.06347; as the baseline of Yue et al. 2025 (VAPO), arXiv 2504.05118",
    slots={
        "objective.name": Value("policy_gradient", "eq. 7"),
        "objective.advantage": Value("gae", "Schulman et al. 2016, arXiv 1506.02438, eq. 16"),
        "objective.gamma": Value(1.0, "VAPO, section 5.1"),
        "objective.gae_lambda_policy": Value(0.95, "VAPO, section 5.1"),
        "objective.whiten_advantages": ours(True, "not stated; verl whitens with GAE"),
        "objective.trust_region": Value("clip", "eq. 7"),
        "objective.epsilon_low": Value(0.2, "VAPO, section 5.1"),
        "objective.epsilon_high": Value(0.2, "VAPO, section 5.1"),
        "objective.loss_agg_mode": Value("seq-mean-token-mean", "VAPO, section 5.1: sample-level loss"),
        "critic.init": ours("policy", "VAPO starts it from a reward model, which a verified task has not"),
        "critic.gae_lambda_value": Value(0.95, "VAPO, section 5.1"),
        "critic.cliprange_value": ours(0.5, "not stated; verl's"),
    },
    published={
        "rollout.num_prompts": Value(8192, "VAPO, section 5.1"),
        "rollout.num_generations": Value(1, "VAPO, section 5.1"),
        "objective.num_minibatches": Value(16, "VAPO, section 5.1: mini-batches of 512 of 8,192"),
        "rollout.sync_period": Value(16, "fresh samples for every batch of 16 updates"),
        "optim.lr": Value(1e-6, "VAPO, section 5.1"),
        "optim.schedule": Value("constant", "VAPO, section 5.1: warm-up, then constant"),
        "critic.lr": Value(2e-6, "VAPO, section 5.1"),
    },
    note="Without KL, as in VAPO; Ouyang et al. 2022 put it in the reward: objective.kl = reward.",
)
