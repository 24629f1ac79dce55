"""`make drill`: a study left alone, and under kills with the default storage and with a PostgreSQL that goes away."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.drill.compare import differences
from tests.drill.disturb import Tally, disturb
from tests.drill.study import write
from tests.suite.postgres import running


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="kept afterwards; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        return drill(options.folder or Path(name), options.workers, options.kills, options.seed)


def drill(folder: Path, workers: int, kills: int, seed: int) -> int:
    """The whole drill; 0 if nothing was lost, doubled or changed."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    study = write(folder, range(max(2, kills // 6)))
    print(f"left alone   {disturb(study, folder / 'alone', workers=workers, kills=0).words()}", flush=True)
    out: list[str] = []
    out += _report(
        "default", folder, disturb(study, folder / "default", workers=workers, kills=kills, seed=seed), kills
    )
    with running(folder / "postgres") as server:
        tally = disturb(study, folder / "server", workers=workers, kills=kills, seed=seed + 1, server=server)
        out += _report("server", folder, tally, kills, server.url())
    print("verdict      nothing lost, doubled or changed" if not out else f"verdict      {len(out)} differences")
    return int(bool(out))


def _report(name: str, folder: Path, tally: Tally, kills: int, storage: str | None = None) -> list[str]:
    found = differences(folder / name, folder / "alone", storage)
    if tally.kills.total() < kills:
        found.append(f"the study was over after {tally.kills.total()} of {kills} kills")
    print(f"{name:12} {tally.words()}", *found, sep="\n  ", flush=True)
    return found


sys.exit(main())
