"""Trust regions: per-token losses, gradients and what counts as clipped."""

from __future__ import annotations

import math

import pytest
import torch
from objective_cases import TRUST_REGION_REFERENCES, make_config, reference_for, tensor

from suite.objectives.trust_region import TRUST_REGIONS, PolicyLoss, PolicyTokens

RATIOS = [0.3, 0.85, 0.95, 1.0, 1.05, 1.3, 1.45, 2.5]
ADVANTAGES = [-1.5, -0.25, 0.0, 0.5, 2.0]
OBJECTIVE = make_config(kl_penalty_coef=0.7).objective


def surrogate(name: str, logprobs: torch.Tensor) -> PolicyLoss:
    """Every advantage (rows) against every ratio (columns)."""
    old = torch.full_like(logprobs, -1.0)
    advantages = tensor([[a] * len(RATIOS) for a in ADVANTAGES])
    mask_BT = torch.ones_like(logprobs, dtype=torch.bool)
    tokens = PolicyTokens(logprobs, old, (logprobs - old).exp(), advantages, mask_BT, OBJECTIVE.kl_penalty_coef)
    return TRUST_REGIONS[name](tokens, OBJECTIVE)


def grid() -> torch.Tensor:
    return tensor([[math.log(r) - 1.0 for r in RATIOS] for _ in ADVANTAGES]).requires_grad_()


@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_equals_the_formula(name: str) -> None:
    reference = reference_for(TRUST_REGION_REFERENCES, name, "trust region")
    got = surrogate(name, grid())
    expected = [[reference(r, a, OBJECTIVE) for r in RATIOS] for a in ADVANTAGES]
    torch.testing.assert_close(
        got.loss_BT.detach(), tensor([[c[0] for c in row] for row in expected]), rtol=1e-12, atol=0
    )
    assert got.clipped_low_BT.tolist() == [[c[1] for c in row] for row in expected]
    assert got.clipped_high_BT.tolist() == [[c[2] for c in row] for row in expected]


@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_clipped_tokens_and_only_they_have_no_gradient(name: str) -> None:
    logprobs = grid()
    got = surrogate(name, logprobs)
    got.loss_BT.sum().backward()
    assert logprobs.grad is not None
    clipped = got.clipped_low_BT | got.clipped_high_BT
    for b, advantage in enumerate(ADVANTAGES):
        for t, ratio in enumerate(RATIOS):
            penalty = OBJECTIVE.kl_penalty_coef * (ratio - 1) if name == "kl_penalty" else 0.0
            expected = 0.0 if bool(clipped[b, t]) else penalty - ratio * advantage
            assert float(logprobs.grad[b, t]) == pytest.approx(expected, rel=1e-12, abs=1e-15), (advantage, ratio)


def test_worked_by_hand_with_unequal_bounds() -> None:
    # 1.45 is above 1 + 0.4 and 1.3 is not; 0.85 is below 1 - 0.1 and 0.95 is not. Swapped, it would be the reverse.
    got = surrogate("clip", grid())
    up, down = ADVANTAGES.index(2.0), ADVANTAGES.index(-1.5)
    assert got.loss_BT[up, RATIOS.index(1.45)].item() == pytest.approx(-2.8)
    assert got.loss_BT[up, RATIOS.index(1.3)].item() == pytest.approx(-2.6)
    assert got.loss_BT[down, RATIOS.index(0.85)].item() == pytest.approx(1.35)
    assert got.loss_BT[down, RATIOS.index(0.95)].item() == pytest.approx(1.425)
    assert got.loss_BT[down, RATIOS.index(2.5)].item() == pytest.approx(3.75)
    assert [int(x.sum()) for x in (got.clipped_low_BT, got.clipped_high_BT)] == [4, 4]


def test_the_penalty_expects_the_gradient_of_the_kl_from_the_old_policy() -> None:
    old = tensor([0.5, 0.3, 0.15, 0.05]).log()
    logits = tensor([0.2, -0.4, 1.1, 0.3]).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    zeros = torch.zeros(4, dtype=torch.float64)
    tokens = PolicyTokens(logprobs, old, (logprobs - old).exp(), zeros, torch.ones(4, dtype=torch.bool), 1.0)
    found = TRUST_REGIONS["kl_penalty"](tokens, OBJECTIVE)
    got = torch.autograd.grad((old.exp() * found.loss_BT).sum(), logits, retain_graph=True)[0]
    divergence = (old.exp() * (old - logprobs)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(divergence, logits)[0], rtol=1e-9, atol=1e-12)
    assert found.kl_old_BT is not None
    assert float((old.exp() * found.kl_old_BT).sum()) == pytest.approx(float(divergence.detach()), rel=1e-12)


def test_at_a_ratio_of_1_all_trust_regions_agree() -> None:
    for name in TRUST_REGIONS:
        logprobs = torch.full((len(ADVANTAGES), len(RATIOS)), -1.0, dtype=torch.float64, requires_grad=True)
        got = surrogate(name, logprobs)
        got.loss_BT.sum().backward()
        assert logprobs.grad is not None
        torch.testing.assert_close(logprobs.grad[:, 0], -tensor(ADVANTAGES), rtol=0, atol=0)
        assert not bool((got.clipped_low_BT | got.clipped_high_BT).any())
