"""The numbers of the report, recomputed by hand for the synthetic study, and what a study that is not whole says."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import COMMIT, LABELS, PROBLEMS, Synthetic, right
from synthetic_report import report_of

T4 = 2.7764451052
"""97.5 % quantile of Student's t, 4 degrees of freedom (any printed table)."""
T4_90 = 2.1318467863


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(Synthetic())[0]


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["arms"]}


def t_interval(values: list[float], quantile: float = T4) -> tuple[float, float, float]:
    mean = sum(values) / len(values)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


@pytest.mark.parametrize("arm", list(LABELS))
def test_mean_and_interval_are_those_of_the_final_values(report: dict[str, Any], arm: str) -> None:
    values = [right(arm, seed) / PROBLEMS for seed in range(5)]
    found = rows(report)[arm]["value"]
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(t_interval(values))
    assert found["kind"] == "t"
    assert [(item["seed"], item["value"]) for item in found["seeds"]] == list(enumerate(values))


@pytest.mark.parametrize("arm", ["semi", "online", "grpo"])
def test_differences_are_paired_by_seed(report: dict[str, Any], arm: str) -> None:
    gaps = [(right(arm, seed) - right("offline", seed)) / PROBLEMS for seed in range(5)]
    found = rows(report)[arm]["difference"]
    assert (found["mean"], found["low"], found["high"]) == pytest.approx(t_interval(gaps))
    per_seed = [run["difference"] for run in report["evidence"][list(LABELS).index(arm)]["runs"]]
    assert per_seed == pytest.approx(gaps)


def test_the_first_row_is_the_seed_model_without_an_interval(report: dict[str, Any]) -> None:
    first = report["arms"][0]
    assert (first["role"], first["value"]["mean"], first["value"]["kind"]) == ("seed_model", 0.4, "constant")
    assert (first["value"]["low"], first["value"]["high"]) == (None, None)
    gaps = [0.4 - right("offline", seed) / PROBLEMS for seed in range(5)]
    assert first["difference"]["mean"] == pytest.approx(sum(gaps) / 5)


def test_verdicts_carry_the_numbers_of_the_claims(report: dict[str, Any]) -> None:
    verdict = report["verdicts"][1]
    gaps = [(right("semi", seed) - right("online", seed)) / PROBLEMS for seed in range(5)]
    assert (verdict["difference"], verdict["low"], verdict["high"]) == pytest.approx(t_interval(gaps, T4_90))
    assert (verdict["level"], verdict["verdict"], verdict["n"]) == (0.9, "supported", 5)
    against_seed = report["verdicts"][2]
    assert against_seed["difference"] == pytest.approx(sum(right("offline", s) / PROBLEMS - 0.4 for s in range(5)) / 5)


def test_the_interval_for_new_problems_is_wider_and_needs_answers_that_give_the_value(report: dict[str, Any]) -> None:
    for row in report["arms"][1:]:
        assert row["new_problems"]["problems"] == PROBLEMS
        assert row["new_problems"]["high"] > row["value"]["high"]
    study = Synthetic()
    data = study.data()
    data.tables.loc[data.tables["arm"] == "semi", "outcome"] = "right"
    found = rows(report_of(study, source=data)[0])
    assert found["semi"]["new_problems"] is None
    assert found["grpo"]["new_problems"] is not None


def test_outcomes_are_counted_apart(report: dict[str, Any]) -> None:
    found = report["evidence"][0]["outcomes"]
    data = Synthetic().data().tables
    mine = data[data["arm"] == "offline"]["outcome"].value_counts() / (5 * PROBLEMS)
    for outcome in ("right", "wrong", "no_answer", "timeout"):
        assert found[outcome] == pytest.approx(mine[outcome])
    assert found["truncated"] == pytest.approx(0.1)
    assert found["answers"] == 200


def test_ten_answers_of_each_kind_are_drawn_and_the_same_ones_each_time(report: dict[str, Any]) -> None:
    again = report_of(Synthetic())[0]
    for found, other in zip(report["evidence"], again["evidence"], strict=True):
        assert len(found["right"]) == len(found["not_right"]) == 10
        assert {row["outcome"] for row in found["right"]} == {"right"}
        assert "right" not in {row["outcome"] for row in found["not_right"]}
        assert found["right"] == other["right"]
        assert len({(row["seed"], row["uid"]) for row in found["right"]}) == 10


def test_the_curves_are_means_over_seeds_and_carry_tokens(report: dict[str, Any]) -> None:
    curve = report["curves"][1]
    assert curve["metric"] == "policy/entropy"
    arm = curve["arms"][1]
    step = arm["points"][3]
    share = 1 - math.exp(-4 * 6 / 20)
    values = [0.7 - share * 0.3 + 0.01 * seed for seed in range(5)]
    assert step["step"] == 6
    assert (step["mean"], step["low"], step["high"]) == pytest.approx(t_interval(values))
    assert step["tokens"] == pytest.approx(6 * 1020)
    assert [len(line["steps"]) for line in arm["lines"]] == [11] * 5


@pytest.mark.parametrize(("arm", "loads", "staleness", "last"), [(0, 1, 9.5, 0), (1, 2, 4.5, 10), (2, 20, 0.0, 19)])
def test_the_timeline_shows_which_weights_sampled(
    report: dict[str, Any], arm: int, loads: int, staleness: float, last: int
) -> None:
    found = report["sync"][arm]
    assert (found["loads"], found["mean_staleness"], found["versions"][-1]) == (loads, staleness, last)
    assert found["steps"] == list(range(20))


