"""Running a study on this machine: every cell once, whatever dies, and the truth in the exit code."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_runner import one_code
from optuna.trial import TrialState
from rich.console import Console

from suite import storage, sweep
from suite.config import RunConfig
from suite.launch import machine
from suite.launch.display import Display, duration, page, totals
from suite.launch.local import print_status, retry, run_study
from suite.launch.machine import Plan, plan_workers
from suite.lease import Watch
from suite.status import CellStatus, StudyStatus
from suite.study import Arm, Study
from suite.sweep import Sweep

ROOT = Path(__file__).resolve().parents[2]
ARMS = (Arm("a", label="s = 1"), Arm("b", {"rollout.sync_period": 10}), Arm("c", {"rollout.sync_period": "inf"}))


def study(arms: int = 2, seeds: tuple[int, ...] = (1, 2, 3, 4)) -> Study:
    return Study("mini", "?", RunConfig(), ARMS[:arms], seeds)


def run(one: Study, folder: Path, workers: int = 2, **more: Any) -> tuple[StudyStatus, str]:
    text = io.StringIO()
    console = Console(file=text, width=120)
    return run_study(
        one, folder, workers, runner="tests.suite.fake_runner:run", console=console, **more
    ), text.getvalue()


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with one_code(monkeypatch):
        yield


def plan(folder: Path, **arms: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(arms))


def starts(folder: Path) -> dict[str, list[list[str]]]:
    """Cell -> its starts, each as [process, threads, first step]."""
    files = folder.glob("cells/*/starts.txt")
    return {path.parent.name: [line.split() for line in path.read_text().splitlines()] for path in files}


def test_eight_cells_on_four_workers_run_once_each_and_a_second_run_only_what_is_missing(tmp_path: Path) -> None:
    plan(tmp_path, a={"seconds": 0.05}, b={"seconds": 0.05})
    status, text = run(study(), tmp_path, 4)
    assert status.exit_code == 0
    assert {(cell.arm, cell.seed): cell.metrics["eval/test/accuracy"] for cell in status.cells} == {
        (arm, seed): period + seed / 1000 for arm, period in (("a", 1), ("b", 10)) for seed in (1, 2, 3, 4)
    }
    begun = starts(tmp_path)
    assert len(begun) == 8
    assert all(len(each) == 1 for each in begun.values())
    assert len({each[0][0] for each in begun.values()}) >= 2, "one worker did everything"
    assert {each[0][1] for each in begun.values()} == {"1"}, "threads per worker"
    for line in (
        "mini: 2 arms x 4 seeds = 8 cells",
        "4 workers with 1 thread each",
        "8 done, 0 running, 0 waiting, 0 failed",
    ):
        assert line in text
    assert text.count(": done in ") == 8

    assert run(study(), tmp_path)[0].exit_code == 0
    assert starts(tmp_path) == begun, "finished cells were run again"
    grown, _ = run(study(3, (1, 2, 3, 4, 5)), tmp_path, 2, arms=["a", "c"], seeds=[1, 5])
    assert [(cell.arm, cell.seed) for cell in grown.cells] == [("a", 1), ("c", 1), ("a", 5), ("c", 5)]
    assert grown.exit_code == 0
    after = starts(tmp_path)
    assert {name.rsplit("-", 1)[0] for name in after.keys() - begun.keys()} == {"c-seed1", "a-seed5", "c-seed5"}
    assert {name: after[name] for name in begun} == begun


def test_a_killed_worker_and_a_failing_arm_stop_nobody_else(tmp_path: Path) -> None:
    plan(tmp_path, a={"kill_at": 4}, b={"fail_at": 3, "error": "runtime", "times": 9})
    status, text = run(study(3, (1,)), tmp_path)
    assert [(cell.arm, cell.status, cell.attempts) for cell in status.cells] == [
        ("a", "complete", 2),
        ("b", "failed", 2),
        ("c", "complete", 1),
    ]
    assert status.exit_code == 1
    killed = next(each for name, each in starts(tmp_path).items() if name.startswith("a"))
    assert [first for _, _, first in killed] == ["0", "3"], "it goes on from its checkpoint"
    assert "killed by SIGKILL" in text
    assert "failed after 2 attempts: error: RuntimeError: planned at step 3 (step 2)" in text
    assert f"`suite retry {tmp_path}`" in "".join(text.split("\n"))
    assert "Traceback" in next(tmp_path.glob("cells/b-*/attempts/1/error.txt")).read_text()
    assert "planned at step 3" in (tmp_path / "progress.log").read_text()

    assert print_status(tmp_path, Console(file=io.StringIO())).exit_code == 1
    plan(tmp_path)
    assert retry(tmp_path, ["a"]) == 0
    assert run(study(3, (1,)), tmp_path)[0].exit_code == 0, "a cell that failed is missing, and tried again"


def test_cells_that_would_fail_in_the_same_way_wait_for_a_retry(tmp_path: Path) -> None:
    plan(tmp_path, b={"fail_at": 2, "error": "nan", "times": 1})
    assert run(study(2, (1,)), tmp_path)[0].exit_code == 1
    assert run(study(2, (1,)), tmp_path)[0].exit_code == 1
    assert retry(tmp_path, ["b"]) == 1
    assert run(study(2, (1,)), tmp_path)[0].exit_code == 0


LAUNCHER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/suite")
from test_local import run, study
status, text = run(study(), Path(sys.argv[1]))
print(text)
sys.exit(status.exit_code)
"""


