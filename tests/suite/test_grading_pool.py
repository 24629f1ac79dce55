"""The worker processes: bounded time, death, retries, threads, nested processes, no leftovers (seen through /proc)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from suite.grading import Grader
from suite.grading_pool import Job, Reply, WorkerPool

ROOT = Path(__file__).resolve().parents[2]


def box(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    until = time.monotonic() + 20
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


BOMBS = [
    r"10^{10^{10}}",
    r"9^{9^9}",
    r"5^{5^{5^{5^5}}}",
    "(10^9)!",
    "100000000!",
    r"2^{2^{2^{2^{2^2}}}}",
    r"\binom{10^8}{5\cdot10^7}",
    r"\gcd(2^{10^9}-1,2^{10^9+1}-1)",
    "(" * 400 + "7" + ")" * 400,
    "9**9**9**9",
    r"9^{9^{9^{9}}}+1",
]


@pytest.mark.slow
def test_bombs_end_in_bounded_time_and_are_not_asked_twice() -> None:
    pairs = [("7", box(bomb)) for bomb in BOMBS] + [("7", box("7"))]
    with Grader(workers=2, deadline_s=7, batch_deadline_s=50) as grader:
        grader.warm_up()
        start = time.monotonic()
        verdicts = grader.grade_batch(pairs)
        assert time.monotonic() - start < 52
        assert {v.outcome for v in verdicts[:-1]} <= {"wrong", "timeout"}
        assert "timeout" in {v.outcome for v in verdicts}
        assert [v.answer for v in verdicts[:-1]] == BOMBS
        assert verdicts[-1].outcome == "right"
        again = time.monotonic()
        if grader.counters["batch_deadline"] == 0:
            assert grader.grade_batch(pairs) == verdicts
            assert time.monotonic() - again < 5


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers that misbehave when told to: a stand-in for a computation that hears no alarm, and for a crash."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if 'suite.grading_pool' in ' '.join(sys.orig_argv):\n"
        "    class Module:\n"
        "        @staticmethod\n"
        "        def judge(gold, text):\n"
        "            from suite.grading_pool import Reply\n"
        "            print('noise on standard output', flush=True)\n"
        "            if text == 'hang': time.sleep(1000)\n"
        "            if text == 'crash': os._exit(3)\n"
        "            if text.startswith('killed'):\n"
        "                _, times, mark = text.split(' ')\n"
        "                with open(mark, 'a') as file: file.write('x')\n"
        "                if os.path.getsize(mark) <= int(times): os.kill(os.getpid(), 15 if times == '4' else 9)\n"
        "            if text.startswith('crash once') and not os.path.exists(text[11:]):\n"
        "                open(text[11:], 'w').close(); os._exit(3)\n"
        "            return Reply('right' if gold == text else 'wrong')\n"
        "        raw = judge\n"
        "    sys.modules['suite.grading_math'] = Module\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("hanging")
def test_a_hanging_job_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    pool = WorkerPool(workers=1, deadline_s=1.0, memory_gib=2)
    texts = ["a", "hang", "a", "crash", f"crash once {tmp_path / 'mark'}", "b"]
    replies = pool.run([Job("judge", "a", text) for text in texts], time.monotonic() + 60)
    assert replies[0] == replies[2] == Reply("right")  # also: printing does not disturb the replies
    assert replies[1] == Reply("timeout")
    assert replies[3] == Reply("error", final=False)
    assert replies[4] == replies[5] == Reply("wrong")
    assert pool.respawns == 4  # one hang, two crashes, one crash
    (pid,) = pool.pids()
    pool.close()
    assert not Path(f"/proc/{pid}").exists()  # reaped, not a zombie
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([Job("judge", "a", "a")], time.monotonic() + 1)


@pytest.mark.usefixtures("hanging")
def test_a_job_whose_worker_is_killed_again_and_again_by_others_is_still_answered(tmp_path: Path) -> None:
    pool = WorkerPool(workers=1, deadline_s=20.0, memory_gib=2)
    texts = [f"killed {times} {tmp_path / str(times)}" for times in (2, 4, 5)]
    replies = pool.run([Job("judge", "a", text) for text in texts], time.monotonic() + 120)
    assert replies == [Reply("wrong"), Reply("wrong"), Reply("error", final=False)]
    pool.close()


@pytest.mark.usefixtures("hanging")
def test_the_deadline_of_a_batch_bounds_it_and_its_verdicts_are_not_final() -> None:
    pool = WorkerPool(workers=1, deadline_s=60, memory_gib=2)
    pool.warm_up()
    start = time.monotonic()
    replies = pool.run([Job("judge", "a", "a"), Job("judge", "a", "hang"), Job("judge", "a", "b")], start + 2)
    assert time.monotonic() - start < 10
    assert replies == [Reply("right"), *2 * [Reply("timeout", ("batch_deadline",), final=False)]]
    assert pool.run([Job("judge", "a", "b")], time.monotonic() + 60) == [Reply("wrong")]
    pool.close()


@pytest.mark.usefixtures("hanging")
def test_closing_does_not_wait_for_a_hanging_job() -> None:
    pool = WorkerPool(workers=1, deadline_s=60, memory_gib=2)
    pool.warm_up()
    (pid,) = pool.pids()
    found: list[Reply] = []
    caller = threading.Thread(target=lambda: found.extend(pool.run([Job("judge", "a", "hang")], time.monotonic() + 50)))
    caller.start()
    time.sleep(0.5)
    pool.close()
    caller.join(timeout=20)
    assert [reply.outcome for reply in found] == ["error"]
    assert gone(pid)


def test_a_worker_that_cannot_start_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')\n")
    monkeypatch.setattr("suite.grading_pool.Path.resolve", lambda _: tmp_path / "suite" / "grading_pool.py")
    pool = WorkerPool(workers=1, deadline_s=5, memory_gib=2)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(RuntimeError, match="did not start"):
        pool.run([Job("judge", "1", "2")], time.monotonic() + 300)
    pool.close()


def test_a_killed_worker_is_replaced_and_no_verdict_is_lost() -> None:
    with Grader(workers=2, want_raw=False) as grader:
        grader.warm_up()
        pids = grader.worker_pids()
        assert len(pids) == 2
        killer = threading.Timer(0.3, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
        killer.start()
        verdicts = grader.grade_batch([(rf"\frac{{{n}}}{{7}}", box(rf"\frac{{{2 * n}}}{{14}}")) for n in range(1, 200)])
        killer.join()
        assert {v.outcome for v in verdicts} == {"right"}
        assert grader.grade_batch([("x+1", box("1+x"))])[0].outcome == "right"
        assert grader.counters["respawns"] >= 1
        assert not set(pids) & set(grader.worker_pids())


def test_works_from_other_threads_at_once_and_outlives_them() -> None:
    with Grader(workers=1, want_raw=False) as grader:
        outcomes: dict[int, str] = {}

        def work(n: int) -> None:
            verdict = grader.grade_batch([(rf"\frac{{{n}}}{{3}}", box(rf"\frac{{{2 * n}}}{{6}}"))])[0]
            outcomes[n] = verdict.outcome

        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == dict.fromkeys((1, 2, 4, 5), "right")
        (pid,) = grader.worker_pids()
        time.sleep(0.2)
        assert alive(pid)  # it must not die with the thread that first asked
        assert grader.counters["right"] == 4


def test_works_in_a_forked_child_of_a_process_that_has_graded() -> None:
    with Grader(workers=1, want_raw=False) as grader:
        assert grader.grade_batch([("x+1", box("1+x"))])[0].outcome == "right"
        child = os.fork()
        if child == 0:
            outcome = grader.grade_batch([("x+2", box("2+x"))])[0].outcome
            grader.close()
            os._exit(0 if outcome == "right" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert grader.grade_batch([("x+3", box("3+x"))])[0].outcome == "right"


PARENT = r"""
import multiprocessing, os, signal, sys

