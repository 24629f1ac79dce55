"""Policy-gradient objectives: GRPO and its kin as a choice of advantage, trust region, aggregation, KL and entropy.

Room for what is not here: a ratio of whole sequences is another `PolicyTokens.ratio_BT`; CISPO, dual clip and
covariance control are trust regions of their own, which see ratio, log-probs, advantages and mask together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives.advantages import ADVANTAGES, AdvantageInputs, advantage_reads, advantages
from suite.objectives.aggregation import AGGREGATIONS, Counts, keep
from suite.objectives.controllers import MovingBaseline, PenaltyCoefficient
from suite.objectives.entropy import entropy_reads, entropy_term
from suite.objectives.importance_sampling import IMPORTANCE_SAMPLING_MODES
from suite.objectives.kl import resolve_kl_estimator
from suite.objectives.ratio import ratio_is_one, resolve_ratio_reference
from suite.objectives.trust_region import TRUST_REGIONS, PolicyTokens
from suite.protocols import Controller, Group, LossOutput, Objective, Rollout, Selected
from suite.tasks import names_of

_POSITIVE = "positive_"


def policy_gradient_reads(config: RunConfig) -> frozenset[str]:
    """The options that `PolicyGradient` reads, given their values."""
    objective = config.objective
    names = {"objective.ratio_reference", "objective.kl", "objective.positive_nll_coef"} | entropy_reads(objective)
    names |= advantage_reads(objective)
    names |= {"objective.trust_region"} | TRUST_REGIONS.entry(objective.trust_region).reads
    names |= {"objective.loss_agg_mode"} | AGGREGATIONS.entry(objective.loss_agg_mode).reads
    names |= {"objective.importance_sampling_mode"}
    names |= IMPORTANCE_SAMPLING_MODES.entry(objective.importance_sampling_mode).reads
    if objective.kl != "none":
        names |= {"objective.kl_coef", "objective.kl_estimator", "rollout.reference_sync"}
    return frozenset(names)


class PolicyGradient(Objective):
    """Aggregated surrogate + kl_coef x aggregated KL (`kl = loss`) - entropy coefficient x mean entropy
    + positive_nll_coef x mean over the tokens of correct rollouts of -log pi (VAPO, arXiv 2504.05118, eq. 9).

    The ratio is exp(logprobs - old). With the generator as its reference, old is `sampler_logprobs_BT`. With the
    learner, old is `learner_logprobs_BT` as prepared, and the ratio is exactly 1, not 1 up to the rounding of
    another micro-batch split, where the weights have not moved: with one update per rollout batch, and wherever a
    micro-batch comes without `learner_logprobs_BT` (the first update of a batch), old is `logprobs.detach()`.
    With an `importance_sampling_mode` the surrogate of each token, and no other term, is multiplied by a weight that
    corrects for a sampler other than the learner of the same model weights. It carries no gradient, and changes no
    denominator.
    Every rollout that has a reward is trained on, as a unit of its own. With `entropy` off the term is left to an
    objective that this one is a part of.
    """

    def __init__(self, config: RunConfig, completion_budget: int, *, entropy: bool = True) -> None:
        objective = config.objective
        self._objective, self._budget = objective, completion_budget
        self._baseline = ADVANTAGES[objective.advantage].baseline
        self._tasks = names_of(config)
        self._trust_region = TRUST_REGIONS[objective.trust_region]
        self._aggregate = AGGREGATIONS[objective.loss_agg_mode]
        self._correct = IMPORTANCE_SAMPLING_MODES[objective.importance_sampling_mode]
        self._reference = resolve_ratio_reference(config)
        self._ratio_is_one = ratio_is_one(config)
        self._kl_in = objective.kl
        self._entropy = entropy_term(objective) if entropy else None
        self.needs_entropy = self._entropy is not None
        self.needs_reference = self._kl_in != "none"
        self.needs_learner_logprobs = self._reference == "learner" and (
            not self._ratio_is_one or self._kl_in == "reward"
        )
        self._positive_coef = objective.positive_nll_coef
        self._moving = MovingBaseline(objective, len(self._tasks)) if self._baseline == "moving" else None
        self._penalty = PenaltyCoefficient(objective) if objective.trust_region == "kl_penalty" else None
        adapted = {
            "baseline": self._moving,
            "penalty": self._penalty,
            "entropy": self._entropy.controller if self._entropy else None,
        }
        self.controllers: dict[str, Controller] = {name: part for name, part in adapted.items() if part is not None}
        if self._kl_in != "none":
            self._kl, self._kl_coef = resolve_kl_estimator(objective), objective.kl_coef

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """All rollouts with a reward, in order, each a unit of its own.

        One whose reward abstained (NaN), or that of its greedy completion where that is the baseline, is left out:
        it is in no statistic of its group and in no loss.
        """
        rollouts = [rollout for group in groups for rollout in group if self.is_scored(rollout)]
        return Selected(rollouts, [[row] for row in range(len(rollouts))], self.row_targets(rollouts))

    def is_scored(self, rollout: Rollout) -> bool:
        """Whether all rewards that its advantage needs are there."""
        if self._baseline != "greedy":
            return not math.isnan(rollout.reward)
        assert rollout.greedy is not None
        return not math.isnan(rollout.reward + rollout.greedy.reward)

    def row_targets(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        """What `prepare` and `loss` need to know of each row beyond the batch's own columns.

        `task`: its place among the tasks of a mixture. `correct`: 1 if graded right, for the NLL of correct rollouts.
        `greedy_reward`: that of its prompt's greedy completion.
        """
        targets: dict[str, list[float]] = {}
        if len(self._tasks) > 1:
            targets["task"] = [float(self._tasks.index(rollout.prompt.task)) for rollout in rollouts]
        if self._positive_coef != 0:
            targets["correct"] = [float(rollout.verdict.outcome == "right") for rollout in rollouts]
        if self._baseline == "greedy":
            targets["greedy_reward"] = [rollout.greedy.reward for rollout in rollouts if rollout.greedy is not None]
        return targets

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Fills `advantages_BT` (float32) from the rewards of the whole rollout batch; `reward/baseline` if it has one.

        KL in the reward: each trained token is charged kl_coef x k, with k taken between the policy at sampling
        time (the denominator of the ratio) and the reference, without a gradient.
        """
        mask_BT = batch.mask_BT
        assert not batch.rewards_B.isnan().any()
        if self._penalty:
            self._penalty.start()
        if self._reference == "learner" and not self._ratio_is_one:
            assert batch.learner_logprobs_BT is not None
        token_rewards_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, device=mask_BT.device)
        if batch.token_rewards_BT is not None:
            token_rewards_BT = keep(batch.token_rewards_BT, mask_BT).double()
        if self._kl_in == "reward":
            sampled_BT = batch.learner_logprobs_BT if self._reference == "learner" else batch.sampler_logprobs_BT
            assert sampled_BT is not None
            assert batch.ref_logprobs_BT is not None
            kl_BT = self._kl(
                keep(sampled_BT.detach(), mask_BT).double(), keep(batch.ref_logprobs_BT.detach(), mask_BT).double()
            )
            token_rewards_BT = token_rewards_BT - self._kl_coef * kl_BT
        values_BT = None if batch.values_BT is None else keep(batch.values_BT, mask_BT).double()
        inputs = AdvantageInputs(
            batch.rewards_B.double(), token_rewards_BT, mask_BT, batch.group_B, batch.targets, values_BT
        )
        batch.rewards_BT = inputs.rewards_BT
        baseline_B = batch.targets["greedy_reward"].double() if self._baseline == "greedy" else None
        if self._moving:
            baseline_B = self._moving.take(inputs.returns_B, inputs.task_B)
        batch.advantages_BT = advantages(replace(inputs, baseline_B=baseline_B), self._objective).float()
        return {} if baseline_B is None else {"reward/baseline": float(baseline_B.mean())}

    def denominators(self, batch: Batch) -> dict[str, float]:
        """`tokens` and `sequences` (those with a trained token), and the counts of the other terms by prefix."""
        counts = Counts.of(batch.mask_BT).named()
        if self._positive_coef != 0:
            counts |= Counts.of(self._positive(batch)).named(_POSITIVE)
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
        # the old log-probs are the learner's of the weights that sampled: `suite.validate` refuses every other case
        weights = self._correct(tokens.old_logprobs_BT, micro.sampler_logprobs_BT, mask_BT, self._objective)
        loss_BT = surrogate.loss_BT if weights is None else weights.weights_BT.to(surrogate.loss_BT) * surrogate.loss_BT
        loss = self._aggregate(loss_BT, mask_BT, counts, self._budget)

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
        maxima = self._maxima(tokens)
        if weights is not None:
            sums |= weights.sums(mask_BT, counts)
            maxima |= weights.maxima(mask_BT)
        if self._kl_in == "loss":
            assert micro.ref_logprobs_BT is not None
            kl_BT = self._kl(tokens.logprobs_BT, keep(micro.ref_logprobs_BT, mask_BT))
            kl = self._aggregate(kl_BT, mask_BT, counts, self._budget)
            loss = loss + self._kl_coef * kl
            sums["loss/kl"] = float(kl.detach())
        if surrogate.kl_old_BT is not None:
            sums["loss/kl_old"] = fraction(surrogate.kl_old_BT)
        if self._positive_coef != 0:
            over = Counts.read(denominators, _POSITIVE)
            nll = AGGREGATIONS["token-mean"](-tokens.logprobs_BT, self._positive(micro), over, 0)
            loss = loss + self._positive_coef * nll
            sums["loss/positive_nll"] = float(nll.detach())
        if self._entropy:
            mean = self._entropy.mean(entropy_BT, mask_BT, denominators)
            loss = loss - self._entropy.coef * mean
            sums["loss/entropy"] = float(mean.detach())
        return LossOutput(loss, sums, maxima)

    def _maxima(self, tokens: PolicyTokens) -> dict[str, float]:
        """The largest ratio, and the coefficients that adapt as they stand."""
        ratios = tokens.ratio_BT.detach()[tokens.mask_BT]
        out = {"loss/ratio_max": float(ratios.max())} if len(ratios) else {}
        if self._penalty:
            out["loss/kl_penalty_coef"] = self._penalty.value
        return out | (self._entropy.report() if self._entropy else {})

    def _positive(self, batch: Batch) -> torch.Tensor:
        """The trained tokens of correct rollouts."""
        return batch.mask_BT & (batch.targets["correct"] > 0)[:, None]

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
        coef = self._penalty.value if self._penalty else 0.0
        return PolicyTokens(logprobs_BT, old_BT, torch.exp(logprobs_BT - old_BT), advantages_BT, mask_BT, coef)
