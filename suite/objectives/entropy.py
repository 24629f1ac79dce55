"""The entropy bonus: the same term whatever the loss it joins and however that loss is aggregated."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from suite.config import ObjectiveConfig
from suite.objectives.aggregation import AGGREGATIONS, Counts
from suite.objectives.controllers import EntropyCoefficient

_MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean"}
_PREFIX = "entropy_"


class EntropyTerm:
    """coef x mean entropy (nats, full vocabulary) over the covered tokens of a step, to be subtracted from a loss.

    `entropy_mean` takes the mean over tokens, or over per-sequence means (arXiv 2506.21495's code).
    The gradient flows through the entropy; masked tokens are in neither value nor gradient.
    """

    def __init__(self, objective: ObjectiveConfig) -> None:
        self.controller = EntropyCoefficient(objective)
        self._mean = AGGREGATIONS[_MODES[objective.entropy_mean]]

    @property
    def coef(self) -> float:
        """The coefficient of the coming step; 0 while an adaptive one rests."""
        return self.controller.applied

    def report(self) -> dict[str, float]:
        """The coefficient as a metric, where it adapts."""
        return {"loss/entropy_coef": self.coef} if self.controller.adapts else {}

    def denominators(self, mask_BT: torch.Tensor) -> dict[str, float]:
        """The step's counts; `mask_BT` marks the covered tokens."""
        return Counts.of(mask_BT).named(_PREFIX)

    def mean(
        self, entropy_BT: torch.Tensor | None, mask_BT: torch.Tensor, denominators: Mapping[str, float]
    ) -> torch.Tensor:
        """This micro-batch's share of the step's mean entropy, before the coefficient; (B, T) in, a scalar out."""
        assert entropy_BT is not None
        return self._mean(entropy_BT, mask_BT, Counts.read(denominators, _PREFIX), 0)


def entropy_term(objective: ObjectiveConfig) -> EntropyTerm | None:
    """The term of a configuration; None when its coefficient is 0 and stays so."""
    return EntropyTerm(objective) if objective.entropy_coef != 0 or objective.entropy_target != 0 else None


def entropy_reads(objective: ObjectiveConfig) -> set[str]:
    """The options that the term reads."""
    names = {"objective.entropy_coef", "objective.entropy_target"}
    if objective.entropy_target != 0:
        names |= {"objective.entropy_coef_delta", "objective.entropy_coef_max"}
    return names | ({"objective.entropy_mean"} if entropy_term(objective) else set())
