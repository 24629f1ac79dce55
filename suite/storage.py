"""Where a sweep keeps its trials: an Optuna storage, a lock across processes, and patience with outages.

Optuna's own change of a trial from WAITING to RUNNING reads and writes in two steps on SQLite: with four
processes claiming 60 trials, 63 to 74 claims succeeded. Every change of state therefore happens under `Store.lock`.

The default is SQLite and not a journal file. A journal writes faster (0.5 ms against 4 ms), but a full disk can
leave half a line in it, after which it cannot be read, and its lock outlives a killed process by 30 s;
SQLite's transactions and the kernel's file lock have neither trouble, and the Optuna dashboard opens it as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import filelock
import optuna
import sqlalchemy
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from sqlalchemy import exc
from sqlalchemy.engine import URL, make_url

from suite.masking import masked

T = TypeVar("T")

VARIABLE = "SUITE_STORAGE"
"""Environment variable that carries a storage's URL, password and all, to workers: arguments can be read by anyone."""

LOCK_TIMEOUT_S = 60.0
"""Longest wait for the lock, and for SQLite's own. Both are held for milliseconds; longer means a suspended process."""

_KINDS = "sqlite:///FILE, postgresql+psycopg://USER@HOST/NAME, mysql+pymysql://USER@HOST/NAME or journal:FILE"
_CONNECT = {
    "sqlite": {"timeout": LOCK_TIMEOUT_S},
    "postgresql": {"connect_timeout": 10},
    "mysql": {"connect_timeout": 10},
}
_OUTAGES = (exc.OperationalError, exc.InterfaceError, exc.InternalError, StorageInternalError)

FILE = "storage.sqlite3"
"""The storage of a study that names none, in its folder."""


def default_url(folder: Path) -> str:
    """The storage of a study that names none: an SQLite file in the study's folder."""
    return URL.create("sqlite", database=str(folder.resolve() / FILE)).render_as_string()


def _absolute(url: str) -> str:
    """The URL with a file's path made absolute, so that it means the same in every process."""
    if url.startswith("journal:"):
        return f"journal:{Path(url.removeprefix('journal:')).resolve()}"
    try:
        parsed = make_url(url)
    except exc.ArgumentError:
        return url
    if parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        return url
    return parsed.set(database=str(Path(str(parsed.database)).resolve())).render_as_string(hide_password=False)


def _explained(error: BaseException, url: str) -> ValueError:
    """One sentence for what is wrong with a storage. The driver's own text is not repeated: it may hold a secret."""
    shown = f"storage {masked(url)}"
    if isinstance(error, exc.NoSuchModuleError):
        return ValueError(f"{shown} names a database or driver that does not exist; write {_KINDS}")
    if isinstance(error, exc.ArgumentError | ValueError):
        return ValueError(f"{shown} is malformed; write {_KINDS}")
    if isinstance(error, ImportError):
        missing = getattr(error.__cause__ or error, "name", None) or "its driver"
        return ValueError(f"{shown} needs the Python package {missing!r}, which is not installed; install it with pip")
    text = str(getattr(error, "orig", error)).lower()
    if re.search("password|authentication|access denied", text):
        return ValueError(f"{shown} refused the user or the password; check both")
    if "does not exist" in text or "unknown database" in text:
        return ValueError(f"{shown} names a database that does not exist; create it first")
    if "not a database" in text or "malformed" in text:
        return ValueError(f"{shown} is a file of another kind; name another file or move this one away")
    if isinstance(error, RuntimeError) and "version" in text:
        return ValueError(
            f"{shown} was written by another version of Optuna; use that version, or `optuna storage upgrade`"
        )
    return Unreachable(f"{shown} cannot be opened; check that it is running, reachable and writable from here")


def _beside(path: Path) -> filelock.BaseFileLock:
    # The lock would make missing folders, and a typing error in a path would go unnoticed.
    if not path.parent.is_dir():
        raise FileNotFoundError(path.parent)
    return filelock.FileLock(f"{path}.claims", timeout=LOCK_TIMEOUT_S)


