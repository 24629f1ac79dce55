"""Direct preference optimisation on pairs drawn from groups (Rafailov et al. 2023; arXiv 2506.21495, eq. 3 and 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import logsigmoid

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives.aggregation import AGGREGATIONS, Counts, keep
from suite.objectives.entropy import entropy_reads, entropy_term
from suite.objectives.pairs import PAIR_RULES, pair_rule_reads, pair_up
from suite.objectives.policy_gradient import PolicyGradient, policy_gradient_reads
from suite.protocols import Controller, Group, LossOutput, Objective, Selected

_NLL, _GRPO = "nll_", "grpo_"


def dpo_reads(config: RunConfig) -> frozenset[str]:
    """The options that `DPO` reads, given their values."""
    objective = config.objective
    names = {f"objective.{name}" for name in ("beta", "label_smoothing", "nll_coef", "grpo_coef")}
    names |= {"rollout.reference_sync"} | entropy_reads(objective) | pair_rule_reads(config)
    if entropy_term(objective):
        names.add("objective.entropy_over")
    if objective.nll_coef != 0:
        names.add("objective.nll_length_normalized")
    return frozenset(names | (policy_gradient_reads(config) if objective.grpo_coef != 0 else set()))


class DPO(Objective):
    """The mean over the step's pairs of the preference loss, + nll_coef x NLL of the chosen, + grpo_coef x GRPO.

    Preference loss: -(1 - e) logsigmoid(m) - e logsigmoid(-m), with the margin m = beta x (log-ratio of chosen -
    log-ratio of rejected), a log-ratio being the sum over trained tokens of log pi - log ref, and e the label
    smoothing (0: DPO; above: conservative DPO, Mitchell 2023). Several rollouts on a side are every chosen against
    every rejected one, averaged within the group (GroupDPO, arXiv 2506.21495, eq. 4).

    NLL: -log pi of the chosen answers, over the chosen tokens of the step, or (not length-normalised) summed over
    tokens and averaged as the comparisons are. GRPO: `PolicyGradient` with its own slots on the same rows, whose
    groups are thus the rows of a pair; the entropy term is this objective's and enters once.

    The rows of a pair are one unit, and `targets["sign"]` is +1 for chosen, -1 for rejected rows. A pair with a side
    that has no trained token is in neither numerator nor denominator; a step without pairs has a loss of exactly 0.
    """

    needs_reference = True

    def __init__(self, config: RunConfig, completion_budget: int) -> None:
        objective = config.objective
        PAIR_RULES.entry(objective.pair_rule)  # an unknown name is refused here, not at the first batch
        self._config = config
        self._beta, self._smoothing = objective.beta, objective.label_smoothing
        self._nll_coef, self._grpo_coef = objective.nll_coef, objective.grpo_coef
        self._nll_over_tokens = self._nll_coef != 0 and objective.nll_length_normalized
        self._grpo = PolicyGradient(config, completion_budget, entropy=False) if self._grpo_coef != 0 else None
        self.needs_learner_logprobs = self._grpo is not None and self._grpo.needs_learner_logprobs
        self._entropy = entropy_term(objective)
        self._entropy_over = objective.entropy_over if self._entropy else "all"
        self.needs_entropy = self._entropy is not None
        self.needs_learner_logprobs = self._grpo is not None and self._grpo.needs_learner_logprobs
        self.controllers: dict[str, Controller] = dict(self._grpo.controllers) if self._grpo else {}
        if self._entropy:
            self.controllers["entropy"] = self._entropy.controller

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """One pair per group that has one. A group's draw depends on the key and its prompt, not on other groups.

        With a GRPO part, a pair with a rollout that has no reward is none.
        """
        paired = pair_up(groups, key, self._config)
        selected = Selected(rollouts=[], units=[], targets={"sign": []})
        for group, pair in zip(groups, paired.pairs, strict=True):
            members = [group[i] for i in (*pair.chosen, *pair.rejected)] if pair else []
            if pair is None or (self._grpo and not all(map(self._grpo.is_scored, members))):
                continue
            start = len(selected.rollouts)
            selected.units.append(list(range(start, start + len(members))))
            selected.rollouts.extend(members)
            selected.targets["sign"].extend([1.0] * len(pair.chosen) + [-1.0] * len(pair.rejected))
        if self._grpo:
            selected.targets.update(self._grpo.row_targets(selected.rollouts))
        pairs = len(selected.units)
        selected.metrics.update({"dpo/pairs": float(pairs), "dpo/skipped_groups": float(len(groups) - pairs)})
        selected.metrics.update(paired.metrics)
        return selected

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Fills in the advantages where there is a GRPO part: the pairs themselves are the signal."""
        return self._grpo.prepare(batch) if self._grpo else {}

    def denominators(self, batch: Batch) -> dict[str, float]:
        """`pairs`, and the counts of the other terms, each under a prefix of its own."""
        contests = _contests(batch)
        counts = {"pairs": float(len({unit for unit, *_ in contests}))}
        if self._nll_over_tokens:
            counts |= Counts.of(_chosen_mask(batch, contests)).named(_NLL)
        if self._grpo:
            counts |= {f"{_GRPO}{name}": value for name, value in self._grpo.denominators(batch).items()}
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
        loss = -(share * ((1 - self._smoothing) * logsigmoid(margin) + self._smoothing * logsigmoid(-margin))).sum()
        counts, logprob_B = Counts.of(mask_BT), logprobs_BT.sum(1)
        held_B = logprob_B.detach()
        sums = {
            "loss/preference": float(loss.detach()),
            "loss/trained_tokens": counts.tokens,
            "loss/trained_sequences": counts.sequences,
            "dpo/accuracy": float((share * (margin > 0)).sum()),
            "dpo/margin": float((share * margin.detach()).sum()),
            "dpo/chosen_logprob": float((share * held_B[chosen]).sum()),
            "dpo/rejected_logprob": float((share * held_B[rejected]).sum()),
        }
        if self._nll_coef != 0:
            nll = -(share * logprob_B[chosen]).sum()
            if self._nll_over_tokens:
                over = Counts.read(denominators, _NLL)
                nll = AGGREGATIONS["token-mean"](-logprobs_BT, _chosen_mask(micro, contests), over, 0)
            loss = loss + self._nll_coef * nll
            sums["loss/nll"] = float(nll.detach())
        if self._grpo:
            theirs = {n.removeprefix(_GRPO): v for n, v in denominators.items() if n.startswith(_GRPO)}
            part = self._grpo.loss(micro, logprobs_BT, None, theirs)
            loss = loss + self._grpo_coef * part.loss
            sums, maxima = part.sums | sums, part.maxima
        else:
            maxima = {}
        if self._entropy:
            mean = self._entropy.mean(entropy_BT, self._covered(micro), denominators)
            loss = loss - self._entropy.coef * mean
            sums["loss/entropy"] = float(mean.detach())
            maxima |= self._entropy.report()
        return LossOutput(loss, sums, maxima)

    def _covered(self, batch: Batch) -> torch.Tensor:
        """The tokens that the entropy term covers."""
        if self._entropy_over == "all":
            return batch.mask_BT
        return batch.mask_BT & (batch.targets["sign"] > 0)[:, None]


Contest = tuple[int, int, int, float]
"""(unit, chosen row, rejected row, weight)."""


def _contests(batch: Batch) -> list[Contest]:
    """Every comparison of rows with trained tokens; the weights of a unit's sum to 1."""
    trained, sign = batch.mask_BT.any(1).tolist(), batch.targets["sign"].tolist()
    out = []
    for unit, rows in enumerate(batch.units):
        chosen = [row for row in rows if trained[row] and sign[row] > 0]
        rejected = [row for row in rows if trained[row] and sign[row] < 0]
        out += [(unit, c, r, 1 / (len(chosen) * len(rejected))) for c in chosen for r in rejected]
    return out


def _chosen_mask(batch: Batch, contests: Sequence[Contest]) -> torch.Tensor:
    """The trained tokens of the chosen rows that are compared with anything."""
    compared_B = torch.zeros(len(batch), dtype=torch.bool, device=batch.mask_BT.device)
    compared_B[[chosen for _, chosen, _, _ in contests]] = True
    return batch.mask_BT & compared_B[:, None]
