"""`suite train`: one run, outside of any study."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from suite.commands.catalogue import console
from suite.config import RunConfig, apply, differences, fingerprint
from suite.registry import import_file
from suite.starts import pinned, prepare

PIPED_S = 10.0
"""Seconds between two lines of progress where nobody watches a screen."""

_SHOWN = ("reward/mean", "eval/validation/accuracy", "policy/entropy")


@contextmanager
def _stop_once() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM is noted, so that a checkpoint can be written; the second ends the process."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)
        restore()

    for number in before:
        signal.signal(number, hear)
    try:
        yield heard
    finally:
        restore()


def train(config: RunConfig, name: str, folder: Path | None, plugins: Sequence[Path], nproc: int = 1) -> int:
    """Train one run on `nproc` ranks, or go on with it; print its last metrics. 1 if it fails, 130 if stopped."""
    from ablations.axis import check_name
    from suite.inert import effective
    from suite.launch import ranks
    from suite.validate import validate

    check_name("run", name)
    for plugin in plugins:
        import_file(plugin)
    config = apply(config, {})
    validate(config)
    ranks.check(nproc)
    ranks.check_engine(config, nproc)
    screen = console()
    config = pinned(config)
    prepare([config.model], partial(screen.print, highlight=False))
    config = pinned(config)
    for option, reason in effective(config)[1].items():
        if option in differences(config, RunConfig()):
            screen.print(f"note   {option} changes nothing, {reason}", highlight=False)
    from suite.run import Interrupted, NonFiniteLoss, Progress, RunInfo, run

    folder = folder or Path("runs") / "train" / f"{name}-{fingerprint(config)[:8]}"
    changed = {option: list(pair) for option, pair in differences(config, RunConfig()).items()}
    with _stop_once() as heard, screen.status("loading") as line:
        said = [0.0]

        def show(progress: Progress) -> None:
            shown = {name: progress.metrics[name] for name in _SHOWN if name in progress.metrics}
            words = "".join(f"   {name} {value:.3f}" for name, value in shown.items())
            line.update(f"step {progress.step} of {progress.steps}{words}")
            now = time.monotonic()
            if not screen.is_terminal and (now - said[0] >= PIPED_S or progress.step == progress.steps):
                said[0] = now
                screen.print(f"step {progress.step} of {progress.steps}{words}", highlight=False)

        try:
            info = RunInfo("train", name, name, changed)
            runner = partial(ranks.run, nproc=nproc, plugins=plugins) if nproc > 1 else run
            metrics = runner(config, folder, info, on_progress=show, stop=lambda: bool(heard))
        except Interrupted as stopped:
            print(f"suite: {stopped}; the same command goes on from there", file=sys.stderr)
            return 130
        except NonFiniteLoss as error:
            print(f"suite: the run failed: {error}; see {folder / 'failure'}", file=sys.stderr)
            return 1
    for metric in sorted(metrics):
        if metric.startswith(("eval/", "policy/", "cost/")):
            screen.print(f"{metric:32} {metrics[metric]:.6g}", highlight=False)
    if not metrics.get("cost/trained_tokens"):
        screen.print(
            "note   no token was trained: no rollout gave the objective anything to learn from", highlight=False
        )
    screen.print(f"results  {folder}", highlight=False, soft_wrap=True)
    return 0
