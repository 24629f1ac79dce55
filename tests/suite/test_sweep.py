"""The sweep: cells become trials once, are claimed by one worker each, and nothing finished is lost or repeated."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from fake_runner import one_code
from optuna.trial import TrialState

from suite import declaration, lease, sweep
from suite.config import RunConfig, from_json
from suite.failures import Failure
from suite.lease import LeaseLost, new_owner
from suite.storage import Store, default_url
from suite.study import Arm, Claim, Study
from suite.sweep import Sweep

PERIODS = {"online": 1, "k": 10, "offline": "inf"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


def study(arms: tuple[str, ...] = ("online", "k", "offline"), seeds: tuple[int, ...] = (3, 5), **more: Any) -> Study:
    made = tuple(Arm(name, {} if name == "online" else {"rollout.sync_period": PERIODS[name]}) for name in arms)
    claim = Claim("better", "better", "online", arms[-1], 0.03)
    return Study("mini", "Does it matter?", RunConfig(), made, seeds, (claim,), **more)


def finish(one: Sweep, count: int = 100, owner: str = "") -> list[str]:
    """Claims and finishes cells, with a value that tells them apart; the names in order."""
    done = []
    while len(done) < count and (held := one.claim(owner or new_owner())):
        one.finish(held, {"eval/test/accuracy": held.seed / 10})
        done.append(held.cell)
    return done


def trials(one: Sweep) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="mini", storage=Store(one.store.url).optuna).trials


def test_cells_are_trials_named_as_the_axes(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    found = [(t.state, t.params["rollout.sync_period"], t.params["seed"], t.user_attrs["arm"]) for t in trials(one)]
    waiting = TrialState.WAITING
    assert found == [
        (waiting, 1, 3, "online"),
        (waiting, 10, 3, "k"),
        (waiting, "inf", 3, "offline"),
        (waiting, 1, 5, "online"),
        (waiting, 10, 5, "k"),
        (waiting, "inf", 5, "offline"),
    ]


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


def test_an_owner_that_lost_its_cell_can_write_nothing(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    slow = one.claim("slow|1|||a")
    assert slow is not None
    one.report(slow, {"step": 4, "steps": 9})
    assert one.recover({"a": Failure("lost", "SIGKILL", "its worker was killed", 0)}) == {slow.cell: "a"}
    for write in (
        lambda: one.report(slow, {"step": 5}),
        lambda: one.finish(slow, {"eval/test/accuracy": 1.0}),
        lambda: one.release(slow),
        lambda: one.fail(slow, Failure("error", "E", "m", 5)),
        lambda: one.leases.note(slow, 5, 0.5),
    ):
        with pytest.raises(LeaseLost, match=slow.cell):
            write()
    quick = one.claim("quick|1|||b")
    assert quick is not None
    assert (quick.cell, quick.number, quick.reached) == (slow.cell, 2, 4)
    with pytest.raises(LeaseLost):
        one.finish(slow, {"eval/test/accuracy": 1.0})
    one.finish(quick, {"eval/test/accuracy": 0.25})
    with pytest.raises(LeaseLost):
        one.finish(slow, {"eval/test/accuracy": 1.0})
    one.finish(quick, {"eval/test/accuracy": 0.25})  # said twice, as when the first confirmation was lost
    assert trials(one)[0].value == 0.25
    assert trials(one)[0].user_attrs["attempts"][0]["reason"] == "lost: SIGKILL: its worker was killed (step 4)"
    assert json.loads((one.cell_folder(slow) / "attempts" / "1" / "attempt.json").read_text())["step"] == 4


def test_a_claim_whose_confirmation_was_lost_is_found_again(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    first = one.claim("me|1|||a")
    assert one.claim("me|1|||a") == first
    assert one.snapshot().count("running") == 1


def test_a_released_cell_goes_on_without_counting_as_failed(tmp_path: Path) -> None:
    one = Sweep.open(study(seeds=(3,)), tmp_path)
    for number in range(1, 6):
        held = one.claim(new_owner())
        assert held is not None
        assert (held.number, held.arm) == (number, "online")
        one.release(held)
    assert one.snapshot().count("waiting") == 3
    assert one.snapshot().cells[0].error is None


def test_a_process_of_this_machine_that_ended_is_known_to_be_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from suite.lease import new_owner; print(new_owner())"]
    dead = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    assert lease.is_gone(dead)
    assert not lease.is_gone(new_owner())
    host, process, _, machine, name = new_owner().split("|")
    assert lease.is_gone("|".join((host, process, "1", machine, name))), "the number was given to another process"
    assert not lease.is_gone("|".join((host, process, "1", "elsewhere", name)))
    one = Sweep.open(study(), tmp_path)
    held = one.claim(dead)
    assert held is not None
    assert list(one.recover()) == [held.cell]


class Clock:
    """A monotonic clock that the test turns, and a wall clock that goes backwards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(lease.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(lease.time, "time", lambda: 2e9 - 3600 * self.now)


def test_silence_is_measured_by_the_observers_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sweep.open(study(), tmp_path)
    alive, silent = one.claim("far|1||elsewhere|a"), one.claim("far|2||elsewhere|b")
    assert alive is not None
    assert silent is not None
    clock = Clock(monkeypatch)
    looks = int(lease.TTL_S / lease.HEARTBEAT_S)
    for look in range(looks):
        assert one.recover() == {}, f"look {look}"
        one.report(alive, {"step": 0})
        clock.now += lease.HEARTBEAT_S
    assert one.recover() == {silent.cell: "b"}
    one.report(alive, {"step": 1})


def test_an_observer_that_slept_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sweep.open(study(), tmp_path)
    held = one.claim("far|1||elsewhere|a")
    clock = Clock(monkeypatch)
    for _ in range(3):
        assert one.recover() == {}
        clock.now += 10 * lease.TTL_S
    assert held is not None
    one.report(held, {"step": 1})


@pytest.mark.parametrize("edit", ['{"number": "2"}', '"mine"', "null", '{"number": -1, "owner": ""}'])
def test_a_lease_edited_by_hand_is_refused_and_the_cell_taken_back(
    tmp_path: Path, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Sweep.open(study(), tmp_path)
    held = one.claim(new_owner())
    assert held is not None
    with sqlite3.connect(tmp_path / "storage.sqlite3") as base:
        key = "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'lease' AND trial_id = ?"
        base.execute(key, (edit, held.trial))
    with pytest.raises(LeaseLost):
        one.finish(held, {"eval/test/accuracy": 1.0})
    clock = Clock(monkeypatch)
    freed: list[str] = []
    for _ in range(100):
        freed += one.recover()
        clock.now += lease.HEARTBEAT_S
    assert freed == [held.cell]
    again = one.claim(new_owner())
    assert again is not None
    assert again.cell == held.cell
    one.finish(again, {"eval/test/accuracy": 1.0})


def test_unreadable_leases_say_what_they_are(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    first = trials(one)[0]
    first.set_user_attr("lease", {"number": True, "holder": "me"})
    with pytest.raises(ValueError, match=r'the lease of cell online-seed3-.* reads {"number": true, "holder": "me"}'):
        lease.lease_of(first)


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


def code(monkeypatch: pytest.MonkeyPatch, commit: str, dirty: bool = False, **versions: str) -> None:
    """Makes this process run another commit."""
    now = {"commit": commit, "dirty": dirty, "versions": {"torch": "2.13.0", **versions}}
    for module in (sweep, declaration):
        monkeypatch.setattr(module, "provenance", lambda: now)


def changed(**more: Any) -> Study:
    """The study with another definition of arm k."""
    one = study(**more)
    arms = tuple(Arm("k", {"rollout.sync_period": 20}) if arm.name == "k" else arm for arm in one.arms)
    return replace(one, arms=arms)


def test_a_changed_arm_makes_finished_cells_stale_and_waiting_ones_new(tmp_path: Path) -> None:
    first = Sweep.open(study(), tmp_path)
    done = finish(first, 3)  # seed 3 of all arms
    again = Sweep.open(changed(), tmp_path)
    status = again.snapshot()
    assert [(c.arm, c.seed, c.status) for c in status.cells] == [
        ("online", 3, "complete"),
        ("k", 3, "stale"),
        ("offline", 3, "complete"),
        ("online", 5, "waiting"),
        ("k", 5, "waiting"),
        ("offline", 5, "waiting"),
    ]
    stale = status.cells[1]
    assert (stale.name, stale.error) == (done[1], "finished under another definition of the arm")
    assert json.loads((tmp_path / "study.json").read_text())["cells"][1]["name"] == done[1]
    assert [name.rsplit("-", 1)[0] for name in finish(again)] == ["online-seed5", "offline-seed5", "k-seed5"]
    assert again.snapshot().exit_code == 2, "a stale cell is not the study's result"

    rerun = Sweep.open(changed(), tmp_path, rerun_stale=declaration.Choice(["k"]))
    assert [name.rsplit("-", 1)[0] for name in finish(rerun)] == ["k-seed3"]
    assert rerun.snapshot().exit_code == 0
    back = Sweep.open(study(), tmp_path)
    assert [c.status for c in back.snapshot().cells] == [*["complete"] * 4, "stale", "complete"]
    assert back.snapshot().cells[1].name == done[1], "the first definition's result is still there"


def test_another_commit_makes_finished_cells_stale_until_a_rerun_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code(monkeypatch, "1111111111")
    done = finish(Sweep.open(study(seeds=(3,)), tmp_path), 2)
    (tmp_path / "cells" / done[0] / "result.json").write_text("old")
    code(monkeypatch, "2222222222", dirty=True)
    now = Sweep.open(study(seeds=(3,)), tmp_path)
    assert [c.status for c in now.snapshot().cells] == ["stale", "stale", "waiting"]
    assert now.snapshot().cells[0].error == (
        "finished by commit 11111111, the code is now commit 22222222 with changes"
    )
    assert len(finish(now)) == 1, "finished cells were run again without being asked for"
    rerun = Sweep.open(study(seeds=(3,)), tmp_path, rerun_stale=declaration.Choice(["online"]))
    held = rerun.claim(new_owner())
    assert held is not None
    assert (held.cell, held.number) == (done[0], 2)
    assert not (rerun.cell_folder(held) / "result.json").exists(), "the old result would be taken for the new one"
    assert (tmp_path / "stale" / f"{done[0]}-1" / "result.json").read_text() == "old"
    assert rerun.config(held).seed == 3
    rerun.finish(held, {"eval/test/accuracy": 0.5})
    assert [c.status for c in rerun.snapshot().cells] == ["complete", "stale", "complete"]


def test_other_code_is_refused_while_workers_run_and_recorded_when_one_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code(monkeypatch, "1111111111")
    one = Sweep.open(study(seeds=(3,)), tmp_path)
    held = one.claim(new_owner())
    assert held is not None
    code(monkeypatch, "2222222222")
    assert one.mixed() == "study 'mini' runs other code: commit 11111111 there, commit 22222222 here"
    with pytest.raises(ValueError, match="commit 11111111 there, commit 22222222 here; bring them together, or pass"):
        Sweep.open(study(seeds=(3,)), tmp_path)
    mixed = Sweep.open(study(seeds=(3,)), tmp_path, allow_mixed=True)
    one.release(held)
    finish(mixed)
    cell = trials(mixed)[0].user_attrs
    assert (cell["commit"], cell["code"]) == ("2222222222", ["commit 11111111", "commit 22222222"])
    assert mixed.snapshot().notes == (f"cell {held.cell} was worked on by commit 11111111 and by commit 22222222",)


def test_other_libraries_are_refused_and_recorded_when_one_insists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code(monkeypatch, "1111111111")
    finish(Sweep.open(study(seeds=(3,)), tmp_path), 1)
    code(monkeypatch, "1111111111", torch="2.14.0", vllm="0.32.0")
    with pytest.raises(ValueError, match=r"torch 2\.13\.0 against 2\.14\.0, vllm absent against 0\.32\.0; bring them"):
        Sweep.open(study(seeds=(3,)), tmp_path)
    mixed = Sweep.open(study(seeds=(3,)), tmp_path, allow_mixed=True)
    finish(mixed)
    assert mixed.snapshot().notes == (
        "finished cells ran under different libraries: torch 2.13.0 against 2.14.0, vllm absent against 0.32.0",
    )


def test_a_password_in_the_command_is_not_written_down(tmp_path: Path) -> None:
    Sweep.open(study(), tmp_path, command="suite run mini --storage postgresql://u:s3cret@h/db --workers 2")
    text = (tmp_path / "study.json").read_text()
    assert "s3cret" not in text
    assert "postgresql://u:***@h/db --workers 2" in text
