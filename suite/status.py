"""How a study stands: every cell with its state and progress, and what that means for the exit code and the wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Literal

State = Literal["waiting", "running", "complete", "failed", "stale"]
STATES: tuple[State, ...] = ("waiting", "running", "complete", "failed", "stale")


@dataclass(frozen=True)
class CellStatus:
    """One cell as the storage has it."""

    arm: str
    seed: int
    name: str
    fingerprint: str
    status: State
    """`stale`: finished, but by another definition of the arm or another commit."""
    folder: str
    error: str | None = None
    """Why it failed, why it is stale, or what its last attempt died of, in one line."""
    attempts: int = 0
    step: int = 0
    steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    seconds: float = 0.0
    """Time spent by the worker that has it or finished it, seconds."""
    started_at: int = 0
    """The step from which that worker went on."""
    worker: str = ""
    """The worker that has it or had it last."""
    tokens_per_second: float = 0.0
    """Tokens generated for training per second since its first step; loading and starting are not counted."""

    @property
    def share(self) -> float:
        """Part of the optimizer steps that is done, 0 to 1."""
        return 1.0 if self.status == "complete" else min(1.0, self.step / self.steps) if self.steps else 0.0


@dataclass(frozen=True)
class StudyStatus:
    """A study at one moment."""

    name: str
    arms: Mapping[str, str]
    """Names and labels, in the study's order; the first is the control."""
    cells: tuple[CellStatus, ...]
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    """What the user should know besides the counts, one sentence each."""

    def of(self, arm: str) -> tuple[CellStatus, ...]:
        """The cells of one arm."""
        return tuple(cell for cell in self.cells if cell.arm == arm)

    def part(self, takes: Callable[[str, int], bool]) -> StudyStatus:
        """The same with only the cells whose arm and seed `takes` accepts, and their arms."""
        cells = tuple(cell for cell in self.cells if takes(cell.arm, cell.seed))
        arms = {name: label for name, label in self.arms.items() if any(cell.arm == name for cell in cells)}
        return replace(self, arms=arms, cells=cells)

    def count(self, status: State, arm: str | None = None) -> int:
        """How many cells (of an arm) are in a state."""
        return sum(cell.status == status for cell in (self.cells if arm is None else self.of(arm)))

    @property
    def exit_code(self) -> int:
        """0: every cell is complete. 1: a cell failed. 2: cells are left or stale. 130: stopped on request."""
        if self.interrupted:
            return 130
        if self.count("failed"):
            return 1
        return 0 if self.count("complete") == len(self.cells) else 2

    def seconds_left(self, workers: int) -> float | None:
        """An estimate from the cells done and the progress of those running; None before anything is known.

        A cell takes the mean time of its arm's cells, of all cells if its arm has none yet. A cell that has done less
        than a tenth says nothing: its seconds are those of loading, and perhaps of training the seed model.
        """
        known: dict[str, list[float]] = {}
        for cell in self.cells:
            done = cell.share if cell.status in ("complete", "running") else 0.0
            fresh = done - (cell.started_at / cell.steps if cell.steps else 0.0)
            if cell.seconds > 0 and fresh > 0.1:
                known.setdefault(cell.arm, []).append(cell.seconds / fresh)
        if not known:
            return None
        overall = fmean(value for values in known.values() for value in values)
        left = [
            (1 - cell.share) * (fmean(known[cell.arm]) if cell.arm in known else overall)
            for cell in self.cells
            if cell.status in ("waiting", "running")
        ]
        # No schedule beats the longest cell, nor the total shared evenly.
        return max(sum(left) / max(1, workers), max(left, default=0.0))
