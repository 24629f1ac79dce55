"""Direct preference optimisation on pairs drawn from groups (Rafailov et al. 2023; arXiv 2506.21495, eq. 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import logsigmoid

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives.aggregation import Counts, keep
from suite.objectives.entropy import entropy_reads, entropy_term
from suite.objectives.pairs import PAIR_RULES
from suite.protocols import Group, LossOutput, Selected
from suite.randomness import generator


def dpo_reads(config: RunConfig) -> frozenset[str]:
    """The options that `DPO` reads, given their values."""
    objective = config.objective
    names = {"objective.beta", "objective.pair_rule", "rollout.reference_sync"} | entropy_reads(objective)
    if objective.entropy_coef != 0:
        names.add("objective.entropy_over")
    return frozenset(names | PAIR_RULES.entry(objective.pair_rule).reads)


class DPO:
    """Mean over the step's pairs of -logsigmoid(beta x (log-ratio of chosen - log-ratio of rejected)).

    A log-ratio is the sum over trained tokens of log pi - log ref. The rows of a pair are one unit, and
    `targets["sign"]` is +1 for chosen, -1 for rejected rows. A pair with a side that has no trained token is in
    neither numerator nor denominator; a step without pairs has a loss of exactly 0.
    """

    needs_reference = True
    needs_learner_logprobs = False

    def __init__(self, config: RunConfig, completion_budget: int) -> None:
        objective = config.objective
        self._beta = objective.beta
        self._pair_rule = PAIR_RULES[objective.pair_rule]
        self._entropy = entropy_term(objective)
        self._entropy_over = objective.entropy_over if self._entropy else "all"
        self.needs_entropy = self._entropy is not None

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """One pair per group that has one. A group's draw depends on the key and its prompt, not on other groups."""
        selected = Selected(rollouts=[], units=[], targets={"sign": []})
        for group in groups:
            pair = self._pair_rule(group, generator(*key, group[0].prompt.uid)) if group else None
            if pair is None:
                continue
            members = [*pair.chosen, *pair.rejected]
            start = len(selected.rollouts)
            selected.units.append(list(range(start, start + len(members))))
            selected.rollouts.extend(group[i] for i in members)
            selected.targets["sign"].extend([1.0] * len(pair.chosen) + [-1.0] * len(pair.rejected))
        pairs = len(selected.units)
        selected.metrics.update({"dpo/pairs": float(pairs), "dpo/skipped_groups": float(len(groups) - pairs)})
        return selected

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Nothing to prepare: the pairs are the signal."""
        return {}

    def denominators(self, batch: Batch) -> dict[str, float]:
        """`pairs`, and the counts of the entropy term where there is one."""
        counts = {"pairs": float(len({unit for unit, *_ in _contests(batch)}))}
        return counts | (self._entropy.denominators(self._covered(batch)) if self._entropy else {})

    def loss(
        self,
        micro: Batch,
        logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor | None,
        denominators: Mapping[str, float],
    ) -> LossOutput:
        """The pairs of a micro-batch; units must be whole. Margins are in nats times beta."""
        mask_BT = micro.mask_BT
        assert micro.ref_logprobs_BT is not None
        logprobs_BT = keep(logprobs_BT, mask_BT)
        # token by token before the sum: two long sums that nearly cancel would lose digits in float32
        log_ratio_B = (logprobs_BT - keep(micro.ref_logprobs_BT, mask_BT)).sum(1)
        contests, device = _contests(micro), logprobs_BT.device
        chosen = torch.tensor([c for _, c, _, _ in contests], dtype=torch.long, device=device)
        rejected = torch.tensor([r for _, _, r, _ in contests], dtype=torch.long, device=device)
        share = torch.tensor([w for *_, w in contests], dtype=logprobs_BT.dtype, device=device)
        share = share / max(denominators["pairs"], 1.0)
        margin = self._beta * (log_ratio_B[chosen] - log_ratio_B[rejected])
        loss = -(share * logsigmoid(margin)).sum()
        counts, logprob_B = Counts.of(mask_BT), logprobs_BT.detach().sum(1)
        sums = {
            "loss/preference": float(loss.detach()),
            "loss/trained_tokens": counts.tokens,
            "loss/trained_sequences": counts.sequences,
            "dpo/accuracy": float((share * (margin > 0)).sum()),
            "dpo/margin": float((share * margin.detach()).sum()),
            "dpo/chosen_logprob": float((share * logprob_B[chosen]).sum()),
            "dpo/rejected_logprob": float((share * logprob_B[rejected]).sum()),
        }
        if self._entropy:
            mean = self._entropy.mean(entropy_BT, self._covered(micro), denominators)
            loss = loss - self._entropy.coef * mean
            sums["loss/entropy"] = float(mean.detach())
        return LossOutput(loss, sums)

    def _covered(self, batch: Batch) -> torch.Tensor:
        """The tokens that the entropy term covers."""
        if self._entropy_over == "all":
            return batch.mask_BT
        return batch.mask_BT & (batch.targets["sign"] > 0)[:, None]


def _contests(batch: Batch) -> list[tuple[int, int, int, float]]:
    """(unit, chosen row, rejected row, weight) of every comparison of rows with trained tokens; a unit's sum to 1."""
    trained, sign = batch.mask_BT.any(1).tolist(), batch.targets["sign"].tolist()
    out = []
    for unit, rows in enumerate(batch.units):
        chosen = [row for row in rows if trained[row] and sign[row] > 0]
        rejected = [row for row in rows if trained[row] and sign[row] < 0]
        out += [(unit, c, r, 1 / (len(chosen) * len(rejected))) for c in chosen for r in rejected]
    return out
