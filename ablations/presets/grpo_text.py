"""GRPO as the text of the paper of the comparison has it."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="grpo_text",
    title="GRPO, as in the text of 2506.21495",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="grpo",
    slots={
        "rollout.sync_period": Value(1, "set-up: GRPO at s = 1 only"),
        "objective.scale_rewards": Value("none", "eq. 1: the group's mean alone is subtracted"),
        "objective.loss_agg_mode": Value("seq-mean-token-sum", "eq. 1: token sums, no 1/|o|"),
        "objective.kl_coef": Value(0.001, "Table 4"),
    },
    published={
        "rollout.num_prompts": Value(64, "Table 4, verifiable tasks (32 on the others)"),
        "rollout.num_generations": Value(8, "Table 5"),
        "rollout.max_completion_length": Value(2048, "Table 4, verifiable tasks (1,024 on the others)"),
        "rollout.temperature": Value(1.0, "set-up"),
        "rollout.top_p": Value(1.0, "set-up"),
        "optim.lr": ours(1e-6, "the cell of Table 4 cannot be read; as in its other rows"),
        "optim.eps": ours(1e-4, "the cell of Table 4 cannot be read; as in its other rows of verifiable tasks"),
        "optim.max_grad_norm": ours(0.1, "the cell of Table 4 cannot be read; as in its other rows"),
        "optim.beta1": ours(0.9, "not reported; fairseq2's recipe default"),
        "optim.beta2": ours(0.95, "not reported; fairseq2's recipe default"),
        "optim.weight_decay": ours(0.1, "not reported; fairseq2's recipe default"),
        "optim.schedule": ours("constant", "not reported"),
        "optim.warmup_steps": ours(0, "not reported; fairseq2's recipe default"),
    },
)
