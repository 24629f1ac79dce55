"""Rows that were lost before a resume are logged again: whatever happens to the journal, no row is missing at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import small

from reports.wandb_file import read_run
from suite.run import Interrupted, RunInfo, run

INFO = RunInfo("rows", "base", "base", {})
CONFIG = small(train__steps=6, train__checkpoint_every=2, train__keep_checkpoints=2, eval__every=3)


def journal(folder: Path) -> Path:
    (found,) = (folder / "wandb").glob("*.jsonl")
    return found


def edited(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))


def another_number(lines: list[str]) -> list[str]:
    rows = [json.loads(line) for line in lines]
    next(row for row in rows if "reward/mean" in row.get("metrics", {}))["metrics"]["reward/mean"] += 0.25
    return [json.dumps(row) for row in rows]


DAMAGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "whole": (lambda folder: None, 4),
    "its last row is cut": (lambda folder: edited(journal(folder), lambda lines: [*lines[:-1], lines[-1][:-9]]), 2),
    "rows are cut off": (lambda folder: edited(journal(folder), lambda lines: lines[:-1]), 2),
    "its first row is gone": (lambda folder: edited(journal(folder), lambda lines: lines[1:]), 0),
    "a number was changed": (lambda folder: edited(journal(folder), another_number), 0),
    "missing": (lambda folder: journal(folder).unlink(), 0),
    "the W&B folder is missing": (lambda folder: shutil.rmtree(folder / "wandb"), 0),
    "a table is missing": (lambda folder: [path.unlink() for path in folder.rglob("*.table.json")], 0),
}


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return timeless(run(CONFIG, tmp_path_factory.mktemp("undisturbed") / "run", INFO))


@pytest.mark.parametrize(("damage", "goes_on_from"), DAMAGES.values(), ids=DAMAGES)
def test_no_row_is_lost(
    damage: Callable[[Path], object],
    goes_on_from: int,
    undisturbed: dict[str, float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = iter([False, False, False, True])
    with pytest.raises(Interrupted, match="after step 4"):
        run(CONFIG, tmp_path / "run", INFO, stop=lambda: next(asked))
    damage(tmp_path / "run")
    seen: list[int] = []
    metrics = run(CONFIG, tmp_path / "run", INFO, on_progress=lambda progress: seen.append(progress.step))
    assert seen[0] == (goes_on_from + 1 if goes_on_from else 0)
    assert ("the journal of rows in" in capsys.readouterr().out) == (goes_on_from < 4)
    last = max((tmp_path / "run").rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert [row["step"] for row in read_run(last).history if "reward/mean" in row] == [1, 2, 3, 4, 5, 6]
    assert timeless(metrics) == undisturbed
