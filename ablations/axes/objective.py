"""DPO or GRPO; each arm replaces the whole objective, so that no option of the other is left behind."""

from ablations.preset import objective
from suite.study import Arm, Axis

GRPO = objective("grpo_text")
"""GRPO as the paper's text has it (eq. 1): the group's mean subtracted, no std, token sums; KL as in Table 4."""

GRPO_CODE = objective("grpo_code")
"""GRPO as the paper's code has it: divided by the std, mean over the tokens of each sequence."""

AXIS = Axis(
    name="objective",
    question="Does it matter whether the rewards train preference pairs or a policy gradient?",
    arms=(
        Arm("control", label="DPO"),
        Arm("grpo", {"objective": GRPO}, "GRPO"),
        Arm("grpo_code", {"objective": GRPO_CODE}, "GRPO, as in the code"),
    ),
    sources=(
        "Lanchantin et al. 2025, arXiv 2506.21495, eq. 1 and 3, Table 4",
        "fairseq2, online_finetune/_grpo.py (std and token means)",
        "Liu et al. 2025, arXiv 2503.20783 (no division by length or std)",
    ),
    needs={"objective.name": "dpo"},
)
