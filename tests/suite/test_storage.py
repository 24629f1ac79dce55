"""Storages by URL: what cannot be used is named in one sentence, without its password; servers may come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import one_code
from postgres import Server, running
from sqlalchemy.exc import DBAPIError, OperationalError

from suite import storage
from suite.config import RunConfig
from suite.lease import LeaseLost, new_owner
from suite.storage import StorageDown, Store, default_url, masked
from suite.study import Arm, Study
from suite.sweep import Sweep

STUDY = Study("mini", "?", RunConfig(), (Arm("a"), Arm("b", {"optim.lr": 0.5})), (1, 2))


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://u:s3cret@h:5432/db", "postgresql+psycopg://u:***@h:5432/db"),
        ("mysql+pymysql://u@h/db?password=s3cret", "mysql+pymysql://u@h/db?password=***"),
        ("sqlite:////data/x.db", "sqlite:////data/x.db"),
        ("journal:/data/x.log", "journal:/data/x.log"),
        ("u:s3cret@h", "(not a URL)"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked(url).replace("%2A", "*") == shown


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("oracle://u:s3cret@h/db", "is malformed"),
        ("postgresql+nonsense://u:s3cret@h/db", "names a database or driver that does not exist"),
        ("postgresql+pg8000://u:s3cret@h/db", "needs the Python package 'pg8000', which is not installed"),
        ("sqlite://", "is malformed"),
        ("sqlite:///:memory:", "is malformed"),
        ("u:s3cret@h", r"\(not a URL\) is malformed; write sqlite:///FILE"),
        ("sqlite:////nowhere/at/all/x.db", "cannot be opened; check that it is running, reachable and writable"),
        ("journal:/nowhere/at/all/x.log", "cannot be opened"),
    ],
)
def test_storages_that_cannot_be_used_are_named_in_one_sentence(url: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Store(url)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("a letter, not a database " * 50)
    with pytest.raises(ValueError, match="is a file of another kind"):
        Store(f"sqlite:///{tmp_path / 'x.db'}")
    assert (tmp_path / "x.db").read_text().startswith("a letter")


def test_the_lock_excludes_other_stores_and_threads_and_may_be_entered_again(tmp_path: Path) -> None:
    one, other, order = Store(default_url(tmp_path)), Store(default_url(tmp_path)), []

    def second() -> None:
        with other.lock():
            order.append("second")

    with one.lock(), one.lock():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


HOLDER = """
import os, signal, sys
from suite.storage import Store
with Store(sys.argv[1]).lock():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel does not tell who holds a lock")
def test_a_suspended_process_that_holds_the_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_S", 1.0)
    store = Store(default_url(tmp_path))
    assert store.holder() is None
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, store.url], cwd=Path(__file__).resolve().parents[2])
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED)

    def action() -> None:
        with store.lock():
            raise AssertionError

    with pytest.raises(StorageDown, match=f"locked for 1 s by process {holder.pid}; is it suspended"):
        store.call(action)
    holder.kill()
    holder.wait()
    with store.lock():
        assert store.holder() == os.getpid()


def test_a_storage_that_does_not_answer_is_asked_again_for_as_long_as_one_is_willing(tmp_path: Path) -> None:
    store, calls = Store(default_url(tmp_path), patience_s=60), []

    def action() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise OperationalError("", {}, Exception("server closed the connection"))
        return "done"

    assert store.call(action) == "done"
    calls.clear()
    store.patience_s = 0.0
    with pytest.raises(StorageDown, match=r"storage sqlite:.* does not answer"):
        store.call(action)
    assert len(calls) == 1
    store.patience_s, store.give_up = 60, lambda: True
    with pytest.raises(StorageDown):
        store.call(action)


def test_another_storage_for_the_same_study_is_refused(tmp_path: Path) -> None:
    journal = f"journal:{tmp_path / 'journal.log'}"
    Sweep.open(STUDY, tmp_path, storage=journal)
    assert Sweep.open(STUDY, tmp_path).store.url == journal, "it is found by itself"
    with pytest.raises(ValueError, match=r"keeps its cells in journal:.*, not in sqlite:.*; name that storage"):
        Sweep.open(STUDY, tmp_path, storage=f"sqlite:///{tmp_path / 'other.db'}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("postgres")) as one:
        yield one


def test_postgresql_names_what_is_wrong(server: Server) -> None:
    for url, sentence in (
        (server.url("wr0ng"), "refused the user or the password; check both"),
        (server.url(database="nowhere"), "names a database that does not exist; create it first"),
        (server.url().replace(str(server.port), "1"), "cannot be opened; check that it is running"),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            Store(url)
        assert "s3cret" not in str(caught.value)
        assert "wr0ng" not in str(caught.value)


def test_postgresql_keeps_a_study_whose_password_is_written_nowhere(server: Server, tmp_path: Path) -> None:
    one = Sweep.open(STUDY, tmp_path, storage=server.url(), command=f"suite run mini --storage {server.url()}")
    assert all(b"s3cret" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(ValueError, match=r"keeps its cells in postgresql\+psycopg://u:\*\*\*@.*; pass --storage"):
        Sweep.attach(tmp_path)
    slow = one.claim("slow|1|||a")
    assert slow is not None
    lock = threading.Thread(target=lambda: Sweep.attach(tmp_path, server.url()).recover())
    with one.store.lock():
        lock.start()
        one.report(slow, {"step": 1})
    lock.join(30)
    one.release(slow)
    with pytest.raises(LeaseLost):
        one.finish(slow, {"eval/test/accuracy": 1.0})
    done = 0
    while (held := one.claim(new_owner())) is not None:
        one.finish(held, {"eval/test/accuracy": 1.0})
        done += 1
    assert done == 4
    assert one.snapshot().exit_code == 0


def test_a_suspended_holder_keeps_nobody_waiting_on_postgresql(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LOCK_TIMEOUT_S", 1.0)
    slow, quick, order = Store(server.url()), Store(server.url()), []

    def hold() -> None:
        with pytest.raises(DBAPIError), slow.lock():  # noqa: PT012
            order.append("slow has it")
            time.sleep(3.0)
            order.append("slow goes on")

    thread = threading.Thread(target=hold)
    thread.start()
    while not order:
        time.sleep(0.01)
    quick.patience_s = 10.0

    def action() -> None:
        with quick.lock():
            order.append("quick")

    quick.call(action)
    thread.join(10)
    assert order == ["slow has it", "quick", "slow goes on"]


def test_a_server_that_stops_and_starts_loses_nothing(server: Server, tmp_path: Path) -> None:
    study = Study("outage", "?", RunConfig(), STUDY.arms, STUDY.seeds)
    one = Sweep.open(study, tmp_path, storage=server.url())
    held = one.claim(new_owner())
    assert held is not None
    server.stop()
    with pytest.raises(StorageDown, match="does not answer"):
        one.report(held, {"step": 1})
    one.store.patience_s = 60.0
    back = threading.Timer(1.0, server.start)
    back.start()
    late = Sweep.attach(tmp_path, server.url(), patience_s=60.0)
    one.finish(held, {"eval/test/accuracy": 0.25})
    back.join()
    assert late.snapshot().count("complete") == 1
    assert one.snapshot().count("complete") == 1
    assert one.claim(new_owner()) is not None
