"""GRPO as first published."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="grpo",
    title="GRPO",
    paper="Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300",
    slots={
        "objective.name": Value("policy_gradient", "eq. 3"),
        "objective.advantage": Value("group", "section 4.1.2"),
        "objective.scale_rewards": Value("group", "section 4.1.2: divided by the group's std"),
        "objective.advantage_eps": ours(1e-6, "not stated; verl's"),
        "objective.advantage_ddof": ours(1, "not stated; torch's, as in verl and TRL"),
        "objective.trust_region": Value("clip", "eq. 3"),
        "objective.epsilon_low": ours(0.2, "not reported; PPO's (1707.06347)"),
        "objective.epsilon_high": ours(0.2, "not reported; PPO's (1707.06347)"),
        "objective.loss_agg_mode": Value("seq-mean-token-mean", "eq. 3: 1/G sum of 1/|o| sums"),
        "objective.kl": Value("loss", "eq. 3"),
        "objective.kl_estimator": Value("k3", "eq. 4"),
        "objective.kl_coef": Value(0.04, "section 4.2"),
    },
    published={
        "rollout.num_prompts": ours(16, "section 4.2: a batch of 1,024, read as samples: 16 x 64"),
        "rollout.num_generations": Value(64, "section 4.2"),
        "rollout.max_completion_length": Value(1024, "section 4.2"),
        "rollout.temperature": ours(1.0, "not reported"),
        "objective.num_minibatches": Value(1, "section 4.2: a single update per exploration stage"),
        "optim.lr": Value(1e-6, "section 4.2"),
    },
    note="The paper of the comparison has a GRPO of its own, without std and with token sums: grpo_text.",
)
