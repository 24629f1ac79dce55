"""Pair rules: how the rollouts of a group become a preference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from suite.config import RunConfig
from suite.judges import JUDGES, Comparison
from suite.protocols import Group
from suite.randomness import generator
from suite.registry import Registry

CORRECT_ABOVE = 0.5
"""Rewards above this count as correct: halfway between right (1) and wrong (0), so that shaping does not turn one
into the other."""

TIE_TOLERANCE = 1e-6
"""Rewards that differ by at most this, relative to the larger of 1 and the largest of them, are a tie."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Positions in a group. Several on one side mean every chosen against every rejected one, averaged."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Paired:
    """What a pair rule makes of a rollout batch."""

    pairs: list[Pair | None]
    """One per group, None where the group has none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What else there is to count."""


PairRule = Callable[[Sequence[Group], Sequence[np.random.Generator], RunConfig], Paired]
"""(groups, keyed randomness of each group, configuration) -> a pair or None for each. Ties never meet."""

PAIR_RULES: Registry[PairRule] = Registry("pair rule")


def one_by_one(rule: Callable[[Group, np.random.Generator], Pair | None]) -> PairRule:
    """A pair rule from a function that sees one group at a time."""

    def apply(groups: Sequence[Group], rngs: Sequence[np.random.Generator], config: RunConfig) -> Paired:
        return Paired([rule(group, rng) if group else None for group, rng in zip(groups, rngs, strict=True)])

    return apply


def rule_of(group: Group, config: RunConfig) -> str:
    """The name of the rule that pairs a group: its prompt's own, else `objective.pair_rule`."""
    return (group[0].prompt.pair_rule if group else "") or config.objective.pair_rule


def pair_rule_reads(config: RunConfig) -> frozenset[str]:
    """The options that choosing pairs looks at."""
    names = PAIR_RULES.entry(config.objective.pair_rule).reads | {"objective.pair_rule"}
    return names | JUDGES.entry(config.judge.name).reads if "judge.name" in names else names


def pair_up(groups: Sequence[Group], key: tuple[int | str, ...], config: RunConfig) -> Paired:
    """The pairs of a rollout batch, each group by its rule; a draw depends on the key and the group's prompt alone."""
    rngs = [generator(*key, group[0].prompt.uid if group else "") for group in groups]
    names = [rule_of(group, config) for group in groups]
    out = Paired([None] * len(groups))
    for name in dict.fromkeys(names):
        rows = [row for row, other in enumerate(names) if other == name]
        made = PAIR_RULES[name]([groups[row] for row in rows], [rngs[row] for row in rows], config)
        for row, pair in zip(rows, made.pairs, strict=True):
            out.pairs[row] = pair
        out.metrics.update(made.metrics)
    return out


def scored(group: Group) -> list[int]:
    """The rollouts whose reward is a number: one that abstains is on neither side."""
    return [i for i, rollout in enumerate(group) if not math.isnan(rollout.reward)]


def sides(group: Group) -> tuple[list[int], list[int]]:
    """The correct rollouts (reward above `CORRECT_ABOVE`) and the incorrect ones."""
    correct = [i for i in scored(group) if group[i].reward > CORRECT_ABOVE]
    return correct, [i for i in scored(group) if group[i].reward <= CORRECT_ABOVE]


TELLS_CORRECT = frozenset({"random", "group"})
"""Pair rules that take `sides`: for rewards of right and wrong, not for scores."""


def extremes(group: Group) -> tuple[list[int], list[int]]:
    """The rollouts of the highest and of the lowest reward; both empty where all rewards are a tie."""
    rewards = {i: group[i].reward for i in scored(group)}
    if not rewards:
        return [], []
    high, low = max(rewards.values()), min(rewards.values())
    margin = TIE_TOLERANCE * max(1.0, abs(high), abs(low))
    if high - low <= margin:
        return [], []
    return [i for i, r in rewards.items() if high - r <= margin], [i for i, r in rewards.items() if r - low <= margin]


def _one_of_each(chosen: list[int], rejected: list[int], rng: np.random.Generator) -> Pair | None:
    if not chosen or not rejected:
        return None
    return Pair((chosen[rng.integers(len(chosen))],), (rejected[rng.integers(len(rejected))],))


@PAIR_RULES.register("random")
@one_by_one
def random_pair(group: Group, rng: np.random.Generator) -> Pair | None:
    """A correct rollout against an incorrect one, each drawn uniformly; None unless the group has both.

    Correct is a reward above `CORRECT_ABOVE`; given pairs (1 for chosen, 0 for rejected) come out as given.
    arXiv 2506.21495, section 3.
    """
    return _one_of_each(*sides(group), rng)


@PAIR_RULES.register("group")
@one_by_one
def whole_group(group: Group, rng: np.random.Generator) -> Pair | None:
    """Every correct rollout against every incorrect one, the mean over all comparisons being the group's loss.

    GroupDPO, arXiv 2506.21495, eq. 4. None unless the group has both.
    """
    correct, incorrect = sides(group)
    return Pair(tuple(correct), tuple(incorrect)) if correct and incorrect else None


@PAIR_RULES.register("best_worst")
@one_by_one
def best_against_worst(group: Group, rng: np.random.Generator) -> Pair | None:
    """The rollout of the highest reward against that of the lowest, each drawn uniformly among equals; None for a tie.

    For rewards on a scale (arXiv 2506.21495, section 3: non-verifiable prompts).
    """
    return _one_of_each(*extremes(group), rng)


@PAIR_RULES.register("given")
@one_by_one
def given_pair(group: Group, rng: np.random.Generator) -> Pair | None:
    """The preference of an outside source as it is: sample 0 was chosen over sample 1."""
    place = {rollout.sample: i for i, rollout in enumerate(group)}
    return Pair((place[0],), (place[1],)) if 0 in place and 1 in place else None


@PAIR_RULES.register("judge", reads=["judge.name"])
def judged_pair(groups: Sequence[Group], rngs: Sequence[np.random.Generator], config: RunConfig) -> Paired:
    """Two rollouts of different text, drawn at random, the one that a pairwise judge prefers being chosen.

    Which of the two the judge reads first is drawn too, so that a judge with a liking for a position favours
    neither. Where it answers neither side the group has no pair, and is counted in `dpo/judge_unanswered`. Rewards
    play no part. OAIF, arXiv 2402.04792.
    """
    drawn: dict[int, tuple[int, int]] = {}
    for number, (group, rng) in enumerate(zip(groups, rngs, strict=True)):
        order = [int(i) for i in rng.permutation(len(group))]
        other = [i for i in order if group[i].text != group[order[0]].text]
        if other:
            drawn[number] = (order[0], other[0]) if rng.integers(2) else (other[0], order[0])
    asked = [
        Comparison(groups[n][first].prompt.text, groups[n][first].text, groups[n][second].text)
        for n, (first, second) in drawn.items()
    ]
    answers = JUDGES[config.judge.name](asked, config.judge) if asked else []
    pairs: list[Pair | None] = [None] * len(groups)
    for (number, (first, second)), answer in zip(drawn.items(), answers, strict=True):
        if answer is not None:
            chosen, rejected = (first, second) if answer == "first" else (second, first)
            pairs[number] = Pair((chosen,), (rejected,))
    return Paired(pairs, {"dpo/judge_unanswered": float(answers.count(None))})
