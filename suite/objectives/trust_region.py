"""Surrogates of the policy loss: how far the importance ratio may carry an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from suite.config import ObjectiveConfig
from suite.registry import Registry


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The inputs of a surrogate, each (B, T), 0 at masked positions (a ratio of 1 there); the gradient is in
    `logprobs_BT` and `ratio_BT`."""

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    ratio_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    penalty_coef: float = 0.0
    """The coefficient that a penalty has at present."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A per-token loss to be minimised, and which tokens lost their gradient to the lower and the upper bound."""

    loss_BT: torch.Tensor
    clipped_low_BT: torch.Tensor
    clipped_high_BT: torch.Tensor
    kl_old_BT: torch.Tensor | None = None
    """Of a penalty: the KL to the policy at sampling time, before its coefficient."""


TrustRegion = Callable[[PolicyTokens, ObjectiveConfig], PolicyLoss]

TRUST_REGIONS: Registry[TrustRegion] = Registry("trust region")


@TRUST_REGIONS.register("none")
def no_trust_region(tokens: PolicyTokens, objective: ObjectiveConfig) -> PolicyLoss:
    """-ratio x advantage: the importance-weighted policy gradient, never clipped."""
    never_BT = torch.zeros_like(tokens.mask_BT)
    return PolicyLoss(-tokens.ratio_BT * tokens.advantages_BT, never_BT, never_BT)


@TRUST_REGIONS.register("clip", reads=["objective.epsilon_low", "objective.epsilon_high"])
def clip(tokens: PolicyTokens, objective: ObjectiveConfig) -> PolicyLoss:
    """-min(ratio x A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) x A): PPO's surrogate, with DAPO's two bounds.

    A token is clipped low where A < 0 and the ratio is below the lower bound, high where A > 0 and it is above
    the upper one: there, and only there, its gradient is 0. Schulman et al. 2017, eq. 7; arXiv 2503.14476, eq. 10.
    """
    ratio_BT, advantages_BT = tokens.ratio_BT, tokens.advantages_BT
    low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
    bounded_BT = ratio_BT.clamp(low, high)
    return PolicyLoss(
        -torch.minimum(ratio_BT * advantages_BT, bounded_BT * advantages_BT),
        tokens.mask_BT & (advantages_BT < 0) & (ratio_BT < low),
        tokens.mask_BT & (advantages_BT > 0) & (ratio_BT > high),
    )


@TRUST_REGIONS.register("kl_penalty", reads=["objective.kl_penalty_coef", "objective.kl_penalty_target"])
def kl_penalty(tokens: PolicyTokens, objective: ObjectiveConfig) -> PolicyLoss:
    """-ratio x advantage + coefficient x KL(old, pi): PPO's penalty (Schulman et al. 2017, eq. 8). Nothing is clipped.

    The KL is estimated per token by ratio - 1 - log ratio, from tokens of the old policy: never negative, unbiased in
    value and gradient, and with neither at a ratio of 1. `suite.objectives.controllers` adapts the coefficient.
    """
    plain = no_trust_region(tokens, objective)
    log_ratio_BT = tokens.logprobs_BT - tokens.old_logprobs_BT
    kl_BT = torch.expm1(log_ratio_BT) - log_ratio_BT
    return replace(plain, loss_BT=plain.loss_BT + tokens.penalty_coef * kl_BT, kl_old_BT=kl_BT.detach())
