"""Supervised training on selected answers: which rows, and the loss against its formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objective_cases import BAD, ENTROPY, LOGPROBS, MASK, make_batch, make_config, make_rollout, mean, poisoned, step

from suite.batch import collate
from suite.objectives import build

NAN = math.nan


def sft(**options: Any) -> Any:
    return build(make_config(**({"name": "sft"} | options)))


def groups(rewards: list[list[float]]) -> list[list[Any]]:
    return [[make_rollout(r, i, uid=f"p{g}") for i, r in enumerate(row)] for g, row in enumerate(rewards)]


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_is_the_mean_over_the_tokens_of_the_step(size: int) -> None:
    loss, gradient, _, sums, _ = step(sft(), make_batch(), size=size)
    marks = [(v, m) for row, marks in zip(LOGPROBS, MASK) for v, m in zip(row, marks)]
    count = sum(m for _, m in marks)
    assert loss == pytest.approx(mean(-v for v, m in marks if m), rel=1e-12)
    assert sums["loss/nll"] == pytest.approx(loss, rel=1e-12)
    assert (sums["loss/trained_tokens"], sums["loss/trained_sequences"]) == (count, 6)
    torch.testing.assert_close(gradient, -torch.tensor(MASK, dtype=torch.float64) / count, rtol=1e-12, atol=0)


def test_worked_by_hand_long_answers_weigh_more_than_short_ones() -> None:
    # 2 tokens at log-prob -1 and 6 at -3: (2 + 18) / 8, not the mean of 1 and 3
    batch = make_batch([[1] * 2 + [0] * 4, [1] * 6])
    loss, *_ = step(sft(), batch, [[-1.0] * 6, [-3.0] * 6], [[0.0] * 6] * 2)
    assert loss == pytest.approx(2.5, rel=1e-12)


@pytest.mark.parametrize("bad", BAD)
def test_masked_values_reach_neither_value_nor_gradient(bad: float) -> None:
    objective = sft(entropy_coef=0.1)
    clean = step(objective, make_batch())
    dirty = step(objective, make_batch(), poisoned(LOGPROBS, bad).tolist(), poisoned(ENTROPY, bad).tolist())
    assert (dirty[0], dirty[3]) == (clean[0], clean[3])
    assert all(torch.equal(a, b) for a, b in zip(dirty[1:3], clean[1:3]))


def test_the_entropy_bonus_is_subtracted() -> None:
    loss, _, of_entropy, sums, _ = step(sft(entropy_coef=0.1), make_batch())
    assert loss == pytest.approx(sums["loss/nll"] - 0.1 * sums["loss/entropy"], rel=1e-12)
    assert float(of_entropy.sum()) == pytest.approx(-0.1, rel=1e-12)


REWARDS = [[1.0, 0.0, 1.0], [0.0, 0.0], [0.9, NAN, 0.2], [NAN, NAN], [3.0, -1.0, 3.0], [2.0, 2.0]]


def test_correct_rows() -> None:
    selected = sft().select(groups(REWARDS), (0,))
    assert [(r.prompt.uid, r.sample) for r in selected.rollouts] == [
        ("p0", 0), ("p0", 2), ("p2", 0), ("p4", 0), ("p4", 2), ("p5", 0), ("p5", 1)
    ]  # fmt: skip
    assert selected.units == [[i] for i in range(7)]
    assert selected.metrics == {"sft/rows": 7.0, "sft/skipped_groups": 2.0}


def test_best_rows_are_one_of_each_group_and_none_of_a_tie() -> None:
    selected = sft(sft_rows="best").select(groups(REWARDS), (0,))
    assert [(r.prompt.uid, r.sample) for r in selected.rollouts] == [("p0", 0), ("p2", 0), ("p4", 0)]
    assert selected.metrics == {"sft/rows": 3.0, "sft/skipped_groups": 3.0}


def test_without_rows_the_loss_is_exactly_0_with_a_graph() -> None:
    objective = sft(entropy_coef=0.1)
    empty = collate(objective.select(groups([[0.0]]), ("key",)), pad_id=0, group_of=[])
    logprobs = torch.zeros(empty.mask_BT.shape, requires_grad=True)
    part = objective.loss(empty, logprobs, torch.zeros_like(logprobs), objective.denominators(empty))
    part.loss.backward()
    assert float(part.loss.detach()) == 0.0


def test_needs() -> None:
    assert not sft().needs_reference
    assert not sft().needs_entropy
    assert sft(entropy_coef=1e-4).needs_entropy
