"""Worker processes that compare answers, and that can be killed.

`WorkerPool.run` returns one reply per job, in order, by its deadline, whatever the answers are. Why processes: no
timeout inside a process stops every computation that a model's answer can ask for (`9^{9^{9^9}}`), and math-verify's
own timeouts work in a main thread only. A worker is this module run as a program (no fork, no pickle, no torch);
parent and worker exchange JSON, each message behind its length. It ends when its parent ends: its input closes, and on
Linux the kernel kills it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["right", "wrong", "no_answer", "timeout", "error", "scored", "abstained"]

START_S = 120.0  # to import sympy on a busy machine
_CRASHES, _KILLS = 2, 5
"""Deaths of its worker after which a job is given up: by its own fault, and at the hands of others."""
_LENGTH = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Job:
    """One question to a worker: are two answers equal (`judge`), or what does math-verify say of a text (`raw`)?"""

    kind: Literal["judge", "raw"]
    gold: str
    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A worker's reply. `final` is False where asking again could give another one, so it must not be remembered."""

    outcome: Outcome
    flags: tuple[str, ...] = ()
    final: bool = True


LATE = Reply("timeout", ("batch_deadline",), final=False)


@dataclass(frozen=True, slots=True)
class _Task:
    job: Job
    until: float
    reply: Future[Reply]


