"""JSON over HTTP to one server: single requests, and many at a time whose answers are taken in order."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

CONCURRENCY = 256
"""Requests that are with the server at a time; the rest wait here."""

CONNECT_S = 10.0
"""How long a connection may take to come about."""


class Refused(RuntimeError):
    """The server has answered, with an error; the message is its own words."""


GONE = (OSError, http.client.HTTPException)
"""What is raised where the server does not answer."""


class Line:
    """One connection, on which one request after the other is made.

    An answer may take any time, unless `patience` says how many seconds; a machine that is gone is noticed in a minute.
    """

    def __init__(self, url: str, patience: float | None = None) -> None:
        parts = urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix, self._patience = parts.path.rstrip("/"), patience
        self._connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_S)

    def post(self, path: str, body: object) -> Any:
        """The answer to a POST. Raises Refused, or one of GONE."""
        return self._ask("POST", path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        """The answer to a GET. Raises Refused, or one of GONE."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        if self._connection.sock is None:
            self._connection.connect()
            sock: socket.socket = self._connection.sock  # type: ignore[assignment]
            sock.settimeout(self._patience)
            _keep_alive(sock)
        self._connection.request(method, self._prefix + path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise Refused(f"HTTP {answer.status}: {_words(text)}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise Refused(f"its answer to {path} is not JSON: {_words(text)}") from error

    def hang_up(self) -> None:
        """End a request under way, from another thread."""
        if (sock := self._connection.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()


def _keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice a machine that has vanished without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _words(text: bytes) -> str:
    """What an error's body says."""
    plain = text.decode(errors="replace").strip()
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(plain)
        error = found.get("error", found) if isinstance(found, dict) else found
        return " ".join(str(error if isinstance(error, str) else error.get("message") or error["detail"]).split())
    return " ".join(plain.split())[:500] or "no words"


class Flight:
    """Many POSTs to one path: all are due at once, in order, `CONCURRENCY` are with the server at a time.

    Threads are daemons, so that a process that leaves waits for none of them.
    """

    def __init__(
        self, url: str, path: str, count: int, body: Callable[[int], object], read: Callable[[Any], Any]
    ) -> None:
        self._path, self._body, self._read = path, body, read
        self._due = iter(range(count))
        self._done: dict[int, Any] = {}
        self._failure: Exception | None = None
        self._over = False
        self._changed = threading.Condition()
        self._lines = [Line(url) for _ in range(min(CONCURRENCY, count))]
        self._threads = [threading.Thread(target=self._work, args=[line], daemon=True) for line in self._lines]
        for thread in self._threads:
            thread.start()

    def take(self, place: int) -> Any:
        """What was read of the answer to the request of that place, as soon as it is there; once.

        Raises what another request met if this one will have no answer.
        """
        with self._changed:
            self._changed.wait_for(lambda: place in self._done or self._over)
            if place in self._done:
                return self._done.pop(place)
            raise self._failure or RuntimeError("the requests were given up")

    def stop(self) -> None:
        """Send no more of them."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def ended(self, patience: float) -> bool:
        """Whether, within so many seconds, every request that was sent has its answer."""
        for thread in self._threads:
            thread.join(patience)
            if thread.is_alive():
                return False
        return True

    def hang_up(self) -> None:
        """Send no more, and drop the connections: vLLM ends a request whose connection is gone."""
        self.stop()
        for line in self._lines:
            line.hang_up()

    def _next(self) -> int | None:
        with self._changed:
            return None if self._over else next(self._due, None)

    def _work(self, line: Line) -> None:
        try:
            while (place := self._next()) is not None:
                found = line.post(self._path, self._body(place))
                try:
                    answer = self._read(found)
                except (LookupError, TypeError, ValueError) as error:
                    raise Refused(f"its answer to {self._path} is not what was asked for ({error!r})") from error
                with self._changed:
                    self._done[place] = answer
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  raised where the answer is taken
            with self._changed:
                self._failure, self._over = self._failure or error, True
                self._changed.notify_all()
        finally:
            line.close()
