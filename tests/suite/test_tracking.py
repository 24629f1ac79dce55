"""What the tracker promises: rows and tables come back exactly, a resume loses nothing, nothing leaks."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from reports.load import load_study
from reports.wandb_file import read_run
from suite.metrics import METRICS, TABLES, describe, describe_table, markdown
from suite.tracking import Tracker

ROOT = Path(__file__).resolve().parents[2]
ARM = {"project": "study", "group": "s10", "name": "s10-3"}
CONFIG = {"study": "study", "arm": "s10", "seed": 3, "run": {"lr": 3e-5, "sync": {"period": math.inf}}, "differs": {}}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("WANDB_") and n != "WANDB_SERVICE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def track(tmp_path: Path) -> Iterator[Callable[..., Tracker]]:
    made: list[Tracker] = []

    def make(folder: str = "cell", **changed: Any) -> Tracker:
        made.append(Tracker(tmp_path / folder, **{**ARM, "config": CONFIG, **changed}))
        return made[-1]

    yield make
    for tracker in made:
        tracker.finish()


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("run-*.wandb")
    return path


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def test_rows_and_run_come_back_exactly(track: Callable[..., Tracker], tmp_path: Path) -> None:
    rows = [
        (0, {"reward/mean": math.nan, "loss/kl": math.inf, "dpo/margin": -math.inf, "loss/total": 1 / 3}),
        (1, {"reward/mean": np.float32(0.1), "dpo/pairs": np.int64(7), "cost/generated_tokens": 123_456_789_012}),
        (7, {"loss/total": -5e-324, "kl/ref": 1.7976931348623157e308, "eval/val/avg@16": 0.1 + 0.2}),
    ]
    with track(tags=["a", "b"]) as tracker:
        for step, metrics in rows:
            tracker.log(step, metrics)
    run = read_run(only_file(tmp_path / "cell"))
    assert (run.project, run.group, run.name, run.run_id) == ("study", "s10", "s10-3", tracker.run_id)
    assert {k: v for k, v in run.config.items() if k != "tracking"} == CONFIG
    assert (run.exit_code, run.truncated, run.damage) == (0, False, "")
    for (step, metrics), got in zip(rows, run.history, strict=True):
        assert got["step"] == step
        logged = {key: value for key, value in got.items() if not key.startswith("_") and key != "step"}
        assert logged.keys() == metrics.keys()
        assert all(same(float(metrics[key]), logged[key]) for key in metrics)


def test_a_table_comes_back_whole_and_stays_in_the_folder(track: Callable[..., Tracker], tmp_path: Path) -> None:
    rows = [
        [f"p{i}", i % 3 - 1, "no_answer", math.nan if i == 5 else i / 7, i % 2 == 0, '½ | \n"x"'] for i in range(10_003)
    ]
    columns = ["uid", "sample", "outcome", "reward", "truncated", "completion"]
    with track() as tracker:
        tracker.log_table(40, "eval/test/problems", (columns, rows))
        tracker.log_table(50, "eval/test/problems", pd.DataFrame(rows[:2], columns=columns))
    files = read_run(only_file(tmp_path / "cell")).tables["eval/test/problems"]
    assert sorted(files) == [40, 50]
    got = json.loads(files[40].read_text())
    assert got["columns"] == columns
    assert len(got["data"]) == 10_003  # wandb would have kept 10,000
    assert all(math.isnan(r[3]) if i == 5 else r == rows[i] for i, r in enumerate(got["data"]))
    assert json.loads(files[50].read_text())["data"] == rows[:2]
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_a_relative_folder_is_found_by_a_process_started_elsewhere(
    track: Callable[..., Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    track("first").finish()  # starts wandb's process, in this folder
    monkeypatch.chdir(tmp_path)
    with Tracker(Path("cell"), **ARM, config=CONFIG) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    assert [row["reward/mean"] for row in read_run(only_file(tmp_path / "cell")).history] == [0.5]


def test_mistakes_are_refused(track: Callable[..., Tracker]) -> None:
    tracker = track(run_id="abc", resume_step=4)
    with pytest.raises(ValueError, match=r"loss/clipfrac.*near names: loss/clip_frac"):
        tracker.log(4, {"loss/clipfrac": 0.0})
    with pytest.raises(ValueError, match="no table is called 'eval/problems'"):
        tracker.log_table(4, "eval/problems", (["uid"], [["a"]]))
    with pytest.raises(ValueError, match="reward/mean is a str"):
        tracker.log(4, {"reward/mean": "0.5"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="step is 3: it must be an int, and at least 4"):
        tracker.log(3, {"reward/mean": 0.5})
    with pytest.raises(ValueError, match=r"reserved one \['seed'\]"):
        tracker.log_table(4, "eval/t/problems", (["uid", "seed"], [["a", 1]]))
    with pytest.raises(ValueError, match="row 1 has 1 cells for 2 columns"):
        tracker.log_table(4, "eval/t/problems", (["uid", "tokens"], [["a", 1], ["b"]]))
    with pytest.raises(ValueError, match="resume_step is -1"):
        track(resume_step=-1)


def test_an_exception_ends_the_run_with_exit_code_1(track: Callable[..., Tracker], tmp_path: Path) -> None:
    def cell(tracker: Tracker) -> None:
        with tracker:
            tracker.log(0, {"reward/mean": 1.0})
            raise KeyError("planted")

    tracker = track()
    with pytest.raises(KeyError, match="planted"):
        cell(tracker)
    tracker.finish()  # a second call does nothing
    run = read_run(only_file(tmp_path / "cell"))
    assert run.exit_code == 1
    assert len(run.history) == 1


def test_environment(track: Callable[..., Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROJECT": "mine", "RUN_GROUP": "x", "NAME": "x", "RUN_ID": "x", "TAGS": "t"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    track().finish()
    run = read_run(only_file(tmp_path))
    assert (run.project, run.group, run.name) == ("mine", "s10", "s10-3")
    assert run.run_id != "x"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with track("off") as tracker:
        tracker.log(0, {"reward/mean": 1.0})
        tracker.log_table(0, "eval/t/problems", (["uid"], [["a"]]))
        tracker.sync()
        with pytest.raises(ValueError, match="no metric is called"):
            tracker.log(0, {"x": 1.0})
    assert tracker.url is None
    assert not [path for path in (tmp_path / "off").rglob("*") if path.is_file()]


def test_no_secret_is_written(track: Callable[..., Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "5e" * 20
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ValueError, match="holds the value of WANDB_API_KEY"):
        track(config={**CONFIG, "run": {"login": f"key={key}"}})
    with track() as tracker:
        tracker.log(0, {"reward/mean": 1.0})
        tracker.log_table(0, "eval/t/problems", (["uid"], [["a"]]))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert not [path for path in files if key.encode() in path.read_bytes()]


CHILD = """
import os, signal, sys
from pathlib import Path
from suite.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]), project="study", group="s10", name="s10-3", config={"arm": "s10", "seed": 3},
                  run_id="resumed")
