"""Supervised training on the correct samples of the seed model."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="sft",
    title="SFT on correct samples",
    paper="Yuan et al. 2023, arXiv 2308.01825 (rejection sampling fine-tuning)",
    slots={
        "objective.name": Value("sft", "rejection sampling fine-tuning: cross-entropy on the samples kept"),
        "objective.sft_rows": Value("correct", "rejection sampling fine-tuning: samples with the right answer"),
        "rollout.sync_period": Value("inf", "rejection sampling fine-tuning: the samples are the seed model's"),
    },
    note="The paper keeps distinct reasoning paths only and makes three passes; here every correct sample counts once.",
)
