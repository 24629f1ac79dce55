"""Generalized advantage estimation: advantages and value targets from per-token rewards and a critic's values.

A trajectory is the trained tokens of a row, in order; masked positions are stepped over. Nothing follows its last
token: a value of 0, whether the completion ended by itself or at its budget. Schulman et al. 2016 (arXiv
1506.02438), eq. 16.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from suite.config import CriticConfig, ObjectiveConfig
from suite.objectives.advantages import AdvantageInputs, estimator
from suite.objectives.aggregation import keep


def gae(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float, lambda_B: torch.Tensor
) -> torch.Tensor:
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; 0 at masked positions.

    Reward units, (B, T) in and out, one lambda per row. lambda 0 gives delta_t, lambda 1 the discounted return minus
    V_t. What masked positions hold (NaN, infinite) reaches nothing.
    """
    advantages_BT = torch.zeros_like(values_BT)
    ahead_B = torch.zeros_like(values_BT[:, 0])
    next_value_B = torch.zeros_like(ahead_B)
    for t in reversed(range(mask_BT.shape[1])):
        trained_B = mask_BT[:, t]
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        ahead_B = torch.where(trained_B, delta_B + gamma * lambda_B * ahead_B, ahead_B)
        next_value_B = torch.where(trained_B, values_BT[:, t], next_value_B)
        advantages_BT[:, t] = torch.where(trained_B, ahead_B, 0.0)
    return advantages_BT


def value_targets(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """V_t + A_t, what the critic is regressed on, (B, T); with lambda 1 the Monte-Carlo return, whatever the values."""
    lambda_B = torch.full((len(mask_BT),), gae_lambda, dtype=torch.float64, device=mask_BT.device)
    values_BT = values_BT.double()
    return keep(values_BT + gae(rewards_BT.double(), values_BT, mask_BT, gamma, lambda_B), mask_BT)


def length_adaptive_lambda(mask_BT: torch.Tensor, alpha: float) -> torch.Tensor:
    """lambda = 1 - 1 / (alpha l), l the trained tokens of a row, (B,), float64 (arXiv 2504.05118, section 4.2).

    The horizon 1 / (1 - lambda) is then alpha l, a set share of the completion, so alpha scales with the lengths of
    a task: 0.05 suits completions of a thousand tokens and needs 20 of them at the least; 1 suits any length.
    A row of one token has no use for its lambda and gets 0. Raises ValueError where lambda would be negative.
    """
    lengths_B = mask_BT.sum(1).double()
    long_B = lengths_B > 1
    if bool((alpha * lengths_B[long_B] < 1).any()):
        shortest = int(lengths_B[long_B].min())
        enough = math.ceil(1e4 / shortest) / 1e4  # rounded up, so that it would do as printed
        raise ValueError(
            f"objective.length_adaptive_alpha is {alpha:g}, but the shortest completion to need it has {shortest} "
            f"trained tokens, and 1 - 1 / ({alpha:g} x {shortest}) = {1 - 1 / (alpha * shortest):.3g} is no lambda; "
            f"take at least {enough:g} for it, or 1 for completions of any length"
        )
    return torch.where(long_B, 1 - 1 / (alpha * lengths_B).clamp(min=1.0), 0.0)


@estimator(
    "gae",
    reads=[
        "objective.gamma", "objective.gae_lambda_policy", "objective.length_adaptive_alpha",
        *(f"critic.{field.name}" for field in dataclasses.fields(CriticConfig)),
    ],
)  # fmt: skip
def gae_advantages(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """GAE over the per-token rewards (KL in the reward included, the scalar on the last trained token) and the values.

    lambda is `gae_lambda_policy`, or each row's own with `length_adaptive_alpha` above 0. The critic's targets have
    a lambda of their own, `critic.gae_lambda_value` (arXiv 2503.01491, decoupled GAE). Raises ValueError as
    `length_adaptive_lambda` says.
    """
    assert inputs.values_BT is not None
    mask_BT, alpha = inputs.mask_BT, objective.length_adaptive_alpha
    if alpha:
        lambda_B = length_adaptive_lambda(mask_BT, alpha)
    else:
        lambda_B = torch.full_like(inputs.rewards_B, objective.gae_lambda_policy)
    return gae(inputs.rewards_BT, inputs.values_BT.double(), mask_BT, objective.gamma, lambda_B)
