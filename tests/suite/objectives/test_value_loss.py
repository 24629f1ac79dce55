"""The critic's loss: clipping worked by hand, one denominator for the whole step, nothing from masked positions."""

from __future__ import annotations

import pytest
import torch
from objective_cases import BAD, MASK, MASK_BT, numeric_gradient, poisoned, rows, tensor

from suite.objectives.value_loss import value_loss

VALUES, OLD, RETURNS = rows(21, -1.0, 1.0), rows(22, -1.0, 1.0), rows(23, -1.5, 1.5)
TOKENS = float(sum(map(sum, MASK)))


def reference(values: list[list[float]], cliprange: float) -> float:
    """In plain Python, term by term."""
    total = 0.0
    for row in zip(values, OLD, RETURNS, MASK):
        for value, old, target, mask in zip(*row):
            near = min(max(value, old - cliprange), old + cliprange)
            total += 0.5 * max((value - target) ** 2, (near - target) ** 2) if mask else 0.0
    return total / TOKENS


def test_clipping_by_hand() -> None:
    """Old value 1, range .5: values may count as .5 to 1.5."""
    values = tensor([[2.0, 2.0, 1.2, 0.0]]).requires_grad_()
    old, targets = torch.ones((1, 4), dtype=torch.float64), tensor([[1.0, 3.0, 0.0, 0.25]])
    loss, clipped = value_loss(values, old, targets, torch.ones((1, 4), dtype=torch.bool), tokens=4, cliprange=0.5)
    # (2-1)^2 = 1 over (1.5-1)^2 = .25; (1.5-3)^2 = 2.25 over (2-3)^2 = 1: clipped; 1.44 in range; the last equal
    assert float(loss.detach()) == pytest.approx(0.5 * (1.0 + 2.25 + 1.44 + 0.0625) / 4)
    assert clipped == 0.25
    loss.backward()
    assert values.grad is not None
    # the clipped token has no gradient; where both errors are equal, torch gives half of each
    assert values.grad[0].tolist() == pytest.approx([1.0 / 4, 0.0, 1.2 / 4, -0.25 / 8])


def test_without_a_range_it_is_the_plain_squared_error() -> None:
    loss, clipped = value_loss(tensor(VALUES), tensor(OLD), tensor(RETURNS), MASK_BT, tokens=TOKENS, cliprange=0.0)
    plain = (0.5 * (tensor(VALUES) - tensor(RETURNS)) ** 2)[MASK_BT].mean()
    assert float(loss) == pytest.approx(float(plain), rel=1e-12)
    assert clipped == 0.0
    narrow, share = value_loss(tensor(VALUES), tensor(OLD), tensor(RETURNS), MASK_BT, tokens=TOKENS, cliprange=0.1)
    assert float(narrow) > float(plain)
    assert share > 0


@pytest.mark.parametrize("cliprange", [0.05, 0.3, 5.0])
def test_value_and_gradient_equal_the_formula(cliprange: float) -> None:
    values = tensor(VALUES).requires_grad_()
    loss, _ = value_loss(values, tensor(OLD), tensor(RETURNS), MASK_BT, tokens=TOKENS, cliprange=cliprange)
    assert float(loss.detach()) == pytest.approx(reference(VALUES, cliprange), rel=1e-12)
    loss.backward()
    want = numeric_gradient(lambda at: reference(at, cliprange), VALUES)
    assert values.grad is not None
    torch.testing.assert_close(values.grad, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_split_of_a_step_changes_value_or_gradient(size: int) -> None:
    whole = tensor(VALUES).requires_grad_()
    loss, clipped = value_loss(whole, tensor(OLD), tensor(RETURNS), MASK_BT, tokens=TOKENS, cliprange=0.2)
    loss.backward()
    parts, total, share = tensor(VALUES).requires_grad_(), 0.0, 0.0
    for start in range(0, len(MASK), size):
        rows_B = slice(start, start + size)
        piece, its = value_loss(
            parts[rows_B], tensor(OLD)[rows_B], tensor(RETURNS)[rows_B], MASK_BT[rows_B], tokens=TOKENS, cliprange=0.2
        )
        piece.backward()
        total, share = total + float(piece.detach()), share + its
    assert total == pytest.approx(float(loss.detach()), rel=1e-12)
    assert share == pytest.approx(clipped, rel=1e-12)
    assert whole.grad is not None
    assert parts.grad is not None
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", BAD)
def test_masked_positions_reach_neither_value_nor_gradient(bad: float) -> None:
    clean = value_loss(tensor(VALUES), tensor(OLD), tensor(RETURNS), MASK_BT, tokens=TOKENS, cliprange=0.2)
    values = poisoned(VALUES, bad).requires_grad_()
    loss, clipped = value_loss(
        values, poisoned(OLD, bad), poisoned(RETURNS, bad), MASK_BT, tokens=TOKENS, cliprange=0.2
    )
    assert (float(loss.detach()), clipped) == (float(clean[0]), clean[1])
    loss.backward()
    assert values.grad is not None
    assert not values.grad[~MASK_BT].any()
    assert bool(values.grad.isfinite().all())


def test_a_step_without_trained_tokens_has_a_loss_of_exactly_0() -> None:
    values = tensor(VALUES).requires_grad_()
    none_BT = torch.zeros_like(MASK_BT)
    loss, clipped = value_loss(values, tensor(OLD), tensor(RETURNS), none_BT, tokens=0, cliprange=0.2)
    loss.backward()
    assert (float(loss.detach()), clipped) == (0.0, 0.0)
    assert values.grad is not None
    assert not values.grad.any()
