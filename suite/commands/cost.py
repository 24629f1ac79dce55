"""What a cell will cost, counted before it runs."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from suite.config import FROM_SEED, RunConfig, apply
from suite.run import Progress


@dataclass(frozen=True)
class Cost:
    """Counts for one cell, or several added up. Tokens are upper bounds: every completion as long as the budget."""

    steps: int
    """Optimizer steps."""
    rollouts: int
    """Completions sampled for training."""
    evaluations: int
    """Completions sampled for evaluation and the probe."""
    tokens: int
    """Tokens sampled at most, evaluation included."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.steps + other.steps,
            self.rollouts + other.rollouts,
            self.evaluations + other.evaluations,
            self.tokens + other.tokens,
        )


def completion_budget(config: RunConfig) -> int:
    """Longest completion of a single task, tokens: the configuration's, else the task's own."""
    from suite.tasks import replies
    from suite.tasks.arithmetic import FAMILIES
    from suite.tasks.files import DEFAULT_BUDGET

    own = {name: family.max_completion_length for name, family in FAMILIES.items()} | {replies.NAME: replies.BUDGET}
    return config.rollout.max_completion_length or own.get(config.task.name, DEFAULT_BUDGET)


def _held_out(config: RunConfig, split: Literal["validation", "test"]) -> int:
    """Problems evaluated of a single task's split; an unknown `all there are` of a file counts as none."""
    from suite.tasks import numina, replies, wildchat
    from suite.tasks.arithmetic import FAMILIES

    count = config.eval.validation_problems if split == "validation" else config.eval.test_problems
    if count:
        return count
    if family := FAMILIES.get(config.task.name):
        return len(family.problems()[split])
    if config.task.name == replies.NAME:
        return len(replies.errands()[split])
    return {"numina_math": numina.HELD_OUT, "wildchat": wildchat.HELD_OUT}.get(config.task.name, 0)


def _tasks(config: RunConfig) -> list[tuple[RunConfig, int]]:
    """The tasks of a run, each as the configuration of its own, and how many prompts of a batch are its."""
    from suite.tasks import mixture

    if config.task.name != mixture.NAME:
        return [(config, config.rollout.num_prompts)]
    prompts = mixture.counts(mixture.proportions(config), config.rollout.num_prompts)
    return [(mixture.part_config(config, name), count) for name, count in prompts.items()]


def evaluations(config: RunConfig) -> int:
    """How often the validation problems are evaluated: before step 1, every so many steps, and after the last."""
    steps, every = config.train.steps, config.eval.every
    return 1 + steps // every + (steps % every > 0)


def cost(config: RunConfig) -> Cost:
    """The cost of one cell of this configuration."""
    from suite.rollout.greedy import needs_greedy

    batches = math.ceil(config.train.steps / config.updates_per_batch)
    sampled = {
        "generator": batches,
        "fixed": min(batches, config.rollout.fixed_batches),
        "external": 0,
    }[config.rollout.source]
    per_prompt = sampled * (config.rollout.num_generations + needs_greedy(config))
    per_problem = 1 + config.eval.num_samples
    probe = config.eval.probe_prompts * config.eval.probe_samples
    total = Cost(config.train.steps, 0, 0, 0)
    for task, prompts in _tasks(config):
        validation = _held_out(task, "validation") * per_problem + probe
        held_out = evaluations(config) * validation + 2 * _held_out(task, "test") * per_problem
        rollouts = prompts * per_prompt
        total += Cost(0, rollouts, held_out, (rollouts + held_out) * completion_budget(task))
    return total


@dataclass(frozen=True)
class Pilot:
    """Two rollout batches and two small evaluations of a configuration, extrapolated to the whole run."""

    seconds: float
    shaped: bool
    """Whether the shaping changed any reward of the pilot's rollouts."""
    rollouts: int


def is_cheap(config: RunConfig) -> bool:
    """Whether a pilot takes seconds: the model is an embedded one, and trained."""
    from suite.starts import pinned

    return config.model.path.startswith(FROM_SEED) and bool(pinned(config).model.weights)


@contextmanager
def short_run(config: RunConfig, watch: Callable[[Progress], None]) -> Iterator[Path]:
    """A run on one thread, as a worker would do it, untracked, in a folder that is there within the context only."""
    import torch
    from transformers.utils import logging

    from suite.run import RunInfo, run

    logging.disable_progress_bar()
    threads, mode = torch.get_num_threads(), os.environ.get("WANDB_MODE")
    torch.set_num_threads(1)
    os.environ["WANDB_MODE"] = "disabled"
    try:
        with tempfile.TemporaryDirectory() as name:
            run(config, Path(name) / "pilot", RunInfo("pilot", "pilot", "pilot", {}), on_progress=watch)
            yield Path(name) / "pilot"
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("WANDB_MODE") if mode is None else os.environ.update(WANDB_MODE=mode)


def pilot(config: RunConfig) -> Pilot:
    """Run two rollout batches."""
    updates = config.updates_per_batch
    count = {name: min(getattr(config.eval, name) or 50, 50) for name in ("validation_problems", "test_problems")}
    short = {"train.steps": 2 * updates, "eval.every": 2 * updates, **{f"eval.{name}": n for name, n in count.items()}}
    steps: dict[int, float] = {}
    evaluation = [0.0]

    def watch(progress: Progress) -> None:
        steps.setdefault(progress.step, progress.metrics.get("time/step_s", 0.0))
        evaluation[0] = progress.metrics.get("time/eval_s", 0.0)

    with short_run(apply(config, short), watch) as folder:
        rollouts, shaped = _shaped(folder / "rollouts")
    # the first batch pays for warming up, the last evaluation has both kinds of problems and the probe
    batch = sum(seconds for step, seconds in steps.items() if step > updates)
    samples = (
        sum(count.values()) * (1 + config.eval.num_samples) + config.eval.probe_prompts * config.eval.probe_samples
    )
    whole = config.train.steps / updates * batch + cost(config).evaluations / samples * evaluation[0]
    return Pilot(whole, shaped, rollouts)


def ends(config: RunConfig, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics before the first and after the last step of a run cut to `steps`, evaluated at both ends alone."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}

    def watch(progress: Progress) -> None:
        (last if progress.step else first).update(progress.metrics)

    with short_run(apply(config, {"train.steps": steps, "eval.every": steps}), watch):
        return first, last


def _shaped(folder: Path) -> tuple[int, bool]:
    """How many rollouts were stored, and whether the reward of any differs from its verdict's."""
    import pyarrow.parquet

    columns = ["reward", "outcome"]
    rows = [
        row
        for path in folder.glob("*.parquet")
        for row in pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    ]
    return len(rows), any(row["reward"] != (row["outcome"] == "right") for row in rows)


def finished_seconds(folder: Path, storage: str | None = None) -> dict[str, float]:
    """Arm -> mean seconds of its complete cells in a study's folder; empty if there are none."""
    from suite.sweep import Sweep

    if not (folder / "study.json").is_file():
        return {}
    status = Sweep.attach(folder, storage).snapshot(write=False)
    spent = {
        arm: [c.seconds for c in status.of(arm) if c.status == "complete" and c.seconds > 0] for arm in status.arms
    }
    return {arm: fmean(seconds) for arm, seconds in spent.items() if seconds}
