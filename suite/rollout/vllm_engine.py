"""A vLLM engine in a process of its own, as its worker sees it: started once, asked, replaced when it has died."""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from suite import distributed
from suite.failures import EngineDied
from suite.rollout.remote import Answered, Asked
from suite.rollout.transfer import private_folder
from suite.rollout.vllm_host import ANSWER, FAILED, PART, READY

_ENVIRONMENT = {
    # the engine lives in the host's own process, so that the host's end is its end
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # functions are sent to the ranks of a tensor-parallel engine, all of them on this machine
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

ON_CPU = {
    # one decorated helper of vLLM would otherwise be compiled for most of a minute, even in eager mode
    "TORCHDYNAMO_DISABLE": "1",
}
ON_GPU = {
    # vLLM's attention in float32 is a Triton kernel, which would multiply in TF32: 13 bits less
    "TRITON_F32_DEFAULT": "ieee",
}
"""What a vLLM process needs in its environment, unless it says otherwise."""

GONE_S = 10.0
"""How long the end of an engine's own processes, which hold memory of its GPUs, is waited for, seconds."""


def require_vllm(what: str) -> None:
    """Raises ValueError if vLLM, which `what` says is needed, is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            f"{what}, and vLLM is not installed; run `make vllm-cpu` or `make vllm-gpu`, "
            "or take rollout.engine = 'in_process'"
        )


def python_path() -> str:
    """The PYTHONPATH with which another process finds this very package."""
    root = str(Path(__file__).resolve().parent.parent.parent)
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))


@dataclass(frozen=True)
class Settings:
    """What decides whether a running engine serves another cell."""

    architecture: str
    """The model's configuration, names and versions aside."""
    dtype: str
    max_model_len: int
    tensor_parallel_size: int
    memory_share: float
    enable_prefix_caching: bool
    trust_remote_code: bool
    transfer: str = "file"
    sleep: bool = False

    def options(self, model: str) -> dict[str, Any]:
        """The engine's arguments."""
        return {"model": model, **{name: value for name, value in asdict(self).items() if name != "architecture"}}


def architecture(folder: str) -> str:
    """Hash of a model folder's configuration without what does not shape the model; of the id where it is none."""
    described = Path(folder) / "config.json"
    if not described.is_file():
        return folder
    tree = json.loads(described.read_text(encoding="utf-8"))
    kept = {name: value for name, value in tree.items() if name not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Engine:
    """A running engine. It ends when it is closed, when it fails, and with this process."""

    settings: Settings
    process: subprocess.Popen[bytes]
    connection: Connection
    place: Path
    """Its folder in shared memory, with vLLM's own log."""
    comparable: dict[str, int] = field(default_factory=dict)
    """Tensors that can be compared with the learner's bit for bit, and how many copies of each the engine holds."""
    _stream: object | None = None
    """The generation under way, if there is one."""

    @classmethod
    def start(cls, settings: Settings, model: str) -> Engine:
        """Start an engine on a model. Raises EngineDied with vLLM's words if it does not come up."""
        require_vllm("rollout.engine is 'vllm'")
        place = private_folder()
        mine, theirs = socket.socketpair()
        with (place / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "suite.rollout.vllm_host", str(theirs.fileno()), str(os.getpid())],
                env=_environment(settings.tensor_parallel_size),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        theirs.close()
        engine = cls(settings, process, Connection(mine.detach()), place)
        atexit.register(engine.close)
        engine._send(settings.options(model))
        engine._receive(READY)
        return engine

    @property
    def dtype(self) -> str:
        """Precision of its weights."""
        return self.settings.dtype

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self.settings.max_model_len

    @property
    def alive(self) -> bool:
        return not self.connection.closed and self.process.poll() is None

    @property
    def generating(self) -> bool:
        """Whether a generation is under way, which anything that is asked now would end."""
        return self._stream is not None

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the host's method answers. Whatever it was generating is given up."""
        self._send((name, arguments))
        return self._receive(ANSWER)

    def stream(self, batches: Sequence[Sequence[Asked]], sampling: dict[str, Any]) -> Iterator[list[Answered]]:
        """The batches' completions, batch by batch, while the later ones are being generated."""
        self._send(("generate", (batches, sampling)))
        mine = self._stream = object()
        for number in range(len(batches)):
            if self._stream is not mine:
                raise RuntimeError(f"the engine was asked something else after {number} of {len(batches)} batches")
            part = self._receive(PART)
            if number == len(batches) - 1:
                self._receive(ANSWER)
                self._stream = None
            yield part

    def words(self) -> str:
        """What vLLM said last: the last error in its log, else its last lines."""
        lines = self._log().splitlines()
        errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?\w*(\.\w+)*(Error|Exception)\b", line)]
        return "\n".join(errors[-1:] or [line for line in lines if line.strip()][-3:])

    def _log(self) -> str:
        """vLLM's log so far; empty once the engine is closed, which removes it."""
        path = self.place / "log.txt"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def close(self) -> None:
        """End the engine with all its processes, and remove what it left in shared memory."""
        atexit.unregister(self.close)
        self.connection.close()
        _end_group(self.process)
        shutil.rmtree(self.place, ignore_errors=True)

    def _send(self, message: Any) -> None:
        try:
            if self._stream is not None:
                self._abandon()
            self.connection.send(message)
        except OSError as error:
            raise self._died() from error

    def _abandon(self) -> None:
        """Give up a generation under way: an empty one ends it; what was sent before its answer is thrown away."""
        self._stream = None
        self.connection.send(("generate", ([], {})))
        for _ in range(2):
            while self._next()[0] != ANSWER:
                pass

    def _receive(self, kind: str) -> Any:
        found, value = self._next()
        if found == FAILED:
            self.close_with_log()
            raise EngineDied(f"vLLM failed: {value}")
        assert found == kind, f"the engine sent {found!r} where {kind!r} was due"
        return value

    def _next(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _died(self) -> EngineDied:
        code, words = self.process.wait(), self.words()
        self.close_with_log()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDied(f"the vLLM engine ended with {how}; it said last: {words or 'nothing'}")

    def close_with_log(self) -> None:
        """Close, after copying vLLM's log to this process's standard error, which a sweep keeps with the cell."""
        if text := self._log():
            print(text[-20_000:], file=sys.stderr, flush=True)
        self.close()


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a group, with the group: no process of it runs, or holds memory, afterwards."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    until = time.monotonic() + GONE_S
    while _runs(leader.pid) and time.monotonic() < until:
        time.sleep(0.02)


def _runs(group: int) -> bool:
    """Whether a process of a group runs: one that nobody has waited for yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, found = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False


def _environment(devices: int) -> dict[str, str]:
    """The environment of an engine on so many devices."""
    there = ON_CPU if distributed.device().type == "cpu" else ON_GPU
    return {**_ENVIRONMENT, **there, **_own_environment(devices), "PYTHONPATH": python_path()}


def _own_environment(devices: int) -> dict[str, str]:
    """This process's environment for its engine: a rank's own place is not vLLM's, its GPUs are.

    On a CPU the workers of a tensor-parallel engine get a core each, which vLLM would have from NUMA nodes alone.
    """
    ranked = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ranked)}
    if devices > 1 and distributed.device().type == "cpu":
        kept = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, sorted(os.sched_getaffinity(0))[:devices])), **kept}
    if distributed.size() > 1 and (first := distributed.device().index) is not None:
        visible = kept.get("CUDA_VISIBLE_DEVICES", "").split(",")
        seen = visible if visible != [""] else [str(number) for number in range(first + devices)]
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first : first + devices])
    return kept


_RUNNING: list[Engine] = []


def acquire(settings: Settings, model: str) -> Engine:
    """This process's engine for the settings: the running one if it fits, else a new one in its place."""
    for engine in list(_RUNNING):
        if engine.alive and engine.settings == settings:
            return engine
        _RUNNING.remove(engine)
        engine.close()
    _RUNNING.append(Engine.start(settings, model))
    return _RUNNING[-1]


def release_all() -> None:
    """End every engine of this process."""
    while _RUNNING:
        _RUNNING.pop().close()
