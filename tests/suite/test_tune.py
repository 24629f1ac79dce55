"""A search: the same trials whatever the machine does, scored on validation alone, and only fresh runs compared."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from fake_runner import one_code
from fake_tune_runner import score
from optuna.trial import TrialState

from suite.config import RunConfig, apply
from suite.search import FILE, OneOf, search_folder, tuned, winners
from suite.status import CellStatus
from suite.storage import Store, default_url
from suite.study import Study
from suite.tune import Tuned, outcome, outcomes
from suite.tuning import Trial
from tests.suite.tuned import LR, ROOT, book, ended, facts, plan, starts, study, tune


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite"))))
    with one_code(monkeypatch):
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Tuned, str]]:
    """An undisturbed search on two workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite"))))
        with one_code(patch):
            folder = tmp_path_factory.mktemp("whole") / "mini"
            yield (folder, *tune(study(), folder))


def test_every_arm_gets_its_trials_and_each_is_run_once_under_each_search_seed(
    whole: tuple[Path, Tuned, str],
) -> None:
    folder, found, text = whole
    assert found.exit_code == 0
    trials = book(study(), folder).trials()
    assert [(t.arm, t.number) for t in trials] == [(arm, n) for n in range(4) for arm in ("online", "k")]
    begun = starts(search_folder(folder))
    assert len(begun) == 2 * 4 * 2
    assert set(begun.values()) == {1}
    for trial in trials:
        config = apply(study().config(trial.arm), trial.params)
        by_hand = {seed: score(replace(config, seed=seed)) for seed in (101, 102)}
        assert trial.scores == by_hand, "each seed's own validation score"
        assert trial.score == pytest.approx(sum(by_hand.values()) / 2, abs=1e-15)
        assert trial.tokens == 1200
    assert "search: batch 1 of 2, trials 0 to 1 of each arm; with the comparison 22 cells to run" in text
    assert "search: batch 2 of 2, trials 2 to 3 of each arm; with the comparison 14 cells to run, about" in text


def test_only_the_winners_runs_under_fresh_seeds_are_compared(whole: tuple[Path, Tuned, str]) -> None:
    folder, found, _ = whole
    for arm in ("online", "k"):
        trials = book(study(), folder).trials(arm)
        assert found.params[arm] == max(trials, key=lambda t: t.score or -1).params
    tree = json.loads((folder / "study.json").read_text())
    assert tree["name"] == "mini"
    assert {(cell["arm"], cell["seed"]) for cell in tree["cells"]} == {
        (a, s) for a in ("online", "k") for s in (1, 2, 4)
    }
    assert len(starts(folder)) == 6
    config = json.loads(next(folder.glob("cells/online-seed2-*/config.json")).read_text())["run"]
    assert config["optim"]["lr"] == found.params["online"]["optim.lr"]
    assert config["eval"]["test_problems"] == 2000
    trial = json.loads(next(search_folder(folder).glob("cells/online-t00-seed101-*/config.json")).read_text())["run"]
    assert trial["eval"]["test_problems"] == 1, "a trial learns nothing about the test problems"
    assert [cell["arm"] for cell in tree["cells"]][:2] == ["online", "k"]


def test_the_search_is_recorded_beside_the_study(whole: tuple[Path, Tuned, str]) -> None:
    folder, found, _ = whole
    tree = json.loads((folder / FILE).read_text())
    assert (tree["study"], tree["done"], tree["seeds"], tree["trials"]) == ("mini", True, [101, 102], 4)
    assert tree["arms"][0]["ranges"] == {"optim.lr": "1e-05 to 0.001, log", "objective.beta": "0.05 to 5, log"}
    assert [trial["number"] for trial in tree["arms"][1]["trials"]] == [0, 1, 2, 3]
    assert tree["arms"][1]["importance"] is None
    again = winners(study(), folder)
    assert again == tuned(study(), found.params)
    assert again.search is None
    assert {c["seed"]: c["declared"] for c in json.loads((folder / "study.json").read_text())["cells"]
            if c["arm"] == "k"} == {int(s): f for s, f in tree["arms"][1]["cells"].items()}  # fmt: skip


def test_a_finished_search_runs_nothing_again(
    whole: tuple[Path, Tuned, str],
) -> None:
    folder, found, _ = whole
    begun = starts(search_folder(folder)), starts(folder)
    again, text = tune(study(), folder)
    assert (again.params, again.exit_code) == (found.params, 0)
    assert (starts(search_folder(folder)), starts(folder)) == begun
    assert "search: batch" not in text


def test_more_trials_go_on_as_if_they_had_been_declared_at_once(tmp_path: Path) -> None:
    six = filled(study(6), tmp_path / "six")
    assert filled(study(5), tmp_path / "five") == six[:10]
    assert filled(study(6), tmp_path / "five") == six


@pytest.mark.slow
def test_the_search_is_the_same_on_any_number_of_workers(whole: tuple[Path, Tuned, str], tmp_path: Path) -> None:
    tune(study(), tmp_path / "mini", 1)
    assert facts(study(), tmp_path / "mini") == facts(study(), whole[0])


