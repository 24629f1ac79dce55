"""What the user sees while a study runs: a live table on a terminal, plain lines everywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from suite.status import CellStatus, StudyStatus

COLUMNS = (
    ("val acc", "eval/validation/accuracy", 100.0, ".1f"),
    ("entropy", "policy/entropy", 1.0, ".2f"),
    ("length", "policy/probe_length", 1.0, ".1f"),
)
"""Heading, metric, factor, format: means over the arm's cells that have the metric."""

PLAIN_INTERVAL_S = 30.0
"""Seconds between the lines that sum up, where there is no terminal."""


def duration(seconds: float) -> str:
    """A time for people: `45 s`, `1 min 40 s`, `3 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def short(value: float) -> str:
    """A number of tokens per second: `850`, `9.1k`."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def totals(status: StudyStatus, workers: int | None = None) -> str:
    """The line under the table: counts, and about how long it will take."""
    counts = {name: status.count(name) for name in ("complete", "running", "waiting", "failed", "stale")}
    line = ", ".join(
        f"{counts[name]} {'done' if name == 'complete' else name}"
        for name in counts
        if counts[name] or name in ("complete", "running", "waiting", "failed")
    )
    if workers and counts["waiting"] + counts["running"]:
        left = status.seconds_left(workers)
        line += "     time left: not known yet" if left is None else f"     about {duration(left)} left"
    return line


def _mean(cells: Iterable[CellStatus], metric: str, factor: float, form: str) -> str:
    values = [cell.metrics[metric] for cell in cells if metric in cell.metrics]
    return format(factor * fmean(values), form) if values else ""


def table(status: StudyStatus) -> Table:
    """Per arm: cells done, step of the cell that is furthest, means of the current metrics, tokens per second.

    Metrics are over the arm's finished cells, over its running ones as long as none has finished.
    """
    out = Table(box=None, pad_edge=False, header_style="bold")
    out.add_column("arm", no_wrap=True)
    for heading in ("cells", "step", *(column[0] for column in COLUMNS), "tokens/s"):
        out.add_column(heading, justify="right")
    for arm, label in status.arms.items():
        cells = status.of(arm)
        running = [cell for cell in cells if cell.status == "running"]
        shown = [cell for cell in cells if cell.status == "complete"] or running
        step = max((cell.step for cell in (running or shown)), default=0)
        rates = [cell.tokens_per_second for cell in (running or shown) if cell.tokens_per_second]
        failed = status.count("failed", arm)
        out.add_row(
            label,
            f"{status.count('complete', arm)}/{len(cells)}{f' ({failed} failed)' if failed else ''}",
            str(step) if step else "",
            *(_mean(shown, metric, factor, form) for _, metric, factor, form in COLUMNS),
            short(fmean(rates)) if rates else "",
            style="red" if failed else "",
        )
    return out


def page(status: StudyStatus, workers: int | None = None) -> Group:
    """The table, the totals, what failed and why, and what else the user should know."""
    failed = [
        Text(f"failed   {cell.name}: {cell.error}", style="red") for cell in status.cells if cell.status == "failed"
    ]
    more = [Text(f"and {len(failed) - 5} more failed cells")] if len(failed) > 5 else []
    notes = [Text(note) for note in status.notes]
    return Group(Text(""), table(status), Text(""), Text(totals(status, workers)), *failed[:5], *more, *notes)


class Display:
    """Shows a study while it runs, and writes the same as plain lines to `progress.log` in its folder."""

    def __init__(self, console: Console, folder: Path, workers: int) -> None:
        self._console, self._workers = console, workers
        self._log = (folder / "progress.log").open("a", encoding="utf-8")
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._before: dict[str, CellStatus] = {}
        self._summed_up = time.monotonic()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._log.close()

    def say(self, line: str) -> None:
        """One line, to the user and to the log."""
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
        self._log.flush()
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, status: StudyStatus) -> None:
        """Brings the display up to date: the live table, and a line for every cell that came to an end."""
        for cell in status.cells:
            before = self._before.get(cell.name)
            if before is not None and before.status != cell.status:
                self._changed(cell)
            elif before is not None and before.attempts < cell.attempts and cell.error:
                self.say(f"{cell.name}: trying again after {cell.error}")
            self._before[cell.name] = cell
        if self._live is not None:
            self._live.update(page(status, self._workers), refresh=True)
        elif time.monotonic() - self._summed_up > PLAIN_INTERVAL_S:
            self._summed_up = time.monotonic()
            self.say(totals(status, self._workers))
            for cell in status.cells:
                if cell.status == "running":
                    at = f"step {cell.step} of {cell.steps}" if cell.steps else "starting"
                    self.say(f"  {cell.name}: {at}{_figures(cell)}")

    def _changed(self, cell: CellStatus) -> None:
        if cell.status == "complete":
            self.say(f"{cell.name}: done in {duration(cell.seconds)}{_figures(cell)}")
        elif cell.status == "failed":
            self.say(f"{cell.name}: failed after {cell.attempts} attempts: {cell.error}")
        elif cell.status == "waiting" and cell.error:
            self.say(f"{cell.name}: back in the queue after {cell.error}")


def _figures(cell: CellStatus) -> str:
    shown = [
        f"{heading} {format(factor * cell.metrics[metric], form)}"
        for heading, metric, factor, form in COLUMNS
        if metric in cell.metrics
    ]
    return f", {', '.join(shown)}" if shown else ""
