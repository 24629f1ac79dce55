"""The best of n samples of a model: a way to evaluate, beside any way to train."""

from ablations.preset import Preset, ours

PRESET = Preset(
    name="best_of_n",
    title="best of n",
    paper="Stiennon et al. 2020, arXiv 2009.01325",
    slots={
        "eval.num_samples": ours(16, "the n of reports differs; pass@16 is common"),
    },
    note="For a verified task the verifier chooses (pass@n, an upper bound), for a scored one the reward, or a reward "
    "model that eval.reward_model names.",
    evaluates=True,
)
