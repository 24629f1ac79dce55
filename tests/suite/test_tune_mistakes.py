"""Searches that cannot be, and the command line."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import one_code
from rich.console import Console

from suite import cli
from suite.config import RunConfig, apply
from suite.launch import machine
from suite.search import Float, Int, LogFloat, OneOf, Search, examine, search_folder
from suite.status import StudyStatus
from suite.study import Arm
from suite.tune import Tuned, tune_study
from tests.suite.tuned import BETA, LR, ROOT, book, ended, study, tune


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite"))))
    with one_code(monkeypatch):
        yield


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("trials is 0 and must be a whole number from 1", {"trials": 0}),
    ("name at least one, each once", {"seeds": (101, 101)}),
    ("sampler is 'random'", {"sampler": "random"}),
    ("pruner is 'median'", {"pruner": "median"}),
    ("acts between a trial's seeds, and there is one", {"pruner": "wilcoxon", "seeds": (101,)}),
    ("scored on validation problems", {"metric": "eval/test/accuracy"}),
    ("measures eval/validation/avg@4", {"metric": "eval/validation/avg@3"}),
    ("seeds 2 are also the study's", {"seeds": (101, 2)}),
    ("arm 'k' has no ranges", {"ranges": {"online": {"optim.lr": LR}}}),
    ("unknown arm 'q'", {"ranges": {"q": {"optim.lr": LR}}}),
    ("unknown option 'optim.lrr'", {"ranges": {"online": {"optim.lrr": LR}}}),
    ("optim.warmup_steps is 1e-05 and must be a whole number", {"ranges": {"online": {"optim.warmup_steps": LR}}}),
    ("train.steps would change the training budget", {"ranges": {"online": {"train.steps": Int(10, 20)}}}),
    ("eval.num_samples decides", {"ranges": {"online": {"eval.num_samples": Int(1, 4)}}}),
    ("write LogFloat", {"ranges": {"online": {"optim.lr": (1e-5, 1e-3)}}}),
    ("nothing reads objective.epsilon_low here", {"ranges": {"online": {"objective.epsilon_low": Float(0.1, 0.3)}}}),
    ("optim.beta1 is 1.5 and must be at least 0 and below 1", {"ranges": {"online": {"optim.beta1": Float(0.5, 1.5)}}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "change"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_search_that_cannot_be_is_refused(words: str, change: dict[str, Any]) -> None:
    rest = {"k": {"optim.lr": LR}}
    if "ranges" in change and "k" not in words:
        change = {**change, "ranges": {**rest, **change["ranges"]}}

    def declared() -> None:
        one = study(**change)
        one.check()
        examine(one)

    with pytest.raises(ValueError) as refused:
        declared()
    assert words in str(refused.value)


def test_an_option_that_changes_nothing_and_unequal_budgets_are_refused() -> None:
    gradient = apply(RunConfig(), {"objective.name": "policy_gradient"})
    lr = {"optim.lr": LR}
    one = replace(study(ranges={"online": {"objective.epsilon_high": Float(0.2, 0.4), **lr}, "k": lr}), base=gradient)
    with pytest.raises(ValueError, match=r"objective\.epsilon_high changes nothing, the ratio to the learner is 1"):
        examine(one)
    examine(replace(one, base=apply(gradient, {"objective.num_epochs": 2, "rollout.sync_period": 2})))
    arms = (Arm("online"), Arm("k", {"train.steps": 60}))
    with pytest.raises(ValueError, match=r"train\.steps is 60 in arm 'k' and 120 in 'online'; every arm"):
        replace(study(), arms=arms).check()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LogFloat(0, 1), "must start above 0"),
        (lambda: LogFloat(1e-3, 1e-5), "the first the smaller"),
        (lambda: Float(0.0, math.inf), "finite"),
        (lambda: Int(1, 2.5), "whole numbers"),  # type: ignore[arg-type]
        (lambda: OneOf((1,)), "at least two"),
        (lambda: OneOf("ab"), "at least two"),  # type: ignore[arg-type]
    ],
)
def test_ranges_that_are_none(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_values_are_rounded_within_their_range() -> None:
    assert LogFloat(1e-5, 1e-3).rounded(1.23456e-4) == 1.235e-4
    assert Float(0.12342, 0.2).rounded(0.123421) == 0.12342
    assert Int(1, 5).rounded(3) == 3


def test_importance_needs_twenty_scored_trials(tmp_path: Path) -> None:
    """lr decides nearly everything in the fake; a trial that was pruned or failed is no evidence."""
    one = study(24, ranges={"online": {"optim.lr": LogFloat(1e-6, 1e-2), "objective.beta": LogFloat(0.4, 0.6)},
                            "k": {"optim.lr": LR, "objective.beta": BETA}}, batch=8)  # fmt: skip
    search_folder(tmp_path / "mini").mkdir()
    opened = book(one, tmp_path / "mini")
    while batch := opened.propose():
        for trial in batch:
            lost = replace(trial, state="failed", reason="x")
            opened.end(lost if trial.arm == "k" and trial.number < 5 else ended(one, trial))
    found = opened.importance("online")
    assert found is not None
    assert found["optim.lr"] > 0.8
    assert sum(found.values()) == pytest.approx(1)
    assert opened.importance("k") is None, "19 scored trials"


LITTLE = """
from suite.config import RunConfig
from suite.search import LogFloat, Search
from suite.study import Arm, Study

