"""From per-token values to one number: the four denominators of the field, counted over a whole optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from suite.registry import Registry


@dataclass(frozen=True, slots=True)
class Counts:
    """Trained tokens, and sequences with at least one of them, of a whole optimizer step. They add up over ranks."""

    tokens: float
    sequences: float

    @classmethod
    def of(cls, mask_BT: torch.Tensor) -> Counts:
        """Count a step's mask."""
        return cls(float(mask_BT.sum()), float(mask_BT.any(1).sum()))

    def named(self, prefix: str = "") -> dict[str, float]:
        """As entries of an objective's denominators; `read` is the inverse."""
        return {f"{prefix}tokens": self.tokens, f"{prefix}sequences": self.sequences}

    @classmethod
    def read(cls, denominators: Mapping[str, float], prefix: str = "") -> Counts:
        """The counts that `named` wrote."""
        return cls(denominators[f"{prefix}tokens"], denominators[f"{prefix}sequences"])


def keep(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The values where the mask is set and 0 elsewhere, in at least float32.

    Applied to a loss's inputs, before any arithmetic, it lets neither a masked value nor its gradient
    through, whatever it is (NaN, infinite). Applied to results it would not: 0 x NaN is NaN in the backward pass.
    """
    values_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


Aggregation = Callable[[torch.Tensor, torch.Tensor, Counts, int], torch.Tensor]
"""(values_BT, mask_BT, the step's counts, completion budget) -> a scalar: this micro-batch's share.

Shares add up over micro-batches and ranks, so no split of a step changes its value or gradient; masked
sequences are in neither numerator nor denominator; a step without trained tokens gives exactly 0.
Only `seq-mean-token-sum-norm` reads the budget (tokens).
"""

AGGREGATIONS: Registry[Aggregation] = Registry("loss aggregation mode")


@AGGREGATIONS.register("token-mean")
def token_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, budget: int) -> torch.Tensor:
    """Mean over the trained tokens of the step (DAPO, arXiv 2503.14476)."""
    return keep(values_BT, mask_BT).sum() / max(counts.tokens, 1.0)


@AGGREGATIONS.register("seq-mean-token-mean")
def seq_mean_token_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, budget: int) -> torch.Tensor:
    """Mean over sequences of each one's mean over its tokens (GRPO, arXiv 2402.03300, eq. 3)."""
    lengths_B = mask_BT.sum(1).clamp(min=1)
    return (keep(values_BT, mask_BT).sum(1) / lengths_B).sum() / max(counts.sequences, 1.0)


@AGGREGATIONS.register("seq-mean-token-sum")
def seq_mean_token_sum(values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, budget: int) -> torch.Tensor:
    """Mean over sequences of each one's sum over its tokens (arXiv 2506.21495, eq. 1)."""
    return keep(values_BT, mask_BT).sum() / max(counts.sequences, 1.0)


@AGGREGATIONS.register("seq-mean-token-sum-norm", reads=["rollout.max_completion_length"])
def seq_mean_token_sum_norm(
    values_BT: torch.Tensor, mask_BT: torch.Tensor, counts: Counts, budget: int
) -> torch.Tensor:
    """`seq-mean-token-sum` divided by the completion budget, a constant, never a padded width (Dr. GRPO,
    arXiv 2503.20783)."""
    assert budget > 0
    return keep(values_BT, mask_BT).sum() / max(counts.sequences, 1.0) / budget
