"""A reward that an untrained model earns too; importing this registers it."""

from __future__ import annotations

from suite.rewards import SHAPINGS


@SHAPINGS.register("test_low_tokens")
def low_tokens(groups: list, reward: object) -> None:
    """The share of tokens below 8."""
    for group in groups:
        for rollout in group:
            ids = rollout.completion.token_ids
            rollout.reward = sum(token < 8 for token in ids) / len(ids)
