"""`suite run STUDY --dry-run`: cells, differences, inert arms and cost, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suite.commands.catalogue import change_words, console
from suite.commands.cost import Cost, Pilot, cost, finished_seconds, is_cheap, pilot
from suite.config import flatten
from suite.starts import pinned
from suite.study import Cell, Study


def check_arms(study: Study) -> None:
    """Raises ValueError, naming study and arm, if an arm's configuration cannot run or a claim cannot be decided."""
    from suite.claim_checks import check_claims
    from suite.validate import validate

    study.check()

    for arm in study.arms:
        try:
            validate(study.config(arm.name))
        except ValueError as error:
            raise ValueError(f"study {study.name!r}, arm {arm.name!r}: {error}") from error
    check_claims(study)


def chosen(study: Study, arms: Sequence[str], seeds: Sequence[int] | None) -> list[Cell]:
    """The study's cells of these arms and seeds (none named: all); ValueError for an arm or a seed that it lacks."""
    for name in arms:
        study.arm(name)
    for seed in seeds or ():
        if seed not in study.seeds:
            raise ValueError(f"study {study.name!r} has no seed {seed}; it has {', '.join(map(str, study.seeds))}")
    return [cell for cell in study.cells() if cell.arm in (arms or {cell.arm}) and cell.seed in (seeds or {cell.seed})]


def inert_arms(study: Study) -> dict[str, str]:
    """Arms that cannot differ from the control, and why."""
    from suite.inert import inert_reason

    control = study.config(study.control.name)
    reasons = {arm.name: inert_reason(study.config(arm.name), control) for arm in study.arms[1:]}
    return {name: reason for name, reason in reasons.items() if reason}


def warn_inert(study: Study, screen: Console) -> None:
    """Say which arms are inert, one line each."""
    for name, reason in inert_arms(study).items():
        screen.print(f"[yellow]inert[/]  {name} cannot differ from {study.control.name}: {reason}", highlight=False)


def dry_run(study: Study, cells: Sequence[Cell], folder: Path, workers: int, storage: str | None = None) -> None:
    """Print what `suite run` would do; nothing is written."""
    screen = console()
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    seeds = sorted({cell.seed for cell in cells})
    screen.print(f"[bold]{study.name}[/]  {study.question}", highlight=False, soft_wrap=True)
    screen.print(f"{len(arms)} arms x {len(seeds)} seeds = {len(cells)} cells in {folder}", highlight=False)
    done = _finished(cells, folder, storage)
    if done:
        screen.print(f"{len(done)} of them are finished and not run again: {len(cells) - len(done)} are left")
    left = [cell for cell in cells if cell.fingerprint not in done]
    screen.print(_arms_table(study, arms))
    warn_inert(study, screen)
    _notes(study, arms, screen)
    screen.print(_cost_table(study, left))
    _time(study, left, folder, workers, screen, storage)
    for claim in study.claims:
        link = {"better": "better than", "different": "different from", "equivalent": "equivalent to"}[claim.kind]
        words = f"{claim.arm} {link} {claim.than}"
        screen.print(f"claim  {claim.name}: {words}, smallest effect {claim.smallest_effect:g} of {claim.metric}")


def _finished(cells: Sequence[Cell], folder: Path, storage: str | None) -> set[str]:
    """The fingerprints of the cells that are complete in a study's folder."""
    from suite.sweep import Sweep

    if not (folder / "study.json").is_file():
        return set()
    status = Sweep.attach(folder, storage).snapshot(write=False)
    return {cell.fingerprint for cell in status.cells if cell.status == "complete"} & {c.fingerprint for c in cells}


def _arms_table(study: Study, arms: Sequence[str]) -> Table:
    inert = inert_arms(study)
    table = Table("arm", "label", f"differs from {study.control.name}", "")
    for name in arms:
        words = "the control" if name == study.control.name else change_words(study.differs(name))
        table.add_row(name, escape(study.arm(name).title), escape(words), "[yellow]inert[/]" if name in inert else "")
    return table


