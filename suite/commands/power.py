"""`suite plan`: what a study costs, measured, and which of its claims its seeds can decide."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from suite.commands.catalogue import console
from suite.commands.cost import Cost, cost, ends
from suite.commands.plan import Seconds, check_arms, chosen, duration, measured, warn_inert
from suite.commands.study import RUNS, resolve
from suite.launch.machine import threads_each
from suite.storage import VARIABLE
from suite.study import SEED_MODEL, Cell, Claim, Study

POWER = 0.8

Values = Callable[[str, str], Mapping[int, float]]
"""(metric, arm) -> seed -> value."""


@dataclass(frozen=True)
class Spread:
    """How much the difference of a claim's two sides varies from seed to seed."""

    sd: float
    """What the plan reckons with: an upper bound where it was estimated. In the metric's unit."""
    source: str


@dataclass(frozen=True)
class Decision:
    """What a number of seeds can do for one claim."""

    claim: Claim
    spread: Spread
    power: float
    """Chance that the seeds support the claim: at its smallest effect; for `equivalent`, at no difference."""
    needed: int
    """Seeds for 80 %."""


def spread(claim: Claim, final: Values, initial: Values, source: str) -> Spread | None:
    """From two common seeds on: the 80 % upper confidence bound of the paired SD. None below two."""
    from reports.stats import paired, sd_upper

    sides = [
        initial(claim.metric, other) if name == SEED_MODEL else final(claim.metric, name)
        for name, other in ((claim.arm, claim.than), (claim.than, claim.arm))
    ]
    pair = paired(sides[0], sides[1])
    if pair.sd is None:
        return None
    return Spread(sd_upper(pair.sd, pair.n), f"{source}: {pair.sd:.3g} over {pair.n} seeds, bound above")


def decide(claims: Sequence[Claim], spreads: Mapping[str, Spread], seeds: int) -> list[Decision]:
    """One decision per claim whose spread is known, by its name. Tests are at .05 / claims, the strictest step of Holm.

    Sources: `reports.stats.power`, `reports.stats.seeds_needed`.
    """
    from reports.claims import ALPHA
    from reports.stats import power, seeds_needed

    alpha, out = ALPHA / max(1, len(claims)), []
    for claim in claims:
        found = spreads.get(claim.name)
        if found is not None:
            chance = power(claim.kind, claim.smallest_effect, found.sd, seeds, alpha) if seeds > 1 else 0.0
            needed = seeds_needed(claim.kind, claim.smallest_effect, found.sd, POWER, alpha)
            out.append(Decision(claim, found, chance, needed))
    return out


def finished_spreads(study: Study, folder: Path) -> dict[str, Spread]:
    """From the study's finished cells, as its report would read them; empty where there are none."""
    from reports.declared import declaration
    from reports.load import load_study
    from reports.results import Results

    if not any((folder / "cells").glob("*/result.json")):
        return {}
    data = load_study(folder, tables=False)
    results = Results(declaration(folder, data), data)

    def final(metric: str, arm: str) -> Mapping[int, float]:
        return results.final(arm, metric)

    def initial(metric: str, arm: str) -> Mapping[int, float]:
        return results.initial(arm, metric)

    found = {claim.name: spread(claim, final, initial, "finished cells") for claim in study.claims}
    return {name: one for name, one in found.items() if one is not None}


def pilot_spreads(study: Study, count: int, steps: int, screen: Console) -> dict[str, Spread]:
    """From `count` runs per arm, cut to `steps` optimizer steps, on seeds that the study does not use."""
    first = max(study.seeds) + 1
    sides = {name for claim in study.claims for name in (claim.arm, claim.than)} - {SEED_MODEL}
    values: dict[tuple[str, int], tuple[dict[str, float], dict[str, float]]] = {}
    for seed in range(first, first + count):
        for arm in study.arms:
            if arm.name in sides:
                screen.print(f"pilot  {arm.name}, seed {seed}, {steps} steps", highlight=False)
                values[arm.name, seed] = ends(study.config(arm.name, seed), steps)

    def at(end: int) -> Values:
        return lambda metric, arm: {
            seed: both[end][metric] for (name, seed), both in values.items() if name == arm and metric in both[end]
        }

    whole = study.base.train.steps
    short = ", which understates the spread" if steps < whole else ""
    source = f"a pilot of {steps} of {whole} steps{short}"
    found = {claim.name: spread(claim, at(1), at(0), source) for claim in study.claims}
    return {name: one for name, one in found.items() if one is not None}


