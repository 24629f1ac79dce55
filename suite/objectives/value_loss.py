"""The critic's loss: squared error to the targets, kept near the values that the batch was prepared with."""

from __future__ import annotations

import torch

from suite.objectives.aggregation import keep


def value_loss(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    tokens: float,
    cliprange: float,
) -> tuple[torch.Tensor, float]:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of a micro-batch, and its share of clipped tokens.

    `tokens` counts the trained tokens of the whole optimizer step, so that shares add up to its mean over tokens
    whatever the split; without any the loss is exactly 0. A token is clipped where the clipped error is the larger
    one: there, and only there, it has no gradient. `cliprange` is in reward units; 0 = never. Masked positions reach
    neither value nor gradient. Schulman et al. 2017 (PPO's code); Huang et al. 2024 (arXiv 2403.17031).
    """
    values_BT, old_BT = keep(values_BT, mask_BT), keep(old_values_BT, mask_BT)
    returns_BT = keep(returns_BT, mask_BT)
    errors_BT = (values_BT - returns_BT) ** 2
    bound = cliprange or float("inf")
    near_BT = torch.minimum(torch.maximum(values_BT, old_BT - bound), old_BT + bound)
    clipped_BT = (near_BT - returns_BT) ** 2
    loss = 0.5 * torch.maximum(errors_BT, clipped_BT).sum() / max(tokens, 1.0)
    return loss, float((clipped_BT > errors_BT).sum()) / max(tokens, 1.0)
