"""DPO on pairs of fresh samples: the generator takes the learner's weights after every optimizer step."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="dpo_online",
    title="online DPO",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    slots={
        "objective.name": Value("dpo", "eq. 3"),
        "objective.pair_rule": Value("random", "section 3: random correct against random incorrect"),
        "rollout.sync_period": Value(1, "Table 1, s = 1"),
        "rollout.reference_sync": ours("none", "Table 4 has both; see the published layer"),
    },
    published={
        "objective.beta": Value(0.1, "Table 4, verifiable tasks (0.01 on the others)"),
        "rollout.reference_sync": Value("with_generator", "Table 4, verifiable tasks (none on the others)"),
        "rollout.num_prompts": Value(64, "Table 4, verifiable tasks (32 on the others)"),
        "rollout.num_generations": ours(8, "not stated for DPO; the group of its GRPO (Table 5)"),
        "rollout.max_completion_length": Value(2048, "Table 4, verifiable tasks (1,024 on the others)"),
        "rollout.temperature": Value(1.0, "set-up"),
        "rollout.top_p": Value(1.0, "set-up"),
        "optim.lr": Value(1e-6, "Table 4"),
        "optim.eps": Value(1e-4, "Table 4, verifiable tasks (1e-8 on the others)"),
        "optim.max_grad_norm": Value(0.1, "Table 4"),
        "optim.beta1": ours(0.9, "not reported; fairseq2's recipe default"),
        "optim.beta2": ours(0.95, "not reported; fairseq2's recipe default"),
        "optim.weight_decay": ours(0.1, "not reported; fairseq2's recipe default"),
        "optim.schedule": ours("constant", "not reported"),
        "optim.warmup_steps": ours(0, "not reported; fairseq2's recipe default"),
    },
    note="The published layer is that of verifiable tasks.",
)
