"""A cell that is killed at a chosen moment, the worst ones among them, ends as one that nobody killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drill.compare import newest_rows, parquet, results

ROOT = Path(__file__).resolve().parents[2]

POINTS = (
    "suite.train:evaluate:1:after",  # in the evaluation before step 1
    "suite.train:evaluate:3:before",  # in the evaluation at step 2, whose checkpoint is written before it
    "suite.train:evaluate:5:before",  # in the last evaluation, between the validation and the test problems
    "suite.tracking:Tracker.log_table:2:after",  # between the last table and its row of metrics
    "suite.checkpoint:save_file:5:after",  # a file of the second checkpoint is there, its hash is not
    "suite.checkpoint:_to_disk:4:after",  # the first checkpoint is whole but not in its place
    "suite.checkpoint:_to_disk:15:before",  # the third is in its place, the first not yet removed
    "suite.checkpoint:_remove:1:before",  # before the first removal
    "suite.rollout.collect:write_table:3:before",  # a rollout batch is not stored
    "suite.tracking:Tracker.finish:1:before",  # trained to the end, W&B has not heard of it
    "suite.tracking:_wait_for_end:1:before",  # while W&B writes its last rows
    "suite.checkpoint:write_json:10:before",  # W&B has all, the result is not written
    # a second death while the rows of the first attempt are sent again
    "suite.train:evaluate:3:before+suite.tracking:Tracker._replay:2:after",
    "suite.train:evaluate:3:before+suite.tracking:_new_journal:1:before",
    "suite.train:evaluate:3:before+suite.checkpoint:restore:1:after+suite.train:evaluate:2:after",
)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_cell_killed_anywhere_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SUITE_COMMIT": "0123456789"}
    command = [sys.executable, "-m", "tests.drill.die", str(tmp_path), *POINTS]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone = tmp_path / "alone" / "cell"
    once = newest_rows(alone.parent)["cell"]
    assert set(once.values()) == {1}
    for number, point in enumerate(POINTS):
        cell = tmp_path / str(number) / "cell"
        assert results(cell, alone) == [], point
        for kind in ("rollouts", "evaluations"):
            assert parquet(cell / kind, alone / kind) == [], point
        assert newest_rows(cell.parent) == {"cell": once}, point
        assert len({path.name for path in cell.rglob("run-*.wandb")}) == 1, f"{point}: more than one W&B run"
        assert [path.name for path in (cell / "checkpoints").iterdir()] != [], point
        assert not list((cell / "checkpoints").glob(".*")), point