def test_another_key_or_arm_proposes_something_else(whole: tuple[Path, Tuned, str], tmp_path: Path) -> None:
    one = book(study(key=1), tmp_path) if search_folder(tmp_path).mkdir() is None else None
    assert one is not None
    other = {t.params["optim.lr"] for t in one.propose()}
    first = {t.params["optim.lr"] for t in book(study(), whole[0]).trials()[:4]}
    assert len(other) == len(first) == 4
    assert not other & first


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_proposals_are_drawn_by_the_sampler_and_do_not_depend_on_interruptions(sampler: str, tmp_path: Path) -> None:
    """Two books over equal histories, one opened anew before every call; and after the start it is no random search."""
    one = study(6, sampler=sampler)
    plain, anew = filled(one, tmp_path / "a"), filled(one, tmp_path / "b", anew=True)
    assert [t.params for t in plain] == [t.params for t in anew]
    random = filled(study(6, startup=100), tmp_path / "c")
    assert [t.params for t in plain if t.number < 2] == [t.params for t in random if t.number < 2]
    assert all(a.params != b.params for a, b in zip(plain, random, strict=True) if a.number >= 2)


def filled(one: Study, folder: Path, anew: bool = False) -> list[Trial]:
    """A search without runs: every trial scores what the fake runner would give it."""
    search_folder(folder).mkdir(exist_ok=True)
    opened = book(one, folder)
    while batch := opened.propose():
        opened = book(one, folder) if anew else opened
        for trial in batch:
            opened.end(ended(one, trial))
    return opened.trials()


def test_the_winner_is_the_best_complete_trial_and_the_first_of_equals(tmp_path: Path) -> None:
    one = study(4)
    search_folder(tmp_path / "mini").mkdir()
    opened = book(one, tmp_path / "mini")
    scores = {0: 0.4, 1: 0.6, 2: 0.6, 3: 0.9}
    while batch := opened.propose():
        for trial in batch:
            state = "diverged" if trial.number == 3 else "complete"
            opened.end(replace(trial, state=state, score=scores[trial.number], scores={101: scores[trial.number]}))
    best = opened.best("k")
    assert best is not None
    assert best.number == 1
    assert [t.number if (t := opened.best("k", before)) else None for before in (0, 1, 2, 3)] == [None, 0, 1, 1]
    assert [t.number if (t := opened.rival(trial)) else None for trial in opened.trials("k")] == [None, None, 1, 1]


def test_a_batch_knows_only_earlier_batches(tmp_path: Path) -> None:
    """Ending one of two trials of a batch before the other is proposed changes nothing."""
    one = study(6)
    for name in ("a", "b"):
        search_folder(tmp_path / name).mkdir()
    early, late = book(one, tmp_path / "a"), book(one, tmp_path / "b")
    for opened in (early, late):
        for _ in range(2):
            for trial in opened.propose():
                opened.end(ended(one, trial))
    batch = late.propose()
    # killed after the first proposal of the batch, and its only trial ended by hand
    early._add("online", 4)
    early.end(replace(ended(one, early.trials("online")[-1]), score=0.99))
    rest = early.propose()
    assert {(t.arm, t.number): t.params for t in batch if (t.arm, t.number) != ("online", 4)} == {
        (t.arm, t.number): t.params for t in rest
    }


