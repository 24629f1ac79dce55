"""Pair rules: right against wrong, ties never, drawn from keyed randomness."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from objective_cases import make_config, make_rollout, reference_for

from suite.config import RunConfig, apply
from suite.judges import JUDGES
from suite.objectives.pairs import PAIR_RULES, Pair, one_by_one, pair_up
from suite.randomness import generator


@pytest.fixture(autouse=True)
def higher_judge() -> Iterator[None]:
    """A judge that prefers the answer of the higher reward, which the text of the test's rollouts is."""

    @JUDGES.register("higher")
    def higher(comparisons: Any, options: Any) -> list[str | None]:
        gaps = [float(c.first) - float(c.second) for c in comparisons]
        return [None if math.isnan(gap) or gap == 0 else "first" if gap > 0 else "second" for gap in gaps]

    yield
    del JUDGES._entries["higher"]


@cache
def config(rule: str) -> RunConfig:
    return apply(make_config(name="dpo", pair_rule=rule), {"judge.name": "higher"})


def make_group(rewards: list[float], uid: str = "p0") -> list[Any]:
    return [replace(make_rollout(r, i, uid), text=str(r)) for i, r in enumerate(rewards)]


def _random(rewards: list[float]) -> set[tuple[int, int]]:
    right = [i for i, r in enumerate(rewards) if r > 0.5]
    wrong = [i for i, r in enumerate(rewards) if r <= 0.5]
    return {(c, r) for c in right for r in wrong}


def _best_worst(rewards: list[float]) -> set[tuple[int, int]]:
    known = [r for r in rewards if r == r]
    high, low = max(known, default=0), min(known, default=0)
    return {(c, r) for c, x in enumerate(rewards) for r, y in enumerate(rewards) if x == high > low == y}


def _any_two(rewards: list[float]) -> set[tuple[int, int]]:
    return {(c, r) for c, x in enumerate(rewards) for r, y in enumerate(rewards) if x > y}


REFERENCES: dict[str, Callable[[list[float]], set[tuple[int, int]]]] = {
    "random": _random,
    "group": _random,
    "best_worst": _best_worst,
    "given": lambda rewards: {(0, 1)} if len(rewards) > 1 else set(),
    "judge": _any_two,
}
"""Pair rule -> every (chosen, rejected) comparison that it may make of given rewards."""

GROUPS = [
    [1.0, 0.0],
    [1.0, 0.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 1.0],
    [0.0, 0.0],
    [0.0, 1.0, -1.0],
    [0.9, 1.2, 0.1, -0.3],
    [0.7],
    [1.0, math.nan, 0.0],
    [math.nan, math.nan],
]


def draw(name: str, rewards: list[float], rng: np.random.Generator) -> list[tuple[int, int]]:
    (pair,) = PAIR_RULES[name]([make_group(rewards)], [rng], config(name)).pairs
    return [] if pair is None else [(c, r) for c in pair.chosen for r in pair.rejected]


@pytest.mark.parametrize("name", PAIR_RULES)
@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_makes_every_allowed_comparison_and_no_other(name: str, rewards: list[float]) -> None:
    seen = {pair for i in range(200) for pair in draw(name, rewards, generator(i))}
    assert seen == reference_for(REFERENCES, name, "pair rule")(rewards)
    if name != "given":
        assert all(rewards[c] > rewards[r] for c, r in seen)


@pytest.mark.parametrize(
    ("name", "pairs"), [("random", 1), ("best_worst", 1), ("judge", 1), ("given", 1), ("group", 6)]
)
def test_a_group_of_five_gives_one_pair_or_all_comparisons(name: str, pairs: int) -> None:
    assert len(draw(name, [1.0, 0.0, 1.0, 0.0, 1.0], generator(0))) == pairs


@pytest.mark.parametrize("rule", ["random", "best_worst"])
def test_draws_are_uniform_over_both_sides(rule: str) -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 1.0]
    counts = Counter(pair for i in range(3000) for pair in draw(rule, rewards, generator("uniform", i)))
    assert len(counts) == 6
    # 500 expected of each; a binomial of 3000 draws at 1/6 has a deviation of 20
    assert all(abs(count - 500) < 105 for count in counts.values())


