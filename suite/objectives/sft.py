"""Supervised training on selected answers: given ones, or the sampled ones that the reward likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives.aggregation import AGGREGATIONS, Counts
from suite.objectives.entropy import entropy_reads, entropy_term
from suite.objectives.pairs import extremes, sides
from suite.protocols import Controller, Group, LossOutput, Objective, Selected


def sft_reads(config: RunConfig) -> frozenset[str]:
    """The options that `SFT` reads, given their values."""
    return frozenset({"objective.sft_rows"} | entropy_reads(config.objective))


class SFT(Objective):
    """The mean over the step's trained tokens of -log pi of the selected answers (token-mean), - the entropy bonus.

    `sft_rows = correct`: every rollout with a reward above 0.5 (SFT on correct samples, or rejection sampling; of a
    given pair the chosen answer). `best`: the first of the highest reward in each group (RAFT, arXiv 2304.06767),
    and none where all rewards are a tie. Each row is a unit of its own; a step without rows has a loss of exactly 0.
    """

    needs_reference = False

    def __init__(self, config: RunConfig, completion_budget: int) -> None:
        self._rows = config.objective.sft_rows
        self._entropy = entropy_term(config.objective)
        self.controllers: dict[str, Controller] = {"entropy": self._entropy.controller} if self._entropy else {}
        self.needs_entropy = self._entropy is not None

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """The answers that are learnt, group by group; nothing is drawn."""
        kept = [sides(group)[0] if self._rows == "correct" else extremes(group)[0][:1] for group in groups]
        rollouts = [group[i] for group, rows in zip(groups, kept, strict=True) for i in rows]
        metrics = {"sft/rows": float(len(rollouts)), "sft/skipped_groups": float(sum(not rows for rows in kept))}
        return Selected(rollouts, [[row] for row in range(len(rollouts))], metrics=metrics)

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Nothing to prepare: the answers are the signal."""
        return {}

    def denominators(self, batch: Batch) -> dict[str, float]:
        """`tokens` and `sequences`, and the counts of the entropy term."""
        counts = Counts.of(batch.mask_BT).named()
        return counts | (self._entropy.denominators(batch.mask_BT) if self._entropy else {})

    def loss(
        self,
        micro: Batch,
        logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor | None,
        denominators: Mapping[str, float],
    ) -> LossOutput:
        """A micro-batch's share, nats per token."""
        mask_BT, ours = micro.mask_BT, Counts.of(micro.mask_BT)
        loss = AGGREGATIONS["token-mean"](-logprobs_BT, mask_BT, Counts.read(denominators), 0)
        sums = {
            "loss/nll": float(loss.detach()),
            "loss/trained_tokens": ours.tokens,
            "loss/trained_sequences": ours.sequences,
        }
        if self._entropy:
            mean = self._entropy.mean(entropy_BT, mask_BT, denominators)
            loss = loss - self._entropy.coef * mean
            sums["loss/entropy"] = float(mean.detach())
        return LossOutput(loss, sums, self._entropy.report() if self._entropy else {})
