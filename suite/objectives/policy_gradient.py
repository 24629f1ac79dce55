"""Policy-gradient objectives: GRPO and its kin as a choice of advantage, trust region, aggregation, KL and entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives.advantages import ADVANTAGES, AdvantageInputs
from suite.objectives.aggregation import AGGREGATIONS, Counts, keep
from suite.objectives.entropy import entropy_reads, entropy_term
from suite.objectives.kl import resolve_kl_estimator
from suite.objectives.ratio import ratio_is_one, resolve_ratio_reference
from suite.objectives.trust_region import TRUST_REGIONS, PolicyTokens
from suite.protocols import Group, LossOutput, Selected
from suite.registry import Registry

_SLOTS: Mapping[str, Registry[Any]] = {
    "advantage": ADVANTAGES,
    "trust_region": TRUST_REGIONS,
    "loss_agg_mode": AGGREGATIONS,
}


def policy_gradient_reads(config: RunConfig) -> frozenset[str]:
    """The options that `PolicyGradient` reads, given their values."""
    objective = config.objective
    names = {"objective.ratio_reference", "objective.kl"} | entropy_reads(objective)
    for slot, registry in _SLOTS.items():
        names |= {f"objective.{slot}"} | registry.entry(getattr(objective, slot)).reads
    if objective.scale_rewards == "none":
        names.discard("objective.advantage_eps")
    if objective.kl != "none":
        names |= {"objective.kl_coef", "objective.kl_estimator", "rollout.reference_sync"}
    return frozenset(names)


class PolicyGradient:
    """Aggregated surrogate + kl_coef x aggregated KL (`kl = loss`) - entropy_coef x mean entropy.

    The ratio is exp(logprobs - old). With the generator as its reference, old is `sampler_logprobs_BT`. With the
    learner, old is `learner_logprobs_BT` as prepared, and the ratio is exactly 1, not 1 up to the rounding of
    another micro-batch split, where the weights have not moved: with one update per rollout batch, and wherever a
    micro-batch comes without `learner_logprobs_BT` (the first update of a batch), old is `logprobs.detach()`.
    Every rollout is trained on, as a unit of its own.
    """

    def __init__(self, config: RunConfig, completion_budget: int) -> None:
        objective = config.objective
        self._objective, self._budget = objective, completion_budget
        self._advantage = ADVANTAGES[objective.advantage]
        self._trust_region = TRUST_REGIONS[objective.trust_region]
        self._aggregate = AGGREGATIONS[objective.loss_agg_mode]
        self._reference = resolve_ratio_reference(config)
        self._ratio_is_one = ratio_is_one(config)
        self._kl_in = objective.kl
        self._entropy = entropy_term(objective)
        self.needs_entropy = self._entropy is not None
        self.needs_reference = self._kl_in != "none"
        self.needs_learner_logprobs = self._reference == "learner" and (
            not self._ratio_is_one or self._kl_in == "reward"
        )
        if self._kl_in != "none":
            self._kl, self._kl_coef = resolve_kl_estimator(objective), objective.kl_coef

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """All rollouts, in order, each a unit of its own."""
        rollouts = [rollout for group in groups for rollout in group]
        return Selected(rollouts, [[row] for row in range(len(rollouts))])

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Fills `advantages_BT` (float32) from the rewards of the whole rollout batch.

        KL in the reward: each trained token is charged kl_coef x k, with k taken between the policy at sampling
        time (the denominator of the ratio) and the reference, without a gradient.
        """
        mask_BT = batch.mask_BT
        if self._reference == "learner" and not self._ratio_is_one:
            assert batch.learner_logprobs_BT is not None
        token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
        if self._kl_in == "reward":
            sampled_BT = batch.learner_logprobs_BT if self._reference == "learner" else batch.sampler_logprobs_BT
            assert sampled_BT is not None
            assert batch.ref_logprobs_BT is not None
            kl_BT = self._kl(
                keep(sampled_BT.detach(), mask_BT).double(), keep(batch.ref_logprobs_BT.detach(), mask_BT).double()
            )
            token_rewards_BT = -self._kl_coef * kl_BT
        inputs = AdvantageInputs(batch.rewards_B.double(), token_rewards_BT, mask_BT, batch.group_B, batch.targets)
        batch.advantages_BT = keep(self._advantage(inputs, self._objective), mask_BT).float()
        return {}

    def denominators(self, batch: Batch) -> dict[str, float]:
        """`tokens` and `sequences` (those with a trained token), and the counts of the entropy term."""
        counts = Counts.of(batch.mask_BT).named()
        return counts | (self._entropy.denominators(batch.mask_BT) if self._entropy else {})

    def loss(
        self,
        micro: Batch,
        logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor | None,
        denominators: Mapping[str, float],
    ) -> LossOutput:
        """A micro-batch's share. `loss/policy` and `loss/kl` are aggregated as configured, the others per token."""
        mask_BT, counts = micro.mask_BT, Counts.read(denominators)
        tokens = self._tokens(micro, logprobs_BT)
        surrogate = self._trust_region(tokens, self._objective)
        loss = self._aggregate(surrogate.loss_BT, mask_BT, counts, self._budget)

        def fraction(values_BT: torch.Tensor) -> float:
            return float(keep(values_BT.detach(), mask_BT).sum()) / max(counts.tokens, 1.0)

        ours, low, high = Counts.of(mask_BT), fraction(surrogate.clipped_low_BT), fraction(surrogate.clipped_high_BT)
        sums = {
            "loss/policy": float(loss.detach()),
            "loss/clip_frac": low + high,
            "loss/clip_frac_low": low,
            "loss/clip_frac_high": high,
            "loss/ratio_mean": fraction(tokens.ratio_BT),
            "loss/trained_tokens": ours.tokens,
            "loss/trained_sequences": ours.sequences,
        }
        if self._kl_in == "loss":
            assert micro.ref_logprobs_BT is not None
            kl_BT = self._kl(tokens.logprobs_BT, keep(micro.ref_logprobs_BT, mask_BT))
            kl = self._aggregate(kl_BT, mask_BT, counts, self._budget)
            loss = loss + self._kl_coef * kl
            sums["loss/kl"] = float(kl.detach())
        if self._entropy:
            mean = self._entropy.mean(entropy_BT, mask_BT, denominators)
            loss = loss - self._entropy.coef * mean
            sums["loss/entropy"] = float(mean.detach())
        ratios = tokens.ratio_BT.detach()[mask_BT]
        return LossOutput(loss, sums, {"loss/ratio_max": float(ratios.max())} if len(ratios) else {})

    def _tokens(self, micro: Batch, logprobs_BT: torch.Tensor) -> PolicyTokens:
        """The surrogate's inputs with masked positions taken out before any arithmetic."""
        mask_BT = micro.mask_BT
        logprobs_BT = keep(logprobs_BT, mask_BT)
        old_BT = micro.sampler_logprobs_BT if self._reference == "generator" else micro.learner_logprobs_BT
        if self._ratio_is_one or old_BT is None:
            old_BT = logprobs_BT.detach()
        old_BT = keep(old_BT, mask_BT)
        assert micro.advantages_BT is not None
        advantages_BT = keep(micro.advantages_BT, mask_BT)
        return PolicyTokens(logprobs_BT, old_BT, torch.exp(logprobs_BT - old_BT), advantages_BT, mask_BT)