def test_best_and_worst_within_rounding_are_a_tie() -> None:
    assert draw("best_worst", [1000.0, 1000.0005], generator(0)) == []
    assert draw("best_worst", [1000.0, 1000.01], generator(0)) == [(1, 0)]
    assert draw("best_worst", [-3.5, 7.25, 0.0], generator(0)) == [(1, 0)]


def test_worked_by_hand_a_given_pair_comes_out_as_given() -> None:
    for rule in ("random", "group", "best_worst", "given"):
        assert draw(rule, [1.0, 0.0], generator(0)) == [(0, 1)]
    assert draw("random", [0.0, 1.0], generator(0)) == [(1, 0)]
    assert draw("given", [0.0, 1.0], generator(0)) == [(0, 1)]


def test_equal_keys_draw_equal_pairs() -> None:
    rewards = [float(i % 2) for i in range(40)]
    assert draw("random", rewards, generator(1, "pairs")) == draw("random", rewards, generator(1, "pairs"))
    assert len({draw("random", rewards, generator(i))[0] for i in range(10)}) > 5


def test_a_judge_is_asked_in_either_order_and_its_answer_follows_the_text() -> None:
    asked: list[Any] = []
    higher = JUDGES["higher"]

    @JUDGES.register("noting")
    def noting(comparisons: Any, options: Any) -> Any:
        asked.extend(comparisons)
        return higher(comparisons, options)

    try:
        judged = apply(config("judge"), {"judge.name": "noting"})
        groups = [make_group([0.25, 0.75], f"p{i}") for i in range(400)]
        paired = pair_up(groups, ("key",), judged)
    finally:
        del JUDGES._entries["noting"]
    assert paired.pairs == [Pair((1,), (0,))] * 400
    assert paired.metrics == {"dpo/judge_unanswered": 0.0}
    # 200 expected; the deviation of 400 fair coins is 10
    assert 150 < sum(c.first == "0.75" for c in asked) < 250
    assert asked[0].prompt == "1+1"


def test_a_judge_that_sees_only_positions_prefers_neither_rollout() -> None:
    JUDGES.register("first")(lambda comparisons, options: ["first"] * len(comparisons))
    try:
        judged = apply(config("judge"), {"judge.name": "first"})
        # two rollouts of one text: without a coin the first drawn would be that text two times in three
        pairs = pair_up([make_group([0.25, 0.25, 0.75], f"p{i}") for i in range(900)], ("key",), judged).pairs
    finally:
        del JUDGES._entries["first"]
    # 450 expected; the deviation of 900 fair coins is 15
    assert 380 < sum(pair is not None and pair.rejected == (2,) for pair in pairs) < 520


def test_a_judge_that_answers_neither_side_gives_no_pair_and_is_counted() -> None:
    nan = math.nan
    groups = [
        make_group(rewards, f"p{i}") for i, rewards in enumerate([[1.0, 0.0], [nan, 0.0], [0.5, 0.5], [2.0, 3.0]])
    ]
    paired = pair_up(groups, ("key",), config("judge"))
    # equal texts are not even asked about
    assert paired.pairs == [Pair((0,), (1,)), None, None, Pair((1,), (0,))]
    assert paired.metrics == {"dpo/judge_unanswered": 1.0}


def test_a_prompt_may_bring_its_own_rule() -> None:
    @PAIR_RULES.register("last_first")
    @one_by_one
    def last_first(group: Any, rng: Any) -> Pair:
        return Pair((len(group) - 1,), (0,))

    try:
        groups = [make_group([1.0, 0.0, 0.0], f"p{i}") for i in range(3)]
        groups[1] = [replace(r, prompt=replace(r.prompt, pair_rule="last_first")) for r in groups[1]]
        paired = pair_up(groups, (0,), config("group"))
    finally:
        del PAIR_RULES._entries["last_first"]
    assert paired.pairs == [Pair((0,), (1, 2)), Pair((2,), (0,)), Pair((0,), (1, 2))]
