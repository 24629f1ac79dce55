"""The sweep: cells become trials once, are claimed by one worker each, and nothing finished is lost or repeated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runner import one_code
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from suite import declaration, sweep
from suite.config import RunConfig, from_json
from suite.lease import new_owner
from suite.storage import default_url
from suite.study import Arm, Study
from suite.sweep import Sweep
from tests.suite.sweeping import finish, study, trials

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


def test_cells_are_trials_named_as_the_axes(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    found = [(t.state, t.params, t.user_attrs["seed"], t.user_attrs["arm"]) for t in trials(one)]
    periods = {"online": 1, "k": 10, "offline": "inf"}
    assert found == [
        (TrialState.WAITING, {"arm": arm, "rollout.sync_period": period}, seed, arm)
        for seed in (3, 5)
        for arm, period in periods.items()
    ]
    assert one.study.metric_names == ["eval/test/accuracy"]


def test_a_dashboard_gets_axes_as_wide_as_what_was_declared(tmp_path: Path) -> None:
    """A number's space goes from the smallest to the largest, and grows; a choice that came later has its own."""

    def spaces(values: dict[str, float]) -> list[dict[str, BaseDistribution]]:
        arms = tuple(Arm(name, {"objective.beta": value}) for name, value in values.items())
        one = Sweep.open(Study("mini", "", RunConfig(), arms, (3,), metric="eval/test/accuracy"), tmp_path)
        return [trial.distributions for trial in trials(one)]

    first = spaces({"low": 0.1, "mid": 0.3})
    assert [found["objective.beta"] for found in first] == [FloatDistribution(0.1, 0.3)] * 2
    grown = spaces({"low": 0.1, "mid": 0.3, "high": 2.5})
    assert grown[:2] == first
    assert grown[2]["objective.beta"] == FloatDistribution(0.1, 2.5)
    assert grown[2]["arm (2)"] == CategoricalDistribution(["low", "mid", "high"])


def test_the_folder_declares_the_study_and_each_cell(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path, [tmp_path / "axis.py"], command="suite run mini")
    tree = json.loads((tmp_path / "study.json").read_text())
    assert tree["arms"][2] == {
        "name": "offline",
        "label": "offline",
        "differs": {"rollout.sync_period": [1, "inf"]},
        "inert": None,
    }
    assert tree["seeds"] == [3, 5]
    assert tree["claims"][0]["than"] == "offline"
    assert tree["plugins"] == [str(tmp_path / "axis.py")]
    assert len(tree["cells"]) == 6
    cell = tree["cells"][1]
    assert (cell["arm"], cell["seed"], cell["status"], cell["error"]) == ("k", 3, "waiting", None)
    config = from_json(json.loads((tmp_path / cell["folder"] / "config.json").read_text())["run"])
    assert (config.rollout.sync_period, config.seed) == (10, 3)


def test_opening_again_and_in_parallel_changes_nothing(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path)
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Sweep.open(study(), tmp_path), range(8)))
    assert len(trials(opened[0])) == 6


def test_first_opening_in_parallel_creates_each_cell_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: Sweep.open(study(), tmp_path), range(4)))
    assert len(trials(opened[0])) == 6


def test_finished_cells_are_complete_with_the_studys_metric(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    assert one.snapshot().exit_code == 2
    finish(one, 6)
    status = one.snapshot()
    assert status.count("complete") == 6
    assert status.exit_code == 0
    assert [t.value for t in trials(one)] == [0.3, 0.3, 0.3, 0.5, 0.5, 0.5]
    assert json.loads((tmp_path / "study.json").read_text())["cells"][0]["status"] == "complete"
    assert one.claim(new_owner()) is None


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_adding_arms_and_seeds_runs_only_new_cells(tmp_path: Path, kind: str) -> None:
    storage = None if kind == "sqlite" else f"journal:{tmp_path / 'journal.log'}"
    folder = tmp_path / "run"
    first = finish(Sweep.open(study(("online", "k")), folder, storage=storage), 4)
    before = {t.number: (t.params, t.values, t.user_attrs) for t in trials(Sweep.open(study(("online", "k")), folder))}
    # "inf" is a value that the parameter's space did not have, and 7 a seed.
    grown = Sweep.open(study(("online", "k", "offline"), (3, 5, 7)), folder)
    assert {t.number: (t.params, t.values, t.user_attrs) for t in trials(grown) if t.number < 4} == before
    second = finish(grown)
    assert [name.rsplit("-", 1)[0] for name in second] == [
        "offline-seed3",
        "offline-seed5",
        "online-seed7",
        "k-seed7",
        "offline-seed7",
    ]
    assert not set(first) & set(second)
    assert Sweep.open(study(("online", "k", "offline"), (3, 5, 7)), folder).snapshot().exit_code == 0


def test_a_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path)
    with pytest.raises(ValueError, match="holds study 'mini', not 'other'"):
        Sweep.open(replace(study(), name="other"), tmp_path)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ValueError, match="is not what a sweep writes"):
        Sweep.open(study(), tmp_path)


