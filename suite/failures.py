"""What went wrong in an attempt: told apart by kind, kept in the cell's folder, and whether another try can help."""

from __future__ import annotations

import json
import os
import shlex
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["not finite", "out of memory", "hang", "grader", "engine", "lost", "mistake", "error"]
"""`lost`: the worker went away. `mistake`: a ValueError, which is the user's to mend. `error`: everything else."""

_NAMES: dict[str, Kind] = {
    "NonFiniteLoss": "not finite",
    "MemoryError": "out of memory",
    "OutOfMemoryError": "out of memory",
    "EngineDied": "engine",
    "SyncError": "engine",
}
_PLACES: tuple[tuple[str, Kind], ...] = (("suite/grading", "grader"), ("suite/rollout/", "engine"))

MISTAKE = 2
"""Exit code for what the user has to mend before anything can run."""

REASON_LENGTH = 400
"""Characters of an error kept in the storage; the traceback is in the cell's folder."""


class EngineDied(RuntimeError):
    """The engine is gone; the message ends with its own last words."""


class SyncError(RuntimeError):
    """The engine does not sample from the weights that it was given."""


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without a result."""

    kind: Kind
    error: str
    """Class of the exception, or what the watcher saw (`SIGKILL`, `Hang`)."""
    message: str
    step: int
    """Last optimizer step that was reported."""

    @property
    def reason(self) -> str:
        """One line: kind, class, message and step."""
        line = " ".join(f"{self.kind}: {self.error}: {self.message}".split())
        return f"{line[:REASON_LENGTH]} (step {self.step})"


def classify(error: BaseException) -> Kind:
    """The kind of an exception: by its class, else by the deepest part of the harness that it came through.

    An exception raised by the grader's or the sampler's own code is `grader` or `engine`; ValueError is a `mistake`.
    """
    for cause in (error, error.__cause__):
        for cls in type(cause).__mro__:
            if cls.__name__ in _NAMES:
                return _NAMES[cls.__name__]
    if isinstance(error, ValueError):
        return "mistake"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename.replace(os.sep, "/")
        for place, kind in _PLACES:
            if place in path:
                return kind
    return "error"


def of_exception(error: BaseException, step: int) -> Failure:
    """The failure that an exception stands for."""
    return Failure(classify(error), type(error).__name__, str(error) or "no message", step)


def keep(folder: Path, attempt: int, failure: Failure, text: str, rerun: Sequence[str], owner: str) -> None:
    """Writes `attempts/N/error.txt` (the traceback or what else is known) and `attempt.json` in the cell's folder.

    A text written before, such as the stacks of a hung worker, is kept above the new one.
    """
    place = folder / "attempts" / str(attempt)
    place.mkdir(parents=True, exist_ok=True)
    with (place / "error.txt").open("a", encoding="utf-8") as file:
        file.write(f"{failure.reason}\nrun again: {shlex.join(rerun)}\n\n{text}\n")
    record = {"attempt": attempt, "owner": owner, **asdict(failure), "rerun": shlex.join(rerun)}
    write_json(place / "attempt.json", record)


def write_json(path: Path, tree: Any) -> None:
    """Writes a JSON file so that a reader sees the old one or the new one, never a part."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with new.open("w", encoding="utf-8") as file:
        file.write(json.dumps(tree, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


@dataclass(frozen=True)
class Retries:
    """How often a cell is tried before it counts as failed. Attempts that got further than all before are free."""

    errors: int = 2
    """Attempts in a row that raised and got no further."""
    losses: int = 10
    """Attempts in a row that lost their worker and got no further: a machine's fault more often than the cell's."""

    def exhausted(self, attempts: Sequence[dict[str, Any]]) -> bool:
        """Whether the last attempt was the last one allowed.

        A loss that is not finite or a user's mistake comes again in the same way, so it is never retried.
        """
        if attempts and attempts[-1]["kind"] in ("not finite", "mistake"):
            return True
        best, errors, losses = 0, 0, 0
        for attempt in attempts:
            if attempt["step"] > best:
                best, errors, losses = attempt["step"], 0, 0
            errors += attempt["kind"] != "lost"
            losses += attempt["kind"] == "lost"
        return errors >= self.errors or losses >= self.losses
