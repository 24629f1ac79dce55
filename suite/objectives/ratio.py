"""The importance ratio: what stands in its denominator, and when it can only be 1."""

from __future__ import annotations

from typing import Literal

from suite.config import RunConfig


def resolve_ratio_reference(config: RunConfig) -> Literal["learner", "generator"]:
    """Whose log-probs are the denominator of the importance ratio.

    `auto` is `generator` when the sync period exceeds the updates per batch U (or is `inf`), so that the
    ratio measures staleness, and `learner` otherwise.
    """
    choice = config.objective.ratio_reference
    if choice != "auto":
        return choice
    period = config.rollout.sync_period
    return "generator" if period == "inf" or period > config.updates_per_batch else "learner"


def ratio_is_one(config: RunConfig) -> bool:
    """Whether the ratio is provably 1 throughout (learner reference, one update per rollout batch).

    Then every trust region is inert: arms that differ only in it, or in its epsilons, are one run.
    """
    return config.updates_per_batch == 1 and resolve_ratio_reference(config) == "learner"
