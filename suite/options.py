"""What each option may be: ranges, choices, and who reads it."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from suite import starts
from suite.config import FROM_ARM, RunConfig, flatten
from suite.registry import Registry


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `low` to `high`; an open end is left out."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        parts = []
        if math.isfinite(self.low):
            parts.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if math.isfinite(self.high):
            parts.append(f"{'below' if self.high_open else 'at most'} {self.high:g}")
        return " and ".join(parts) or "finite"


_COUNT, _FROM_ZERO, _POSITIVE = Range(1), Range(0), Range(0, low_open=True)
_MASS, _DECAY = Range(0, 1, low_open=True), Range(0, 1, high_open=True)

RANGES: dict[str, Range] = {
    "seed": _FROM_ZERO,
    "task.max_prompt_length": _COUNT,
    "task.wildchat_prompts": _COUNT,
    "rollout.num_prompts": _COUNT,
    "rollout.num_generations": _COUNT,
    "rollout.temperature": _POSITIVE,
    "rollout.top_p": _MASS,
    "rollout.top_k": _FROM_ZERO,
    "rollout.max_completion_length": _FROM_ZERO,
    "rollout.sync_period": _COUNT,
    "rollout.fixed_batches": _COUNT,
    "rollout.max_gen_batches": _COUNT,
    "rollout.chunk_size": _COUNT,
    "rollout.tensor_parallel_size": _COUNT,
    "rollout.memory_share": Range(0, 1, high_open=True),
    "rollout.max_model_len": _FROM_ZERO,
    "rollout.window_rollouts": _FROM_ZERO,
    "reward.shaping_coef": Range(),
    "reward.soft_punish_max": _POSITIVE,
    "reward.soft_punish_cache": _POSITIVE,
    "objective.beta": _POSITIVE,
    "objective.label_smoothing": Range(0, 0.5, high_open=True),
    "objective.nll_coef": _FROM_ZERO,
    "objective.grpo_coef": _FROM_ZERO,
    "objective.advantage_eps": _FROM_ZERO,
    "objective.gamma": _MASS,
    "objective.gae_lambda_policy": Range(0, 1),
    "objective.length_adaptive_alpha": _FROM_ZERO,
    "objective.baseline_decay": _MASS,
    "objective.kl_penalty_coef": _POSITIVE,
    "objective.kl_penalty_target": _FROM_ZERO,
    "objective.positive_nll_coef": _FROM_ZERO,
    "objective.entropy_target": _FROM_ZERO,
    "objective.entropy_coef_delta": _POSITIVE,
    "objective.entropy_coef_max": _POSITIVE,
    "objective.epsilon_low": _MASS,
    "objective.epsilon_high": _POSITIVE,
    "objective.importance_sampling_clip_max": Range(1, low_open=True),
    "objective.importance_sampling_clip_min": _DECAY,
    "objective.kl_coef": _FROM_ZERO,
    "objective.entropy_coef": _FROM_ZERO,
    "objective.num_minibatches": _COUNT,
    "objective.num_epochs": _COUNT,
    "judge.max_tokens": _COUNT,
    "judge.timeout_s": _POSITIVE,
    "judge.retries": _FROM_ZERO,
    "judge.concurrency": _COUNT,
    "optim.lr": _POSITIVE,
    "optim.beta1": _DECAY,
    "optim.beta2": _DECAY,
    "optim.eps": _POSITIVE,
    "optim.weight_decay": _FROM_ZERO,
    "optim.max_grad_norm": _FROM_ZERO,
    "optim.warmup_steps": _FROM_ZERO,
    "optim.micro_batch_size": _FROM_ZERO,
    "critic.lr": _POSITIVE,
    "critic.warmup_steps": _FROM_ZERO,
    "critic.max_grad_norm": _FROM_ZERO,
    "critic.cliprange_value": _FROM_ZERO,
    "critic.gae_lambda_value": Range(0, 1),
    "critic.pretrain_steps": _FROM_ZERO,
    "eval.every": _COUNT,
    "eval.validation_problems": _FROM_ZERO,
    "eval.test_problems": _FROM_ZERO,
    "eval.num_samples": _FROM_ZERO,
    "eval.temperature": _POSITIVE,
    "eval.top_p": _MASS,
    "eval.probe_prompts": _COUNT,
    "eval.probe_samples": _COUNT,
    "train.steps": _COUNT,
    "train.checkpoint_every": _FROM_ZERO,
    "train.keep_checkpoints": _COUNT,
}
"""What every numeric option may be."""


def registries() -> dict[str, Registry[Any]]:
    """The options that name an entry of a registry, and the registry. Imports torch."""
    from suite import judges, objectives, rewards, tasks

    return {
        "task.name": tasks.TASKS,
        "reward.shaping": rewards.SHAPINGS,
        "judge.name": judges.JUDGES,
        "objective.name": objectives.OBJECTIVES,
        "objective.pair_rule": objectives.PAIR_RULES,
        "objective.advantage": objectives.ADVANTAGES,
        "objective.trust_region": objectives.TRUST_REGIONS,
        "objective.loss_agg_mode": objectives.AGGREGATIONS,
        "objective.kl_estimator": objectives.KL_ESTIMATORS,
        "objective.importance_sampling_mode": objectives.IMPORTANCE_SAMPLING_MODES,
    }


_ENGINES = {
    "in_process": frozenset[str](),
    "vllm": frozenset(
        ("engine_dtype", "tensor_parallel_size", "memory_share", "prefix_caching", "max_model_len", "transfer",
         "transfer_folder", "sleep")
    ),
    "vllm_server": frozenset(("engine_dtype", "server_url", "transfer", "transfer_folder")),
}  # fmt: skip
"""What each `rollout.engine` reads of the section."""


@functools.cache
def _literals() -> dict[str, tuple[Any, ...]]:
    hints = {
        f"{section}.{name}": hint
        for section, kind in get_type_hints(RunConfig).items()
        if dataclasses.is_dataclass(kind)
        for name, hint in get_type_hints(kind).items()
    }
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def choices() -> dict[str, tuple[Any, ...]]:
    """Every option that takes one of a few values, and the values: the literals and the registered names."""
    out = dict(_literals())
    out.update({option: tuple(registry) for option, registry in registries().items()})
    out["objective.kl_estimator"] = ("auto", *out["objective.kl_estimator"])
    return out


def reads(config: RunConfig) -> frozenset[str]:
    """The options that something looks at under this configuration, whatever their values."""
    from suite import tasks
    from suite.objectives import objective_reads

    table = registries()
    loop = {
        name for name in flatten(config) if not name.startswith(("task.", "reward.", "objective.", "critic.", "judge."))
    }
    loop -= {"rollout.reference_sync"} | ({"rollout.fixed_batches"} if config.rollout.source != "fixed" else set())
    loop -= set() if config.rollout.dynamic_sampling else {"rollout.max_gen_batches"}
    loop -= {"model.weights"} if config.model.path.startswith(FROM_ARM) else {"model.parent", "model.folder"}
    loop -= set() if starts.on_hub(config.model.path) else {"model.revision"}
    engine = "in_process" if config.rollout.source == "external" else config.rollout.engine
    loop -= {f"rollout.{name}" for name in frozenset().union(*_ENGINES.values()) - _ENGINES[engine]}
    loop |= {"task.name", "reward.shaping"}
    shaping, objective = table["reward.shaping"].entry(config.reward.shaping), objective_reads(config)
    # where prompts never repeat, or nothing is referred to, there is nothing to keep
    if config.rollout.source == "generator" or "rollout.reference_sync" not in objective:
        loop.discard("rollout.precompute_ref_log_probs")
    return frozenset(loop) | tasks.task_reads(config) | shaping.reads | objective


def _with(config: RunConfig, option: str, value: Any) -> RunConfig:
    """`apply` for one option whose type is right already: many are tried."""
    section, _, name = option.partition(".")
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


def who_reads(config: RunConfig, option: str) -> str:
    """Which change of one choice, or else of two, would make something read the option."""
    slots = [(name, value, f"{name} = {value}") for name, values in choices().items() for value in values]
    coefficients = ("entropy_coef", "entropy_target", "nll_coef", "grpo_coef")
    slots += [(f"objective.{name}", 1.0, f"objective.{name} above 0") for name in coefficients]
    one, two, here = [], [], reads(config)
    for name, value, words in slots:
        changed = _with(config, name, value)
        if option in reads(changed):
            one.append(words)
        elif reads(changed) != here and not one:
            others = ((_with(changed, other, v), w) for other, v, w in slots if other != name)
            two += [f"{words} and {w}" for both, w in others if option in reads(both)]
    found = one or two
    return f"it is read with {' or '.join(found)}" if found else "leave it at its default"
