"""Advantage estimators: from the rewards of a rollout batch to one advantage per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from suite.config import ObjectiveConfig
from suite.registry import Registry

SPREAD_TOLERANCE = 1e-6
"""A group whose rewards differ by at most this, relative to the larger of 1 and the largest of them, is constant."""

DEVIATION = frozenset({"objective.advantage_eps", "objective.advantage_ddof"})
"""The options of a standard deviation, read by whatever divides by one."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator may look at, float64; a whole rollout batch, groups of any sizes in any order."""

    rewards_B: torch.Tensor
    """The scalar reward of each rollout; never NaN, since a rollout whose reward abstained is not in the batch."""
    token_rewards_BT: torch.Tensor
    """Rewards given token by token (the KL penalty in the reward); 0 at masked positions."""
    mask_BT: torch.Tensor
    group_B: torch.Tensor
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Per-row extras of the batch, shape (B,)."""
    values_BT: torch.Tensor | None = None
    """The critic's value before each token, where the estimator has one."""
    baseline_B: torch.Tensor | None = None
    """What estimators with a baseline from outside the batch subtract from the scalar reward."""

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

    def returns_to_go(self, gamma: float) -> torch.Tensor:
        """(B, T): rewards of a token and of the trained tokens after it, each of these discounted by `gamma` per
        trained token between. Masked positions count in no distance."""
        rewards_BT, out_BT = self.rewards_BT, torch.zeros_like(self.token_rewards_BT)
        running_B = torch.zeros_like(self.rewards_B)
        for t in reversed(range(self.mask_BT.shape[1])):
            running_B = torch.where(self.mask_BT[:, t], rewards_BT[:, t] + gamma * running_B, running_B)
            out_BT[:, t] = running_B
        return out_BT

    def groups(self) -> Iterator[torch.Tensor]:
        """The rows of each group, as a mask (B,)."""
        for group in self.group_B.unique():
            yield self.group_B == group

    @property
    def task_B(self) -> torch.Tensor:
        """Which task of a mixture each row is of (`targets["task"]`); 0 where there is but one."""
        return self.targets.get("task", torch.zeros_like(self.group_B))

    def tasks(self) -> Iterator[torch.Tensor]:
        """The rows of each task of a mixture, whose rewards share no scale."""
        for task in self.task_B.unique():
            yield self.task_B == task


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A formula and what it asks of its surroundings."""

    compute: Callable[[AdvantageInputs, ObjectiveConfig], torch.Tensor]
    """(inputs, objective) -> advantages_BT; what it holds at masked positions means nothing."""
    within_group: bool = False
    """Compares a rollout with others of its prompt: groups of 1 are refused, a constant group has exactly 0."""
    baseline: Literal["none", "moving", "greedy"] = "none"
    """What `inputs.baseline_B` holds: nothing, the moving mean of rewards, or the reward of the greedy completion."""
    whitens: bool = False
    """Whether it is whitened over the batch whatever `whiten_advantages` says."""

    def __call__(self, inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
        return self.compute(inputs, objective)


ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")

_Formula = Callable[[AdvantageInputs, ObjectiveConfig], torch.Tensor]


def estimator(
    name: str,
    *,
    reads: Iterable[str] = (),
    within_group: bool = False,
    baseline: Literal["none", "moving", "greedy"] = "none",
    whitens: bool = False,
) -> Callable[[_Formula], _Formula]:
    """Decorator that registers a formula as an estimator; `reads` names the options that it looks at."""

    def add(compute: _Formula) -> _Formula:
        ADVANTAGES.register(name, reads=reads)(AdvantageEstimator(compute, within_group, baseline, whitens))
        return compute

    return add


def is_constant(values: torch.Tensor) -> bool:
    """Whether max - min is within `SPREAD_TOLERANCE`: a single value is constant, what holds an infinity is not."""
    spread, largest = float(values.max() - values.min()), float(values.abs().max())
    return math.isfinite(largest) and spread <= SPREAD_TOLERANCE * max(1.0, largest)


def advantages(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """advantages_BT (float64), 0 at masked positions: the configured estimator's, whitened where that is asked for.

    With `whiten_advantages`, and for REINFORCE++ always, they are whitened over all trained tokens of a task's
    rollouts in the batch. With an estimator that compares within groups, a constant group still has exactly 0: its
    whitened value would be the mean of the other groups' advantages, and no signal.
    """
    chosen, mask_BT = ADVANTAGES[objective.advantage], inputs.mask_BT
    values_BT = torch.where(mask_BT, chosen.compute(inputs, objective), 0.0)
    if not whitens(objective):
        return values_BT
    for rows_B in inputs.tasks():
        of_task_BT = mask_BT & rows_B[:, None]
        whitened_BT = whiten(values_BT, of_task_BT, objective.advantage_eps, objective.advantage_ddof)
        values_BT = torch.where(of_task_BT, whitened_BT, values_BT)
    if chosen.within_group:
        for rows_B in inputs.groups():
            if is_constant(inputs.returns_B[rows_B]):
                values_BT[rows_B] = 0.0
    return values_BT


def whitens(objective: ObjectiveConfig) -> bool:
    """Whether advantages are whitened."""
    return ADVANTAGES[objective.advantage].whitens or objective.whiten_advantages


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, eps: float, ddof: int = 1) -> torch.Tensor:
    """(A - mean) / (std + eps) over the positions of the mask, 0 elsewhere; values that are all equal become exactly 0.

    Over tokens, so that a long completion weighs more in both moments, as in verl and OpenRLHF.
    """
    values, out_BT = values_BT[mask_BT], torch.zeros_like(values_BT)
    if len(values) and not is_constant(values):
        out_BT[mask_BT] = (values - values.mean()) / (values.std(correction=ddof) + eps)
    return out_BT


def advantage_reads(objective: ObjectiveConfig) -> set[str]:
    """The options that `advantages` reads, given their values."""
    entry = ADVANTAGES.entry(objective.advantage)
    names = {"objective.advantage"} | entry.reads
    if not entry.value.whitens:
        names.add("objective.whiten_advantages")
    if objective.length_adaptive_alpha:
        names.discard("objective.gae_lambda_policy")
    scaled = "objective.scale_rewards" in names and objective.scale_rewards != "none"
    return names | DEVIATION if scaled or whitens(objective) else names


def centred(inputs: AdvantageInputs) -> torch.Tensor:
    """(B,): returns minus the group's mean; a constant group, a single rollout among them, has exactly 0."""
    returns_B, out_B = inputs.returns_B, torch.zeros_like(inputs.rewards_B)
    for rows_B in inputs.groups():
        members = returns_B[rows_B]
        if not is_constant(members):
            out_B[rows_B] = members - members.mean()
    return out_B


