"""Pair rules: how the rollouts of a group become a preference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from suite.protocols import Group
from suite.registry import Registry

CORRECT_ABOVE = 0.5
"""Rewards above this count as correct: halfway between right (1) and wrong (0), so that shaping does not turn one
into the other."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Positions in a group. Several on one side mean every chosen against every rejected one, averaged."""

    chosen: tuple[int, ...]
    rejected: tuple[int, ...]


PairRule = Callable[[Group, np.random.Generator], Pair | None]
"""(group, keyed randomness) -> the pair, or None where the group has none. Rollouts of equal reward never meet."""

PAIR_RULES: Registry[PairRule] = Registry("pair rule")


@PAIR_RULES.register("random")
def random_pair(group: Group, rng: np.random.Generator) -> Pair | None:
    """A correct rollout against an incorrect one, each drawn uniformly; None unless the group has both.

    Correct is a reward above `CORRECT_ABOVE`; given pairs (1 for chosen, 0 for rejected) come out as given.
    arXiv 2506.21495, section 3.
    """
    correct = [i for i, rollout in enumerate(group) if rollout.reward > CORRECT_ABOVE]
    incorrect = [i for i, rollout in enumerate(group) if rollout.reward <= CORRECT_ABOVE]
    if not correct or not incorrect:
        return None
    return Pair((correct[rng.integers(len(correct))],), (incorrect[rng.integers(len(incorrect))],))
