"""`suite studies`, `suite axes`, `suite new` and `suite doctor`: what there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suite.config import RunConfig, apply, differences
from suite.study import Arm, Axis


def console() -> Console:
    """Where commands print. Width follows the terminal; piped output is not wrapped."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=160)


def change_words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """`option: old -> new`, one per line."""
    return "\n".join(f"{name}: {old} → {new}" for name, (old, new) in changes.items()) or "nothing"


def studies() -> int:
    """Print the studies: question, arms, seeds."""
    from ablations.load import load_study
    from ablations.load import studies as known

    table = Table("study", "question", "arms", "seeds", title="suite run STUDY --dry-run")
    for name in known():
        study = load_study(name)
        table.add_row(name, study.question, ", ".join(arm.name for arm in study.arms), str(len(study.seeds)))
    console().print(table)
    return 0


def axes() -> int:
    """Print the axes: question, arms."""
    from ablations.load import axes as known
    from ablations.load import load_axis

    table = Table("axis", "question", "arms", title="suite axes show NAME")
    for name in known():
        axis = load_axis(name)
        table.add_row(name, axis.question, ", ".join(arm.name for arm in axis.arms))
    console().print(table)
    return 0


def show_axis(name: str) -> int:
    """Print what each arm of an axis changes in the plainest base that the axis accepts, and its sources."""
    from ablations.load import axis_file, load_axis
    from suite.inert import inert_reason

    axis = load_axis(name)
    base = apply(RunConfig(), axis.needs)
    screen = console()
    screen.print(f"[bold]{axis.name}[/]  {axis.question}\n{axis_file(name)}", highlight=False, soft_wrap=True)
    needs = ", ".join(f"{option} = {value!r}" for option, value in axis.needs.items())
    screen.print(f"base: the defaults{f' with {needs}' if needs else ''}", highlight=False)
    table = Table("arm", "label", "changes", "inert in this base")
    for arm in axis.arms:
        table.add_row(*map(escape, (arm.name, arm.title, *_arm_words(axis, arm, base, inert_reason))))
    screen.print(table)
    for source in axis.sources:
        screen.print(f"source: {source}", highlight=False, soft_wrap=True)
    return 0


def _arm_words(axis: Axis, arm: Arm, base: RunConfig, inert: Any) -> tuple[str, str]:
    if arm is axis.arms[0]:
        return "nothing (control)", ""
    try:
        config = apply(base, arm.overrides)
        return change_words(differences(config, base)), inert(config, base) or ""
    except ValueError as error:
        raise ValueError(f"axis {axis.name!r}, arm {arm.name!r}: {error}") from error


def new_axis(name: str, folder: Path | None) -> int:
    """Write an axis file and say what to do with it."""
    from ablations.load import AXES
    from ablations.new import new_axis as write

    path = write(name, folder)
    inside = path.parent.resolve() == AXES
    reach = name if inside else str(path)
    lines = [
        f"wrote      {path}",
        f"look       suite axes show {reach}",
        f"plan       suite run mini_sync --axis {reach} --dry-run",
        f"run        suite run mini_sync --axis {reach}",
    ]
    if inside:
        lines.insert(1, f"covered by pytest tests/ablations/test_axes.py -k {name}")
    else:
        lines.insert(1, "covered by the checks of `suite axes show`; the project's tests cover files in ablations/axes")
    console().print("\n".join(lines), highlight=False, soft_wrap=True)
    return 0


def doctor(folder: Path) -> int:
    """Print what this machine can run; 1 if something is missing."""
    from suite.doctor import examine

    table = Table("", "state", "found", "advice")
    colours = {"ok": "green", "limited": "yellow", "missing": "red"}
    checks = examine(folder)
    for check in checks:
        state = f"[{colours[check.state]}]{check.state}[/]"
        table.add_row(check.what, state, escape(check.found), escape(check.advice))
    console().print(table)
    return int(any(check.state == "missing" for check in checks))