LR = {"optim.lr": LogFloat(1e-5, 1e-3)}
STUDY = Study(
    "little", "Does it search?", RunConfig(), (Arm("plain"), Arm("stale", {"rollout.sync_period": 10})), (1, 2),
    search=Search({"plain": LR, "stale": LR}, trials=2, seeds=(7, 8)),
)
"""


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "little.py"
    path.write_text(LITTLE)
    assert cli.main(["tune", str(path), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "1e-05 to 0.001, log" in text
    assert f"{2 * 2 * 120 * 256:,}" in text
    assert "mean over seeds 7, 8; in runs/little-tune" in text
    assert not (tmp_path / "runs").exists()
    assert cli.main(["run", str(path)]) == 2
    assert "declares a search and runs/little holds none; `suite tune little` runs it" in capsys.readouterr().err
    assert cli.main(["tune", "mini_sync"]) == 2
    assert "declares no search" in capsys.readouterr().err
    assert cli.main(["run", "mini_sync", "--tuned", "runs/x"]) == 2
    assert "declares no search" in capsys.readouterr().err

    seen: dict[str, Any] = {}
    monkeypatch.setattr("suite.tune.tune_study", lambda *a, **k: seen.update(a=a, **k) or Tuned({}, None, 130))
    assert cli.main(["tune", str(path), "--workers", "3", "--allow-mixed", "--gpus-per-cell", "2"]) == 130
    assert seen["a"][1:] == (Path("runs/little"), 3, [path])
    assert (seen["command"], seen["allow_mixed"], seen["gpus_per_cell"]) == (f"suite tune {path}", True, 2)


def test_a_search_gives_its_workers_the_gpus_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["a", "b"])
    seen: list[int] = []
    stopped = StudyStatus("mini-tune", {}, (), interrupted=True)
    monkeypatch.setattr("suite.tune.run_study", lambda *_, **how: seen.append(how["gpus_per_cell"]) or stopped)
    found, _ = tune(study(), tmp_path / "mini", gpus_per_cell=2)
    assert (seen, found.exit_code) == ([2], 130)
    with pytest.raises(ValueError, match="--gpus-per-cell is 3, and this machine has 2 GPUs"):
        tune(study(), tmp_path / "other", gpus_per_cell=3)
    assert not search_folder(tmp_path / "other").exists()


@pytest.mark.slow
def test_a_real_search_in_miniature_and_its_report(tmp_path: Path) -> None:
    """Two arms, three trials, one seed, six steps; the report's numbers recomputed from the runs' own results."""
    from fakes import SMALL

    from reports.build import build

    base = apply(RunConfig(), {**SMALL, "eval.every": 3})
    search = Search({"online": {"optim.lr": LR}, "k": {"optim.lr": LR}}, 3, (7,), startup=1)
    one = replace(study(), base=base, arms=(Arm("online"), Arm("k", {"rollout.sync_period": 3})), search=search)
    one = replace(one, seeds=(1, 2))
    found = tune_study(one, tmp_path / "mini", 1, console=Console(file=io.StringIO()))
    assert found.exit_code == 0
    report = json.loads((build(tmp_path / "mini").folder / "report.json").read_text())
    assert report["missing"] == [], "the trials are not taken for the study's runs"
    for arm in report["search"]["arms"]:
        cells = [json.loads(p.read_text()) for p in (tmp_path / "mini" / "cells").glob(f"{arm['name']}-*/result.json")]
        fresh = [cell["metrics"]["eval/validation/accuracy"] for cell in cells]
        assert len(fresh) == 2
        scores = {}
        for number in range(3):
            path = next(search_folder(tmp_path / "mini").glob(f"cells/{arm['name']}-t0{number}-seed7-*/result.json"))
            scores[number] = json.loads(path.read_text())["metrics"]["eval/validation/accuracy"]
        assert [t["score"] for t in arm["trials"]] == pytest.approx([scores[n] for n in range(3)], abs=1e-9)
        best = max(scores.values())
        assert arm["winner"] == min(n for n, value in scores.items() if value == best)
        assert arm["selection"]["difference"]["mean"] == pytest.approx(best - sum(fresh) / 2, abs=1e-9)
        assert arm["selection"]["difference"]["kind"] == "range"
        assert all(trial["tokens"] > 0 and trial["seconds"] > 0 for trial in arm["trials"])
