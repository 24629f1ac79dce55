"""Weights that make up for a sampler which is not quite the learner: truncated importance sampling and masking.

An engine samples from other probabilities than the learner computes under the same weights (kernels, precision). The
ratio of the two, learner over sampler, corrects for it: by token (biased, little variance) or by sequence (the product
over its tokens: unbiased, much variance), truncated to bounds or masked outside of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from suite.config import ObjectiveConfig
from suite.objectives.aggregation import AGGREGATIONS, Counts, keep
from suite.registry import Registry


@dataclass(frozen=True, slots=True)
class Weights:
    """What multiplies the policy loss of each token, without a gradient; one value per sequence is repeated over it."""

    weights_BT: torch.Tensor
    ratio_BT: torch.Tensor
    """Learner over sampler, before anything was truncated or masked (float64)."""
    touched_BT: torch.Tensor
    """Where the ratio is outside of the bounds (bool)."""
    by_sequence: bool

    def sums(self, mask_BT: torch.Tensor, counts: Counts) -> dict[str, float]:
        """A micro-batch's share of the means over the step's trained tokens, or over its sequences."""
        mean = AGGREGATIONS["seq-mean-token-mean" if self.by_sequence else "token-mean"]
        named = {"mismatch/weight_mean": self.weights_BT, "mismatch/touched_frac": self.touched_BT.double()}
        if self.by_sequence:
            named["mismatch/seq_ratio_mean"] = self.ratio_BT
        return {name: float(mean(values_BT, mask_BT, counts, 0)) for name, values_BT in named.items()}

    def maxima(self, mask_BT: torch.Tensor) -> dict[str, float]:
        """The largest ratio of a sequence."""
        ratios = self.ratio_BT[mask_BT]
        return {"mismatch/seq_ratio_max": float(ratios.max())} if self.by_sequence and len(ratios) else {}


ImportanceSampling = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ObjectiveConfig], Weights | None]
"""(learner_logprobs_BT, sampler_logprobs_BT, mask_BT, options) -> weights; None leaves the loss as it is.

Both log-probs are of the sampled tokens under the same model weights and at the sampling temperature. Masked positions
enter nothing, not even a product over a sequence.
"""

IMPORTANCE_SAMPLING_MODES: Registry[ImportanceSampling] = Registry("importance sampling mode")

_BOUNDS = ("objective.importance_sampling_clip_min", "objective.importance_sampling_clip_max")


@IMPORTANCE_SAMPLING_MODES.register("none")
def uncorrected(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor, objective: ObjectiveConfig
) -> None:
    """No weights: the sampler is taken for the learner."""


@IMPORTANCE_SAMPLING_MODES.register("token_truncate", reads=_BOUNDS)
def token_truncate(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor, objective: ObjectiveConfig
) -> Weights:
    """Each token's ratio, clipped to [clip_min, clip_max]: truncated importance sampling (Yao et al. 2025)."""
    return _weights(_log_ratio(learner_BT, sampler_BT, mask_BT), objective, by_sequence=False, masks=False)


@IMPORTANCE_SAMPLING_MODES.register("token_mask", reads=_BOUNDS)
def token_mask(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor, objective: ObjectiveConfig
) -> Weights:
    """Each token's ratio, and 0 where it is outside of [clip_min, clip_max]. Denominators still count the token."""
    return _weights(_log_ratio(learner_BT, sampler_BT, mask_BT), objective, by_sequence=False, masks=True)


@IMPORTANCE_SAMPLING_MODES.register("sequence_truncate", reads=_BOUNDS)
def sequence_truncate(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor, objective: ObjectiveConfig
) -> Weights:
    """The product of a sequence's ratios, clipped to [clip_min, clip_max], for all of its tokens."""
    return _weights(_log_ratio(learner_BT, sampler_BT, mask_BT), objective, by_sequence=True, masks=False)


@IMPORTANCE_SAMPLING_MODES.register("sequence_mask", reads=_BOUNDS)
def sequence_mask(
    learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor, objective: ObjectiveConfig
) -> Weights:
    """The product of a sequence's ratios, and 0 for all of its tokens where that is outside of [clip_min, clip_max].

    Denominators still count the sequence. TRL's default (1.16).
    """
    return _weights(_log_ratio(learner_BT, sampler_BT, mask_BT), objective, by_sequence=True, masks=True)


def _log_ratio(learner_BT: torch.Tensor, sampler_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """log learner - log sampler, 0 at masked positions; float64, for the products of long sequences."""
    return keep(learner_BT.detach().double(), mask_BT) - keep(sampler_BT.detach().double(), mask_BT)


def _weights(log_ratio_BT: torch.Tensor, objective: ObjectiveConfig, *, by_sequence: bool, masks: bool) -> Weights:
    if by_sequence:
        log_ratio_BT = log_ratio_BT.sum(1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = log_ratio_BT.exp()
    low, high = objective.importance_sampling_clip_min, objective.importance_sampling_clip_max
    touched_BT = (ratio_BT < low) | (ratio_BT > high)
    bounded_BT = ratio_BT.masked_fill(touched_BT, 0.0) if masks else ratio_BT.clamp(low, high)
    return Weights(bounded_BT, ratio_BT, touched_BT, by_sequence)
