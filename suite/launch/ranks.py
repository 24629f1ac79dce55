"""One run on several ranks of this machine: torchrun's processes, told to stop, heard, and gone when the run is.

The two sides speak through small files in a folder of their own: `control.json` says whether to go on, `progress.json`
how far the run is, `outcome-R.json` what became of rank R, `pid-R` which process it is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suite.config import RunConfig, to_json
from suite.failures import EngineDied, SyncError
from suite.launch.machine import cores
from suite.run import Interrupted, NonFiniteLoss, Progress, RunInfo

LOOK_S = 0.1
"""Seconds between two looks at the ranks."""
FRESH_S = 10.0
"""A run goes on, and ends, only while its `control.json` is younger, seconds: its launcher may have lost the run."""

JOB, CONTROL, PROGRESS = "job.json", "control.json", "progress.json"

_RAISED: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "Interrupted": Interrupted,
    "NonFiniteLoss": NonFiniteLoss,
    "MemoryError": MemoryError,
    "OutOfMemoryError": MemoryError,
    "EngineDied": EngineDied,
    "SyncError": SyncError,
}


def check(nproc: int, option: str = "--nproc") -> None:
    """Raises ValueError unless this machine can run so many ranks: from 1 on, up to its GPUs where it has any."""
    if nproc < 1:
        raise ValueError(f"{option} is {nproc} and must be at least 1")
    import torch

    have = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if have and nproc > have:
        raise ValueError(f"{option} is {nproc} and must be at most {have}, the GPUs of this machine")


def check_engine(config: RunConfig, nproc: int, option: str = "--nproc") -> None:
    """Raises ValueError for ranks that cannot be shared out among engines, each of which spans the GPUs of some."""
    span = config.rollout.tensor_parallel_size
    if nproc > 1 and config.rollout.engine == "vllm" and nproc % span:
        raise ValueError(
            f"{option} is {nproc} and must be a multiple of rollout.tensor_parallel_size, {span}: an engine shares the "
            "GPUs of so many ranks"
        )


def run(
    config: RunConfig,
    folder: Path,
    info: RunInfo,
    *,
    nproc: int,
    plugins: Sequence[Path] = (),
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """`suite.run.run` on `nproc` ranks, each a process that imports `plugins` first; the same results and errors.

    Whatever `stop` raises ends the ranks at once. No rank outlives this call, nor this process by more than seconds.
    """
    check(nproc)
    check_engine(config, nproc)
    with tempfile.TemporaryDirectory(prefix="suite-ranks-") as name:
        place = Path(name)
        job = {
            "config": to_json(config), "folder": str(folder.absolute()), "info": asdict(info), "parent": os.getpid(),
            "plugins": [str(plugin.absolute()) for plugin in plugins],
        }  # fmt: skip
        put(place / JOB, job)
        put(place / CONTROL, {"at": time.monotonic(), "stop": False})
        process = _start(place, nproc)
        try:
            _watch(process, place, on_progress, stop)
        finally:
            _end(process, place)
        return _outcome(place, process.returncode)


def put(path: Path, value: Any) -> None:
    """Write JSON for another process, which sees it whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)


def _start(place: Path, nproc: int) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // nproc))}
    # a group of its own: Ctrl-C in the terminal reaches this process alone, which passes it on once
    return subprocess.Popen(
        [*torchrun, "--module", "suite.launch.rank", str(place)],
        stdin=subprocess.DEVNULL,
        env={**threads, **os.environ},
        process_group=0,
    )


def _watch(
    process: subprocess.Popen[bytes],
    place: Path,
    on_progress: Callable[[Progress], None] | None,
    stop: Callable[[], bool] | None,
) -> None:
    seen = 0
    while True:
        over = process.poll() is not None
        if on_progress and (place / PROGRESS).is_file():
            found = json.loads((place / PROGRESS).read_text(encoding="utf-8"))
            if found["number"] > seen:
                seen = found["number"]
                on_progress(Progress(found["step"], found["steps"], found["metrics"]))
        if over:
            return
        asked = stop is not None and stop()
        put(place / CONTROL, {"at": time.monotonic(), "stop": asked})
        time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes], place: Path) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    # torchrun gives each rank a session of its own
    for file in place.glob("pid-*"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _outcome(place: Path, code: int) -> dict[str, float]:
    files = sorted(place.glob("outcome-*.json"), key=lambda file: (file.name != "outcome-0.json", file.name))
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for outcome in found:
        if "metrics" in outcome:
            return dict(outcome["metrics"])
    # a rank that lost the others has less to say than the one that they lost
    for outcome in sorted(found, key=lambda each: each["lost"]):
        kind = next((_RAISED[name] for name in outcome["classes"] if name in _RAISED), None)
        raise (kind or RuntimeError)(outcome["message"] if kind else f"{outcome['classes'][0]}: {outcome['message']}")
    raise RuntimeError(f"the ranks ended with exit code {code} and said nothing; see the output above")
