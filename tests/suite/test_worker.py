"""The worker: what it reports while it works, when it stops, and how it records what a cell died of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_runner import one_code

from suite import storage, worker
from suite.config import RunConfig
from suite.declaration import Choice
from suite.failures import Failure, Retries, classify
from suite.lease import Lease, LeaseLost, new_owner
from suite.run import Interrupted, NonFiniteLoss, Progress
from suite.study import Arm, Study
from suite.sweep import Sweep
from suite.worker import Keeper, Stop, work

ROOT = Path(__file__).resolve().parents[2]
STUDY = Study("mini", "?", RunConfig(), (Arm("a"), Arm("b", {"optim.lr": 0.5})), (1, 2))


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


def held(folder: Path) -> tuple[Sweep, Lease]:
    sweep = Sweep.open(STUDY, folder)
    lease = sweep.claim(new_owner())
    assert lease is not None
    return sweep, lease


def runner(behaviour: Callable[..., dict[str, float]]) -> Any:
    def run(config: RunConfig, folder: Path, info: Any, *, on_progress: Any, stop: Any) -> dict[str, float]:
        on_progress(Progress(7, 10, {"eval/validation/accuracy": 0.5}))
        return behaviour(stop)

    return run


def raising(error: Exception) -> Any:
    def behaviour(_: object) -> dict[str, float]:
        raise error

    return runner(behaviour)


def test_a_cell_that_works_is_complete_and_its_output_is_in_its_log(tmp_path: Path) -> None:
    sweep, lease = held(tmp_path)

    def behaviour(_: object) -> dict[str, float]:
        os.write(1, b"from below Python\n")
        subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
        return {"eval/test/accuracy": 0.75}

    assert work(sweep, lease, runner(behaviour), Stop()) == "complete"
    text = (sweep.cell_folder(lease) / "log.txt").read_text()
    assert "from below Python\n" in text
    assert "from a child\n" in text
    cell = sweep.snapshot().cells[0]
    assert (cell.status, cell.step, cell.metrics["eval/test/accuracy"]) == ("complete", 7, 0.75)


@pytest.mark.parametrize(
    ("error", "kind", "tries"),
    [
        (RuntimeError("gone wrong"), "error", 2),
        (NonFiniteLoss("loss is nan"), "not finite", 1),
        (ValueError("no such model"), "mistake", 1),
        (MemoryError("full"), "out of memory", 2),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), "out of memory", 2),
        (OSError("disk"), "error", 2),
    ],
)
def test_failures_are_told_apart_recorded_and_retried_a_bounded_number_of_times(
    tmp_path: Path, error: Exception, kind: str, tries: int
) -> None:
    sweep, lease = held(tmp_path)
    outcomes = [work(sweep, lease, raising(error), Stop())]
    while (again := sweep.claim(new_owner(), Choice(["a"], [1]))) is not None:
        outcomes.append(work(sweep, again, raising(error), Stop()))
    assert outcomes == ["again"] * (tries - 1) + ["failed"]
    cell = sweep.snapshot().cells[0]
    assert (cell.status, cell.attempts) == ("failed", tries)
    assert cell.error == f"{kind}: {type(error).__name__}: {error} (step 7)"
    place = sweep.cell_folder(lease) / "attempts" / str(tries)
    text = (place / "error.txt").read_text()
    assert "Traceback (most recent call last)" in text
    assert "in behaviour" in text
    record = json.loads((place / "attempt.json").read_text())
    assert (record["kind"], record["step"], record["rerun"]) == (kind, 7, f"suite retry {tmp_path} --arm a")
    assert sweep.snapshot().count("waiting") == 3, "the other cells are not touched"


def test_a_failed_cell_runs_again_on_request(tmp_path: Path) -> None:
    sweep, lease = held(tmp_path)
    work(sweep, lease, raising(NonFiniteLoss("nan")), Stop())
    assert sweep.retry(Choice(["b"])) == 0
    assert sweep.retry(kinds=False) == 0, "it would fail in the same way"
    assert sweep.retry(Choice(["a"])) == 1
    assert sweep.retry() == 0
    again = next(iter(iter(lambda: sweep.claim(new_owner(), Choice(["a"], [1])), None)))
    assert (again.cell, again.number) == (lease.cell, 2), "fencing numbers go on counting"
    assert work(sweep, again, runner(lambda _: {"eval/test/accuracy": 0.5}), Stop()) == "complete"
    assert sweep.snapshot().count("failed") == 0


def test_errors_out_of_the_grader_and_the_engine_have_their_own_kinds() -> None:
    def error_from(path: str) -> Exception:
        space: dict[str, Any] = {}
        exec(compile("def f():\n    raise OSError('broken')", path, "exec"), space)
        try:
            space["f"]()
        except OSError as error:
            return error
        raise AssertionError

    assert classify(error_from("/x/suite/grading_pool.py")) == "grader"
    assert classify(error_from("/x/suite/rollout/in_process.py")) == "engine"
    assert classify(error_from("/x/suite/train.py")) == "error"


def test_attempts_that_get_further_are_not_counted_against_the_cell() -> None:
    def attempts(*steps: int, kind: str = "lost") -> list[dict[str, Any]]:
        return [{"kind": kind, "step": step} for step in steps]

    retries = Retries(errors=2, losses=3)
    assert not retries.exhausted(attempts(0, 0))
    assert retries.exhausted(attempts(0, 0, 0))
    assert not retries.exhausted(attempts(1, 2, 3, 4, 5))
    assert retries.exhausted(attempts(1, 2, 2, 2))
    assert not retries.exhausted(attempts(0, kind="error"))
    assert retries.exhausted(attempts(5, 5, kind="error"))
    assert not retries.exhausted(attempts(5, 6, kind="error"))
    assert not retries.exhausted(attempts(0, 0) + attempts(0, kind="hang"))


def test_a_stop_makes_the_run_leave_and_gives_the_cell_back(tmp_path: Path) -> None:
    sweep, lease = held(tmp_path)
    stop = Stop()

    def behaviour(asked: Callable[[], bool]) -> dict[str, float]:
        assert not asked()
        stop(signal.SIGTERM, None)
        assert asked()
        raise Interrupted

    assert work(sweep, lease, runner(behaviour), stop) == "released"
    assert sweep.snapshot().count("waiting") == 4


def test_a_run_that_lost_its_cell_is_stopped_and_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.05)
    sweep, lease = held(tmp_path)

    def behaviour(asked: Callable[[], bool]) -> dict[str, float]:
        sweep.recover({lease.owner.rpartition("|")[2]: Failure("lost", "Test", "taken by the test", 0)})
        while not asked():
            time.sleep(0.01)
        raise AssertionError("stop must raise, so that not even a checkpoint is written")

    assert work(sweep, lease, runner(behaviour), Stop()) == "lost"
    assert sweep.snapshot().cells[0].status == "waiting"
    assert not (sweep.cell_folder(lease) / "attempts" / "1" / "error.txt").read_text().count("Traceback")


def test_a_run_waits_while_its_lease_cannot_be_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(worker, "TTL_S", 0.4)
    sweep, lease = held(tmp_path)
    down, report = threading.Event(), sweep.report

    def unreachable(*arguments: Any) -> None:
        while down.is_set():
            time.sleep(0.01)
        report(*arguments)

    monkeypatch.setattr(sweep, "report", unreachable)
    with Keeper(sweep, lease, Stop()) as keeper:
        assert keeper.stop() is False
        down.set()
        time.sleep(0.5)
        answers: list[bool] = []
        poll = threading.Thread(target=lambda: answers.append(keeper.stop()))
        poll.start()
        poll.join(0.3)
        assert not answers, "the run went on although another worker may have its cell"
        down.clear()
        poll.join(10)
        assert answers == [False]
        down.set()
        time.sleep(0.5)
        keeper._stop(signal.SIGTERM, None)
        with pytest.raises(LeaseLost, match="could not be renewed before leaving"):
            keeper.stop()
        down.clear()


def test_progress_keeps_rare_metrics_and_counts_tokens_from_where_the_attempt_began(tmp_path: Path) -> None:
    sweep, lease = held(tmp_path)
    with Keeper(sweep, lease, Stop()) as keeper:
        keeper.on_progress(Progress(51, 100, {"eval/validation/accuracy": 0.5, "cost/generated_tokens": 9000.0}))
        time.sleep(0.1)
        keeper.on_progress(Progress(52, 100, {"cost/generated_tokens": 9300.0, "kl/ref": float("nan")}))
        shown = keeper.shown()
    assert (shown["step"], shown["started_at"]) == (52, 50)
    assert shown["metrics"] == {"eval/validation/accuracy": 0.5, "cost/generated_tokens": 9300.0}
    assert 0 < shown["tokens_per_second"] <= 3000.0


def start(folder: Path, *more: str, parent: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "suite.worker", "--folder", str(folder), "--runner", "tests.suite.fake_runner:run"]
    command += ["--parent", str(parent or os.getpid()), *more]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)
    return found


def test_a_worker_leaves_when_its_parent_is_gone_and_gives_its_cell_back(tmp_path: Path) -> None:
    sweep = Sweep.open(STUDY, tmp_path)
    (tmp_path / "plan.json").write_text('{"a": {"seconds": 0.1}, "b": {"seconds": 0.1}}')
    process = start(tmp_path)
    wait_for(lambda: sweep.snapshot().count("running"))
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == worker.STOPPED
    assert sweep.snapshot().count("running") == 0
    assert sweep.snapshot().count("failed") == 0


def test_a_worker_leaves_in_time_though_its_run_does_not_poll(tmp_path: Path) -> None:
    sweep = Sweep.open(STUDY, tmp_path)
    (tmp_path / "plan.json").write_text('{"a": {"hang_at": 3}}')
    process = start(tmp_path, "--leave-within", "0.5")
    wait_for(lambda: any(cell.step == 2 for cell in sweep.snapshot().cells))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == worker.STOPPED
    cell = sweep.snapshot().cells[0]
    assert (cell.status, cell.error) == ("waiting", None), "it was given back, and a stop is no failure"
    assert "asked to leave" in (tmp_path / cell.folder / "log.txt").read_text()


def test_a_worker_leaves_in_time_though_its_storage_is_locked(tmp_path: Path) -> None:
    sweep = Sweep.open(STUDY, tmp_path)
    (tmp_path / "plan.json").write_text('{"a": {"hang_at": 3}}')
    process = start(tmp_path, "--leave-within", "0.5")
    wait_for(lambda: any(cell.step == 2 for cell in sweep.snapshot().cells))
    with sweep.store.lock():
        process.send_signal(signal.SIGTERM)
        assert process.wait(storage.LOCK_TIMEOUT_S / 2) == worker.STOPPED


def test_a_hung_cell_is_recorded_with_its_stacks_and_ends_its_worker(tmp_path: Path) -> None:
    sweep = Sweep.open(STUDY, tmp_path)
    (tmp_path / "plan.json").write_text('{"a": {"hang_at": 3}}')
    process = start(tmp_path, "--hang-after", "1")
    assert process.wait(60) == worker.HUNG
    cell = sweep.snapshot().cells[0]
    assert cell.status == "waiting", "a hang is worth another try"
    assert cell.error is not None
    assert cell.error.startswith("hang: Hang: no progress for 1 s")
    assert "_misbehave" in (tmp_path / cell.folder / "attempts" / "1" / "error.txt").read_text()


def test_a_worker_with_other_libraries_is_refused_unless_it_is_told_to_mix(tmp_path: Path) -> None:
    sweep = Sweep.open(STUDY, tmp_path)
    theirs = {**sweep.study.user_attrs["provenance"]}
    theirs["versions"] = {**theirs["versions"], "torch": "1.0"}
    sweep.study.set_user_attr("provenance", theirs)
    process = start(tmp_path)
    assert process.stderr is not None
    words = process.stderr.read().decode()
    assert words.startswith("study 'mini' runs with other library versions: torch 1.0 against")
    assert process.wait(60) == 2
    assert sweep.snapshot().count("waiting") == 4
    with pytest.raises(ValueError, match=r"torch 1.0 against .*pass --allow-mixed to record both"):
        Sweep.open(STUDY, tmp_path)
    Sweep.open(STUDY, tmp_path, allow_mixed=True)
    assert start(tmp_path, "--allow-mixed").wait(60) == 0
    assert sweep.snapshot().exit_code == 0


def test_reasons_are_one_bounded_line() -> None:
    reason = Failure("error", "RuntimeError", "first\n  second " + "x" * 5000, 3).reason
    assert reason.startswith("error: RuntimeError: first second xxx")
    assert reason.endswith(" (step 3)")
    assert len(reason) < 450


def test_the_dashboards_curve_holds_every_evaluation_at_its_own_step(tmp_path: Path) -> None:
    sweep, lease = held(tmp_path)
    with Keeper(sweep, lease, Stop()) as keeper:
        for step, value, seconds in (
            (0, 0.4, 1.0),
            (1, 0.4, 1.0),
            (20, 0.4, 1.0),
            (20, 0.4, 2.0),
            (21, 0.4, 2.0),
            (40, 0.6, 3.0),
        ):
            keeper.on_progress(Progress(step, 40, {"eval/validation/accuracy": value, "time/eval_s": seconds}))
    trial = next(t for t in sweep.study.get_trials() if t._trial_id == lease.trial)
    assert trial.intermediate_values == {0: 0.4, 20: 0.4, 40: 0.6}
    with Keeper(sweep, lease, Stop()) as resumed:
        resumed.on_progress(Progress(41, 60, {"eval/validation/accuracy": 0.6, "time/eval_s": 3.0}))
    trial = next(t for t in sweep.study.get_trials() if t._trial_id == lease.trial)
    assert 41 not in trial.intermediate_values
