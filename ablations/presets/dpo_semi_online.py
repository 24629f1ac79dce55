"""DPO whose generator lags behind by up to s optimizer steps."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="dpo_semi_online",
    title="semi-online DPO",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="dpo_online",
    slots={
        "rollout.sync_period": Value(10, "Table 1, s = 10 (100 beside it; 5 in Table 2)"),
    },
)
