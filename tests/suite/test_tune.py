"""A search: the same trials whatever the machine does, scored on validation alone, and only fresh runs compared."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from fake_runner import one_code
from fake_tune_runner import score, write_answers
from optuna.trial import TrialState
from rich.console import Console

from suite import cli
from suite.config import RunConfig, apply
from suite.search import FILE, Float, Int, LogFloat, OneOf, Search, examine, search_folder, tuned, winners
from suite.status import CellStatus, StudyStatus
from suite.storage import Store, default_url
from suite.study import Arm, Study
from suite.tune import Run, Tuned, outcome, outcomes, run_batch, tune_study
from suite.tuning import Book, Trial, prune

ROOT = Path(__file__).resolve().parents[2]
LR, BETA = LogFloat(1e-5, 1e-3), LogFloat(0.05, 5.0)


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite"))))
    with one_code(monkeypatch):
        yield


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


def ended(one: Study, trial: Trial) -> Trial:
    value = score(apply(one.config(trial.arm), trial.params))
    return replace(trial, state="complete", score=value, scores={101: value, 102: value})


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
        "import sys; sys.path[:0] = ['tests/suite']\n"
        "from pathlib import Path\nfrom test_tune import study\nfrom suite.tune import tune_study\n"
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
    assert cli.main(["tune", str(path), "--workers", "3", "--allow-mixed"]) == 130
    assert seen["a"][1:] == (Path("runs/little"), 3, [path])
    assert (seen["command"], seen["allow_mixed"]) == (f"suite tune {path}", True)


@pytest.mark.slow
def test_a_real_search_in_miniature_and_its_report(tmp_path: Path) -> None:
    """Two arms, three trials, one seed, six steps; the report's numbers recomputed from the runs' own results."""
    from fakes import SMALL

    from reports.build import build

    base = apply(RunConfig(), {**SMALL, "eval.every": 3})
    search = Search({"online": {"optim.lr": LR}, "k": {"optim.lr": LR}}, 3, (7,), startup=1)
    one = replace(study(), base=base, arms=(Arm("online"), Arm("k", {"rollout.sync_period": 3})), search=search)
    one = replace(one, seeds=(1, 2))
    found = tune_study(one, tmp_path / "mini", 2, console=Console(file=io.StringIO()))
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