def test_costs_are_means_per_cell_and_totals(report: dict[str, Any]) -> None:
    grpo = report["costs"][3]
    assert grpo["generated_tokens"] == 20 * (1200 + 20)
    assert grpo["generated_tokens_total"] == 5 * 20 * (1200 + 20)
    assert grpo["trained_tokens"] == 20 * 610
    assert (grpo["seconds"], grpo["seconds_total"]) == (42.0, 210.0)
    assert grpo["sample_s"] == pytest.approx(10.0)


def test_a_failed_cell_is_in_the_list_and_in_no_mean() -> None:
    report = report_of(Synthetic(unfinished=(("online", 2),), absent=(("grpo", 4),)))[0]
    found = rows(report)["online"]
    assert found["value"]["n"] == 4
    assert found["value"]["kind"] == "range"
    assert [item["seed"] for item in found["value"]["seeds"]] == [0, 1, 3, 4]
    assert found["cells"] == {"declared": 5, "finished": 4, "failed": 1}
    assert found["dagger"]
    assert rows(report)["grpo"]["cells"] == {"declared": 5, "finished": 4, "failed": 0}
    texts = {(row["what"], row["why"]) for row in report["missing"]}
    assert (f"{LABELS['online']}, seed 2", "failed: FloatingPointError: the loss is NaN at step 12") in texts
    assert (f"{LABELS['grpo']}, seed 4", "waiting") in texts
    line = report["curves"][0]["arms"][2]["lines"][2]
    assert (line["complete"], line["steps"][-1]) == (False, 12)
    assert report["curves"][0]["arms"][2]["n"] == 4
    # what a failed run spent was spent
    assert report["costs"][2]["seconds_total"] == 210.0


def test_a_run_that_ended_in_an_error_does_not_count_even_with_a_value_at_the_last_step() -> None:
    study = Synthetic()
    data = study.data()
    cell = (data.runs["arm"] == "semi") & (data.runs["seed"] == 2)
    data.runs.loc[cell, ["finished", "exit_code"]] = [False, 1]
    found = rows(report_of(study, source=data)[0])["semi"]
    assert [item["seed"] for item in found["value"]["seeds"]] == [0, 1, 3, 4]
    assert found["cells"]["failed"] == 1


def test_nan_stale_dirty_torn_duplicate_and_foreign_runs_are_named(tmp_path: Path) -> None:
    study = Synthetic(change=lambda a, s, m, step, v: math.nan if (a, s, step) == ("semi", 1, 20) else v)
    data = study.data()
    data.runs.loc[0, "commit"] = "d" * 40
    data.runs.loc[[1, 7], "dirty"] = True
    data.runs.loc[2, "truncated"] = True
    data.runs.loc[3, "fingerprint"] = "another"
    data.duplicates = pd.DataFrame([{**data.runs.iloc[5].to_dict(), "run_id": "twin", "instead": "online0"}])
    report = report_of(study, source=data)[0]
    kinds = [row["kind"] for row in report["missing"]]
    assert {"commit", "file", "left out", "duplicate", "value", "metric", "cell"} <= set(kinds)
    whys = " | ".join(f"{row['what']}: {row['why']}" for row in report["missing"])
    assert f"made by commit dddddddddd, the study stands at {COMMIT[:10]}" in whys
    assert "offline-seed2, grpo-seed1: made with uncommitted changes" in whys
    assert "semi-seed1: eval/test/accuracy is not finite at step 20" in whys
    assert rows(report)["semi"]["value"]["n"] == 4
    assert rows(report)["grpo"]["value"]["n"] == 4  # the run of another configuration does not stand for the cell


def test_two_runs_of_a_cell_count_once_and_the_complete_one_counts() -> None:
    study = Synthetic()
    data = study.data()
    twin = {**data.runs.iloc[0].to_dict(), "run_id": "twin", "finished": False, "exit_code": 1}
    twin["started_at"] = data.runs["started_at"].max() + pd.Timedelta(days=1)
    data.runs = pd.concat([data.runs, pd.DataFrame([twin])], ignore_index=True)
    report = report_of(study, source=data)[0]
    assert rows(report)["grpo"]["value"]["n"] == 5
    assert [row["kind"] for row in report["missing"]] == ["left out"]


def test_arms_of_different_lengths_are_compared_at_their_own_end_and_said_so() -> None:
    report = report_of(Synthetic(steps=lambda arm: 30 if arm == "grpo" else 20))[0]
    assert rows(report)["grpo"]["value"]["n"] == 5
    budget = next(row for row in report["missing"] if row["kind"] == "budget")
    assert "GRPO: 30" in budget["why"]


def test_tables_without_numbered_samples_hold_greedy_answers(report: dict[str, Any]) -> None:
    study = Synthetic()
    data = study.data()
    data.tables = data.tables.drop(columns="sample")
    assert report_of(study, source=data)[0]["arms"] == report["arms"]


def test_a_cell_stands_for_what_the_study_declares_now() -> None:
    study = Synthetic()
    cells = [{**cell, "declared": cell["fingerprint"]} for cell in study.declaration()["cells"]]
    cells[0]["declared"] = "a new definition of the arm"
    found = report_of(study, cells=cells, commit="unknown")[0]
    assert rows(found)["offline"]["value"]["n"] == 4
    assert [row["kind"] for row in found["missing"]] == ["cell", "left out"]


def test_inert_arms_are_labelled(tmp_path: Path) -> None:
    study = Synthetic()
    declared = study.declaration()
    declared["arms"][2]["inert"] = "the ratio is 1: one update per batch"
    from reports.build import build

    folder = study.write(tmp_path, arms=declared["arms"])
    out = build(folder, formats=("html", "latex", "md"), source=study.data()).folder
    assert "the ratio is 1: one update per batch" in (out / "index.html").read_text(encoding="utf-8")
    assert "(inert)" in (out / "table.tex").read_text(encoding="utf-8")
    assert "inert: the ratio is 1" in (out / "report.md").read_text(encoding="utf-8")
