"""REINFORCE++ with the group's mean subtracted first and the KL in the loss."""

from ablations.preset import Preset, Value, ours

PRESET = Preset(
    name="reinforce_pp_baseline",
    title="REINFORCE++-baseline",
    paper="Hu et al. 2025, arXiv 2501.03262",
    parent="reinforce_pp",
    slots={
        "objective.advantage": Value(
            "reinforce_pp_baseline", "eq. 6 and 7 of v9: less the group's mean, then whitened"
        ),
        "objective.kl": Value("loss", "a separate KL loss"),
        "objective.kl_estimator": Value("k2", "a separate KL loss: half the squared log-ratio"),
    },
    published={
        "rollout.num_generations": ours(4, "k > 1; GRPO's k in the comparison"),
    },
)
