"""Pair rules: right against wrong, ties never, drawn from keyed randomness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from objective_cases import make_rollout, reference_for

from suite.objectives.pairs import PAIR_RULES
from suite.randomness import generator


def _random(rewards: list[float]) -> set[tuple[int, int]]:
    right = [i for i, r in enumerate(rewards) if r > 0.5]
    return {(c, r) for c in right for r in range(len(rewards)) if r not in right}


REFERENCES: dict[str, Callable[[list[float]], set[tuple[int, int]]]] = {"random": _random}
"""Pair rule -> every (chosen, rejected) comparison that it may make of given rewards."""

GROUPS = [
    [1.0, 0.0],
    [0.0, 1.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 1.0],
    [0.0, 0.0],
    [0.0, 1.0, -1.0],
    [0.9, 1.2, 0.1, -0.3],
    [0.7],
]


def draw(name: str, rewards: list[float], rng: np.random.Generator) -> list[tuple[int, int]]:
    pair = PAIR_RULES[name]([make_rollout(reward, i) for i, reward in enumerate(rewards)], rng)
    return [] if pair is None else [(c, r) for c in pair.chosen for r in pair.rejected]


@pytest.mark.parametrize("name", PAIR_RULES)
@pytest.mark.parametrize("rewards", GROUPS)
def test_makes_every_allowed_comparison_and_no_other(name: str, rewards: list[float]) -> None:
    allowed = reference_for(REFERENCES, name, "pair rule")(rewards)
    seen = {pair for i in range(200) for pair in draw(name, rewards, generator(i))}
    assert seen == allowed
    assert all(rewards[c] > rewards[r] for c, r in seen)


def test_random_is_uniform_over_right_and_wrong() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    counts = Counter(pair for i in range(6000) for pair in draw("random", rewards, generator("uniform", i)))
    assert len(counts) == 6
    # 1000 expected of each; a binomial of 6000 draws at 1/6 has a deviation of 29
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_worked_by_hand_a_given_pair_comes_out_as_given() -> None:
    assert draw("random", [1.0, 0.0], generator(0)) == [(0, 1)]
    assert draw("random", [0.0, 1.0], generator(0)) == [(1, 0)]


def test_equal_keys_draw_equal_pairs() -> None:
    rewards = [float(i % 2) for i in range(40)]
    assert draw("random", rewards, generator(1, "pairs")) == draw("random", rewards, generator(1, "pairs"))
    assert len({draw("random", rewards, generator(i))[0] for i in range(10)}) > 5