def test_cells_that_left_the_declaration_are_not_run_and_may_come_back(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path)
    small = Sweep.open(study(("online", "k"), (3,)), tmp_path)
    assert len(finish(small)) == 2
    assert small.snapshot().exit_code == 0
    back = Sweep.open(study(), tmp_path)
    assert back.snapshot().count("waiting") == 4
    assert len(finish(back)) == 4


def test_a_result_without_the_metric_or_not_finite_completes_nothing(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    held = one.claim(new_owner())
    assert held is not None
    with pytest.raises(ValueError, match="gave no metric 'eval/test/accuracy'; it gave loss"):
        one.finish(held, {"loss": 1.0})
    with pytest.raises(ValueError, match="= nan"):
        one.finish(held, {"eval/test/accuracy": float("nan")})
    assert one.snapshot().count("running") == 1


def test_a_configuration_changed_by_hand_is_refused(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    held = one.claim(new_owner())
    assert held is not None
    path = one.cell_folder(held) / "config.json"
    tree = json.loads(path.read_text())
    tree["run"]["optim"]["lr"] = 1.0
    path.write_text(json.dumps(tree))
    with pytest.raises(ValueError, match="is not the configuration"):
        one.config(held)


CLAIMER = """
import sys
from pathlib import Path
from suite.sweep import Sweep
from suite.lease import new_owner
sweep, owner = Sweep.attach(Path(sys.argv[1]), patience_s=60), new_owner()
print("ready", flush=True)
sys.stdin.readline()
while lease := sweep.claim(owner):
    sweep.finish(lease, {"eval/test/accuracy": 1.0})
    print(lease.cell, flush=True)
"""


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_processes_that_race_for_cells_get_each_once(tmp_path: Path, kind: str) -> None:
    storage = None if kind == "sqlite" else f"journal:{tmp_path / 'journal.log'}"
    seeds = tuple(range(8))
    one = Sweep.open(study(seeds=seeds), tmp_path, storage=storage)
    command = [sys.executable, "-c", CLAIMER, str(tmp_path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    got = [racer.communicate()[0].split() for racer in racers]
    names = [name for part in got for name in part]
    assert sorted(names) == sorted(cell["name"] for cell in one.declared["cells"])
    assert sum(bool(part) for part in got) >= 2, "one process took all: nothing was raced for"
    assert len(trials(one)) == 24
    assert one.snapshot().exit_code == 0


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.runs cannot be written: Not a directory"):
        Sweep.open(study(), tmp_path / "file" / "runs")
    if os.geteuid() != 0:
        tmp_path.joinpath("closed").mkdir(mode=0o500)
        with pytest.raises(ValueError, match="cannot be written: Permission denied"):
            Sweep.open(study(), tmp_path / "closed")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(declaration.shutil, "disk_usage", lambda _: usage._replace(free=12 * 2**20))
    with pytest.raises(ValueError, match="has 12 MB left and a study needs at least 64; make room"):
        Sweep.open(study(), tmp_path / "full")
    with pytest.raises(ValueError, match="there is no study in"):
        Sweep.attach(tmp_path)


def test_a_storage_without_the_study_is_named(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path)
    (tmp_path / "storage.sqlite3").unlink()
    with pytest.raises(ValueError, match="holds no study 'mini'"):
        Sweep.attach(tmp_path)
    # The folder's own record is enough to begin anew.
    assert Sweep.open(study(), tmp_path).snapshot().count("waiting") == 6


def test_a_moved_folder_goes_on(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path / "a")
    finish(one, 2)
    (tmp_path / "a").rename(tmp_path / "b {1}")
    moved = Sweep.open(study(), tmp_path / "b {1}")
    assert moved.store.url == default_url(tmp_path / "b {1}")
    assert len(finish(moved)) == 4


def test_the_time_left_comes_from_the_cells_done_and_the_progress_made(tmp_path: Path) -> None:
    one = Sweep.open(study(("online", "k"), (3, 5)), tmp_path)
    assert one.snapshot().seconds_left(2) is None
    held = one.claim(new_owner())
    assert held is not None
    one.finish(held, {"eval/test/accuracy": 1.0}, {"step": 10, "steps": 10, "seconds": 8.0})
    held = one.claim(new_owner())
    assert held is not None
    one.report(held, {"step": 5, "steps": 10, "seconds": 10.0, "started_at": 0})
    # online: 8 s a cell; k: 20 s a cell. Left: 8 + 10 + 20 = 38 s on two workers, but no less than one cell of 20 s.
    assert one.snapshot().seconds_left(2) == pytest.approx(20.0)
    assert one.snapshot().seconds_left(1) == pytest.approx(38.0)


def test_progress_is_shown_as_it_was_reported(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    held = one.claim(new_owner())
    assert held is not None
    one.report(held, {"step": 7, "steps": 9, "metrics": {"policy/entropy": 0.4}, "tokens_per_second": 12.5})
    one.leases.note(held, 7, 0.75)
    cell = one.snapshot().cells[0]
    assert (cell.step, cell.steps, cell.metrics["policy/entropy"], cell.tokens_per_second) == (7, 9, 0.4, 12.5)
    assert trials(one)[0].intermediate_values == {7: 0.75}
    assert sweep.CURVE == "eval/validation/accuracy"
