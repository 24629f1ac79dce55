"""The training core on the embedded model: sampling, a step of each objective, an evaluation, a checkpoint."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from suite import checkpoint
from suite import train as core
from suite.config import RunConfig, apply
from suite.evaluate import evaluate

GRPO = {"objective.name": "policy_gradient", "objective.kl": "loss"}


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The best of some repeats, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def figures() -> Iterator[tuple[str, float, str]]:
    """One thread, 32 prompts x 8 rollouts, two-digit addition."""
    torch.set_num_threads(1)
    config = RunConfig()
    parts = core.assemble(config)
    tokens = sum(len(rollout.completion.token_ids) for group in parts.rollouts(0).groups for rollout in group)
    yield "sampling", tokens / seconds(lambda: parts.rollouts(0)), "tokens/s"
    problems = config.eval.validation_problems * (1 + config.eval.num_samples)
    words = parts.policy.tokenizer
    spent = seconds(lambda: evaluate(config, "validation", parts.evaluator, parts.task, words, step=0), 1)
    yield "evaluation, greedy and sampled", problems / spent, "completions/s"
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"policy": parts.policy.model.state_dict()}
        spent = seconds(lambda: checkpoint.save(Path(folder), 0, tensors, {}, keep=1))
    yield "checkpoint of the policy", 1000 * spent, "ms"
    yield "dpo: prepare and update", 1000 * step_seconds(config), "ms"
    yield "grpo: prepare and update", 1000 * step_seconds(apply(config, GRPO)), "ms"


def step_seconds(config: RunConfig) -> float:
    """One optimizer step on a rollout batch that is there."""
    parts = core.assemble(config)
    groups = parts.rollouts(0).groups

    def step() -> None:
        batch, _ = core.prepare(config, parts, groups, 0)
        assert batch is not None
        for mini in core.minibatches(config, batch, 0):
            core.update(config, parts, mini, 0)

    return seconds(step)
