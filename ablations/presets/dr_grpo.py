"""GRPO without the two biases: no division by length or by the std."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="dr_grpo",
    title="Dr. GRPO",
    paper="Liu et al. 2025, arXiv 2503.20783",
    parent="grpo",
    without=("objective.kl_coef", "objective.kl_estimator"),
    slots={
        "objective.scale_rewards": Value("none", "section 3.2"),
        "objective.loss_agg_mode": Value("seq-mean-token-sum-norm", "section 3.2; divided by the generation budget"),
        "objective.kl": Value("none", "Table 6: KL 0"),
    },
    published={
        "rollout.num_prompts": ours(128, "Table 6: rollout batch 128, read as prompts"),
        "rollout.num_generations": Value(8, "Table 6"),
        "rollout.temperature": Value(1.0, "Table 6"),
        "rollout.top_p": Value(1.0, "Table 6"),
        "rollout.max_completion_length": Value(3000, "Table 6"),
        "task.max_prompt_length": Value(1024, "Table 6"),
        "objective.num_epochs": Value(1, "Table 6: one inner epoch"),
        "optim.lr": Value(1e-6, "Table 6"),
        "optim.schedule": Value("constant", "Table 6"),
        "optim.beta1": Value(0.9, "Table 6"),
        "optim.beta2": Value(0.95, "Table 6"),
        "optim.weight_decay": Value(0.0, "Table 6"),
        "optim.max_grad_norm": Value(1.0, "Table 6"),
    },
)
