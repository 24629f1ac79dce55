"""Objectives: families of losses whose slots are named in the configuration and filled from registries.

Each slot is a file with its registry and one small function per entry: advantages, trust regions, aggregations,
KL estimators, importance sampling modes, pair rules. An entry says which options it reads; a new one touches nothing
that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from suite.config import RunConfig
from suite.objectives import gae as _gae  # noqa: F401  registers its entry
from suite.objectives.advantages import ADVANTAGES
from suite.objectives.aggregation import AGGREGATIONS
from suite.objectives.dpo import DPO, dpo_reads
from suite.objectives.importance_sampling import IMPORTANCE_SAMPLING_MODES
from suite.objectives.kl import KL_ESTIMATORS
from suite.objectives.pairs import PAIR_RULES
from suite.objectives.policy_gradient import PolicyGradient, policy_gradient_reads
from suite.objectives.ratio import ratio_is_one, resolve_ratio_reference
from suite.objectives.sft import SFT, sft_reads
from suite.objectives.trust_region import TRUST_REGIONS
from suite.protocols import Objective
from suite.registry import Registry

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "IMPORTANCE_SAMPLING_MODES",
    "KL_ESTIMATORS",
    "OBJECTIVES",
    "PAIR_RULES",
    "TRUST_REGIONS",
    "Family",
    "build",
    "objective_reads",
    "ratio_is_one",
    "resolve_ratio_reference",
]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of losses."""

    build: Callable[[RunConfig, int], Objective]
    """(config, completion budget in tokens) -> the objective."""
    reads: Callable[[RunConfig], frozenset[str]]
    """Which options it looks at, given the values of the others."""
    takes_given: bool = False
    """Whether it can learn from given answers (`rollout.source = external`), which no weights of the run sampled."""


OBJECTIVES: Registry[Family] = Registry("objective")
OBJECTIVES.register("dpo")(Family(DPO, dpo_reads, takes_given=True))
OBJECTIVES.register("policy_gradient")(Family(PolicyGradient, policy_gradient_reads))
OBJECTIVES.register("sft")(Family(SFT, sft_reads, takes_given=True))

_ALWAYS = frozenset({"objective.name", "objective.num_minibatches", "objective.num_epochs"})


def build(config: RunConfig, completion_budget: int = 0) -> Objective:
    """The configured objective. `completion_budget` is the run's, tokens; 0 = `rollout.max_completion_length`.

    Ranges and clashes are `suite.validate`'s. Raises ValueError for unknown names (near ones are suggested), for k1
    in the loss, and where the aggregation divides by the completion budget and there is none.
    """
    budget = completion_budget or config.rollout.max_completion_length
    if budget < 1 and "rollout.max_completion_length" in objective_reads(config):
        raise ValueError(
            f"objective.loss_agg_mode = {config.objective.loss_agg_mode!r} divides by the completion budget; "
            "set rollout.max_completion_length or build the objective with the task's budget"
        )
    return OBJECTIVES[config.objective.name].build(config, budget)


def objective_reads(config: RunConfig) -> frozenset[str]:
    """The options, dotted, that the configured objective with its configured slots looks at; exactly those.

    An option that is not among them and is no other part's has no effect on the run.
    """
    return _ALWAYS | OBJECTIVES[config.objective.name].reads(config)
