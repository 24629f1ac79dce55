"""DPO: the loss on pairs against its formula, and which pairs there are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import (
    BAD,
    ENTROPY,
    LOGPROBS,
    MASK,
    REF,
    Rows,
    make_batch,
    make_config,
    make_rollout,
    mean,
    numeric_gradient,
    poisoned,
    step,
    tensor,
    trained,
)

from suite.batch import Batch, collate
from suite.objectives import build
from suite.objectives.dpo import DPO
from suite.objectives.pairs import PAIR_RULES, Pair

PAIRS = [[0, 1], [6, 5], [4, 2]]
MASKED_PAIR = [2, 3]
BETA = 0.3


def pair_batch(pairs: list[list[int]] = PAIRS, **changes: Any) -> Batch:
    """The case's rows as pairs: (chosen, rejected) of each, in order."""
    order = [row for pair in pairs for row in pair]
    batch = make_batch(**changes)
    batch = replace(batch, units=[[row] for row in range(len(MASK))]).take(order)
    return replace(
        batch,
        units=[[2 * i, 2 * i + 1] for i in range(len(pairs))],
        targets={"sign": torch.tensor([1.0, -1.0] * len(pairs))},
    )


def values(rows: Rows, pairs: list[list[int]] = PAIRS) -> Rows:
    return [rows[row] for pair in pairs for row in pair]


def dpo(**options: Any) -> Any:
    return build(make_config(**({"name": "dpo", "beta": BETA} | options)))


def reference(logprobs: Rows, pairs: list[list[int]] = PAIRS, beta: float = BETA) -> dict[str, float]:
    """Rafailov et al. 2023, eq. 7, pair by pair; `logprobs` in the order of the rows of the case."""

    def total(rows: Rows, row: int) -> float:
        return math.fsum(v for v, m in zip(rows[row], MASK[row]) if m)

    margins = [
        beta * (total(logprobs, c) - total(REF, c)) - beta * (total(logprobs, r) - total(REF, r)) for c, r in pairs
    ]
    return {
        "loss/preference": mean(math.log(1 + math.exp(-m)) for m in margins),
        "dpo/accuracy": mean(float(m > 0) for m in margins),
        "dpo/margin": mean(margins),
        "dpo/chosen_logprob": mean(total(logprobs, c) for c, _ in pairs),
        "dpo/rejected_logprob": mean(total(logprobs, r) for _, r in pairs),
    }


@pytest.mark.parametrize("size", [0, 2, 3, 4])
def test_equals_the_formula_however_it_is_split(size: int) -> None:
    loss, gradient, _, sums, _ = step(dpo(), pair_batch(), values(LOGPROBS), values(ENTROPY), size)
    expected = reference(LOGPROBS)
    assert loss == pytest.approx(expected["loss/preference"], rel=1e-12)
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert 0 < expected["dpo/accuracy"] < 1
    by_row = numeric_gradient(lambda rows: reference(rows)["loss/preference"], LOGPROBS)
    torch.testing.assert_close(gradient, tensor(values(by_row.tolist())), rtol=1e-6, atol=1e-9)
    rows = values(MASK)
    assert (sums["loss/trained_tokens"], sums["loss/trained_sequences"]) == (sum(map(sum, rows)), 6)


def test_worked_by_hand() -> None:
    # beta .1 and summed log-ratios of 3 and -1: a margin of .4, so -log sigmoid(.4) = log(1 + e^-.4) = .513015
    mask = [[1, 1], [1, 0]]
    batch = make_batch(
        mask,
        ref_logprobs_BT=tensor([[-3.0, -3.0], [-1.0, 50.0]]),
        units=[[0, 1]],
        targets={"sign": torch.tensor([1.0, -1.0])},
    )
    loss, gradient, _, sums, _ = step(dpo(beta=0.1), batch, [[-1.0, -2.0], [-2.0, 9.0]], [[0.0] * 2] * 2)
    assert loss == pytest.approx(0.513015, abs=1e-6)
    assert sums["dpo/margin"] == pytest.approx(0.4)
    # d/d margin = -sigmoid(-.4) = -.401312, times beta, for each trained token alike
    torch.testing.assert_close(gradient, tensor([[-0.0401312] * 2, [0.0401312, 0.0]]), rtol=1e-5, atol=0)


