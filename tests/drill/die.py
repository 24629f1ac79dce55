"""Runs one cell that kills itself at a chosen moment, then goes on with it: `python -m tests.drill.die FOLDER POINT`.

A point is `module:function:count:when`: SIGKILL at that call of the function, `before` or `after` it does its work.
Each attempt is a fork of this process, so that the libraries are imported once for all of them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pandas  # noqa: F401  wandb and pyarrow look for it
import wandb.sdk.launch  # noqa: F401  imported by wandb.init
from transformers.models.llama import modeling_llama  # noqa: F401

from suite.config import RunConfig, apply
from suite.run import RunInfo, run
from tests.suite.fakes import SMALL

CONFIG = apply(RunConfig(), {**SMALL, "train.steps": 4, "train.checkpoint_every": 1, "eval.every": 2})


def plant(point: str) -> None:
    """Make the chosen call the last thing that this process does."""
    module, name, count, when = point.split(":")
    holder: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for each in outer:
        holder = getattr(holder, each)
    real, calls = getattr(holder, last), [0]

    def deadly(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == int(count) and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        out = real(*arguments, **named)
        if calls[0] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    setattr(holder, last, deadly)


def attempt(folder: Path, point: str = "") -> int:
    """One attempt in a process of its own; its exit code, minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        if point:
            plant(point)
        run(CONFIG, folder, RunInfo("die", "a", "a", {}))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    """Exit code 0 where every point was reached and every cell finished afterwards."""
    folder = Path(sys.argv[1])
    assert attempt(folder / "alone" / "cell") == 0
    for number, points in enumerate(sys.argv[2:]):
        place = folder / str(number) / "cell"
        for point in points.split("+"):
            code = attempt(place, point)
            assert code == -signal.SIGKILL, f"{point} was not reached ({code})"
        assert attempt(place) == 0, f"after {points} the cell could not go on"
    return 0


sys.exit(main())