def plan(
    name: str,
    workers: int,
    seeds: Sequence[int] | None,
    arms: Sequence[str],
    axes: Sequence[str],
    folder: Path | None,
    storage: str | None,
    sd: float | None,
    pilot_seeds: int,
    pilot_steps: int,
) -> int:
    """Print cells, tokens, measured hours, and what the seeds can decide. Nothing is written."""
    study, _ = resolve(name, axes)
    folder = folder or RUNS / study.name
    storage = storage or os.environ.get(VARIABLE)
    check_arms(study)
    cells = chosen(study, arms, seeds)
    _check(sd, pilot_seeds, pilot_steps)
    screen, count = console(), len({cell.seed for cell in cells})
    names = list(dict.fromkeys(cell.arm for cell in cells))
    screen.print(f"[bold]{study.name}[/]  {study.question}", highlight=False, soft_wrap=True)
    warn_inert(study, screen)
    found = measured(study, names, folder, storage, screen, always=True)
    assert found is not None
    threads = found.threads or threads_each(min(workers, len(cells)), study)[0]
    _costs(cells, found, threads, min(workers, len(cells)), screen)
    if study.search is not None:
        screen.print(f"search is not counted: suite tune {name} --dry-run", highlight=False)
    if not study.claims:
        screen.print("the study makes no claims", highlight=False)
        return 0
    if sd is not None:
        spreads = {claim.name: Spread(sd, "--sd") for claim in study.claims}
    else:
        spreads = finished_spreads(study, folder)
        if not spreads and pilot_seeds:
            steps = _whole(study, pilot_steps)
            spreads = pilot_spreads(study, pilot_seeds, steps, screen)
    _claims(study, spreads, count, found, threads, screen)
    return 0


def _check(sd: float | None, pilot_seeds: int, pilot_steps: int) -> None:
    if sd is not None and not sd > 0:
        raise ValueError(f"--sd is {sd}: a standard deviation, in the metric's unit, is above 0")
    if pilot_seeds < 0 or pilot_seeds == 1:
        raise ValueError(f"--pilot-seeds is {pilot_seeds}: a spread needs at least 2 seeds, and 0 makes no pilot")
    if pilot_steps < 0:
        raise ValueError(f"--pilot-steps is {pilot_steps} and must be at least 1, or 0 for the whole run")


def _whole(study: Study, steps: int) -> int:
    """The pilot's optimizer steps: as asked or the whole run, rounded up to whole rollout batches of any arm."""
    updates = math.lcm(*(study.config(arm.name).updates_per_batch for arm in study.arms))
    asked = min(steps or study.base.train.steps, study.base.train.steps)
    return -(-asked // updates) * updates


def _costs(cells: Sequence[Cell], found: Seconds, threads: int, workers: int, screen: Console) -> None:
    table = Table("arm", "cells", "tokens, at most", "a cell takes", "core-hours", title="cost")
    total, spent = Cost(0, 0, 0, 0), 0.0
    for name in found.arms:
        configs = [cell.config for cell in cells if cell.arm == name]
        arm, seconds = sum(map(cost, configs), Cost(0, 0, 0, 0)), found.arms[name] * len(configs)
        total, spent = total + arm, spent + seconds
        hours = f"{seconds * threads / 3600:.3g}"
        table.add_row(escape(name), str(len(configs)), f"{arm.tokens:,}", duration(found.arms[name]), hours)
    table.add_section()
    table.add_row("all", str(len(cells)), f"{total.tokens:,}", "", f"{spent * threads / 3600:.3g}")
    screen.print(table)
    words = f"{threads} thread{'s' if threads > 1 else ''} a worker; {found.source}"
    screen.print(f"time   about {duration(spent / workers)} on {workers} workers ({words})", highlight=False)


def _claims(
    study: Study, spreads: Mapping[str, Spread], seeds: int, found: Seconds, threads: int, screen: Console
) -> None:
    decisions = {one.claim.name: one for one in decide(study.claims, spreads, seeds)}
    table = Table("claim", "smallest effect", "SD", "from", f"power with {seeds} seeds", "seeds for 80 %")
    for claim in study.claims:
        one, effect = decisions.get(claim.name), f"{claim.kind} by {claim.smallest_effect:g}"
        if one is None:
            table.add_row(escape(claim.name), effect, "unknown", "", "", "")
            continue
        colour = "green" if one.power >= POWER else "yellow"
        chance = f"[{colour}]{one.power:.0%}[/]"
        table.add_row(escape(claim.name), effect, f"{one.spread.sd:.3g}", one.spread.source, chance, str(one.needed))
    screen.print(table)
    if len(decisions) < len(study.claims):
        screen.print(
            "the spread of a claim's difference over seeds is not known: give it with --sd, or measure it with "
            "--pilot-seeds 4 on seeds that the study does not use",
            soft_wrap=True,
        )
        return
    needed = max(one.needed for one in decisions.values())
    weak = [one.claim.name for one in decisions.values() if one.power < POWER]
    hours = needed * sum(found.arms.values()) * threads / 3600
    words = f"cannot decide at 80 %: {', '.join(weak)}" if weak else "decide every claim at 80 %"
    screen.print(f"{seeds} seeds {words}", highlight=False, soft_wrap=True)
    screen.print(f"80 % for every claim: {needed} seeds, {hours:.3g} core-hours", highlight=False)