def launch(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_running(folder: Path, count: int = 2) -> list[int]:
    """Waits until cells have begun; their workers' process ids."""
    limit = time.monotonic() + 60
    # a file is there a moment before its first line
    while len(found := {cell: each for cell, each in starts(folder).items() if each}) < count:
        assert time.monotonic() < limit
        time.sleep(0.02)
    return sorted({int(each[-1][0]) for each in found.values()})


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_gone(processes: list[int]) -> bool:
    limit = time.monotonic() + 30
    while any(map(alive, processes)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(alive, processes))


def test_ctrl_c_stops_cleanly_twice_kills_and_the_next_run_goes_on(tmp_path: Path) -> None:
    plan(tmp_path, a={"seconds": 0.3}, b={"seconds": 0.3})
    launcher = launch(tmp_path)
    workers = until_running(tmp_path)
    # As a terminal does it: to the whole foreground group.
    os.killpg(launcher.pid, signal.SIGINT)
    text = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == 130
    assert "stopping: workers write their checkpoints" in text
    assert "again to go on from the checkpoints" in text
    assert all_gone(workers)
    status = Sweep.attach(tmp_path).snapshot()
    assert status.count("waiting") >= 6
    assert status.count("running") == status.count("failed") == 0
    assert all(cell.error is None for cell in status.cells), "a stop is no failure"

    plan(tmp_path, a={"hang_at": 6, "times": 9}, b={"hang_at": 6, "times": 9})
    launcher = launch(tmp_path)
    limit = time.monotonic() + 60
    while not any(cell.step >= 5 for cell in Sweep.attach(tmp_path).snapshot().cells if cell.status == "running"):
        assert time.monotonic() < limit
        time.sleep(0.2)
    workers = until_running(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None, "a run that does not poll cannot leave at once"
    os.killpg(launcher.pid, signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert all_gone(workers)

    plan(tmp_path)
    status, _ = run(study(), tmp_path)
    assert status.exit_code == 0
    for path in tmp_path.glob("cells/*/steps.txt"):
        assert path.read_text().split() == ["1", "2", "3", "4", "5", "6"], f"{path} repeats or lacks a step"


def test_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    plan(tmp_path, a={"seconds": 0.2}, b={"seconds": 0.2})
    launcher = launch(tmp_path)
    workers = until_running(tmp_path)
    launcher.kill()
    launcher.communicate()
    assert all_gone(workers)
    plan(tmp_path)
    assert run(study(), tmp_path)[0].exit_code == 0


@pytest.mark.slow
def test_random_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    plan(tmp_path, a={"seconds": 0.2}, b={"seconds": 0.2}, c={"seconds": 0.2})
    chance, over, killed = random.Random(5), threading.Event(), []

    def kill() -> None:
        while not over.wait(chance.uniform(0.3, 1.5)) and len(killed) < 9:  # ten lost workers fail a cell
            running = [int(each[-1][0]) for each in starts(tmp_path).values() if alive(int(each[-1][0]))]
            if running:
                killed.append(chance.choice(running))
                os.kill(killed[-1], chance.choice([signal.SIGKILL, signal.SIGTERM]))

    killer = threading.Thread(target=kill)
    killer.start()
    status, _ = run(study(3), tmp_path, 4)
    over.set()
    killer.join()
    assert status.exit_code == 0
    assert len(killed) >= 5
    found = [trial.state for trial in Sweep.attach(tmp_path).study.trials]
    assert found == [TrialState.COMPLETE] * 12, "one trial a cell, each finished once"
    for path in tmp_path.glob("cells/*/steps.txt"):
        assert set(path.read_text().split()) == {"1", "2", "3", "4", "5", "6"}


def test_a_worker_that_cannot_start_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    plugin = tmp_path / "axis.py"
    plugin.write_text("raise ValueError('the axis names no control')")
    status, text = run(study(), tmp_path / "run", plugins=[plugin])
    assert status.exit_code == 2
    assert ": the axis names no control\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop_at", "stop_locked_at"])
def test_a_worker_that_stands_still_is_replaced(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "Watch", partial(Watch, ttl_s=8.0))
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_S", 4.0)
    monkeypatch.setitem(storage._CONNECT, "sqlite", {"timeout": 4.0})
    plan(tmp_path, a={how: 3})
    status, text = run(study(1, (1,)), tmp_path)
    assert status.exit_code == 0
    assert status.cells[0].attempts == 2
    # A process may also be stopped by chance while its other thread holds the lock.
    assert "keeps the storage locked, killed" in text or (how == "stop_at" and "silent, killed; a-seed1-" in text)


@pytest.mark.parametrize("workers", [-1, True, 1.5, "many"])
def test_a_number_of_workers_that_makes_no_sense_is_refused_before_any_work(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(ValueError, match=r"--workers is .* and must be a whole number from 1 on, or auto"):
        run(study(), tmp_path / "run", workers)
    assert not (tmp_path / "run").exists()


def test_unknown_arms_and_seeds_are_refused_with_near_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown arm 'd'"):
        run(study(), tmp_path, arms=["d"])
    with pytest.raises(ValueError, match="has no seed 9; it has 1, 2, 3, 4"):
        run(study(), tmp_path, seeds=[9])


def test_auto_shares_cores_and_memory_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 12)
    monkeypatch.setattr(machine, "free_memory", lambda: 5 * 2**30 + 1)
    assert plan_workers("auto", 20) == Plan(5, "12 cores, 5.0 GB of memory free, 20 cells to run")
    assert plan_workers("auto", 3).workers == 3
    assert plan_workers(8, 20).workers == 8
    assert plan_workers(8, 2).workers == 2
    monkeypatch.setattr(machine, "free_memory", lambda: 100)
    assert plan_workers("auto", 3).workers == 1
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert plan_workers("auto", 30).workers == 12


@pytest.mark.parametrize(
    ("given", "path", "threads", "why"),
    [
        ("", "seed:addition", 1, "more would slow embedded models down"),
        ("", "org/model", 4, "a share of the cores"),
        ("3", "seed:addition", 3, "OMP_NUM_THREADS is 3"),
        ("5,2", "org/model", 5, "OMP_NUM_THREADS is 5"),
    ],
)
def test_threads_are_the_user_s_or_one_for_embedded_models_or_a_share_of_the_cores(
    given: str, path: str, threads: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    mixed = (Arm("a"), Arm("b", {"model.path": path}))
    assert machine.threads_each(3, replace(study(), arms=mixed)) == (threads, why)


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("2", "2")])
def test_a_worker_alone_takes_the_threads_that_are_said(
    given: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 12)
    for name in machine.THREADS:
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    _, text = run(study(1, (1,)), tmp_path, 1)
    assert f"1 workers with {threads} thread" in text
    assert {each[0][1] for each in starts(tmp_path).values()} == {threads}


