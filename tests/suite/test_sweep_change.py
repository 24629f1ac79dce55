"""What changed since a cell finished: the arm, the commit, the libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import one_code

from suite import declaration, sweep
from suite.lease import new_owner
from suite.study import Arm, Study
from suite.sweep import Sweep
from tests.suite.sweeping import finish, study, trials


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


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
    assert (stale.name, stale.error) == (
        done[1],
        "finished under another definition of the arm: rollout.sync_period 10 -> 20",
    )
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
        "changed since it finished: the code, commit 11111111, which is now commit 22222222 with changes"
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
