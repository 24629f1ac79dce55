"""Online DPO with the negative log-likelihood of the chosen answers."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="dpo_nll",
    title="online DPO + NLL",
    paper="Lanchantin et al. 2025, arXiv 2506.21495",
    parent="dpo_online",
    slots={
        "objective.nll_coef": Value(1.0, "section B.2"),
        "objective.nll_length_normalized": Value(True, "the code's default; section 5.1 has both"),
    },
)
