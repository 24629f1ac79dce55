"""Per-token estimators of the KL divergence to the reference (Schulman 2020, "Approximating KL divergence").

In the loss what counts is the gradient, in the reward the value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from suite.config import ObjectiveConfig
from suite.registry import Registry

KLEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logprobs_BT, ref_logprobs_BT) -> nats per token."""

KL_ESTIMATORS: Registry[KLEstimator] = Registry("KL estimator")


@KL_ESTIMATORS.register("k1")
def k1(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """log pi - log ref: unbiased under pi, may be negative. In the loss its expected gradient is E[grad log pi] = 0."""
    return logprobs_BT - ref_logprobs_BT


@KL_ESTIMATORS.register("k2")
def k2(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """(log pi - log ref)^2 / 2: biased as a value; its expected gradient is that of KL(pi, ref)."""
    return 0.5 * (logprobs_BT - ref_logprobs_BT) ** 2


@KL_ESTIMATORS.register("k3")
def k3(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """ref/pi - log(ref/pi) - 1, never negative: unbiased as a value; its expected gradient is that of KL(ref, pi).

    GRPO's choice in the loss (arXiv 2402.03300, eq. 4). In the reward its policy gradient is biased.
    """
    difference_BT = ref_logprobs_BT - logprobs_BT
    return torch.expm1(difference_BT) - difference_BT


@KL_ESTIMATORS.register("k3+")
def k3_plus(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """k3's value with k2's gradient, which is that of KL(pi, ref)."""
    squared_BT = k2(logprobs_BT, ref_logprobs_BT)
    return k3(logprobs_BT, ref_logprobs_BT).detach() + (squared_BT - squared_BT.detach())


def resolve_kl_estimator(objective: ObjectiveConfig) -> KLEstimator:
    """The estimator in use: `auto` is k1 in the reward and k3 in the loss. `objective.kl` must not be `none`.

    In the reward only k1 leaves the policy gradient unbiased; the others are allowed there (k3+ equals k3).
    Raises ValueError for k1 in the loss.
    """
    assert objective.kl != "none"
    name = objective.kl_estimator
    if name == "auto":
        name = "k1" if objective.kl == "reward" else "k3"
    if name == "k1" and objective.kl == "loss":
        raise ValueError(
            "objective.kl_estimator is 'k1', whose expected gradient in the loss is zero; "
            "take k2, k3 or k3+, or objective.kl = 'reward'"
        )
    return KL_ESTIMATORS[name]
