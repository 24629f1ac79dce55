"""From verdicts to the rewards that an objective sees: the verifier's, then an optional registered shaping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from suite.protocols import Group, Rollout
from suite.registry import Registry

Shaping = Callable[[Sequence[Group], float], None]
"""Changes the `reward` of rollouts in place; takes the groups of a batch and the coefficient."""

SHAPINGS: Registry[Shaping] = Registry("reward shaping")


@SHAPINGS.register("none")
def none(groups: Sequence[Group], coefficient: float) -> None:
    """Rewards stay the verifier's."""


def statistics(groups: Sequence[Group], tolerance: float = 1e-6) -> dict[str, float]:
    """The `reward/*` and `length/*` metrics of a rollout batch."""
    rollouts: list[Rollout] = [rollout for group in groups for rollout in group]
    lengths = [len(r.completion.token_ids) for r in rollouts]
    n = len(rollouts)
    spreads, constant = [], 0
    for group in groups:
        rewards = [r.reward for r in group]
        mean = sum(rewards) / len(rewards)
        variance = sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
        spreads.append(variance**0.5)
        constant += max(rewards) - min(rewards) <= tolerance
    outcomes = [r.verdict.outcome for r in rollouts]
    logprobs = [value for r in rollouts for value in r.completion.logprobs]
    sampled = {} if math.isnan(logprobs[0]) else {"policy/entropy_sampled": -sum(logprobs) / len(logprobs)}
    return {
        **sampled,
        "reward/mean": sum(r.reward for r in rollouts) / n,
        "reward/std": sum(spreads) / len(spreads),
        "reward/frac_groups_zero_std": constant / len(groups),
        "reward/right_frac": outcomes.count("right") / n,
        "reward/no_answer_frac": outcomes.count("no_answer") / n,
        "reward/timeout_frac": outcomes.count("timeout") / n,
        "length/mean_tokens": sum(lengths) / n,
        "length/min_tokens": min(lengths),
        "length/max_tokens": max(lengths),
        "length/truncated_frac": sum(r.truncated for r in rollouts) / n,
    }
