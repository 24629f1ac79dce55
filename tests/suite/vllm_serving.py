"""A real server of `suite serve`, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fake_vllm import free_port

from suite.rollout.vllm_server import Server

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(model: Path, log: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that has loaded its model, and its address; it is gone afterwards."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    program = [sys.executable, "-c", "import sys; from suite.cli import main; sys.exit(main())"]
    with log.open("wb") as out:
        found = subprocess.Popen(
            [*program, "serve", str(model), "--port", str(port), *options], cwd=ROOT,
            env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 300
        while True:
            assert found.poll() is None, log.read_text(errors="replace")[-5000:]
            try:
                Server.connect(url)
                break
            except ValueError:
                assert time.monotonic() < until, log.read_text(errors="replace")[-5000:]
                time.sleep(0.5)
        yield found, url
    finally:
        end(found)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with all its processes, at once."""
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
