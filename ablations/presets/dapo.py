"""GRPO with decoupled clipping, dynamic sampling, token-level loss and soft overlong punishment."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="dapo",
    title="DAPO",
    paper="Yu et al. 2025, arXiv 2503.14476",
    parent="grpo",
    without=("objective.kl_coef", "objective.kl_estimator"),
    slots={
        "objective.epsilon_low": Value(0.2, "section 4.1"),
        "objective.epsilon_high": Value(0.28, "section 4.1: clip-higher"),
        "objective.loss_agg_mode": Value("token-mean", "section 3.3"),
        "objective.kl": Value("none", "section 2.3"),
        "rollout.dynamic_sampling": Value(True, "section 3.2"),
        "reward.shaping": Value("soft_overlong", "section 3.4, eq. 13"),
        "reward.shaping_coef": ours(
            0.5, "rewards there are +1 and -1, here 1 and 0: half the distance, half the penalty"
        ),
        "reward.soft_punish_max": Value(1.0, "section 4.1: L_max is the budget, 20,480 tokens"),
        "reward.soft_punish_cache": Value(0.2, "section 4.1: L_cache is 4,096 of 20,480 tokens"),
        "rollout.mask_truncated_completions": ours(
            False, "in Table 1; the authors' best runs are without (verl's recipe)"
        ),
    },
    published={
        "rollout.num_prompts": Value(512, "section 4.1"),
        "rollout.num_generations": Value(16, "section 4.1"),
        "rollout.max_completion_length": Value(20480, "section 4.1"),
        "objective.num_minibatches": Value(16, "section 4.1: mini-batches of 512 of 8,192 samples"),
        "rollout.sync_period": Value(16, "fresh samples for every batch of 16 updates"),
        "optim.lr": Value(1e-6, "section 4.1"),
        "optim.schedule": Value("constant", "section 4.1"),
        "optim.warmup_steps": Value(320, "section 4.1: over 20 rollout batches, of 16 updates"),
        "eval.temperature": Value(1.0, "section 4.1"),
        "eval.top_p": Value(0.7, "section 4.1"),
        "eval.num_samples": Value(32, "section 4.1: avg@32"),
    },
)
