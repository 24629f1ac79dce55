"""The greedy completion of each prompt, for objectives whose baseline is its reward (ReMax, arXiv 2310.10505)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from suite.config import RunConfig
from suite.objectives import ADVANTAGES, objective_reads
from suite.protocols import Group, Rollout, Sampling

GREEDY = -1
"""The greedy completion's index within its group."""


def needs_greedy(config: RunConfig) -> bool:
    """Whether the configured objective asks for one greedy completion per prompt."""
    read = "objective.advantage" in objective_reads(config)
    return read and ADVANTAGES[config.objective.advantage].baseline == "greedy"


def greedy_sampling(budget: int) -> Sampling:
    """How it is drawn, within the task's completion budget."""
    return Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=budget)


def with_greedy(groups: Sequence[Group]) -> list[Group]:
    """The groups, and after them the greedy completions, each a group of its own: all that was sampled and graded."""
    return [*groups, *([group[0].greedy] for group in groups if group and group[0].greedy is not None)]


def copies(group: Group) -> Group:
    """Rollouts whose reward may be changed without changing the group's; they still share one greedy completion."""
    greedy = replace(group[0].greedy) if group and group[0].greedy is not None else None
    return [replace(rollout, greedy=greedy) for rollout in group]


def attach(groups: Sequence[Sequence[Rollout]], greedy: Sequence[Rollout]) -> None:
    """Give the rollouts of each group its prompt's greedy completion."""
    for group, best in zip(groups, greedy, strict=True):
        best.sample = GREEDY
        for rollout in group:
            rollout.greedy = best
