"""A stand-in for the server of `suite serve`: its routes, and answers that a test can hold back or replace."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATE = "/inference/v1/generate"


def free_port() -> int:
    """A port of the loopback at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Fake(ThreadingHTTPServer):
    """Answers a request for a completion with its seed as the only token id."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[str, tuple[int, Any] | None] = {}
        """Path -> status and body instead of the usual ones; None ends the connection."""
        self.logprobs = [-0.5]
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self.running = self.connections = 0
        self.lock, self._held, self._go = threading.Lock(), set[int](), threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of connections that a test has dropped."""

    def hold(self, *seeds: int) -> None:
        """Do not answer requests of these seeds until `release`, or until they are aborted."""
        self._held = set(seeds)

    def release(self) -> None:
        self._go.set()

    def until(self, true: Callable[[], bool], then: Callable[[], object]) -> None:
        """Release what is held as soon as something is true, while `then` waits for it."""

        def watch() -> None:
            end = time.monotonic() + 10
            while not true() and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.1)
            assert true()
            self.release()

        thread = threading.Thread(target=watch)
        thread.start()
        then()
        thread.join()

    def answer(self, path: str, body: Any) -> tuple[int, Any] | None:
        with self.lock:
            self.paths.append(path)
            self.last[path] = body
        if path == GENERATE:
            return self._completion(body)
        if path == "/abort_requests":
            self.release()
        if path in self.answers:
            return self.answers[path]
        if path == "/collective_rpc":
            return 200, {"results": _WORKER[body["method"]]}
        return 200, {"/get_world_size": {"world_size": 2}, "/reset_prefix_cache": {"success": True}}.get(path, {})

    def _completion(self, body: Any) -> tuple[int, Any] | None:
        seed = body["sampling_params"]["seed"]
        with self.lock:
            self.bodies.append(body)
            self.running += 1
        if seed in self._held:
            self._go.wait(20)
        with self.lock:
            self.running -= 1
        rows = [{"token_id": seed, "logprob": value} for value in self.logprobs]
        choice = {"finish_reason": "length", "token_ids": [seed] * len(rows), "logprobs": {"content": rows}}
        return self.answers.get(GENERATE, (200, {"choices": [choice]}))


_WORKER: dict[str, list[Any]] = {
    "suite_describe": [{"dtype": "bfloat16", "max_model_len": 96, "cpu": False, "transfer": "nccl"}] * 2,
    "suite_fingerprint": [
        {"sums": {"a": ["whole", -(2**63)]}, "fused": {"qkv": ["q", "k"]}},
        {"sums": {"a": ["whole", 2**63 - 1]}, "fused": {"qkv": ["q", "k"]}},
    ],
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Fake

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = self.server.answer(self.path, json.loads(text) if text else None)
        if found is None:
            self.close_connection = True
            return
        status, body = found
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def fake() -> Iterator[Fake]:
    """A running stand-in."""
    with Fake() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.release()
            server.shutdown()