def _every_token(values_B: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    return values_B[:, None].expand(inputs.mask_BT.shape)


@estimator("group", reads=["objective.scale_rewards"], within_group=True)
def group_advantages(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """(R - group mean) / (std + eps) for every token of a rollout; a constant group has exactly 0, whatever eps is.

    R is a rollout's return: its scalar reward plus its token rewards summed. Hence a KL penalty in the reward
    enters the group's mean and standard deviation too, and still acts on groups whose task rewards are all
    equal; with `scale_rewards = group` it is then scaled up to unit variance.
    The standard deviation has ddof `advantage_ddof` and is the group's (GRPO, arXiv 2402.03300, section 4.1), that of
    all R of the batch's same task (`batch`), or absent (`none`: Dr. GRPO, arXiv 2503.20783; arXiv 2506.21495, eq. 1).
    Constant is judged group by group in each case.
    """
    returns_B, scale, out_B = inputs.returns_B, objective.scale_rewards, centred(inputs)
    if scale == "none":
        return _every_token(out_B, inputs)
    for rows_B in inputs.groups() if scale == "group" else inputs.tasks():
        if out_B[rows_B].any():
            out_B[rows_B] /= returns_B[rows_B].std(correction=objective.advantage_ddof) + objective.advantage_eps
    return _every_token(out_B, inputs)


@estimator("rloo", within_group=True)
def leave_one_out(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """R minus the mean R of the group's other rollouts, for every token: n / (n - 1) x (R - group mean).

    R is a rollout's return, token rewards included. Ahmadian et al. 2024 (arXiv 2402.14740). A constant
    group, or one of which a single rollout has a reward, has exactly 0.
    """
    out_B = centred(inputs)
    for rows_B in inputs.groups():
        count = int(rows_B.sum())
        out_B[rows_B] *= count / max(count - 1, 1)
    return _every_token(out_B, inputs)


@estimator("rloo_token", reads=["objective.gamma"], within_group=True)
def token_leave_one_out(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """Returns-to-go of a rollout's token rewards minus the mean return of the group's other rollouts.

    Their return is the one from their first trained token, discounted alike. With a scalar reward alone and gamma 1
    this is `rloo`. In a constant group (returns from the first token) a rollout stands in for the others, so that
    scalar rewards give exactly 0. A rollout without trained tokens still counts, with its undiscounted return.
    """
    to_go_BT = inputs.returns_to_go(objective.gamma)
    first_B = inputs.mask_BT.int().argmax(1, keepdim=True)
    whole_B = torch.where(inputs.mask_BT.any(1), to_go_BT.gather(1, first_B)[:, 0], inputs.returns_B)
    baseline_B = whole_B.clone()
    for rows_B in inputs.groups():
        members = whole_B[rows_B]
        if not is_constant(members):
            baseline_B[rows_B] = (members.sum() - members) / (len(members) - 1)
    return to_go_BT - baseline_B[:, None]


@estimator("reinforce", reads=["objective.baseline_decay"], baseline="moving")
def reinforce(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """R minus the moving mean of the returns of earlier batches, for every token (arXiv 2402.14740).

    R is a rollout's return, token rewards included; a completion is one action. Groups play no part.
    """
    assert inputs.baseline_B is not None
    return _every_token(inputs.returns_B - inputs.baseline_B, inputs)


@estimator("remax", reads=["objective.gamma"], baseline="greedy")
def remax(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """Returns-to-go of the token rewards, the scalar one less the reward of the prompt's greedy completion.

    ReMax, arXiv 2310.10505, and as there discounted by gamma per token. A KL penalty in the reward enters by
    its returns-to-go, as in verl; the authors' code charges each token its own share only.
    """
    assert inputs.baseline_B is not None
    return replace(inputs, rewards_B=inputs.rewards_B - inputs.baseline_B).returns_to_go(objective.gamma)


@estimator("reinforce_pp", reads=["objective.gamma"], whitens=True)
def reinforce_plus_plus(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """Returns-to-go of the token rewards, the KL penalty in the reward among them, to be whitened over the batch.

    REINFORCE++, arXiv 2501.03262v9, eq. 4: without a baseline of its own, its mean comes from the whitening.
    """
    return inputs.returns_to_go(objective.gamma)


@estimator("reinforce_pp_baseline", within_group=True, whitens=True)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, objective: ObjectiveConfig) -> torch.Tensor:
    """R minus the group's mean, for every token, to be whitened over the batch (arXiv 2501.03262v9, eq. 6 and 7).

    The paper puts its KL (k2) in the loss. A constant group has exactly 0, before and after the whitening.
    """
    return _every_token(centred(inputs), inputs)
