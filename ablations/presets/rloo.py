"""REINFORCE with the mean reward of the other samples as the baseline."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="rloo",
    title="RLOO",
    paper="Ahmadian et al. 2024, arXiv 2402.14740",
    slots={
        "objective.name": Value("policy_gradient", "REINFORCE"),
        "objective.advantage": Value("rloo", "less the mean reward of the k - 1 others"),
        "objective.trust_region": Value("none", "clipping is active in less than 5 % of steps"),
        "objective.loss_agg_mode": Value("seq-mean-token-sum", "a completion is one action"),
        "objective.kl": Value("reward", "R = r - beta log(pi / ref)"),
        "objective.kl_estimator": Value("k1", "R = r - beta log(pi / ref)"),
        "objective.kl_coef": Value(0.03, "hyperparameters, TL;DR (0.10 for HH)"),
    },
    published={
        "rollout.num_prompts": ours(128, "hyperparameters: a rollout batch of 512, read as samples of k = 4"),
        "rollout.num_generations": Value(4, "Table 1, k = 4 (2 beside it)"),
        "objective.num_minibatches": Value(2, "hyperparameters: 2 gradient steps per batch, of 256"),
        "rollout.sync_period": Value(2, "fresh samples for every batch of 2 gradient steps"),
        "rollout.max_completion_length": ours(512, "hyperparameters: a context of 512"),
        "optim.lr": Value(1e-6, "hyperparameters"),
        "optim.schedule": Value("constant", "hyperparameters"),
        "optim.warmup_steps": Value(18, "hyperparameters: 3 % of 600 steps"),
    },
)
