"""Aggregation: every mode against its formula, and the denominators that whole steps must share."""

from __future__ import annotations

import pytest
import torch
from objective_cases import (
    AGGREGATION_REFERENCES,
    BAD,
    BUDGET,
    LOGPROBS,
    MASK,
    MASK_BT,
    poisoned,
    reference_for,
    tensor,
    trained,
)

from suite.objectives.aggregation import AGGREGATIONS, Counts, keep


def in_parts(mode: str, values: torch.Tensor, mask_BT: torch.Tensor, size: int) -> torch.Tensor:
    """The step's value from micro-batches of `size` rows."""
    counts = Counts.of(mask_BT)
    starts = range(0, len(mask_BT), size)
    parts = [AGGREGATIONS[mode](values[i : i + size], mask_BT[i : i + size], counts, BUDGET) for i in starts]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_equals_the_formula(mode: str) -> None:
    reference = reference_for(AGGREGATION_REFERENCES, mode, "aggregation")
    got = AGGREGATIONS[mode](tensor(LOGPROBS), MASK_BT, Counts.of(MASK_BT), BUDGET)
    assert float(got) == pytest.approx(reference(trained(LOGPROBS, MASK)), rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_micro_batches_change_neither_value_nor_gradient(mode: str, size: int) -> None:
    whole, split = (tensor(LOGPROBS).requires_grad_() for _ in range(2))
    expected = in_parts(mode, whole, MASK_BT, len(MASK))
    got = in_parts(mode, split, MASK_BT, size)
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=0)
    assert split.grad is not None
    assert split.grad[MASK_BT].abs().min() > 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.6),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum", 8.0),
        ("seq-mean-token-sum-norm", 8 / 9),
    ],
)
def test_worked_by_hand_8_tokens_of_1_and_2_tokens_of_4(mode: str, expected: float) -> None:
    # the mean of the micro-batches' own means would be 2.5 for token-mean
    mask_BT = torch.tensor([[1] * 8, [1] * 2 + [0] * 6], dtype=torch.bool)
    values = torch.tensor([[1.0] * 8, [4.0] * 8], dtype=torch.float64)
    assert float(in_parts(mode, values, mask_BT, 1)) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_wider_padding_changes_nothing(mode: str) -> None:
    wide = torch.nn.functional.pad(tensor(LOGPROBS), (0, 11), value=7.0)
    mask_BT = torch.nn.functional.pad(MASK_BT, (0, 11), value=False)
    expected = AGGREGATIONS[mode](tensor(LOGPROBS), MASK_BT, Counts.of(MASK_BT), BUDGET)
    assert float(AGGREGATIONS[mode](wide, mask_BT, Counts.of(mask_BT), BUDGET)) == pytest.approx(
        float(expected), rel=1e-15
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_masked_sequence_leaves_numerator_and_denominator(mode: str) -> None:
    rest = [i for i in range(len(MASK)) if any(MASK[i])]
    assert len(rest) == len(MASK) - 1
    expected = AGGREGATIONS[mode](tensor(LOGPROBS)[rest], MASK_BT[rest], Counts.of(MASK_BT[rest]), BUDGET)
    assert float(in_parts(mode, tensor(LOGPROBS), MASK_BT, 1)) == pytest.approx(float(expected), rel=1e-15)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_all_masked_is_exactly_zero_with_a_graph(mode: str) -> None:
    values = tensor(LOGPROBS).requires_grad_()
    nothing = torch.zeros_like(MASK_BT)
    loss = AGGREGATIONS[mode](values, nothing, Counts.of(nothing), BUDGET)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert values.grad is not None
    assert torch.equal(values.grad, torch.zeros_like(values))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("bad", BAD)
def test_masked_values_reach_neither_value_nor_gradient(mode: str, bad: float) -> None:
    values = poisoned(LOGPROBS, bad).requires_grad_()
    loss = AGGREGATIONS[mode](values, MASK_BT, Counts.of(MASK_BT), BUDGET)
    loss.backward()
    assert float(loss.detach()) == float(AGGREGATIONS[mode](tensor(LOGPROBS), MASK_BT, Counts.of(MASK_BT), BUDGET))
    assert values.grad is not None
    assert torch.equal(values.grad[~MASK_BT], torch.zeros(int((~MASK_BT).sum()), dtype=torch.float64))


def test_keep_stops_the_gradient_of_what_comes_after() -> None:
    values = poisoned(LOGPROBS, torch.nan).requires_grad_()
    torch.exp(keep(values, MASK_BT) ** 2).sum().backward()
    assert values.grad is not None
    assert bool(values.grad.isfinite().all())


def test_keep_computes_in_float32_at_least() -> None:
    assert keep(torch.ones((1, 2), dtype=torch.bfloat16), torch.tensor([[True, False]])).tolist() == [[1.0, 0.0]]
    assert keep(torch.ones((1, 2), dtype=torch.bfloat16), torch.tensor([[True, False]])).dtype == torch.float32
    assert keep(torch.ones((1, 2), dtype=torch.float64), torch.tensor([[True, False]])).dtype == torch.float64


def test_counts_are_of_trained_tokens_and_of_sequences_with_any() -> None:
    assert Counts.of(MASK_BT) == Counts(tokens=18, sequences=6)
    assert Counts.read(Counts(18, 6).named("x_"), "x_") == Counts(18, 6)
