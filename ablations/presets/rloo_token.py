"""RLOO with a return for every token, so that a token answers only for the KL that follows it."""

from ablations.preset import Preset, ours

PRESET = Preset(
    name="rloo_token",
    title="RLOO, token level",
    paper="Ahmadian et al. 2024, arXiv 2402.14740",
    parent="rloo",
    slots={
        "objective.advantage": ours("rloo_token", "returns-to-go less the leave-one-out mean return"),
        "objective.gamma": ours(1.0, "undiscounted, as the response-level estimator"),
    },
    note="A variant: the paper takes the whole completion as one action. Without KL in the reward the two are equal.",
)
