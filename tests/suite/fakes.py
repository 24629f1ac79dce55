"""Stand-ins for tests of the training core."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from suite import train as core
from suite.checkpoint import restore
from suite.config import RunConfig, apply, fingerprint


class MemoryTracker:
    """Keeps what a Tracker would log: step -> metrics, last value per name."""

    def __init__(self, run_id: str = "memory") -> None:
        self.run_id, self.logged, self.rows_hash = run_id, 0, None
        self.rows: dict[int, dict[str, float]] = {}
        self.tables: dict[tuple[int, str], Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def log_table(self, step: int, name: str, table: Any) -> None:
        self.tables[step, name] = table

    def sync(self) -> None:
        """Nothing to write."""

    def column(self, name: str) -> list[float]:
        """The metric over the training steps that logged it, in order."""
        return [row[name] for step, row in sorted(self.rows.items()) if name in row and step > 0]


SMALL = {
    "rollout.num_prompts": 8, "rollout.num_generations": 4, "train.steps": 6, "eval.every": 100,
    "eval.validation_problems": 20, "eval.test_problems": 20, "eval.num_samples": 1, "eval.probe_prompts": 4,
    "train.checkpoint_every": 2, "optim.lr": 1e-4,
}  # fmt: skip

POLICY_GRADIENT = {"objective.name": "policy_gradient", "objective.kl": "loss", "objective.kl_coef": 0.01}


def small(**options: Any) -> RunConfig:
    """A run of a second or two; options with `__` for the dot."""
    return apply(RunConfig(), {**SMALL, **{name.replace("__", "."): value for name, value in options.items()}})


def trained(config: RunConfig, folder: Path, **how: Any) -> tuple[core.Outcome, MemoryTracker]:
    """Train from the folder's newest checkpoint, if any, with a tracker in memory."""
    tracker = MemoryTracker()
    start = restore(folder / "checkpoints", fingerprint(config))
    return core.train(config, folder, tracker, start, **how), tracker  # type: ignore[arg-type]


def rollouts(folder: Path, more: tuple[str, ...] = ()) -> pd.DataFrame:
    """What the run in a folder has sampled, in order: ids, and `more` columns."""
    files = sorted((folder / "rollouts").glob("batch-*.parquet"))
    columns = ["uid", "sample", "token_ids", "version", "finish_reason", "reward", *more]
    return pd.concat([pd.read_parquet(file)[columns] for file in files], ignore_index=True)
