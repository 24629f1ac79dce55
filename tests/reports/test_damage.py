"""Inputs of a report that were damaged, copied or laid in from elsewhere are said, and what is whole is used."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from synthetic import Synthetic

from reports.declared import declaration
from reports.evidence import missing
from reports.load import load_study
from reports.results import Results
from suite.tracking import Tracker

TABLE = (["uid", "outcome"], [["a", "right"], ["b", "wrong"]])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of four steps with a table, as W&B writes it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = {"study": "mini_sync", "arm": "online", "seed": 0, "fingerprint": "f", "commit": "c", "dirty": False}
    tracker = Tracker(tmp_path / "study" / "cell", project="study", group="online", name="n", config=config)
    for step in range(1, 5):
        tracker.log(step, {"time/step_s": 1.0, "eval/test/accuracy": 0.5})
    tracker.log_table(4, "eval/test/problems", TABLE)
    tracker.finish(0)
    return tmp_path / "study"


def test_a_flipped_bit_in_a_table_leaves_it_out(folder: Path) -> None:
    assert list(load_study(folder).tables["outcome"]) == ["right", "wrong"]
    (table,) = folder.rglob("*.table.json")
    table.write_text(table.read_text().replace("wrong", "right"))
    found = load_study(folder)
    assert len(found.tables) == 0
    assert "damaged: its content is not what was logged" in found.unreadable.reason[0]


def test_a_file_that_was_copied_counts_once(folder: Path) -> None:
    plain = load_study(folder)
    (run,) = folder.rglob("offline-run-*")
    shutil.copytree(run, run.with_name(run.name + "-copy"))
    twice = load_study(folder)
    assert twice.runs.segments[0] == 1
    assert twice.runs.seconds[0] == plain.runs.seconds[0]
    assert "a copy of" in twice.unreadable.reason[0]


def test_a_run_of_another_study_is_left_out_by_name(tmp_path: Path) -> None:
    study = Synthetic()
    data = study.data()
    for config in data.runs["config"][:1]:
        config["study"] = "another"
    results = Results(declaration(study.write(tmp_path), data), data)
    assert [row["why"] for row in results.left_out] == ["it is of another study, 'another'"]


def test_steps_that_are_missing_from_a_finished_run_are_counted(tmp_path: Path) -> None:
    study = Synthetic()
    data = study.data()
    rows = data.history[data.history["step"] == 0].assign(metric="time/step_s", value=1.0)
    whole = [rows.assign(step=step) for step in range(1, 21)]
    import pandas as pd

    for kept, words in ((20, None), (18, "its W&B files hold 18 of 20 steps")):
        history = pd.concat([data.history, *whole[:kept]])
        now = dataclasses.replace(data, history=history)
        facts = missing(Results(declaration(study.write(tmp_path), now), now))
        found = {fact["why"] for fact in facts if fact["kind"] == "rows"}
        assert found == ({words} if words else set())