def _notes(study: Study, arms: Sequence[str], screen: Console) -> None:
    """Options that an arm changes without effect, though the arm as a whole is live; what its cost leaves out."""
    from suite.inert import effective

    inert = inert_arms(study)
    for name in arms:
        plain, reasons = effective(study.config(name))
        idle = [option for option in study.differs(name) if option in reasons and flatten(plain)[option] != "auto"]
        for option in idle if name not in inert else ():
            screen.print(f"note   {name}: {option} changes nothing there, {reasons[option]}", highlight=False)
        rollout = study.config(name).rollout
        if rollout.dynamic_sampling:
            words = f"dynamic sampling may take up to {rollout.max_gen_batches} times the rollouts counted here"
            screen.print(f"note   {name}: {words}", highlight=False)


def _cost_table(study: Study, cells: Sequence[Cell]) -> Table:
    header = ("arm", "cells", "optimizer steps", "rollouts", "evaluation samples", "tokens, at most")
    table = Table(*header, title="cost")
    total = Cost(0, 0, 0, 0)
    for name in dict.fromkeys(cell.arm for cell in cells):
        configs = [cell.config for cell in cells if cell.arm == name]
        arm = sum((cost(config) for config in configs), Cost(0, 0, 0, 0))
        total = total + arm
        table.add_row(name, str(len(configs)), *_counts(arm))
    table.add_section()
    table.add_row("all", str(len(cells)), *_counts(total))
    return table


def _counts(value: Cost) -> list[str]:
    return [f"{count:,}" for count in (value.steps, value.rollouts, value.evaluations, value.tokens)]


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@dataclass(frozen=True)
class Seconds:
    """What one cell of each arm takes, on one worker."""

    arms: dict[str, float]
    source: str
    threads: int | None
    """Threads of the worker that was measured; None where it was one of the study's own."""


def measured(
    study: Study, arms: Sequence[str], folder: Path, storage: str | None, screen: Console, *, always: bool
) -> Seconds | None:
    """From finished cells of the folder, else from a pilot of each arm; None if that may take long, unless `always`."""
    known = {arm: seconds for arm, seconds in finished_seconds(folder, storage).items() if arm in arms}
    if known:
        mean, guessed = fmean(known.values()), ", ".join(arm for arm in arms if arm not in known)
        words = f"the mean of finished cells{f'; their mean stands for {guessed}' if guessed else ''}"
        return Seconds({arm: known.get(arm, mean) for arm in arms}, words, None)
    if not always and not all(is_cheap(study.config(arm)) for arm in arms):
        return None
    pilots = {arm: pilot(pinned(study.config(arm))) for arm in arms}
    _unshaped(study, pilots, screen)
    return Seconds({arm: found.seconds for arm, found in pilots.items()}, "a pilot of two rollout batches an arm", 1)


def _time(
    study: Study, cells: Sequence[Cell], folder: Path, workers: int, screen: Console, storage: str | None
) -> None:
    """Print the time that the cells will take."""
    if not cells:
        return
    found = measured(study, list(dict.fromkeys(cell.arm for cell in cells)), folder, storage, screen, always=False)
    if found is None:
        screen.print("time   not estimated: no cell is finished, and a pilot of this model may take long")
        return
    total = sum(found.arms[cell.arm] for cell in cells)
    alone, together = duration(total), duration(total / min(workers, len(cells)))
    screen.print(f"time   {alone} of work, about {together} on {workers} workers ({found.source})", highlight=False)


def _unshaped(study: Study, pilots: Mapping[str, Pilot], screen: Console) -> None:
    """Arms whose shaping left every reward of the pilot as it was: not proof, but worth a look before a night's run."""
    for arm, found in pilots.items():
        shaping = study.config(arm).reward.shaping
        if shaping != "none" and not found.shaped:
            words = (
                f"reward.shaping = {shaping!r} changed none of {found.rollouts} rewards of the seed model's rollouts"
            )
            screen.print(f"[yellow]inert?[/] {arm}: {words}", highlight=False)
