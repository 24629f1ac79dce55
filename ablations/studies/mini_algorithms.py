"""Every preset under one budget: equal steps, prompts and samples a prompt, with SFT and best of n beside them.

What a method generates beyond that (ReMax's greedy completions, the groups that DAPO throws away) is in its cost.
Ours: the rates, and beta 0.7 for the DPO family, at which offline DPO learns in miniature (see LOG.md).
"""

from ablations.load import load_preset, presets
from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study


def _arm(name: str) -> Arm:
    overrides = preset(name)
    if "objective.pair_rule" in overrides:
        overrides["objective.beta"] = 0.7
    return Arm(name, overrides, load_preset(name).title)


_NAMES = [name for name in presets() if not load_preset(name).evaluates]
_NAMES.sort(key=lambda name: name != "dpo_online")  # the control comes first

STUDY = Study(
    name="mini_algorithms",
    question="Which algorithm learns most from the same number of steps, prompts and samples?",
    base=apply(
        RunConfig(),
        {
            **preset("best_of_n", eval={"num_samples": 8}),
            "model.path": "seed:addition/{seed}",
            "train.steps": 120,
            "eval.every": 30,
            "eval.validation_problems": 200,
        },
    ),
    arms=tuple(map(_arm, _NAMES)),
    seeds=(0, 1, 2, 3, 4),
    claims=(
        Claim("online DPO beats offline DPO", "better", "dpo_online", "dpo_offline", smallest_effect=0.03),
        Claim("offline DPO beats SFT", "better", "dpo_offline", "sft", smallest_effect=0.03),
        Claim("online DPO beats SFT", "better", "dpo_online", "sft", smallest_effect=0.03),
        Claim("GRPO beats SFT", "better", "grpo", "sft", smallest_effect=0.03),
        Claim("SFT beats the seed model", "better", "sft", SEED_MODEL, smallest_effect=0.03),
        Claim(
            "GRPO finds no more than best of 8 of the seed model", "equivalent", "grpo", SEED_MODEL,
            smallest_effect=0.03, metric="eval/test/pass@8",
        ),
    ),
)  # fmt: skip
