"""Pruning on paired evidence."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from fake_runner import one_code
from fake_tune_runner import score, write_answers
from optuna.trial import TrialState

from suite.config import apply
from suite.search import search_folder
from suite.status import CellStatus, StudyStatus
from suite.tune import Run, run_batch
from suite.tuning import Book, prune
from tests.suite.tuned import ROOT, book, study


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite"))))
    with one_code(monkeypatch):
        yield


def in_process(opened: Book, place: Path, runs: list[tuple[str, int]]) -> Run:
    """What `run_study` would do with the fake runner, without processes; appends what it runs to `runs`."""

    def run(seeds: Sequence[int], arms: Sequence[str]) -> StudyStatus:
        cells = []
        for cell in opened.cells().cells():
            if cell.arm in arms and cell.seed in seeds:
                if (cell.arm, cell.seed) not in runs:
                    runs.append((cell.arm, cell.seed))
                    write_answers(cell.config, place / "cells" / cell.name)
                metrics = {"eval/validation/accuracy": score(cell.config), "cost/generated_tokens": 600.0}
                cells.append(
                    CellStatus(cell.arm, cell.seed, cell.name, "", "complete", "", metrics=metrics, seconds=3.0)
                )
        return StudyStatus("mini-tune", {}, tuple(cells))

    return run


def test_a_trial_that_is_clearly_worse_gets_no_further_seed(tmp_path: Path) -> None:
    """The best earlier trial is the rival; what was pruned has no score, and its tokens are those it used."""
    one, place = study(8, (101, 102, 103), pruner="wilcoxon"), search_folder(tmp_path / "mini")
    place.mkdir()
    opened, runs = book(one, tmp_path / "mini"), list[tuple[str, int]]()
    while batch := opened.propose():
        assert run_batch(opened, batch, place, in_process(opened, place, runs)) is None
    pruned = [trial for trial in opened.trials() if trial.state == "pruned"]
    assert 0 < len(pruned) < 12
    for trial in opened.trials():
        rival = opened.rival(trial)
        if trial.number < 2:
            assert (rival, trial.state) == (None, "complete")
            continue
        assert rival is not None
        ours, theirs = (score(apply(one.config(t.arm), {**t.params, "seed": 101})) for t in (trial, rival))
        if ours < theirs - 0.15:
            assert (trial.state, list(trial.scores)) == ("pruned", [101])
        if trial.state == "pruned":
            assert ours < theirs
            assert trial.score is None
            assert list(trial.scores) == [101, 102, 103][: len(trial.scores)] != [101, 102, 103]
            assert (trial.tokens, trial.seconds) == (600 * len(trial.scores), 3 * len(trial.scores))
            assert f"worse than trial {rival.number} on the validation problems" in trial.reason
        else:
            assert len(trial.scores) == 3
    assert len(runs) == sum(len(trial.scores) for trial in opened.trials())
    for arm in ("online", "k"):
        frozen = optuna.load_study(study_name=f"mini-tune/{arm}", storage=opened.store.optuna).trials
        assert all(t.value is None for t in frozen if t.state == TrialState.PRUNED), "not its last value"
        best = opened.best(arm)
        assert best is not None
        assert best.state == "complete"


def test_a_batch_that_was_left_goes_on_and_prunes_the_same(tmp_path: Path) -> None:
    one = study(6, (101, 102), pruner="wilcoxon")
    found = []
    for name, leave in (("a", ()), ("b", (2, 5, 6))):
        place = search_folder(tmp_path / name)
        place.mkdir()
        opened, runs, calls = book(one, tmp_path / name), list[tuple[str, int]](), 0
        while batch := opened.propose():
            run = in_process(opened, place, runs)

            def stopped(
                seeds: Sequence[int], arms: Sequence[str], run: Run = run, leave: Sequence[int] = leave
            ) -> StudyStatus:
                nonlocal calls
                calls += 1
                status = run(seeds, arms)
                return replace(status, interrupted=True) if calls in leave else status

            left = run_batch(opened, batch, place, stopped)
            assert (left is not None) == (calls in leave)
        found.append((opened.trials(), runs))
    assert found[0] == found[1]
    assert any(trial.state == "pruned" for trial in found[0][0])


def test_pruning_agrees_with_a_signed_rank_test_by_hand() -> None:
    """Six problems on which the rival alone is right: p = 1/64 one-sided; three: 1/8, not below .1. Equal: never."""
    problems = [f"p{i}" for i in range(6)]
    rival = {7: dict.fromkeys(problems, 1.0), 9: dict.fromkeys(problems, 1.0)}

    def missed(count: int) -> dict[int, dict[str, float]]:
        return {7: {p: float(i >= count) for i, p in enumerate(problems)}}

    assert not prune(rival, missed(0))
    assert prune(rival, missed(6))
    few = {7: dict.fromkeys(problems[:3], 1.0), 9: {}}
    assert not prune(few, {7: dict.fromkeys(problems[:3], 0.0)})
    assert not prune(missed(6), rival), "the better one goes on"
    assert prune(rival, {7: {}}), "a run that diverged earned nothing"
    assert not prune({7: {}}, {7: {}})
    # 40 problems, the rival right on 20 and the trial on 14. Of those 20: rank sum 297.5 against 410, SD 74.4, p = .07.
    # Of the other 20: 339.5, p = .17. Zeros share their ranks.
    many = [f"q{i:02d}" for i in range(40)]
    ours = {7: {q: float(i < 14) for i, q in enumerate(many)}}
    assert prune({7: {q: float(i < 20) for i, q in enumerate(many)}}, ours)
    assert not prune({7: {q: float(i >= 20) for i, q in enumerate(many)}}, ours), "paired by problem"
