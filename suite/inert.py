"""Finds options that cannot act: they are read, but provably change nothing under this configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from suite.config import RunConfig, apply, differences, flatten, identity
from suite.options import reads

Changes = dict[str, tuple[Any, str]]
"""Option -> (the value that gives the same run, why it does)."""


def effective(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """The plainest configuration that provably computes the same run, and for each option that it sets back, why.

    Two configurations with equal effective configurations give equal results under equal seeds. The
    configuration must be valid. Not every equality is found: only those that hold whatever the data.
    """
    reasons: dict[str, str] = {}
    for rule in _RULES:
        values = flatten(config)
        changes = {name: change for name, change in rule(config).items() if values[name] != change[0]}
        if changes:
            config = apply(config, {name: value for name, (value, _) in changes.items()})
        reasons.update({name: why for name, (_, why) in changes.items()})
    return config, reasons


def inert_reason(config: RunConfig, control: RunConfig) -> str | None:
    """Why an arm cannot differ from its control, or None if it can. The seed is left aside."""
    (plain, why), (plain_control, why_control) = effective(config), effective(control)
    if identity(plain) != identity(plain_control):
        return None
    changed = differences(config, control)
    if not changed:
        return "it changes nothing"
    reasons = {name: why.get(name) or why_control.get(name) for name in changed}
    known = dict.fromkeys(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    return "; ".join(known) or "it only changes how the run is carried out"


def _never_synced(config: RunConfig) -> Changes:
    """A period of N steps of the policy or more has no sync: syncs follow at s, 2s, ... < N."""
    period, steps = config.rollout.sync_period, config.policy_steps(config.train.steps)
    changes: Changes = {}
    if period != "inf" and period >= steps and period > config.updates_per_batch:
        changes["rollout.sync_period"] = ("inf", f"no sync falls within {steps} steps")
        period = "inf"
    if period == "inf":
        changes["rollout.reference_sync"] = ("none", "the generator is never synced, so the reference is not either")
    return changes


def _fixed_set(config: RunConfig) -> Changes:
    """A fixed set that outlasts the run is never reused."""
    batches = math.ceil(config.train.steps / config.updates_per_batch)
    if config.rollout.source == "fixed" and config.rollout.fixed_batches >= batches:
        why = f"the fixed set is not reused within {batches} rollout batches"
        plain = _DEFAULTS["rollout.fixed_batches"]
        return {"rollout.source": ("generator", why), "rollout.fixed_batches": (plain, why)}
    return {}


def _engine(config: RunConfig) -> Changes:
    """An engine that samples nothing, and a precision that `auto` takes."""
    if config.rollout.source == "external":
        why = "given pairs are not sampled"
        return {f"rollout.{name}": (_DEFAULTS[f"rollout.{name}"], why) for name in ("engine", "engine_dtype")}
    if config.rollout.engine != "in_process" and config.rollout.engine_dtype == config.learner_dtype:
        return {"rollout.engine_dtype": ("auto", f"auto is {config.learner_dtype} here")}
    return {}


def _given_pairs(config: RunConfig) -> Changes:
    """Given pairs are not sampled, nor chosen from a group: only a judge may turn one around."""
    if config.rollout.source == "external":
        why = "given pairs are not sampled"
        names = ("num_generations", "top_p", "top_k", "mask_truncated_completions")
        changes: Changes = {f"rollout.{name}": (_DEFAULTS[f"rollout.{name}"], why) for name in names}
        if "judge.name" not in reads(config):
            changes["objective.pair_rule"] = (_DEFAULTS["objective.pair_rule"], "the pairs are given")
        return changes
    why = "no pairs are given"
    return {name: (_DEFAULTS[name], why) for name in ("task.chosen_column", "task.rejected_column")}


def _kl(config: RunConfig) -> Changes:
    """A KL term of weight 0, and the estimators that `auto` or detaching make equal."""
    objective = config.objective
    if "objective.kl" not in reads(config) or objective.kl == "none":
        return {}
    if objective.kl_coef == 0:
        why = "objective.kl_coef is 0"
        return {
            "objective.kl": ("none", why),
            "objective.kl_coef": (_DEFAULTS["objective.kl_coef"], why),
            "objective.kl_estimator": ("auto", why),
            "rollout.reference_sync": ("none", why),
        }
    auto = "k1" if objective.kl == "reward" else "k3"
    if objective.kl_estimator == auto:
        return {"objective.kl_estimator": ("auto", f"auto is {auto} for objective.kl = {objective.kl!r}")}
    if objective.kl == "reward" and objective.kl_estimator == "k3+":
        return {"objective.kl_estimator": ("k3", "in the reward no gradient flows, and the value of k3+ is that of k3")}
    return {}


def _ratio(config: RunConfig) -> Changes:
    """The ratio to the learner is exactly 1 at the first update of a batch, and with U = 1 there is no other."""
    from suite.objectives import ratio_is_one, resolve_ratio_reference

    if "objective.ratio_reference" not in reads(config):
        return {}
    changes: Changes = {}
    reference = resolve_ratio_reference(config)
    if config.objective.trust_region in ("clip", "kl_penalty", "none") and ratio_is_one(config):
        why = "the ratio to the learner is 1 at the only update of a batch"
        for name in ("trust_region", "epsilon_low", "epsilon_high", "kl_penalty_coef", "kl_penalty_target"):
            changes[f"objective.{name}"] = (_DEFAULTS[f"objective.{name}"], why)
    if resolve_ratio_reference(apply(config, {"objective.ratio_reference": "auto"})) == reference:
        changes["objective.ratio_reference"] = ("auto", f"auto is {reference} here")
    return changes


def _importance_sampling(config: RunConfig) -> Changes:
    """A sampler that is the learner's own model in its own precision, and bounds that rounding does not reach."""
    objective, mode = config.objective, "objective.importance_sampling_mode"
    if mode not in reads(config) or objective.importance_sampling_mode == "none":
        return {}
    precise = config.model.dtype == "float32" and config.learner.compute_dtype == "model"
    one = config.rollout.engine == "in_process" and precise
    if one and objective.importance_sampling_clip_min <= 0.99 and objective.importance_sampling_clip_max >= 1.01:
        why = "in process and in float32 sampler and learner agree to rounding, so every weight is 1"
        names = (mode, "objective.importance_sampling_clip_min", "objective.importance_sampling_clip_max")
        return {name: (_DEFAULTS[name], why) for name in names}
    return {}