for step in range(31):
    tracker.log(step, {"reward/mean": 1000 + step, "time/step_s": 1.0})
    if step % 10 == 0:
        tracker.log(step, {"eval/val/accuracy": step / 100})
        tracker.log_table(step, "eval/val/problems", (["uid", "tokens"], [["a", step], ["b", 2 * step]]))
        tracker.sync()
how = sys.argv[2]
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "_exit":
    os._exit(3)
tracker.finish()
"""


def child(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), how], env=environment, capture_output=True, text=True, timeout=120
    )


def test_it_is_silent(tmp_path: Path) -> None:
    done = child(tmp_path, "finish")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("how", ["kill", "_exit"])
def test_a_killed_run_resumes_with_every_step_once(how: str, track: Callable[..., Tracker], tmp_path: Path) -> None:
    done = child(tmp_path / "cell", how)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else 3)
    with track(run_id="resumed", resume_step=20) as tracker:  # rows 21 to 30 of the first attempt were for nothing
        for step in range(21, 41):
            tracker.log(step, {"reward/mean": 2000 + step, "time/step_s": 2.0})
        tracker.log_table(40, "eval/val/problems", (["uid", "tokens"], [["a", -1]]))
    newest = max((tmp_path / "cell").rglob("run-*.wandb"), key=lambda p: (p.stat().st_mtime_ns, str(p)))
    steps = [row["step"] for row in read_run(newest).history if "reward/mean" in row]
    assert steps == list(range(41))  # the newest file alone has every step once
    study = load_study(tmp_path)
    rewards = study.history[study.history.metric == "reward/mean"]
    assert rewards.step.tolist() == list(range(41))
    assert rewards.value.tolist() == [1000 + s for s in range(21)] + [2000 + s for s in range(21, 41)]
    accuracy = study.history[study.history.metric == "eval/val/accuracy"].set_index("step").value.to_dict()
    assert {step: accuracy[step] for step in (0, 10, 20)} == {0: 0.0, 10: 0.1, 20: 0.2}
    tokens = study.tables.groupby("step").tokens.apply(list).to_dict()
    assert {step: tokens[step] for step in (0, 10, 20, 40)} == {0: [0, 0], 10: [10, 20], 20: [20, 40], 40: [-1]}
    (run,) = study.runs.to_dict("records")
    assert (run["finished"], run["exit_code"]) == (True, 0)
    assert run["segments"] in (1, 2)  # wandb may be killed before it has written anything of the first attempt


def test_a_second_resume_keeps_what_the_first_kept(track: Callable[..., Tracker], tmp_path: Path) -> None:
    for attempt, (start, stop) in enumerate([(0, 12), (5, 9), (8, 15)]):
        tracker = track(run_id="r", resume_step=start)
        for step in range(start, stop):
            tracker.log(step, {"reward/mean": 100 * attempt + step})
        tracker.finish(exit_code=1 if attempt < 2 else 0)
    study = load_study(tmp_path)
    expected = [float(s) for s in range(5)] + [105.0, 106.0, 107.0] + [200.0 + s for s in range(8, 15)]
    assert study.history.value.tolist() == expected
    assert study.history.step.tolist() == list(range(15))


def test_of_a_damaged_journal_the_whole_part_is_kept(
    track: Callable[..., Tracker], tmp_path: Path
) -> None:
    tracker = track(run_id="r")
    for step in range(3):
        tracker.log(step, {"reward/mean": step})
    tracker.finish()
    journal = tmp_path / "cell" / "wandb" / "r.jsonl"
    whole = journal.read_text()
    journal.write_text(whole[:-4])
    track(run_id="r", resume_step=9).finish()
    assert [json.loads(line)["step"] for line in journal.read_text().splitlines()] == [0, 1]
    journal.write_text(whole.replace('{"row": 1', '{"row" 1'))
    track(run_id="r", resume_step=9).finish()
    assert [json.loads(line)["step"] for line in journal.read_text().splitlines()] == [0]


class ServerRun:
    """Stands for a wandb run that is continued online, with `starting_step` rows already on the server."""

    disabled = offline = False

    def __init__(self, starting_step: int) -> None:
        self.starting_step = starting_step
        self.rows: list[dict[str, Any]] = []

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.mark.parametrize(
    ("received", "attempts", "sent"),
    [
        # of 10 rows 6 arrived, then all
        ([0, 6, 14], [(0, 10), (8, 13), (13, 14)], [[*range(10)], [6, 7, 8, *range(8, 13)], [13]]),
        # all arrived, then the server lost the run, then all arrived again
        ([0, 10, 0, 11], [(0, 10), (5, 8), (7, 9), (8, 9)], [[*range(10)], [5, 6, 7], [*range(6), 5, 6, 7, 7, 8], [8]]),
    ],
)
def test_an_online_resume_sends_only_what_the_server_lacks(
    received: list[int],
    attempts: list[tuple[int, int]],
    sent: list[list[int]],
    track: Callable[..., Tracker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = [ServerRun(count) for count in received]
    waiting = iter(runs)
    monkeypatch.setattr("suite.tracking._init", lambda *_: next(waiting))
    for start, stop in attempts:
        tracker = track(run_id="r", resume_step=start)
        for step in range(start, stop):
            tracker.log(step, {"reward/mean": step})
        tracker.finish()
    assert [[row["step"] for row in run.rows] for run in runs] == sent


def test_docs_and_metrics_agree() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert text == markdown(), "write docs/metrics.md anew: see suite/metrics.py"
    table = text.split("## Table")[0]
    named = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert named == list(METRICS)
    for metric in METRICS.values():
        assert metric.formula
        assert metric.unit
        assert metric.reduction
        (line,) = [x for x in table.splitlines() if x.startswith(f"| `{metric.name}` |")]
        assert re.split(r"(?<!\\) \| ", line.strip("| "))[1:4] == [metric.formula, metric.unit, metric.reduction]


def test_describe() -> None:
    for name in METRICS:
        assert describe(name).name == name
    assert describe("eval/gsm8k/avg@16").name == "eval/<benchmark>/avg@k"
    assert describe("eval/MATH-500/accuracy").name == "eval/<benchmark>/accuracy"
    assert describe_table("eval/test/problems") is TABLES["eval/<benchmark>/problems"]
    for wrong in (
        "eval/a/b/accuracy",
        "eval//accuracy",
        "eval/x/avg@0",
        "eval/x/avg@",
        "xloss/kl",
        "loss/kl/x",
        "loss.kl",
    ):
        with pytest.raises(ValueError, match="no metric is called"):
            describe(wrong)
