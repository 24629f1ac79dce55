"""GRPO as the code of the paper of the comparison has it."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="grpo_code",
    title="GRPO, as in the code of 2506.21495",
    paper="Lanchantin et al. 2025, arXiv 2506.21495; fairseq2, online_finetune/_grpo.py",
    parent="grpo_text",
    slots={
        "objective.scale_rewards": Value("group", "_grpo.py: divided by std + 1e-6"),
        "objective.advantage_eps": Value(1e-6, "_grpo.py"),
        "objective.loss_agg_mode": Value("seq-mean-token-mean", "_grpo.py: length_normalization, on by default"),
    },
)
