"""From verdicts to the rewards that an objective sees: the task's, then an optional registered shaping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from suite.config import RewardConfig
from suite.protocols import Group, Rollout
from suite.registry import Registry

Shaping = Callable[[Sequence[Group], RewardConfig], None]
"""Changes the `reward` of rollouts in place; takes the groups of a batch and the configuration's `reward` section."""

SHAPINGS: Registry[Shaping] = Registry("reward shaping")


@SHAPINGS.register("none")
def none(groups: Sequence[Group], reward: RewardConfig) -> None:
    """Rewards stay the task's."""


@SHAPINGS.register("soft_overlong", reads=["reward.shaping_coef", "reward.soft_punish_max", "reward.soft_punish_cache"])
def soft_overlong(groups: Sequence[Group], reward: RewardConfig) -> None:
    """Adds `shaping_coef` times DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), the end token counted.

    L_max and L_cache are shares of the budget that the rollout was sampled with, so that they scale with the task.
    A coefficient of 1 is DAPO's, whose wrong answers cost -1: with 0 for wrong, 0.5 keeps its proportions.
    """
    for group in groups:
        for rollout in group:
            assert rollout.budget > 0
            rollout.reward += reward.shaping_coef * overlong_punishment(
                len(rollout.completion.token_ids),
                reward.soft_punish_max * rollout.budget,
                reward.soft_punish_cache * rollout.budget,
            )


def overlong_punishment(length: int, longest: float, cache: float) -> float:
    """0 up to `longest - cache` tokens, then linearly down to -1 at `longest`, and -1 beyond."""
    return max(-1.0, min(0.0, (longest - cache - length) / cache))


def scored(rewards: Iterable[float]) -> list[float]:
    """The rewards that are there: an abstention (NaN) is left out, not averaged in."""
    return [reward for reward in rewards if not math.isnan(reward)]


def mean(values: Sequence[float]) -> float:
    """Their mean, NaN of none."""
    return sum(values) / len(values) if values else math.nan


def _spread(rewards: Sequence[float]) -> float:
    """The standard deviation, ddof 1; 0 of fewer than two."""
    centre = mean(rewards)
    return math.sqrt(sum((reward - centre) ** 2 for reward in rewards) / max(1, len(rewards) - 1))


def constant(rewards: Sequence[float], tolerance: float = 1e-6) -> bool:
    """Whether scored rewards are all equal, or fewer than two, by the tolerance of the advantages: nothing to learn."""
    largest = max(1.0, *map(abs, rewards)) if rewards else 1.0
    return len(rewards) < 2 or (math.isfinite(largest) and max(rewards) - min(rewards) <= tolerance * largest)


def statistics(groups: Sequence[Group]) -> dict[str, float]:
    """The `reward/*`, `length/*`, `measure/*` and, for a mixture, `task/*` metrics of a rollout batch.

    Means are over what was scored. In a mixture rewards of unlike units stand side by side: their mean and spread
    are given task by task only. An empty batch has no metrics.
    """
    rollouts: list[Rollout] = [rollout for group in groups for rollout in group]
    if not rollouts:
        return {}
    lengths = [len(r.completion.token_ids) for r in rollouts]
    n = len(rollouts)
    of_group = [scored(r.reward for r in group) for group in groups]
    outcomes = [r.verdict.outcome for r in rollouts]
    logprobs = [value for r in rollouts for value in r.completion.logprobs]
    out = {} if math.isnan(logprobs[0]) else {"policy/entropy_sampled": -sum(logprobs) / len(logprobs)}
    names = sorted({group[0].prompt.task for group in groups})
    if len(names) == 1:
        out |= _rewards(of_group, "reward/mean", "reward/std")
    for name in names if any(names) else []:
        out |= _of_task(name, [group for group in groups if group[0].prompt.task == name])
    for measure in sorted({measure for r in rollouts for measure in r.verdict.measures}):
        found = [r.verdict.measures[measure] for r in rollouts if measure in r.verdict.measures]
        out[f"measure/{measure}"] = mean(found)
    return {
        **out,
        "reward/scored_frac": sum(map(len, of_group)) / n,
        "reward/frac_groups_zero_std": sum(map(constant, of_group)) / len(groups),
        "reward/right_frac": outcomes.count("right") / n,
        "reward/no_answer_frac": outcomes.count("no_answer") / n,
        "reward/timeout_frac": outcomes.count("timeout") / n,
        "length/mean_tokens": sum(lengths) / n,
        "length/min_tokens": min(lengths),
        "length/max_tokens": max(lengths),
        "length/truncated_frac": sum(r.truncated for r in rollouts) / n,
    }


def _rewards(of_group: Sequence[list[float]], mean_name: str, std_name: str) -> dict[str, float]:
    """Mean over what was scored, and the mean spread of the groups that hold a score; nothing where nothing was."""
    values = [reward for rewards in of_group for reward in rewards]
    if not values:
        return {}
    return {mean_name: mean(values), std_name: mean([_spread(rewards) for rewards in of_group if rewards])}


def _of_task(name: str, groups: Sequence[Group]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    of_group = [scored(r.reward for r in group) for group in groups]
    return {
        **_rewards(of_group, f"task/{name}/reward_mean", f"task/{name}/reward_std"),
        f"task/{name}/frac_groups_zero_std": sum(map(constant, of_group)) / len(groups),
        f"task/{name}/scored_frac": sum(map(len, of_group)) / len(rollouts),
        f"task/{name}/mean_tokens": sum(len(r.completion.token_ids) for r in rollouts) / len(rollouts),
        f"task/{name}/truncated_frac": sum(r.truncated for r in rollouts) / len(rollouts),
        f"task/{name}/groups": float(len(groups)),
    }
