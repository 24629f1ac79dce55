"""The reference's log-probs, computed afresh or kept for answers that are met again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from suite.batch import Batch

Key = tuple[int, tuple[int, ...]]


class Memory:
    """Log-probs of a model that never changes, by the tokens of prompt and completion.

    Kept values are those of the first time, which another batch's padding would change by no more than rounding. Where
    answers repeat (a fixed set, given pairs), the forward pass of the reference is saved from the second pass over
    them on: of the three passes of an update (learner, reference, learner with its gradient) one. What is kept is one
    number a token; a resumed run computes what it needs again.
    """

    def __init__(self, *, keep: bool) -> None:
        self._known: dict[Key, torch.Tensor] | None = {} if keep else None

    def __call__(self, batch: Batch, compute: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
        """`compute(batch)`, (B, T), of which only rows that are not known yet are computed."""
        if self._known is None:
            return compute(batch)
        keys = [_key(batch, row) for row in range(len(batch))]
        missing = [row for row, key in enumerate(keys) if key not in self._known]
        if missing:
            rows = batch
            if len(missing) < len(batch):
                rows = replace(batch, units=[[row] for row in range(len(batch))]).take(missing)
            for row, values_T in zip(missing, compute(rows), strict=True):
                self._known[keys[row]] = values_T[batch.mask_BT[row]]
        out_BT = torch.zeros(batch.mask_BT.shape, device=batch.mask_BT.device)
        for row, key in enumerate(keys):
            out_BT[row, batch.mask_BT[row]] = self._known[key]
        return out_BT


def _key(batch: Batch, row: int) -> Key:
    tokens = batch.input_ids_BL[row][batch.attention_mask_BL[row].bool()]
    return int(batch.mask_BT[row].sum()), tuple(tokens.tolist())