def work(queue):
    from suite.grading import Grader
    grader = Grader(workers=1, want_raw=False)
    outcome = grader.grade_batch([("x+1", r"\boxed{1+x}")])[0].outcome
    queue.put((outcome, grader.worker_pids()))
    queue.close(); queue.join_thread()
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,), daemon=True)
    child.start()
    outcome, pids = queue.get(timeout=120)
    child.join()
    print(outcome, *pids)
"""


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_no_worker_survives_a_spawned_and_daemonic_parent(tmp_path: Path, how: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    done = subprocess.run(
        [sys.executable, str(script), how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    outcome, pid = done.stdout.split()
    assert outcome == "right"
    assert gone(int(pid))


@pytest.mark.usefixtures("hanging")
def test_a_worker_busy_in_a_computation_dies_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import threading, time\n"
        "from suite.grading import Grader\n"
        "grader = Grader(workers=1, want_raw=False, deadline_s=1000); grader.warm_up()\n"
        "threading.Thread(target=grader.grade_batch, args=([('a', r'\\boxed{hang}')],)).start()\n"
        "time.sleep(0.5); print(grader.worker_pids()[0], flush=True); time.sleep(100)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    assert gone(pid)


def test_workers_are_limited_and_light() -> None:
    with Grader(workers=1, memory_gib=1.5) as grader:
        grader.warm_up()
        (pid,) = grader.worker_pids()
        maps = Path(f"/proc/{pid}/maps").read_text()
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        limits = Path(f"/proc/{pid}/limits").read_text()
    assert "libtorch" not in maps
    assert {"SYMPY_GROUND_TYPES=python", "OMP_NUM_THREADS=1"} <= set(environment)
    assert str(int(1.5 * 2**30)) in next(line for line in limits.splitlines() if line.startswith("Max address space"))


def test_odd_text_arrives_whole() -> None:
    odd = "\ud800 \0 \u2028 é" + "x" * 300_000
    with Grader(workers=1) as grader:
        verdicts = grader.grade_batch([("7", odd + box("7")), ("7", odd), ("7", box(odd))])
    assert [v.outcome for v in verdicts[:2]] == ["right", "no_answer"]
    assert verdicts[2].outcome in ("wrong", "timeout")
