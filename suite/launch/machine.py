"""What this machine has to share among workers."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from suite.config import FROM_SEED
from suite.study import Study

MEMORY_PER_WORKER = 2**30
"""Bytes counted for a worker: PyTorch, the libraries around it, and a tiny model."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
"""What tells libraries how many threads to take."""

_GROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = (_GROUP / "cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def free_memory() -> int | None:
    """Bytes of memory that are free for use, within the control group's limit; None where that cannot be told."""
    try:
        rows = (row.split() for row in Path("/proc/meminfo").read_text().splitlines())
        free = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    except (OSError, StopIteration):
        return None
    try:
        limit = int((_GROUP / "memory.max").read_text())
        return min(free, limit - int((_GROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free


def memory_kills() -> int:
    """How many processes of this control group the kernel has killed for want of memory; 0 where that is not told."""
    try:
        rows = dict(row.split() for row in (_GROUP / "memory.events").read_text().splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError):
        return 0


@dataclass(frozen=True)
class Plan:
    """How many workers."""

    workers: int
    why: str


def plan_workers(workers: int | Literal["auto"], cells: int) -> Plan:
    """How many workers. `auto`: one a core, as far as memory and cells go. Raises ValueError for a number below 1."""
    have = cores()
    if workers == "auto":
        memory = free_memory()
        fit = have if memory is None else max(1, memory // MEMORY_PER_WORKER)
        count = max(1, min(have, fit, cells))
        room = "" if memory is None else f", {memory / 2**30:.1f} GB of memory free"
        why = f"{have} cores{room}, {cells} cells to run"
    elif isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1:
        count, why = min(workers, max(1, cells)), f"{have} cores, {cells} cells to run"
    else:
        raise ValueError(f"--workers is {workers!r} and must be a whole number from 1 on, or auto")
    return Plan(count, why)


def threads_each(processes: int, study: Study) -> tuple[int, str]:
    """Threads for each of a study's processes, and why so many.

    The user's OMP_NUM_THREADS; without it one for embedded models, which two threads on two cores train 3.5 times
    slower, and for others a share of the cores.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if given.isdigit() and int(given):
        return int(given), f"OMP_NUM_THREADS is {given}"
    if all(study.config(arm.name).model.path.startswith(FROM_SEED) for arm in study.arms):
        return 1, "more would slow embedded models down"
    return max(1, cores() // processes), "a share of the cores"


@dataclass(frozen=True)
class GpuShare:
    """The machine's GPUs, divided among workers."""

    groups: tuple[str, ...] = ()
    """What the workers' CUDA_VISIBLE_DEVICES say; empty = nothing is said to them."""
    limit: int | None = None
    """Most workers; None = any number."""
    note: str = ""
    """What the user should know."""

    def within(self, plan: Plan) -> Plan:
        """The plan with no more workers than there are GPUs for, and a reason that says so."""
        if self.limit is None:
            return plan
        count = min(plan.workers, self.limit)
        why = f"{plan.why}, GPUs for {self.limit} cells at a time" + (f"; {self.note}" if self.note else "")
        return replace(plan, workers=count, why=why)


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    command = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split()


def share_gpus(per_cell: int) -> GpuShare:
    """Divides the GPUs among workers: `per_cell` for each, and none for two; 0: one for each, shared if they are few.

    Raises ValueError for a negative number, and where there are fewer GPUs than one cell asks for.
    """
    if per_cell < 0:
        raise ValueError(f"--gpus-per-cell is {per_cell} and must be at least 0")
    found = gpus()
    if per_cell == 0:
        return GpuShare(tuple(found))
    if len(found) < per_cell:
        have = {0: "no GPU", 1: "1 GPU"}.get(len(found), f"{len(found)} GPUs")
        raise ValueError(f"--gpus-per-cell is {per_cell}, and this machine has {have}")
    count, idle = divmod(len(found), per_cell)
    groups = tuple(",".join(found[i * per_cell : (i + 1) * per_cell]) for i in range(count))
    note = f"{len(found)} GPUs do not divide by --gpus-per-cell {per_cell}: {idle} of them idle" if idle else ""
    return GpuShare(groups, count, note)
