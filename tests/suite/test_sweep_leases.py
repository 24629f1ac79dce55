"""Who holds a cell: leases, lost and edited, clocks, and owners that are gone."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import one_code

from suite import lease
from suite.failures import Failure
from suite.lease import LeaseLost, new_owner
from suite.sweep import Sweep
from tests.suite.sweeping import study, trials

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


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
