"""DPO on samples of the seed model, which is never replaced."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="dpo_offline",
    title="offline DPO",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="dpo_online",
    slots={
        "rollout.sync_period": Value("inf", "Table 1, s = inf"),
        "rollout.source": ours(
            "generator", "fresh samples of the seed model, as in the code; the text has one fixed set"
        ),
    },
    published={
        "rollout.reference_sync": Value("none", "Table 4"),
    },
    note="For the text's fixed set take rollout.source = fixed; for DPO as first published (2305.18290), external.",
)
