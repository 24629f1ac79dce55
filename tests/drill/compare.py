"""What a study that was disturbed has lost, doubled or changed against the same study left alone."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from optuna.trial import TrialState

from reports.load import load_study
from reports.wandb_file import RunFile, read_run
from suite.sweep import Sweep


def differences(folder: Path, alone: Path, storage: str | None = None) -> list[str]:
    """One sentence per difference; none where every cell is finished once, bit for bit, with every W&B step once."""
    out = _trials(folder, storage)
    cells = sorted(path.name for path in (alone / "cells").iterdir())
    assert cells, f"{alone} holds no cells"
    for name in cells:
        out += results(folder / "cells" / name, alone / "cells" / name)
        for kind in ("rollouts", "evaluations"):
            out += parquet(folder / "cells" / name / kind, alone / "cells" / name / kind)
    return out + _tracked(folder, alone, len(cells))


def _trials(folder: Path, storage: str | None) -> list[str]:
    trials = Sweep.attach(folder, storage).study.trials
    counts = Counter(trial.user_attrs["cell"] for trial in trials)
    out = [f"{cell} has {count} trials" for cell, count in counts.items() if count != 1]
    return out + [f"trial {t.number} is {t.state.name}" for t in trials if t.state != TrialState.COMPLETE]


def _timeless(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("time/")}


def results(folder: Path, alone: Path) -> list[str]:
    """How the results of two cells differ, timings aside."""
    if not (folder / "result.json").is_file():
        return [f"{folder.name} has no result"]
    mine, theirs = (json.loads((place / "result.json").read_text()) for place in (folder, alone))
    out = [] if mine["weights"] == theirs["weights"] else [f"{folder.name}: the final weights differ"]
    if _timeless(mine["metrics"]) != _timeless(theirs["metrics"]):
        out.append(f"{folder.name}: the final metrics differ")
    return out


def parquet(folder: Path, alone: Path) -> list[str]:
    """How two folders of Parquet files differ."""
    names = [sorted(path.name for path in place.glob("*.parquet")) for place in (folder, alone)]
    if names[0] != names[1]:
        return [f"{folder}: {sorted({*names[0]} ^ {*names[1]})} are missing or too many"]
    tables = ([pq.read_table(place / name) for place in (folder, alone)] for name in names[0])
    return [f"{folder / name} differs" for name, (a, b) in zip(names[0], tables, strict=True) if not a.equals(b)]


def _tracked(folder: Path, alone: Path, cells: int) -> list[str]:
    mine, theirs = load_study(folder), load_study(alone)
    out = [f"W&B has {len(mine.runs)} runs for {cells} cells"] if len(mine.runs) != cells else []
    out += [f"W&B has a second run of {name}" for name in mine.duplicates["name"]]
    out += [f"W&B has no end of {run}" for run in mine.runs["name"][~mine.runs["finished"]]]
    out += _frames("history", *(_history(data.history) for data in (mine, theirs)))
    out += _frames("tables", *(data.tables.drop(columns="run_id") for data in (mine, theirs)))
    for name, rows in newest_rows(folder).items():
        out += [
            f"{name}: step {step} logs {metric} {count} times" for (step, metric), count in rows.items() if count > 1
        ]
    counted, once = ({name: set(rows) for name, rows in newest_rows(place).items()} for place in (folder, alone))
    return out + [f"{name}: its last W&B file lacks or adds rows" for name in once if counted.get(name) != once[name]]


def _history(frame: pd.DataFrame) -> pd.DataFrame:
    kept = frame[~frame["metric"].str.startswith("time/")]
    return kept.drop(columns="run_id").reset_index(drop=True)


def _frames(what: str, mine: pd.DataFrame, theirs: pd.DataFrame) -> list[str]:
    try:
        pd.testing.assert_frame_equal(mine, theirs, check_exact=True)
    except AssertionError as error:
        return [f"W&B {what}: {' '.join(str(error).split())[:300]}"]
    return []


def newest_rows(folder: Path) -> dict[str, Counter[tuple[int, str]]]:
    """Cell -> how often its last W&B file logs each step and metric."""
    last: dict[str, RunFile] = {}
    for path in folder.rglob("run-*.wandb"):
        file = read_run(path)
        if file.run_id and (file.name not in last or _segment(file) > _segment(last[file.name])):
            last[file.name] = file
    return {
        name: Counter(
            (int(row["step"]), metric)
            for row in file.history
            for metric in row
            if metric != "step" and metric[0] != "_"
        )
        for name, file in last.items()
    }


def _segment(file: RunFile) -> int:
    return int(file.config["tracking"]["segment"])