def _shaping(config: RunConfig) -> Changes:
    """A punishment of strength 0."""
    if config.reward.shaping == "soft_overlong" and config.reward.shaping_coef == 0:
        return {"reward.shaping": ("none", "reward.shaping_coef is 0")}
    return {}


def _scaling(config: RunConfig) -> Changes:
    """A batch of one prompt is one group."""
    one_group = config.rollout.num_prompts == 1 and config.objective.scale_rewards == "batch"
    return {"objective.scale_rewards": ("group", "the batch is one group")} if one_group else {}


def _entropy(config: RunConfig) -> Changes:
    if config.objective.entropy_coef or config.objective.entropy_target:
        return {}
    names = ("objective.entropy_over", "objective.entropy_mean")
    return {name: (_DEFAULTS[name], "objective.entropy_coef is 0") for name in names}


def _schedule(config: RunConfig) -> Changes:
    """The rate is at its peak from the last step of the warm-up on, and there once whatever the schedule."""
    if config.optim.warmup_steps >= config.policy_steps(config.train.steps) - 1:
        return {"optim.schedule": (_DEFAULTS["optim.schedule"], "the warm-up lasts to the end")}
    if config.optim.warmup_steps == 1 and config.optim.schedule == "constant":
        return {"optim.warmup_steps": (0, "a warm-up of one step is none")}
    return {}


def _critic(config: RunConfig) -> Changes:
    """Values have not moved at the first update of a batch, and with U = 1 there is no other."""
    changes: Changes = {}
    if config.updates_per_batch == 1:
        why = "no value has moved at the only update of a batch"
        changes["critic.cliprange_value"] = (_DEFAULTS["critic.cliprange_value"], why)
    if config.critic.warmup_steps == 1:
        changes["critic.warmup_steps"] = (0, "a warm-up of one step is none")
    return changes


def _unread(config: RunConfig) -> Changes:
    """What no part reads once the other rules have been applied."""
    read = reads(config)
    return {name: (value, "nothing reads it here") for name, value in _DEFAULTS.items() if name not in read}


_DEFAULTS = flatten(RunConfig())

_RULES: tuple[Callable[[RunConfig], Changes], ...] = (
    _never_synced,
    _fixed_set,
    _engine,
    _given_pairs,
    _kl,
    _ratio,
    _importance_sampling,
    _shaping,
    _scaling,
    _entropy,
    _schedule,
    _critic,
    _unread,
)
