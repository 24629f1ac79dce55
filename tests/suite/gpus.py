"""What tests on GPUs share: when they are skipped, models for GPU kernels, and how much memory is free."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_llama import make

GIBIBYTE = 2**30
HAS_VLLM = importlib.util.find_spec("vllm") is not None
NO_VLLM = "vLLM is not installed (make vllm-gpu installs it)"


def count() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def needs(number: int, *, vllm: bool = False) -> list[pytest.MarkDecorator]:
    """Marks of a test module that needs so many GPUs, and vLLM."""
    what = "a GPU" if number == 1 else f"{number} GPUs"
    # the first that holds says why
    checks = [pytest.mark.skipif(count() < number, reason=f"needs {what}")]
    if vllm:
        checks.append(pytest.mark.skipif(not HAS_VLLM, reason=NO_VLLM))
    return [pytest.mark.gpu, *checks]


def model(folder: Path, *, tied: bool = False, scale: float = 3.0) -> Path:
    """An untrained Llama with heads of 64, which two GPUs can share."""
    return make(folder, tied=tied, head=64, kv_heads=2, scale=scale)


def free() -> int:
    """Bytes of the first GPU that no process holds, this one's cache aside."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def comes(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something is true within some seconds."""
    until = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < until:
        time.sleep(0.1)
    return found
