"""A user's path from an empty folder to a page, by the command line alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STUDY = """
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

BASE = apply(RunConfig(), {
    "rollout.num_prompts": 8, "rollout.num_generations": 4, "train.steps": 4, "eval.every": 2,
    "eval.validation_problems": 20, "eval.test_problems": 40, "eval.num_samples": 1, "eval.probe_prompts": 4,
})
STUDY = Study(
    name="tiny", question="Does it run?", base=BASE, seeds=(0, 1),
    arms=(Arm("online"), Arm("offline", {"rollout.sync_period": "inf"})),
    claims=(Claim("online beats the seed model", "better", "online", SEED_MODEL, smallest_effect=0.05),),
)
"""


def suite(folder: Path, *arguments: str) -> str:
    """Run the command line in a folder; its output, exit code 0 asserted."""
    command = [sys.executable, "-c", "import sys; from suite.cli import main; sys.exit(main())", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_study_and_a_new_axis_from_file_to_report(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(STUDY)
    assert "4 cells" in suite(tmp_path, "run", "tiny.py", "--dry-run")
    assert not (tmp_path / "runs").exists()
    suite(tmp_path, "run", "tiny.py", "--workers", "2")
    assert "4" in suite(tmp_path, "status", "tiny.py")
    out = suite(tmp_path, "report", "tiny.py")
    assert "online beats the seed model" in out
    report = json.loads((tmp_path / "runs/tiny/report/report.json").read_text())
    results = {}
    for path in (tmp_path / "runs/tiny/cells").glob("*/result.json"):
        record = json.loads(path.with_name("config.json").read_text())
        results[record["arm"], record["seed"]] = json.loads(path.read_text())["metrics"]["eval/test/accuracy"]
    assert len(results) == 4
    for arm in ("online", "offline"):
        mean = (results[arm, 0] + results[arm, 1]) / 2
        row = next(row for row in report["arms"] if row["name"] == arm)
        assert row["value"]["mean"] == pytest.approx(mean, abs=1e-9)
    # a new axis beside the study: written, shown, run, reported
    suite(tmp_path, "new", "axis", "length_penalty", "--folder", ".")
    assert "reward.shaping" in suite(tmp_path, "axes", "show", "length_penalty.py")
    suite(tmp_path, "run", "tiny.py", "--axis", "length_penalty.py", "--seeds", "0", "--workers", "1")
    suite(tmp_path, "report", "tiny-length_penalty")
    page = next((tmp_path / "runs").glob("*length_penalty*/report/index.html")).read_text(encoding="utf-8")
    assert "length_penalty" in page
    assert page.count("data:image/svg+xml") >= 4
