"""Numbers that adapt while a run trains: what they are now, how they move, and what a checkpoint keeps of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from suite.config import ObjectiveConfig
from suite.protocols import State


class MovingBaseline:
    """A weighted mean of the mean rewards of the rollout batches so far, the newest weighing 1 and each older one
    `baseline_decay` times the one after it; with a decay of 1 the plain mean of all batches (arXiv 2402.14740).
    Each task of a mixture has one of its own: their rewards share no scale.
    """

    def __init__(self, objective: ObjectiveConfig, tasks: int) -> None:
        self._decay = objective.baseline_decay
        self._total, self._weight = [0.0] * tasks, [0.0] * tasks

    def take(self, returns_B: torch.Tensor, task_B: torch.Tensor) -> torch.Tensor:
        """The baseline of each rollout of a batch, from the batches before it; then the batch joins them.

        Before any other batch it is the batch's own mean, so that the first update does not raise whatever was sampled.
        """
        out_B = torch.zeros_like(returns_B)
        for task in task_B.unique().tolist():
            rows_B, place = task_B == task, int(task)
            mean = float(returns_B[rows_B].mean())
            out_B[rows_B] = self._total[place] / self._weight[place] if self._weight[place] else mean
            self._total[place] = self._decay * self._total[place] + mean
            self._weight[place] = self._decay * self._weight[place] + 1.0
        return out_B

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Optimizer steps do not move it."""

    def state(self) -> State:
        totals = {f"total.{place}": value for place, value in enumerate(self._total)}
        return {**totals, **{f"weight.{place}": value for place, value in enumerate(self._weight)}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for place in range(len(self._total)):
            self._total[place], self._weight[place] = float(state[f"total.{place}"]), float(state[f"weight.{place}"])


class EntropyCoefficient:
    """The coefficient of the entropy bonus: fixed, or adapted to a target entropy (Skywork-OR1, arXiv 2505.22312).

    With a target, an optimizer step whose mean entropy was below it adds `entropy_coef_delta`, any other subtracts
    it, within [0, entropy_coef_max]; and the bonus counts only while the entropy, as the step before saw it, is below
    the target. The first step has none. Steps that train on nothing leave everything as it is.
    """

    def __init__(self, objective: ObjectiveConfig) -> None:
        self._coef, self._target = objective.entropy_coef, objective.entropy_target
        self._entropy = math.inf
        if self._target:
            self._delta, self._max = objective.entropy_coef_delta, objective.entropy_coef_max

    @property
    def adapts(self) -> bool:
        """Whether there is a target."""
        return self._target != 0

    @property
    def applied(self) -> float:
        """What multiplies the mean entropy in the coming step."""
        return self._coef if not self._target or self._entropy < self._target else 0.0

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Adapt to the entropy of an optimizer step."""
        if not self._target or not metrics.get("loss/trained_tokens"):
            return
        self._entropy = metrics["loss/entropy"]
        change = self._delta if self._entropy < self._target else -self._delta
        self._coef = min(max(self._coef + change, 0.0), self._max)

    def state(self) -> State:
        return {"coef": self._coef, "entropy": self._entropy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._coef, self._entropy = float(state["coef"]), float(state["entropy"])


class PenaltyCoefficient:
    """The coefficient of the KL penalty: fixed, or adapted once per rollout batch (Schulman et al. 2017, section 4).

    d is the mean of `loss/kl_old` over the optimizer steps of the batch's last epoch, each measured before it moves
    the weights. d < target / 1.5 halves the coefficient and d > 1.5 x target doubles it, for the next batch.
    """

    def __init__(self, objective: ObjectiveConfig) -> None:
        self.value, self._target = objective.kl_penalty_coef, objective.kl_penalty_target
        self._updates = objective.num_minibatches * objective.num_epochs
        self._last = objective.num_minibatches
        self.start()

    def start(self) -> None:
        """A new rollout batch."""
        self._seen, self._found = 0, list[float]()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take note of an optimizer step, and adapt after the batch's last one."""
        self._seen += 1
        if self._seen > self._updates - self._last and metrics.get("loss/trained_tokens"):
            self._found.append(metrics["loss/kl_old"])
        if self._target and self._seen == self._updates and self._found:
            divergence = sum(self._found) / len(self._found)
            if divergence < self._target / 1.5:
                self.value /= 2
            elif divergence > self._target * 1.5:
                self.value *= 2

    def state(self) -> State:
        return {"coef": self.value}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["coef"])
