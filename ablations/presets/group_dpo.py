"""DPO with every correct sample of a group against every incorrect one."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="group_dpo",
    title="GroupDPO",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="dpo_semi_online",
    slots={
        "objective.pair_rule": Value("group", "eq. 4"),
    },
    note="Compared with semi-online DPO there (Figure 8); of which s the text does not say.",
)
