"""REINFORCE with the reward of the greedy completion as the baseline."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="remax",
    title="ReMax",
    paper="Li et al. 2023, arXiv 2310.10505, and the authors' repository liziniu/ReMax",
    slots={
        "objective.name": Value("policy_gradient", "REINFORCE with a greedy baseline"),
        "objective.advantage": Value("remax", "less the reward of the greedy completion"),
        "objective.trust_region": Value("none", "REINFORCE's gradient, no ratio"),
        "objective.loss_agg_mode": Value("token-mean", "repository: the mean over the tokens of a batch"),
        "objective.kl": Value("reward", "repository: a penalty on every token"),
        "objective.kl_estimator": Value("k1", "repository: log pi - log ref"),
        "objective.kl_coef": Value(0.05, "repository, step 3 script for Llama-2-7B: kl_ctl"),
    },
    published={
        "objective.gamma": Value(0.99, "repository, step 3 script"),
        "objective.num_epochs": Value(1, "repository, step 3 script"),
        "rollout.num_generations": Value(1, "one sample and one greedy completion a prompt"),
        "rollout.max_completion_length": Value(256, "repository, step 3 script"),
        "task.max_prompt_length": Value(256, "repository, step 3 script"),
        "optim.lr": Value(1e-6, "repository, step 3 script"),
        "optim.schedule": Value("cosine", "repository, step 3 script"),
        "optim.weight_decay": Value(0.1, "repository, step 3 script"),
        "optim.warmup_steps": Value(0, "repository, step 3 script"),
    },
    note="The greedy completion is counted in the cost. The repository clips rewards at 5, out of reach here.",
)