def test_where_policy_and_reference_agree_the_loss_is_log_2() -> None:
    loss, _, _, sums, _ = step(dpo(), pair_batch(), values(REF), values(ENTROPY))
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    assert sums["dpo/accuracy"] == 0.0


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_margins_are_stable_in_float32(sign: int) -> None:
    batch = pair_batch(ref_logprobs_BT=torch.zeros((7, 5)))
    logprobs = torch.tensor([[s * sign * -1e4] * 5 for s in [-1, 1] * 3], requires_grad=True)
    objective = dpo()
    part = objective.loss(batch, logprobs, None, objective.denominators(batch))
    part.loss.backward()
    assert part.loss.dtype == torch.float32
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())
    assert float(part.loss.detach()) == pytest.approx(0.0 if sign > 0 else -part.sums["dpo/margin"], rel=1e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("over", ["all", "chosen"])
def test_masked_values_reach_neither_value_nor_gradient(bad: float, over: str) -> None:
    objective = dpo(entropy_coef=0.2, entropy_over=over)
    clean = step(objective, pair_batch(), values(LOGPROBS), values(ENTROPY))
    mask = values(MASK)
    logprobs, entropy = (poisoned(values(rows), bad, mask).tolist() for rows in (LOGPROBS, ENTROPY))
    dirty = step(objective, pair_batch(ref_logprobs_BT=poisoned(REF, bad)), logprobs, entropy)
    assert dirty[0] == clean[0]
    assert dirty[3] == clean[3]
    for got, expected in zip(dirty[1:3], clean[1:3]):
        assert torch.equal(got, expected)
        assert not got[torch.tensor(mask) == 0].any()


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("masked", [MASKED_PAIR, MASKED_PAIR[::-1]])
def test_a_pair_with_a_masked_side_leaves_numerator_and_denominator(size: int, masked: list[int]) -> None:
    pairs = [*PAIRS[:2], masked, PAIRS[2]]
    objective = dpo()
    assert objective.denominators(pair_batch(pairs)) == {"pairs": 3.0}
    loss, gradient, _, sums, _ = step(
        objective, pair_batch(pairs), values(LOGPROBS, pairs), values(ENTROPY, pairs), size
    )
    expected = reference(LOGPROBS)
    assert loss == pytest.approx(expected["loss/preference"], rel=1e-12)
    assert sums["dpo/margin"] == pytest.approx(expected["dpo/margin"], rel=1e-12)
    assert not gradient[4:6].any()


def test_without_pairs_the_loss_is_exactly_0_with_a_graph() -> None:
    objective = dpo(entropy_coef=0.1)
    only_masked = pair_batch([MASKED_PAIR], mask_BT=torch.zeros((7, 5), dtype=torch.bool))
    loss, gradient, of_entropy, sums, _ = step(
        objective, only_masked, values(LOGPROBS, [MASKED_PAIR]), values(ENTROPY, [MASKED_PAIR])
    )
    assert loss == 0.0
    assert not gradient.any()
    assert not of_entropy.any()
    assert set(sums.values()) == {0.0}
    empty = collate(objective.select([[make_rollout(1.0)]], ("key",)), pad_id=0, group_of=[])
    empty.ref_logprobs_BT = torch.zeros(empty.mask_BT.shape)
    logprobs = torch.zeros(empty.mask_BT.shape, requires_grad=True)
    part = objective.loss(empty, logprobs, torch.zeros_like(logprobs), objective.denominators(empty))
    part.loss.backward()
    assert float(part.loss.detach()) == 0.0


@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("over", ["all", "chosen"])
@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_entropy_covers_all_or_chosen_rows(size: int, over: str, mode: str) -> None:
    objective = dpo(entropy_coef=0.2, entropy_over=over, entropy_mean=mode)
    loss, _, gradient, sums, _ = step(objective, pair_batch(), values(LOGPROBS), values(ENTROPY), size)
    rows = [row for pair in PAIRS for row in (pair if over == "all" else pair[:1])]
    sequences = trained([ENTROPY[row] for row in rows], [MASK[row] for row in rows])
    expected = mean(mean(s) for s in sequences) if mode == "sequence" else mean(v for s in sequences for v in s)
    assert sums["loss/entropy"] == pytest.approx(expected, rel=1e-12)
    assert loss == pytest.approx(reference(LOGPROBS)["loss/preference"] - 0.2 * expected, rel=1e-12)
    assert float(gradient.sum()) == pytest.approx(-0.2, rel=1e-12)
    assert bool(gradient[1::2].any()) is (over == "all")


def groups(rewards: list[list[float]]) -> list[list[Any]]:
    return [[make_rollout(r, i, uid=f"p{g}") for i, r in enumerate(row)] for g, row in enumerate(rewards)]


def test_select_pairs_right_with_wrong_and_counts_what_it_skips() -> None:
    selected = dpo().select(groups([[0.0, 1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]), (0, 1))
    assert selected.units == [[0, 1], [2, 3]]
    assert [r.reward for r in selected.rollouts] == [1.0, 0.0, 1.0, 0.0]
    assert [r.prompt.uid for r in selected.rollouts] == ["p0", "p0", "p3", "p3"]
    assert selected.targets == {"sign": [1.0, -1.0, 1.0, -1.0]}
    assert selected.metrics == {"dpo/pairs": 2.0, "dpo/skipped_groups": 2.0}


def test_a_draw_depends_on_key_and_prompt_only() -> None:
    many = groups([[float(i % 2) for i in range(50)] for _ in range(8)])
    whole = dpo().select(many, (3, 5)).rollouts
    assert dpo().select(many, (3, 5)).rollouts == whole
    assert dpo().select(many[4:], (3, 5)).rollouts == whole[8:]
    assert dpo().select(many, (3, 6)).rollouts != whole
    assert len({r.sample for r in whole[::2]}) > 3


def test_several_rollouts_on_a_side_mean_all_comparisons_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    # GroupDPO (arXiv 2506.21495, eq. 4) is then one new pair rule
    everything = Pair((0, 2), (1, 3, 4))
    monkeypatch.setattr(DPO, "__init__", lambda self: None)
    objective: Any = DPO()
    objective._pair_rule, objective._beta, objective._entropy = (lambda group, rng: everything), BETA, None
    selected = objective.select(groups([[1.0, 0.0, 1.0, 0.0, 0.0]]), (0,))
    assert selected.units == [[0, 1, 2, 3, 4]]
    order = [0, 2, 1, 4, 6]
    batch = replace(make_batch().take(order), units=selected.units, targets={"sign": torch.tensor([1, 1, -1, -1, -1])})
    loss, *_ = step(objective, batch, [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order])
    pairs = [[c, r] for c in (0, 2) for r in (1, 4, 6)]
    assert loss == pytest.approx(reference(LOGPROBS, pairs)["loss/preference"], rel=1e-12)


def test_needs() -> None:
    assert dpo().needs_reference
    assert not dpo().needs_entropy
    assert dpo(entropy_coef=1e-4).needs_entropy
    assert list(PAIR_RULES) == ["random"]
    with pytest.raises(ValueError, match="unknown pair rule 'randon'; did you mean 'random'"):
        dpo(pair_rule="randon")
