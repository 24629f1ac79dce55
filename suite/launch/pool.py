"""Worker processes of one run: started, heard when they die, told to stop, and kept going until no cell is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from suite.declaration import Choice
from suite.failures import MISTAKE, Failure
from suite.launch.display import Display
from suite.launch.machine import memory_kills
from suite.storage import StorageDown
from suite.sweep import Sweep

LOOK_S = 2.0
"""Seconds between looks at the storage."""
GRACE_S = 10.0
"""Seconds beyond the time that workers have to leave, after which they are killed."""
LINGER_S = 60.0
"""Seconds in which workers must have ended when no cell is left."""

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
_ENOUGH = 6
"""A worker that could not start counts 3, one that died before it had a cell 1; at this sum no more are started."""


class Pool:
    """The worker processes. Each has a log under `workers/` in the study's folder, and the GPUs of one of `groups`:
    one that no other worker has, as far as there are such."""

    def __init__(
        self, folder: Path, arguments: Sequence[str], environment: dict[str, str], groups: Sequence[str] = ()
    ) -> None:
        self._folder, self._arguments, self._environment = folder, list(arguments), environment
        self._groups, self._group_of = list(groups), dict[str, str]()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "workers").mkdir(exist_ok=True)

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def name_of(self, process: int | None) -> str | None:
        """The worker that runs as a process; None if none does."""
        return next((name for name, each in self._running.items() if each.pid == process), None)

    def log(self, name: str) -> Path:
        """Where a worker's output goes while it has no cell."""
        return self._folder / "workers" / f"{name}.log"

    def start(self) -> None:
        """Starts a worker under a name that is never used again."""
        name = uuid.uuid4().hex[:8]
        command = [sys.executable, "-m", "suite.worker", "--folder", str(self._folder), "--name", name]
        environment = self._environment
        if self._groups:
            held = [self._group_of[other] for other in self._running]
            self._group_of[name] = min(self._groups, key=held.count)
            environment = {**environment, "CUDA_VISIBLE_DEVICES": self._group_of[name]}
        with self.log(name).open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on once.
            self._running[name] = subprocess.Popen(
                [*command, "--parent", str(os.getpid()), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def gone(self) -> dict[str, int]:
        """The workers that ended since the last call, with their exit codes (minus the signal, if one killed them)."""
        over = {name: code for name, process in self._running.items() if (code := process.poll()) is not None}
        for name in over:
            self._close(name)
        return over

    def stop(self) -> None:
        """Asks every worker to write a checkpoint and leave."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def kill(self, *names: str) -> None:
        """Kills these workers, or all, with every process that they started."""
        for name in names or self._running:
            _kill_group(self._running[name].pid)

    def end(self) -> None:
        """Kills whatever still runs and waits for it."""
        self.kill()
        for name, process in list(self._running.items()):
            process.wait()
            self._close(name)

    def _close(self, name: str) -> None:
        process = self._running.pop(name)
        if process.stdin is not None:
            process.stdin.close()
        # A worker that was killed may have left processes of its own.
        _kill_group(process.pid)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


class Supervisor:
    """Keeps the workers of a pool going, shows what they do, and passes on that the user wants to stop."""

    def __init__(
        self, sweep: Sweep, pool: Pool, display: Display, choice: Choice, heard: list[int], grace_s: float
    ) -> None:
        self._grace_s = grace_s
        self._sweep, self._pool, self._display, self._choice, self._heard = sweep, pool, display, choice, heard
        self._answered = 0
        self._deadline: float | None = None
        self._dead: dict[str, Failure] = {}
        self._left = True
        self._barren = 0
        self._kills = memory_kills()
        self._down = False

    def run(self, count: int) -> None:
        """Starts `count` workers and returns when all have ended."""
        for _ in range(count):
            self._pool.start()
        looked = 0.0
        # Deaths that the storage has not heard of yet keep it going, unless the user wants to leave.
        while len(self._pool) or (self._dead and not self._answered):
            self._answer()
            over = self._pool.gone()
            if over or time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                self._bury(over)
                try:
                    self._look()
                    self._down = False
                except StorageDown as error:
                    self._unlock(error)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._pool.kill()
            time.sleep(0.1)

    def _unlock(self, error: StorageDown) -> None:
        """Says that the storage does not answer; kills the own worker that keeps it locked, if there is one."""
        if not self._down:
            self._display.say(f"{error}; waiting for it")
        self._down = True
        stuck = self._pool.name_of(self._sweep.store.holder())
        if stuck is not None:
            self._display.say(f"worker {stuck}: keeps the storage locked, killed")
            self._pool.kill(stuck)

    def _answer(self) -> None:
        if len(self._heard) == self._answered:
            return
        self._answered = len(self._heard)
        if self._answered == 1:
            self._display.say("stopping: workers write their checkpoints (once more kills them)")
            self._deadline = time.monotonic() + self._grace_s
            self._pool.stop()
        else:
            self._display.say("killing the workers; their cells go on from their last checkpoints")
            self._pool.kill()

    def _bury(self, over: dict[str, int]) -> None:
        for name, code in over.items():
            if code == 0:
                continue
            failure = self._death(code)
            self._dead[name] = failure
            if not self._answered:
                words = _last_words(self._pool.log(name)) if code == MISTAKE else failure.message
                self._display.say(f"worker {name}: {words}")
                self._barren += 3 if code == MISTAKE else 0

    def _death(self, code: int) -> Failure:
        if code >= 0:
            return Failure("lost", "WorkerLost", f"its worker ended with exit code {code}", 0)
        name, kills = signal.Signals(-code).name, memory_kills()
        if name == "SIGKILL" and kills > self._kills:
            self._kills = kills
            return Failure("out of memory", name, "the kernel killed its worker for want of memory", 0)
        if name in _CRASHES:
            return Failure("error", name, f"its worker crashed with {name}", 0)
        return Failure("lost", name, f"its worker was killed by {name}", 0)

    def _look(self) -> None:
        freed = self._sweep.recover(self._dead)
        everything = self._sweep.snapshot()
        fruitful = set(freed.values()) | {cell.worker for cell in everything.cells}
        status = everything.part(self._choice.takes)
        self._display.show(status)
        for cell, name in freed.items():
            if name in self._pool:
                self._display.say(f"worker {name}: silent, killed; {cell} is free again")
                self._pool.kill(name)
        self._left = bool(status.count("waiting") + status.count("running"))
        if not self._left and self._deadline is None:
            self._deadline = time.monotonic() + LINGER_S
        for name in self._dead:
            self._barren = 0 if name in fruitful else self._barren + 1
            if self._left and not self._answered and self._barren < _ENOUGH:
                self._pool.start()
        self._dead = {}


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it could not start, and said nothing"
