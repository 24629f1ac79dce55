"""A run that trains nothing: it counts steps, keeps a checkpoint, and does what `plan.json` says its arm does.

A plan: arm -> {"seconds": per step, "fail_at": step, "error": class, "kill_at": step, "hang_at": step, "stop_at": step,
"stop_locked_at": step, "times": starts that do so}.
Every step that is really taken is a line of `steps.txt`, every start a line of `starts.txt`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import provenance
from suite.config import RunConfig
from suite.launch.machine import THREADS
from suite.run import Interrupted, NonFiniteLoss, Progress, RunInfo
from suite.sweep import Sweep

if TYPE_CHECKING:  # every worker imports this file
    import pytest

STEPS = 6


@contextmanager
def one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this process and its children one commit, whatever happens to the repository while the tests run."""
    monkeypatch.setenv(provenance.VARIABLE, "0123456789")
    provenance._provenance.cache_clear()
    yield
    provenance._provenance.cache_clear()


ERRORS: dict[str, type[Exception]] = {
    "runtime": RuntimeError,
    "nan": NonFiniteLoss,
    "mistake": ValueError,
    "memory": MemoryError,
}


def value(config: RunConfig) -> float:
    """The result, another one for every cell."""
    period = 100 if config.rollout.sync_period == "inf" else config.rollout.sync_period
    return period + config.seed / 1000


def run(
    config: RunConfig,
    folder: Path,
    info: RunInfo,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    assert on_progress is not None
    assert stop is not None
    path = folder.parent.parent / "plan.json"
    plan = json.loads(path.read_text()).get(info.arm, {}) if path.exists() else {}
    checkpoint = folder / "checkpoint.txt"
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with (folder / "starts.txt").open("a") as file:
        threads = {os.environ.get(name, "none") for name in THREADS}
        file.write(f"{os.getpid()} {'/'.join(sorted(threads))} {start}\n")
    first = len((folder / "starts.txt").read_text().splitlines()) <= plan.get("times", 1)
    print(f"training {info.label}")
    for step in range(start + 1, STEPS + 1):
        time.sleep(plan.get("seconds", 0.0))
        if first:
            _misbehave(plan, step, folder.parent.parent)
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{step}\n")
        checkpoint.write_text(str(step))
        on_progress(
            Progress(step, STEPS, {"eval/validation/accuracy": step / 10, "cost/generated_tokens": 100.0 * step})
        )
        if stop():
            raise Interrupted
    return {"eval/test/accuracy": value(config), "policy/entropy": 0.5, "undefined": float("nan")}


def _misbehave(plan: dict[str, float], step: int, folder: Path) -> None:
    if step == plan.get("fail_at"):
        raise ERRORS[str(plan["error"])](f"planned at step {step}")
    if step == plan.get("kill_at"):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == plan.get("stop_at"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if step == plan.get("stop_locked_at"):
        with Sweep.attach(folder).store.lock():
            os.kill(os.getpid(), signal.SIGSTOP)
    if step == plan.get("hang_at"):
        time.sleep(600)


def ranked(config: RunConfig, folder: Path, info: RunInfo, *, nproc: int, **how: Any) -> dict[str, float]:
    """`run`, which notes the number of ranks asked for, the GPUs it may use, and its process."""
    how.pop("plugins")
    with (folder / "ranks.txt").open("a") as file:
        file.write(f"{nproc} {os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}\n")
    return run(config, folder, info, **how)