def cell(arm: str, seed: int, status: Any, **more: Any) -> CellStatus:
    return CellStatus(arm, seed, f"{arm}-{seed}", "f", status, "", **more)


STATUS = StudyStatus(
    "mini",
    {"a": "dpo  s=inf", "b": "dpo  s=10"},
    (
        cell("a", 1, "complete", step=120, steps=120, seconds=60.0, metrics={"eval/validation/accuracy": 0.4}),
        cell("a", 2, "complete", step=120, steps=120, seconds=80.0, metrics={"eval/validation/accuracy": 0.42}),
        cell(
            "b",
            1,
            "running",
            step=84,
            steps=120,
            seconds=70.0,
            tokens_per_second=8812.0,
            metrics={"eval/validation/accuracy": 0.498, "policy/entropy": 0.424, "policy/probe_length": 4.13},
        ),
        cell("b", 2, "failed", error="not finite: NonFiniteLoss: loss is nan (step 7)", attempts=1),
    ),
)


def test_the_table_shows_each_arm_and_the_failures() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(page(STATUS, 2))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[0] == ["arm", "cells", "step", "val", "acc", "entropy", "length", "tokens/s"]
    assert lines[1] == ["dpo", "s=inf", "2/2", "120", "41.0"]
    assert lines[2] == ["dpo", "s=10", "0/2", "(1", "failed)", "84", "49.8", "0.42", "4.1", "8.8k"]
    assert totals(STATUS, 2) == "2 done, 1 running, 0 waiting, 1 failed     about 30 s left"
    assert "b-2: not finite: NonFiniteLoss: loss is nan (step 7)" in text.getvalue()


def test_a_terminal_gets_a_live_table_and_the_log_plain_lines(tmp_path: Path) -> None:
    text = io.StringIO()
    with Display(Console(file=text, force_terminal=True, width=100), tmp_path, 2) as display:
        before = StudyStatus("mini", STATUS.arms, (cell("a", 1, "running", step=3, steps=120), *STATUS.cells[1:]))
        display.show(before)
        display.show(STATUS)
    assert "\x1b[" in text.getvalue()
    assert (tmp_path / "progress.log").read_text().splitlines()[0].endswith("  a-1: done in 1 min 0 s, val acc 40.0")


@pytest.mark.parametrize(
    ("seconds", "text"), [(44.6, "45 s"), (100, "1 min 40 s"), (3599.6, "1 h 0 min"), (11100, "3 h 5 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
