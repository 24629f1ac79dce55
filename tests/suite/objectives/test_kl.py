"""KL estimators: values against their formulas, gradients against the analytic KL of a small categorical."""

from __future__ import annotations

import math

import pytest
import torch
from objective_cases import KL_REFERENCES, LOGPROBS, REF, make_config, reference_for, tensor

from suite.objectives.kl import KL_ESTIMATORS, resolve_kl_estimator

REF_V = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equals_the_formula(name: str) -> None:
    reference = reference_for(KL_REFERENCES, name, "KL estimator")
    got = KL_ESTIMATORS[name](tensor(LOGPROBS), tensor(REF))
    expected = [[reference(p, q) for p, q in zip(*two)] for two in zip(LOGPROBS, REF)]
    torch.testing.assert_close(got, tensor(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", -math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 1 - math.log(2))]
)
def test_worked_by_hand_where_the_reference_is_twice_as_likely(name: str, expected: float) -> None:
    got = KL_ESTIMATORS[name](tensor([[math.log(0.25)]]), tensor([[math.log(0.5)]]))
    assert float(got) == pytest.approx(expected, rel=1e-12)


def analytic(divergence: str) -> torch.Tensor:
    """The gradient of a divergence between softmax(logits) and the reference, by its definition."""
    logits = policy_logits()
    p = torch.softmax(logits, 0)
    value = (p * (p / REF_V).log()).sum() if divergence == "KL(pi, ref)" else (REF_V * (REF_V / p).log()).sum()
    return torch.autograd.grad(value, logits)[0]


def policy_logits() -> torch.Tensor:
    return torch.tensor([0.2, -0.4, 1.1, 0.3], dtype=torch.float64, requires_grad=True)


def expected_gradient(name: str) -> torch.Tensor:
    """E over tokens drawn from the policy of the estimator's gradient, by enumeration."""
    logits = policy_logits()
    logprobs = torch.log_softmax(logits, 0)
    estimate = KL_ESTIMATORS[name](logprobs, REF_V.log())
    return torch.autograd.grad((logprobs.exp().detach() * estimate).sum(), logits)[0]


@pytest.mark.parametrize(("name", "divergence"), [("k2", "KL(pi, ref)"), ("k3+", "KL(pi, ref)"), ("k3", "KL(ref, pi)")])
def test_expected_gradient_is_that_of_the_divergence(name: str, divergence: str) -> None:
    torch.testing.assert_close(expected_gradient(name), analytic(divergence), rtol=1e-9, atol=1e-12)
    assert (analytic("KL(pi, ref)") - analytic("KL(ref, pi)")).abs().max() > 0.05


def test_k1_in_the_reward_expects_the_gradient_of_the_divergence() -> None:
    # REINFORCE with the reward -k1, which carries no gradient of its own: E[-k1 grad log pi] = -grad KL(pi, ref)
    logits = policy_logits()
    logprobs = torch.log_softmax(logits, 0)
    reward = -KL_ESTIMATORS["k1"](logprobs.detach(), REF_V.log())
    got = torch.autograd.grad((logprobs.exp().detach() * reward * logprobs).sum(), logits, retain_graph=True)[0]
    torch.testing.assert_close(got, -analytic("KL(pi, ref)"), rtol=1e-9, atol=1e-12)
    biased = -KL_ESTIMATORS["k3"](logprobs.detach(), REF_V.log())
    other = torch.autograd.grad((logprobs.exp().detach() * biased * torch.log_softmax(logits, 0)).sum(), logits)[0]
    assert float((other + analytic("KL(pi, ref)")).abs().max()) > 0.01


def test_k3_plus_has_the_value_of_k3() -> None:
    assert torch.equal(
        KL_ESTIMATORS["k3+"](tensor(LOGPROBS), tensor(REF)), KL_ESTIMATORS["k3"](tensor(LOGPROBS), tensor(REF))
    )


def test_k1_in_the_loss_pushes_nowhere_and_is_refused() -> None:
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"'k1'.*zero; take k2, k3 or k3\+, or objective.kl = 'reward'"):
        resolve_kl_estimator(make_config(kl="loss", kl_estimator="k1").objective)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(name: str) -> None:
    p = torch.softmax(policy_logits().detach(), 0)
    expected = float((p * (p / REF_V).log()).sum())
    assert float((p * KL_ESTIMATORS[name](p.log(), REF_V.log())).sum()) == pytest.approx(expected, rel=1e-12)


def test_auto_is_k1_in_the_reward_and_k3_in_the_loss() -> None:
    assert resolve_kl_estimator(make_config(kl="reward").objective) is KL_ESTIMATORS["k1"]
    assert resolve_kl_estimator(make_config(kl="loss").objective) is KL_ESTIMATORS["k3"]
    assert resolve_kl_estimator(make_config(kl="reward", kl_estimator="k3").objective) is KL_ESTIMATORS["k3"]


def test_an_unknown_estimator_suggests_near_names() -> None:
    with pytest.raises(ValueError, match=r"unknown KL estimator 'k4'; did you mean 'k"):
        resolve_kl_estimator(make_config(kl="loss", kl_estimator="k4").objective)


def test_equal_policies_have_no_divergence() -> None:
    for name in KL_ESTIMATORS:
        assert float(KL_ESTIMATORS[name](tensor(REF), tensor(REF)).abs().max()) == 0.0