@pytest.mark.slow
def test_a_search_that_was_killed_anywhere_ends_the_same(whole: tuple[Path, Tuned, str], tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    slow = {"seconds": 0.1}
    plan(folder, **{f"{arm}-t{n:02d}": slow for arm in ("online", "k") for n in range(4)})
    code = (
        "from pathlib import Path\nfrom tests.suite.tuned import study\nfrom suite.tune import tune_study\n"
        f"tune_study(study(), Path({str(folder)!r}), runner='tests.suite.fake_tune_runner:run')\n"
    )
    for kind in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
        cells = search_folder(folder) / "cells"
        before = len(list(cells.glob("*/steps.txt")))
        deadline = time.monotonic() + 60
        while len(list(cells.glob("*/steps.txt"))) < before + 3 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(kind)
        process.wait()
    found, _ = tune(study(), folder)
    assert found.exit_code == 0
    assert facts(study(), folder) == facts(study(), whole[0])
    for path in search_folder(folder).glob("cells/*/steps.txt"):
        steps = [int(line) for line in path.read_text().split()]
        assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert found.params == whole[1].params


def test_failed_and_diverged_trials_are_counted_as_what_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    plan(
        folder,
        online_t00={"fail_at": 2, "error": "nan", "times": 9},
        online_t02={"fail_at": 3, "error": "runtime", "times": 9},
        k_t01={"fail_at": 2, "error": "memory", "times": 1},
    )
    found, text = tune(study(), folder)
    assert found.exit_code == 0
    by_name = {(t.arm, t.number): t for t in book(study(), folder).trials()}
    diverged, failed, retried = by_name["online", 0], by_name["online", 2], by_name["k", 1]
    assert (diverged.state, diverged.score, diverged.scores) == ("diverged", 0.0, {101: 0.0, 102: 0.0})
    assert "not finite" in diverged.reason
    assert (failed.state, failed.score, dict(failed.scores)) == ("failed", None, {})
    assert "RuntimeError" in failed.reason
    assert retried.state == "complete"
    assert sum(t.state == "complete" for t in by_name.values() if t.arm == "online") == 2
    states = [t.state for t in optuna.load_study(
        study_name="mini-tune/online", storage=Store(default_url(search_folder(folder))).optuna).trials]  # fmt: skip
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert "failed" in text
    assert book(study(), folder).best("online") in (by_name["online", 1], by_name["online", 3])
    begun = starts(search_folder(folder))
    tune(study(), folder)
    assert starts(search_folder(folder)) == begun, "a failed trial has ended, and is not run again"


def test_a_seed_that_diverged_counts_0_in_its_trials_mean_and_such_a_trial_cannot_win() -> None:
    def cell(seed: int, status: str, value: float | None, error: str | None = None) -> CellStatus:
        metrics = {} if value is None else {"eval/validation/accuracy": value, "cost/generated_tokens": 70.0 + seed}
        return CellStatus("a-t03", seed, "", "", status, "", error, metrics=metrics, seconds=2.0 * seed)  # type: ignore[arg-type]

    trial = Trial("a", 3, {}, "a-t03")
    cells = {("a-t03", 1): cell(1, "complete", 0.7), ("a-t03", 2): cell(2, "failed", None, "not finite: x (step 3)")}
    found = outcome(trial, (1, 2), cells, "eval/validation/accuracy")
    assert (found.state, found.score, found.diverged) == ("diverged", 0.35, (2,))
    assert (found.tokens, found.seconds) == (71.0, 6.0)
    cells["a-t03", 2] = cell(2, "failed", None, "error: RuntimeError: x (step 3)")
    lost = outcome(trial, (1, 2), cells, "eval/validation/accuracy")
    assert (lost.state, lost.score, dict(lost.scores)) == ("failed", None, {}), "half a trial is no score"
    repeated = outcome(replace(trial, number=5), (1,), cells, "eval/validation/accuracy")
    assert (repeated.score, repeated.tokens, repeated.seconds) == (0.7, 0, 0), "nothing was run for it"


def test_an_arm_without_a_scored_trial_has_no_winner_and_nothing_is_compared(tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    plan(folder, **{f"k-t0{n}": {"fail_at": 2, "error": "nan", "times": 9} for n in range(2)})
    found, text = tune(study(2), folder)
    assert (found.exit_code, found.status, set(found.params)) == (1, None, {"online"})
    assert "no trial of k ran to its end" in text
    assert not (folder / "study.json").exists()
    with pytest.raises(ValueError, match="has no winner for k: no trial ran to its end"):
        winners(study(2), folder)
    tree = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**tree, "done": False}))
    with pytest.raises(ValueError, match="is not finished; `suite tune mini` runs it"):
        winners(study(2), folder)
    with pytest.raises(ValueError, match="is of another study or other arms"):
        winners(replace(study(2), name="other"), folder)


def test_outcomes_are_read_from_the_last_evaluation(whole: tuple[Path, Tuned, str]) -> None:
    folder = whole[0]
    opened = book(study(), folder)
    trial = opened.trials("k")[2]
    found = outcomes(opened, trial, (101, 102), search_folder(folder))
    assert {seed: math.fsum(rows.values()) / len(rows) for seed, rows in found.items()} == pytest.approx(trial.scores)


def test_equal_configurations_are_run_once_and_called_repeats(tmp_path: Path) -> None:
    folder = tmp_path / "mini"
    ranges = {"online": {"objective.beta": OneOf((0.1, 0.5))}, "k": {"objective.beta": OneOf((0.1, 0.5))}}
    one = study(5, ranges=ranges)
    found, text = tune(one, folder)
    assert found.exit_code == 0
    trials = book(one, folder).trials("k")
    assert len(trials) == 5
    assert sum(t.repeats for t in trials) >= 3
    assert len({t.cell for t in trials}) == len({t.params["objective.beta"] for t in trials})
    for trial in trials:
        first = next(t for t in trials if t.params == trial.params)
        assert (trial.score, trial.cell) == (first.score, first.name)
        assert trial.tokens == (0 if trial.repeats else 1200)
    assert set(starts(search_folder(folder)).values()) == {1}
    assert "the same as k-t0" in text


def test_a_search_that_changed_is_refused_and_more_trials_are_not(whole: tuple[Path, Tuned, str]) -> None:
    folder = whole[0]
    changed = {
        "ranges": study(ranges={"online": {"optim.lr": LR}, "k": {"optim.lr": LR}}),
        "seeds": study(seeds=(101, 103)),
        "sampler": study(sampler="gp"),
        "configuration": replace(study(), base=apply(RunConfig(), {"train.steps": 60})),
    }
    for word, one in changed.items():
        with pytest.raises(ValueError, match=f"the search of arm 'online' was begun with another {word}; undo"):
            book(one, folder)
    assert len(book(study(9), folder).trials()) == 8
