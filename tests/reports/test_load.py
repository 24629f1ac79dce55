"""Many W&B files become one tidy frame: nothing lost, nothing twice, the same every time."""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from reports.declared import Declaration, DeclaredArm, DeclaredCell
from reports.load import HISTORY_COLUMNS, StudyData, _join, load_api, load_study
from reports.results import Results
from reports.wandb_file import RunFile
from suite.tracking import Tracker

MAKE = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MAKE:
    """Write a run of one cell; returns its run id."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)

    def run(arm: str, seed: int, rows: list[dict[str, float]], exit_code: int = 0, **changed: Any) -> str:
        config = {"arm": arm, "seed": seed, "fingerprint": f"f-{arm}", "commit": "c0ffee", "dirty": seed == 2}
        folder = tmp_path / "study" / changed.pop("folder", f"{arm}-{seed}")
        table = changed.pop("table", None)
        tracker = Tracker(
            folder, project="study", group=arm, name=f"{arm}-{seed}", config=changed.pop("config", config), **changed
        )
        for row in rows:
            tracker.log(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
        if table is not None:
            tracker.log_table(int(rows[-1]["step"]), "eval/test/problems", table)
        tracker.finish(exit_code)
        return tracker.run_id

    return run


def values(study: StudyData, metric: str, **of: Any) -> dict[int, float]:
    frame = study.history[study.history.metric == metric]
    for column, value in of.items():
        frame = frame[frame[column] == value]
    assert frame.step.is_unique
    return dict(zip(frame.step, frame.value, strict=True))


def test_2000_steps_with_an_evaluation_every_50(make: MAKE, tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in range(2000):
        rows.append({"step": step, "reward/mean": step / 3, "loss/kl": math.nan if step % 7 == 0 else step / 11})
        if step % 50 == 0:
            rows.append({"step": step, "eval/val/accuracy": math.nan if step % 500 == 0 else step / 13})
    run_id = make("b", 4, rows)
    study = load_study(tmp_path)
    assert list(study.history.columns) == HISTORY_COLUMNS
    assert [str(dtype) for dtype in study.history.dtypes] == ["str", "int64", "str", "int64", "str", "float64"]
    assert len(study.history) == 2000 * 2 + 40
    assert study.history[["arm", "seed", "run_id"]].drop_duplicates().to_numpy().tolist() == [["b", 4, run_id]]
    assert values(study, "reward/mean") == {step: step / 3 for step in range(2000)}
    kl = values(study, "loss/kl")
    assert [math.isnan(kl[step]) for step in range(2000)] == [step % 7 == 0 for step in range(2000)]
    assert all(kl[step] == step / 11 for step in range(2000) if step % 7)
    accuracy = values(study, "eval/val/accuracy")
    assert list(accuracy) == list(range(0, 2000, 50))
    assert [step for step in accuracy if math.isnan(accuracy[step])] == [0, 500, 1000, 1500]


def frames(study: StudyData) -> list[pd.DataFrame]:
    return [study.history, study.runs, study.tables, study.duplicates, study.unreadable]


def test_two_reads_are_identical_and_order_is_by_arm_and_seed(make: MAKE, tmp_path: Path) -> None:
    rows = [{"step": 0, "reward/mean": 0.25, "loss/kl": math.nan}, {"step": 5, "loss/kl": 1.5, "kl/ref": math.inf}]
    ids = {}
    for arm, seed in (("s10", 2), ("grpo", 10), ("s10", 1), ("grpo", 9)):
        table = (["uid", "tokens", "completion"], [["p1", seed, "a,\nb"], ["p2", None, ""]])
        ids[arm, seed] = make(arm, seed, rows, table=table)
    first, second = load_study(tmp_path), load_study(tmp_path)
    for one, other in zip(frames(first), frames(second), strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert one.to_csv() == other.to_csv()
        assert pickle.dumps(one.to_dict("list")) == pickle.dumps(other.to_dict("list"))
    cells = [("grpo", 9), ("grpo", 10), ("s10", 1), ("s10", 2)]
    assert list(zip(first.runs.arm, first.runs.seed, strict=True)) == cells
    assert first.runs.run_id.tolist() == [ids[cell] for cell in cells]
    assert first.runs.fingerprint.tolist() == ["f-grpo", "f-grpo", "f-s10", "f-s10"]
    assert first.runs.commit.unique().tolist() == ["c0ffee"]
    assert first.runs.dirty.tolist() == [False, False, False, True]
    assert first.runs.config[0]["fingerprint"] == "f-grpo"
    assert "tracking" not in first.runs.config[0]
    assert (first.runs.seconds > 0).all()
    block = [(0, "loss/kl"), (0, "reward/mean"), (5, "kl/ref"), (5, "loss/kl")]
    assert list(zip(first.history.step, first.history.metric, strict=True)) == block * 4
    assert list(first.tables.columns) == ["run_id", "arm", "seed", "step", "table", "uid", "tokens", "completion"]
    assert first.tables.tokens.tolist()[::2] == [9, 10, 1, 2]
    assert first.tables.tokens.isna().tolist() == [False, True] * 4
    assert first.tables.completion.tolist() == ["a,\nb", ""] * 4
    assert set(zip(first.tables.step, first.tables.table, strict=True)) == {(5, "eval/test/problems")}
    assert load_study(tmp_path, tables=False).tables.empty


def test_segments_are_joined_by_run_id(make: MAKE, tmp_path: Path) -> None:
    def rows(low: int, high: int, value: float) -> list[dict[str, float]]:
        return [{"step": step, "reward/mean": value + step} for step in range(low, high)]

    make("a", 1, rows(0, 8, 100), exit_code=1, run_id="r")
    (tmp_path / "study" / "a-1" / "wandb" / "r.jsonl").unlink()  # then only the join knows the first rows
    make("a", 1, rows(5, 11, 200), run_id="r", resume_step=5)
    study = load_study(tmp_path)
    assert values(study, "reward/mean") == {s: 100 + s if s < 5 else 200 + s for s in range(11)}
    (run,) = study.runs.to_dict("records")
    assert (run["run_id"], run["segments"], run["finished"], run["exit_code"]) == ("r", 2, True, 0)
    assert study.duplicates.empty


def test_the_last_segment_wins_though_the_clock_was_set_back() -> None:
    def segment(number: int, hour: int, exit_code: int | None, *steps: int) -> RunFile:
        history = [{"step": step, "reward/mean": 10 * number + step, "_runtime": 1.5 * number} for step in steps]
        return RunFile(
            Path(f"{hour}.wandb"),
            run_id="r",
            config={"tracking": {"segment": number}},
            history=history,
            exit_code=exit_code,
            started_at=datetime(2026, 1, 1, hour, tzinfo=UTC),
        )

    run = _join([segment(2, 3, 0, 2, 3), segment(0, 5, None, 0, 1), segment(1, 4, None, 1, 2)], [])
    assert run.values == {(0, "reward/mean"): 0, (1, "reward/mean"): 11, (2, "reward/mean"): 22, (3, "reward/mean"): 23}
    assert (run.finished, run.segments, run.seconds, run.path) == (True, 3, 4.5, "3.wandb")
    assert run.started_at == datetime(2026, 1, 1, 5, tzinfo=UTC)


def test_one_seed_counts_once_per_arm(make: MAKE, tmp_path: Path) -> None:
    def row(value: float) -> list[dict[str, float]]:
        return [{"step": 0, "reward/mean": value}]

    make("a", 1, row(1), folder="x1", run_id="old")
    make("a", 1, row(2), folder="x2", run_id="new")
    make("a", 1, row(3), folder="x3", run_id="failed", exit_code=1)
    make("a", 2, row(4), folder="x4", run_id="failed-old", exit_code=1)
    make("a", 2, row(5), folder="x5", run_id="failed-new", exit_code=1)
    study = load_study(tmp_path)
    assert study.runs.run_id.tolist() == ["new", "failed-new"]
    assert study.runs.finished.tolist() == [True, False]
    assert study.history.value.tolist() == [2.0, 5.0]
    pairs = dict(zip(study.duplicates.run_id, study.duplicates.instead, strict=True))
    assert pairs == {"failed": "new", "old": "new", "failed-old": "failed-new"}


def test_an_arm_that_was_defined_anew_and_back_again_keeps_its_first_runs(make: MAKE, tmp_path: Path) -> None:
    config = {"arm": "a", "seed": 1, "commit": "c0ffee", "dirty": False}
    for name, fingerprint, value in (("first", "f1", 0.25), ("torn", "f1", 0.5), ("later", "f2", 0.75)):
        rows = [{"step": 0, "eval/test/accuracy": value}]
        made = {**config, "fingerprint": fingerprint}
        make("a", 1, rows, folder=name, run_id=name, config=made, exit_code=int(name == "torn"))
    data = load_study(tmp_path)
    assert data.runs.run_id.tolist() == ["first", "later"]
    assert list(zip(data.duplicates.run_id, data.duplicates.instead, strict=True)) == [("torn", "first")]
    arm = DeclaredArm("a", "a", {})
    for fingerprint, value, other in (("f1", 0.25, "later"), ("f2", 0.75, "first")):
        cell = DeclaredCell("a", 1, f"a-1-{fingerprint}", fingerprint, "complete", None)
        metric = "eval/test/accuracy"
        declared = Declaration("study", "?", metric, "a", (arm,), (1,), cells=(cell,))
        results = Results(declared, data)
        assert results.initial("a", metric) == {1: value}
        (left,) = results.left_out
        assert left["run_id"] == other
        assert "not the one that the study declares now" in left["why"]


def test_torn_damaged_and_foreign_files_are_told(make: MAKE, tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": step + 0.5} for step in range(200)]
    paths = {}
    for seed in (1, 2, 3):
        make("a", seed, rows, run_id=f"r{seed}", table=(["uid"], [["p"]]))
        (paths[seed],) = tmp_path.rglob(f"run-r{seed}.wandb")
    paths[1].write_bytes(paths[1].read_bytes()[:-300])
    flipped = bytearray(paths[2].read_bytes())
    flipped[len(flipped) // 2] ^= 4
    paths[2].write_bytes(flipped)
    shutil.rmtree(paths[3].parent / "files")
    make("a", 4, rows[:1], run_id="r4", config={"arm": "a"})
    empty = tmp_path / "study" / "offline-run-1-e" / "run-e.wandb"
    empty.parent.mkdir()
    empty.write_bytes(b":W&")
    study = load_study(tmp_path)
    assert study.runs.finished.tolist() == [False, False, True]
    assert study.runs.truncated.tolist() == [True, False, False]
    assert study.runs.exit_code.isna().tolist() == [True, True, False]
    assert [bool(text) for text in study.runs.damage] == [False, True, False]
    assert "the checksum does not match" in study.runs.damage[1]
    got = values(study, "reward/mean", seed=2)
    assert 50 < len(got) < 150
    assert got == {step: step + 0.5 for step in range(len(got))}
    assert values(study, "reward/mean", seed=3) == {step: step + 0.5 for step in range(200)}
    reasons = dict(zip(study.unreadable.path, study.unreadable.reason, strict=True))
    assert len(reasons) == 3
    assert reasons[str(empty)] == "ends before the record that describes the run"
    assert sorted(reason.split(":")[0] for reason in reasons.values())[1:] == [
        "run r4 has no integer 'seed' in its configuration",
        "table eval/test/problems of run r3",
    ]


def test_damage_before_a_clean_resume_does_not_spoil_the_run(make: MAKE, tmp_path: Path) -> None:
    rows = [{"step": step, "reward/mean": float(step)} for step in range(50)]
    make("a", 1, rows, run_id="r", exit_code=1)
    (path,) = tmp_path.rglob("run-r.wandb")
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 4
    path.write_bytes(flipped)
    make("a", 1, rows[40:], run_id="r", resume_step=40)
    study = load_study(tmp_path)
    assert study.runs.finished.tolist() == [True]
    assert values(study, "reward/mean") == {step: float(step) for step in range(50)}
    assert study.unreadable.path.tolist() == [str(path)]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no W&B files"):
        load_study(tmp_path)


class FakeRun(SimpleNamespace):
    """As wandb.Api gives a run; a scan with keys drops rows, and history() samples: neither may be used."""

    def scan_history(self, keys: list[str] | None = None) -> Iterator[dict[str, Any]]:
        assert keys is None
        return iter(self.rows)

    def history(self, *_: Any, **__: Any) -> None:
        raise AssertionError("run.history() samples 500 rows")

    def file(self, path: str) -> SimpleNamespace:
        def download(root: str, replace: bool) -> None:
            target = Path(root, path)
            target.parent.mkdir(parents=True)
            target.write_text('{"columns": ["uid", "reward"], "data": [["p", NaN], ["q", 0.5]]}')

        return SimpleNamespace(download=download)


def fake_run(run_id: str, seed: int, state: str, rows: list[dict[str, Any]]) -> FakeRun:
    return FakeRun(
        id=run_id,
        name=run_id,
        group="a",
        state=state,
        url=f"https://server/{run_id}",
        created_at="2026-01-02T03:04:05Z",
        config={"arm": "a", "seed": seed, "_wandb": {}, "tracking": {}, "fingerprint": "f"},
        rows=rows,
    )


def test_the_api_gives_the_same_frames() -> None:
    table = {"_type": "table-file", "path": "media/table/t.table.json"}
    runs = [
        fake_run(
            "r1", 2, "finished", [{"_step": i, "_runtime": i / 2, "step": i, "reward/mean": i} for i in range(600)]
        ),
        fake_run(
            "r2",
            1,
            "crashed",
            [
                {"step": 3, "loss/kl": "NaN", "kl/ref": "-Infinity", "note": "text"},
                {"step": 3, "reward/mean": 1},
                {"step": 4, "eval/t/problems": table},
                {"step": 3, "reward/mean": 2, "loss/total": None},
            ],
        ),
    ]
    asked: list[Any] = []
    api = SimpleNamespace(runs=lambda *arguments: asked.append(arguments) or runs)
    study = load_api("me/study", filters={"group": "a"}, api=api)
    assert asked == [("me/study", {"group": "a"})]
    assert study.runs.run_id.tolist() == ["r2", "r1"]
    assert study.runs.finished.tolist() == [False, True]
    assert study.runs.seconds.tolist() == [0.0, 299.5]
    assert study.runs.started_at[0] == pd.Timestamp("2026-01-02T03:04:05Z")
    assert study.runs.config[0] == {"arm": "a", "seed": 1, "fingerprint": "f"}
    assert values(study, "reward/mean", seed=2) == {i: float(i) for i in range(600)}
    few = study.history[study.history.seed == 1]
    assert few.metric.tolist() == ["kl/ref", "loss/kl", "reward/mean"]
    assert few.value.tolist()[0] == -math.inf
    assert math.isnan(few.value.tolist()[1])
    assert few.value.tolist()[2] == 2.0
    assert study.tables[["seed", "step", "table", "uid"]].to_numpy().tolist() == [
        [1, 4, "eval/t/problems", "p"],
        [1, 4, "eval/t/problems", "q"],
    ]
    with pytest.raises(ValueError, match="'me/none' holds no runs"):
        load_api("me/none", api=SimpleNamespace(runs=lambda *_: []))
