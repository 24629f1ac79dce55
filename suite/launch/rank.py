"""One rank of a run, started by torchrun from `suite.launch.ranks`: `python -m suite.launch.rank FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from suite.config import from_json
from suite.launch.ranks import CONTROL, FRESH_S, JOB, LOOK_S, PROGRESS, put
from suite.registry import import_file
from suite.run import Interrupted, Progress, RunInfo, run

ORPHANED = 75
"""Exit code of a rank whose launcher is gone."""


def _leave_with(parent: int) -> None:
    """End this process soon after another one has ended."""

    def watch() -> None:
        while True:
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os._exit(ORPHANED)
            time.sleep(1.0)

    threading.Thread(target=watch, daemon=True).start()


def main(place: Path) -> int:
    """Run the job of a folder and leave there what became of it; the exit code is 1 after an unexpected error."""
    number = int(os.environ["RANK"])
    job = json.loads((place / JOB).read_text(encoding="utf-8"))
    (place / f"pid-{number}").write_text(str(os.getpid()))
    _leave_with(job["parent"])
    told, code = 0, 0
    outcome: dict[str, Any]

    def on_progress(progress: Progress) -> None:
        nonlocal told
        told += 1
        put(place / PROGRESS, {"number": told, **vars(progress)})

    def stop() -> bool:
        while True:
            control = json.loads((place / CONTROL).read_text(encoding="utf-8"))
            if time.monotonic() - control["at"] < FRESH_S:
                return bool(control["stop"])
            time.sleep(LOOK_S)

    try:
        for plugin in job["plugins"]:
            import_file(Path(plugin))
        info = RunInfo(**job["info"])
        metrics = run(from_json(job["config"]), Path(job["folder"]), info, on_progress=on_progress, stop=stop)
        outcome = {"metrics": metrics}
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must hear of it
        expected = isinstance(error, ValueError | Interrupted)
        if not expected:
            traceback.print_exc()
        classes = [each.__name__ for each in type(error).__mro__]
        lost = "Abandoned" in classes or "DistBackendError" in classes or "Connection" in str(error)
        outcome, code = {"classes": classes, "message": str(error) or "no message", "lost": lost}, int(not expected)
    put(place / f"outcome-{number}.json", outcome)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
