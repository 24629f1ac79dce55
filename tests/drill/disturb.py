"""Runs a study by the command line while its processes are killed at random, until every cell is finished."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from suite.sweep import Sweep
from tests.suite.postgres import Server

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600.0
"""Longest time without a trace of progress: then something is stuck."""

KINDS = ("worker at work", "worker at work", "worker", "grader", "launcher")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@dataclass
class Tally:
    """What was done to a study."""

    kills: Counter[str] = field(default_factory=Counter)
    launches: int = 0
    outages: int = 0
    resumes: int = 0
    """Attempts beyond the first, over all cells."""
    seconds: float = 0.0

    def words(self) -> str:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.kills.items())) or "none"
        return (
            f"{self.kills.total()} kills ({kinds}), {self.outages} outages of the storage, {self.launches} launches, "
            f"{self.resumes} resumes, {self.seconds:.0f} s"
        )


def environment(storage: str | None) -> dict[str, str]:
    """The surroundings of a launcher: one code, one thread, W&B offline, the storage."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"SUITE_COMMIT": "0123456789", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return kept | ({"SUITE_STORAGE": storage} if storage else {})


def disturb(
    study: Path, folder: Path, *, workers: int, kills: int, seed: int = 0, server: Server | None = None
) -> Tally:
    """Run the study to its end under `kills` kills; a server is stopped and started again twice in between.

    Raises AssertionError when nothing moves any more, and when the launcher finds a mistake.
    """
    return _Drill(study, folder, workers, kills, random.Random(seed), server).run()


class _Drill:
    def __init__(
        self, study: Path, folder: Path, workers: int, kills: int, chance: random.Random, server: Server | None
    ) -> None:
        self.study, self.folder, self.workers, self.kills = study, folder, workers, kills
        self.chance, self.server, self.tally = chance, server, Tally()
        self.storage = server.url() if server else None
        self.outages = [kills // 3, 2 * kills // 3] if server else []
        self.launcher: subprocess.Popen[bytes]

    def run(self) -> Tally:
        began = time.monotonic()
        self._launch()
        try:
            while self._next():
                if self.tally.kills.total() < self.kills:
                    self._kill()
                if self.outages and self.tally.kills.total() >= self.outages[0]:
                    self._outage()
        finally:
            self.launcher.kill()
            self.launcher.wait()
        self.tally.seconds = time.monotonic() - began
        trials = Sweep.attach(self.folder, self.storage).study.trials
        self.tally.resumes = sum(trial.user_attrs["lease"]["number"] - 1 for trial in trials)
        return self.tally

    def _launch(self) -> None:
        command = [sys.executable, "-c", "import sys; from suite.cli import main; sys.exit(main())"]
        command += ["run", str(self.study), "--workers", str(self.workers), "--folder", str(self.folder)]
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.launcher = subprocess.Popen(command, stdout=log, stderr=log, env=environment(self.storage), cwd=ROOT)
        self.tally.launches += 1

    def _next(self) -> bool:
        """Wait for the next trace of progress, launching again where the launcher has ended; False when all is done."""
        mark, until = time.time(), time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            code = self.launcher.poll()
            if code == 0:
                return False
            if code is not None:
                assert code != 1, f"cells failed: see {self.folder}.log"
                assert self.tally.launches < 2 * self.kills + 5, f"the launcher ends again and again: {self.folder}.log"
                self._launch()
            if self._newest() > mark:
                return True
            time.sleep(0.05)
        raise AssertionError(f"no progress for {PATIENCE_S:.0f} s: see {self.folder}.log")

    def _newest(self) -> float:
        traces = ("rollouts/*.parquet", "evaluations/*.parquet", "checkpoints/step-*", "result.json")
        found = [path for trace in traces for path in self.folder.glob(f"cells/*/{trace}")]
        return max((path.stat().st_mtime for path in found if path.exists()), default=0.0)

    def _kill(self) -> None:
        time.sleep(self.chance.uniform(0.0, 0.7))
        kind, number = self.chance.choice(KINDS), self.chance.choice(SIGNALS)
        targets = self._targets(kind)
        if not targets:
            return
        try:
            os.kill(self.chance.choice(targets), number)
        except ProcessLookupError:
            return
        self.tally.kills[f"{kind.removesuffix(' at work')} {number.name}"] += 1
        if kind == "launcher":
            self.launcher.wait(timeout=PATIENCE_S)

    def _targets(self, kind: str) -> list[int]:
        if kind == "launcher":
            return [self.launcher.pid]
        workers = [pid for pid, words in _processes() if "suite.worker" in words and str(self.folder) in words]
        if kind == "worker":
            return workers
        if kind == "worker at work":
            return [pid for pid in workers if _output(pid).endswith("/log.txt")]
        return [pid for pid, words in _processes() if "suite.grading_pool" in words and _parent(pid) in workers]

    def _outage(self) -> None:
        assert self.server is not None
        self.outages.pop(0)
        self.server.stop()
        time.sleep(self.chance.uniform(1.0, 4.0))
        self.server.start()
        self.tally.outages += 1


def _processes() -> list[tuple[int, list[str]]]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found.append((int(path.name), (path / "cmdline").read_text().split("\0")))
        except OSError:  # it has ended meanwhile
            continue
    return found


def _parent(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _output(process: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/fd/1")
    except OSError:
        return ""
