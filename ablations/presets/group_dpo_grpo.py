"""GroupDPO and GRPO on the same samples."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="group_dpo_grpo",
    title="GroupDPO + GRPO",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="group_dpo",
    slots={
        "objective.grpo_coef": Value(0.01, "section B.2, alpha (0.001 beside it)"),
        "objective.advantage": Value("group", "eq. 1"),
        "objective.scale_rewards": ours("none", "eq. 1 has no std, the code divides by it; the text's"),
        "objective.loss_agg_mode": Value("seq-mean-token-sum", "eq. 1, and _grpo.py for this loss: no length norm"),
        "objective.trust_region": Value("clip", "eq. 1"),
        "objective.kl": Value("loss", "_grpo.py"),
        "objective.kl_estimator": Value("k3", "_grpo.py"),
        "objective.kl_coef": Value(0.001, "_grpo.py, grpo_beta"),
    },
)