class Store:
    """An Optuna storage opened from a URL, with a lock that excludes all other users of the same storage.

    Raises ValueError, in one sentence and without the password, for a storage that cannot be used.
    `patience_s`: how long it, and `call`, wait for a storage that does not answer, unless `give_up()` says not to.
    """

    def __init__(self, url: str, patience_s: float = 0.0, give_up: Callable[[], bool] = lambda: False) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.url = _absolute(url)
        self.patience_s, self.give_up = patience_s, give_up
        self._mutex = threading.RLock()
        self._held = 0
        self._file_lock: filelock.BaseFileLock | None = None
        self.optuna: BaseStorage
        self._again(self._try_to_open, Unreachable)

    def _try_to_open(self) -> None:
        try:
            self._open()
        except (*_OUTAGES, exc.SQLAlchemyError, ImportError, OSError, RuntimeError, ValueError) as error:
            raise _explained(error, self.url) from None

    def _open(self) -> None:
        if self.url.startswith("journal:"):
            path = Path(self.url.removeprefix("journal:"))
            self._file_lock = _beside(path)
            self.optuna = JournalStorage(JournalFileBackend(str(path)))
            return
        parsed = make_url(self.url)
        kind = parsed.get_backend_name()
        if kind not in _CONNECT or (kind == "sqlite" and parsed.database in (None, "", ":memory:")):
            raise ValueError(kind)
        options: dict[str, Any] = {"connect_args": _CONNECT[kind], "pool_pre_ping": kind != "sqlite"}
        # Optuna fills braces in a URL as a template.
        url = self.url.replace("{", "{{").replace("}", "}}")
        if kind == "sqlite":
            self._file_lock = _beside(Path(str(parsed.database)))
            with self.lock():
                self.optuna = RDBStorage(url, engine_kwargs=options)
            return
        # Two that open an empty database together both create its tables; the second to do so finds them there.
        for last in (False, False, True):
            try:
                self.optuna = RDBStorage(url, engine_kwargs=options)
                return
            except (exc.IntegrityError, exc.ProgrammingError):
                if last:
                    raise
                time.sleep(0.2)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Excludes every other thread and process that uses this storage; may be entered again by its holder.

        Held by a file lock of the kernel beside a file, or by an advisory lock of the database server: either goes
        when its process does.
        """
        with self._mutex:
            self._held += 1
            try:
                if self._held > 1:
                    yield
                elif self._file_lock is not None:
                    with self._file_lock.acquire(poll_interval=0.005):
                        yield
                else:
                    with self._server_lock():
                        yield
            finally:
                self._held -= 1

    def holder(self) -> int | None:
        """The process of this machine that holds the lock of a storage in a file now; None if that cannot be told."""
        if self._file_lock is None:
            return None
        try:
            file = str(os.stat(self._file_lock.lock_file).st_ino)
            rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
        except OSError:
            return None
        found = [int(row[4]) for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == file]
        return found[0] if found else None

    @contextmanager
    def _server_lock(self) -> Iterator[None]:
        assert isinstance(self.optuna, RDBStorage)
        engine = self.optuna.engine
        key = hashlib.sha256(b"rl-ablation-suite claims").hexdigest()
        with engine.connect() as connection:
            if engine.name == "postgresql":
                # The second: a holder that was suspended must not keep everybody else waiting.
                for limit in ("lock_timeout", "idle_in_transaction_session_timeout"):
                    connection.execute(sqlalchemy.text(f"SET LOCAL {limit} = '{LOCK_TIMEOUT_S:.0f}s'"))
                # Bound to the transaction: rolling back, or losing the connection, sets it free.
                connection.execute(sqlalchemy.text("SELECT pg_advisory_xact_lock(:key)"), {"key": int(key[:15], 16)})
                yield
                return
            name = {"name": key[:32], "seconds": LOCK_TIMEOUT_S}
            if connection.execute(sqlalchemy.text("SELECT GET_LOCK(:name, :seconds)"), name).scalar() != 1:
                raise filelock.Timeout(self.url)
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text("SELECT RELEASE_LOCK(:name)"), name)

    def call(self, action: Callable[[], T]) -> T:
        """The result of `action`, tried again while the storage does not answer, for at most `patience_s`
        and until `give_up()` says so.

        `action` must be safe to repeat: a write may have arrived although its confirmation did not. Raises
        `StorageDown` when the time is over or when another process held the lock for too long.
        """
        try:
            return self._again(action, *_OUTAGES, filelock.Timeout)
        except _OUTAGES as error:
            raise StorageDown(f"storage {masked(self.url)} does not answer") from error
        except filelock.Timeout as error:
            raise StorageDown(
                f"storage {masked(self.url)} has been locked for {LOCK_TIMEOUT_S:.0f} s by "
                f"{f'process {holder}' if (holder := self.holder()) else 'another process'}; is it suspended?"
            ) from error

    def _again(self, action: Callable[[], T], *errors: type[Exception]) -> T:
        started, pause = time.monotonic(), 0.2
        while True:
            try:
                return action()
            except errors:
                if self.give_up() or time.monotonic() - started + pause > self.patience_s:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


class Unreachable(ValueError):
    """The storage is not there now; everything else about it may be right."""


class StorageDown(RuntimeError):
    """The storage stopped answering for longer than one was willing to wait."""