class _Worker:
    """One process. Create it in a thread that outlives it: Linux kills it when that thread ends."""

    def __init__(self, memory_gib: float) -> None:
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # gmpy2 computes in C, where no alarm is heard
        env = os.environ | threads | {"SYMPY_GROUND_TYPES": "python", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "suite.grading_pool", str(int(memory_gib * 2**30)), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=env,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    def receive(self, until: float) -> Any:
        """The next message; EOFError where the process has ended, TimeoutError at `until` (monotonic seconds)."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        return json.loads(self._read(length, until))

    def send(self, message: Any, until: float) -> None:
        data = memoryview(_frame(message))
        while data:
            _wait_for(self._in, select.POLLOUT, until)
            try:
                data = data[os.write(self._in, data) :]
            except BrokenPipeError as error:
                raise EOFError("the grading worker has ended") from error

    def _read(self, size: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait_for(self._out, select.POLLIN, until)
            piece = os.read(self._out, size - len(data))
            if not piece:
                raise EOFError("the grading worker has ended")
            data += piece
        return bytes(data)

    def was_killed(self) -> bool:
        """Of one that ended and was stopped: whether a signal that it cannot have sent itself ended it."""
        return self.process.returncode in (-signal.SIGKILL, -signal.SIGTERM)

    def stop(self) -> None:
        """Kill and reap; nothing to lose, as a worker keeps no state."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Up to `workers` processes, started with the first job, each driven by a thread of its own.

    A job that takes longer than `deadline_s` is a timeout: its worker is killed and replaced. A job whose worker
    crashes is tried once more and is then an error; one whose worker is killed by somebody else, four times more. Safe
    to use from several threads and after a fork. RuntimeError where a worker cannot start.
    """

    def __init__(self, workers: int, deadline_s: float, memory_gib: float) -> None:
        self.workers, self.deadline_s, self.memory_gib = workers, deadline_s, memory_gib
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.respawns = 0
        self._pid = os.getpid()
        self._closed = False
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._live: dict[int, _Worker] = {}
        self._ready = threading.Semaphore(0)

    def start(self) -> None:
        """Start the drivers if they do not run (threads do not survive a fork: a forked child gets its own)."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._reset()
        with self._lock:
            if self._closed:
                raise RuntimeError("this grader is closed; make a new one")
            while len(self._threads) < self.workers:
                slot = len(self._threads)
                thread = threading.Thread(target=self._drive, args=(slot,), name=f"grading-{slot}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def warm_up(self) -> None:
        """Return when every worker has started, so that no job waits for one."""
        self.start()
        until = time.monotonic() + START_S
        while len(self._live) < self.workers and time.monotonic() < until and not self._closed:
            self._ready.acquire(timeout=0.5)

    def pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.process.pid for worker in list(self._live.values()) if worker.process.poll() is None]

    def run(self, jobs: Sequence[Job], until: float) -> list[Reply]:
        """One reply per job, in order, at the latest one second after `until` (monotonic seconds)."""
        if not jobs:
            return []
        self.start()
        tasks = [_Task(job, until, Future()) for job in jobs]
        try:
            for task in tasks:
                self._queue.put(task)
            # a job under way is stopped at `until` by its driver, which then needs a moment to report
            waiting = [task.reply for task in tasks]
            done, _ = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            wait([reply for reply in waiting if reply not in done and not reply.cancel()], timeout=1.0)
        finally:
            for task in tasks:
                task.reply.cancel()
        return [t.reply.result() if t.reply.done() and not t.reply.cancelled() else LATE for t in tasks]

    def close(self) -> None:
        """End all workers and threads; jobs under way become errors. May be called twice."""
        with self._lock:
            if self._closed or self._pid != os.getpid():
                return
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for worker in list(self._live.values()):
            worker.process.kill()  # wakes its driver, which reaps it
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection may close the pool anywhere
                thread.join(timeout=10)

    def _drive(self, slot: int) -> None:
        try:
            self._worker(slot)
            self._ready.release()
        except RuntimeError:
            self._ready.release()  # the first job tries again, and tells
        while (task := self._queue.get()) is not None:
            if not task.reply.set_running_or_notify_cancel():
                continue
            try:
                task.reply.set_result(self._answer(slot, task))
            except RuntimeError as error:
                task.reply.set_exception(error)
        self._discard(slot)

    def _answer(self, slot: int, task: _Task) -> Reply:
        crashes = kills = 0
        while crashes < _CRASHES and kills < _KILLS and not self._closed:
            worker = self._worker(slot)
            until = min(time.monotonic() + self.deadline_s, task.until)
            try:
                worker.send(asdict(task.job), until)
                message = worker.receive(until)
                return Reply(message["outcome"], tuple(message["flags"]))
            except TimeoutError:
                self._discard(slot)
                return LATE if until == task.until else Reply("timeout")
            except EOFError:
                self._discard(slot)
                crashes, kills = (crashes, kills + 1) if worker.was_killed() else (crashes + 1, kills)
        return Reply("error", final=False)

    def _worker(self, slot: int) -> _Worker:
        """The slot's worker, started if there is none or it was killed while idle."""
        worker = self._live.get(slot)
        if worker is not None and worker.process.poll() is None:
            return worker
        self._discard(slot)
        kills = 0
        while True:
            worker = _Worker(self.memory_gib)
            try:
                worker.receive(time.monotonic() + START_S)
            except (EOFError, TimeoutError) as error:
                worker.stop()
                kills += 1
                if isinstance(error, EOFError) and worker.was_killed() and kills < _KILLS:
                    continue
                raise RuntimeError(
                    f"a grading worker did not start (exit status {worker.process.returncode}): see its messages on "
                    "stderr, and check that math-verify can be imported and that memory_gib is at least 0.5"
                ) from error
            self._live[slot] = worker
            return worker

    def _discard(self, slot: int) -> None:
        worker = self._live.pop(slot, None)
        if worker is not None:
            worker.stop()
            if not self._closed:
                with self._lock:
                    self.respawns += 1


def _frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _wait_for(descriptor: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def _bind_to_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent, also in the middle of a computation (Linux only)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)  # the parent ended before the line above


def main() -> None:
    """Serve jobs from standard input until it closes."""
    memory, parent = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _bind_to_parent(parent)
    if sys.platform.startswith("linux"):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not land among the replies
    logging.disable(logging.CRITICAL)  # math-verify logs each timeout with the whole text; the reply says it shorter

    from suite.grading_math import judge, raw

    replies.write(_frame("ready"))
    replies.flush()
    while len(header := sys.stdin.buffer.read(_LENGTH.size)) == _LENGTH.size:
        job = Job(**json.loads(sys.stdin.buffer.read(_LENGTH.unpack(header)[0])))
        reply = judge(job.gold, job.text) if job.kind == "judge" else raw(job.gold, job.text)
        replies.write(_frame(asdict(reply)))
        replies.flush()


if __name__ == "__main__":
    main()
