"""A small search for tests of tuning."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_tune_runner import score
from rich.console import Console

from suite.config import RunConfig, apply
from suite.search import LogFloat, Search, search_folder
from suite.storage import Store, default_url
from suite.study import Arm, Study
from suite.tune import Tuned, tune_study
from suite.tuning import Book, Trial

ROOT = Path(__file__).resolve().parents[2]
LR, BETA = LogFloat(1e-5, 1e-3), LogFloat(0.05, 5.0)


def study(trials: int = 4, seeds: tuple[int, ...] = (101, 102), **more: Any) -> Study:
    ranges = {"online": {"optim.lr": LR, "objective.beta": BETA}, "k": {"optim.lr": LR}}
    search = Search(more.pop("ranges", ranges), trials, seeds, startup=more.pop("startup", 2), **more)
    arms = (Arm("online", label="s = 1"), Arm("k", {"rollout.sync_period": 10}))
    return Study("mini", "Which is better, both tuned?", RunConfig(), arms, (1, 2, 4), search=search)


def tune(one: Study, folder: Path, workers: int = 2, **more: Any) -> tuple[Tuned, str]:
    text = io.StringIO()
    console = Console(file=text, width=160)
    found = tune_study(one, folder, workers, runner="tests.suite.fake_tune_runner:run", console=console, **more)
    return found, text.getvalue()


def plan(folder: Path, **arms: dict[str, Any]) -> None:
    """What the fake runner does to trials, by the names of their cells' arms."""
    search_folder(folder).mkdir(parents=True, exist_ok=True)
    (search_folder(folder) / "plan.json").write_text(
        json.dumps({name.replace("_", "-"): a for name, a in arms.items()})
    )


def book(one: Study, folder: Path) -> Book:
    return Book.open(Store(default_url(search_folder(folder))), one)


def starts(folder: Path) -> dict[str, int]:
    """Cell -> how often it was begun."""
    return {p.parent.name: len(p.read_text().splitlines()) for p in folder.glob("cells/*/starts.txt")}


def facts(one: Study, folder: Path) -> list[tuple[Any, ...]]:
    """What a search came to: no times and no ids."""
    return [(t.arm, t.number, dict(t.params), t.state, t.score, dict(t.scores)) for t in book(one, folder).trials()]


def ended(one: Study, trial: Trial) -> Trial:
    value = score(apply(one.config(trial.arm), trial.params))
    return replace(trial, state="complete", score=value, scores={101: value, 102: value})
