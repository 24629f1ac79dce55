"""Advantage estimators: from the rewards of a rollout batch to one advantage per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from suite.config import ObjectiveConfig
from suite.registry import Registry

SPREAD_TOLERANCE = 1e-6
"""A group whose rewards differ by at most this, relative to the larger of 1 and the largest of them, is constant."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator may look at, float64; a whole rollout batch, groups of any sizes in any order."""

    rewards_B: torch.Tensor
    """The scalar reward of each rollout."""
    token_rewards_BT: torch.Tensor
    """Rewards given token by token (the KL penalty in the reward); 0 at masked positions."""
    mask_BT: torch.Tensor
    group_B: torch.Tensor
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Per-row extras of the batch, shape (B,)."""

    @property
    def returns_B(self) -> torch.Tensor:
        """Everything a rollout was rewarded with, undiscounted."""
        return self.rewards_B + self.token_rewards_BT.sum(1)

    @property
    def rewards_BT(self) -> torch.Tensor:
        """Rewards token by token, the scalar one on the last trained token (on none in a row without any)."""
        position_T = torch.arange(1, self.mask_BT.shape[1] + 1, device=self.mask_BT.device)
        place_BT = self.mask_BT * position_T
        last_BT = self.mask_BT & (place_BT == place_BT.amax(1, keepdim=True))
        return self.token_rewards_BT + last_BT * self.rewards_B[:, None]


AdvantageEstimator = Callable[[AdvantageInputs, ObjectiveConfig], torch.Tensor]
"""(inputs, objective) -> advantages_BT; what it holds at masked positions means nothing."""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


def is_constant(values: torch.Tensor) -> bool:
    """Whether max - min is within `SPREAD_TOLERANCE`; a single value is constant."""
    spread = float(values.max() - values.min())
    return spread <= SPREAD_TOLERANCE * max(1.0, float(values.abs().max()))


@ADVANTAGES.register("group", reads=["objective.scale_rewards", "objective.advantage_eps"])
def group_advantages(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """(R - group mean) / (std + eps) for every token of a rollout; a constant group has exactly 0, whatever eps is.

    R is a rollout's return: its scalar reward plus its token rewards summed. Hence a KL penalty in the reward
    enters the group's mean and standard deviation too, and still acts on groups whose task rewards are all
    equal; with `scale_rewards = group` it is then scaled up to unit variance.
    The standard deviation has ddof 1 and is the group's (GRPO, arXiv 2402.03300, section 4.1), the whole batch's
    over all R (`batch`), or absent (`none`: Dr. GRPO, arXiv 2503.20783; arXiv 2506.21495, eq. 1). Constant is
    judged group by group in each case. Raises ValueError for a group of 1 where the group's deviation is asked for.
    """
    returns_B, scale = inputs.returns_B, objective.scale_rewards
    advantages_B = torch.zeros_like(returns_B)
    for group in inputs.group_B.unique():
        rows_B = inputs.group_B == group
        members = returns_B[rows_B]
        if scale == "group" and len(members) < 2:
            raise ValueError(
                "objective.scale_rewards = 'group' needs at least 2 rollouts per prompt: "
                "a group of 1 has no standard deviation"
            )
        if is_constant(members):
            continue
        centred = members - members.mean()
        if scale != "none":
            spread_of = members if scale == "group" else returns_B
            centred = centred / (spread_of.std(correction=1) + objective.advantage_eps)
        advantages_B[rows_B] = centred
    return advantages_B[:, None].expand(inputs.mask_BT.shape)
