"""The entropy term: a gradient that raises entropy, the same beside every loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cases import ENTROPY, MASK, MASK_BT, make_batch, make_config, step, tensor

from suite.objectives import AGGREGATIONS, build
from suite.objectives.entropy import EntropyTerm


def prepared(**options: Any) -> tuple[Any, Any]:
    objective, batch = build(make_config(**options)), make_batch()
    objective.prepare(batch)
    return objective, batch


def test_worked_by_hand_token_and_sequence_means() -> None:
    mask_BT = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    entropy = tensor([[1.0, 2.0, 3.0], [8.0, 99.0, 99.0]])
    for mode, expected in [("token", 14 / 4), ("sequence", (2 + 8) / 2)]:
        term = EntropyTerm(make_config(entropy_coef=0.1, entropy_mean=mode).objective)
        assert float(term.mean(entropy, mask_BT, term.denominators(mask_BT))) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("entropy_mean", ["token", "sequence"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_is_independent_of_aggregation_and_micro_batches(mode: str, entropy_mean: str, size: int) -> None:
    objective, batch = prepared(loss_agg_mode=mode, entropy_coef=0.1, entropy_mean=entropy_mean)
    _, _, gradient, sums, _ = step(objective, batch, size=size)
    lengths = tensor([sum(row) for row in MASK]).clamp(min=1)[:, None]
    weight = 1 / 18 if entropy_mean == "token" else 1 / (6 * lengths)
    expected = -0.1 * weight * tensor(MASK)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert sums["loss/entropy"] == pytest.approx(float((tensor(ENTROPY) * -expected / 0.1).sum()), rel=1e-12)


def test_a_coefficient_of_0_has_no_term_and_needs_no_entropy() -> None:
    objective, batch = prepared(entropy_coef=0.0)
    assert not objective.needs_entropy
    assert build(make_config(entropy_coef=1e-4)).needs_entropy
    _, _, gradient, sums, _ = step(objective, batch)
    assert not gradient.any()
    assert "loss/entropy" not in sums


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_gradient_differs_and_one_step_raises_entropy(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((*MASK_BT.shape, 6), generator=generator, dtype=torch.float64)
    taken = torch.randint(6, MASK_BT.shape, generator=generator)

    def policy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits, -1)
        return logprobs.gather(-1, taken[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)

    after, gradients = {}, {}
    for coef in (0.0, 0.1):
        objective, batch = prepared(loss_agg_mode=mode, entropy_coef=coef)
        logits = start.clone().requires_grad_()
        logprobs, entropy = policy(logits)
        objective.loss(batch, logprobs, entropy, objective.denominators(batch)).loss.backward()
        gradients[coef] = logits.grad
        after[coef] = float(policy(start - 1.0 * logits.grad)[1][MASK_BT].mean())
    difference = gradients[0.1] - gradients[0.0]
    assert float(difference[MASK_BT].abs().max()) > 1e-4
    assert not difference[~MASK_BT].any()
    assert after[0.1] > after[0.0] + 1e-4
    assert float(policy(start - 1.0 * difference)[1][MASK_BT].mean()) > float(policy(start)[1][MASK_BT].mean()) + 1e-4
