"""REINFORCE with a moving mean of rewards as the baseline."""

from ablations.preset import Preset, Value

PRESET = Preset(
    name="reinforce",
    title="REINFORCE",
    paper="Ahmadian et al. 2024, arXiv 2402.14740",
    parent="rloo",
    slots={
        "objective.advantage": Value("reinforce", "less a moving average of rewards"),
        "objective.baseline_decay": Value(1.0, "the mean of all rewards so far"),
    },
    published={
        "rollout.num_prompts": Value(512, "hyperparameters: a rollout batch of 512"),
        "rollout.num_generations": Value(1, "one sample a prompt"),
    },
)
