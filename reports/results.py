"""A study's runs, cell by cell: which run stands for a cell, its series, its final value, its graded answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from reports.declared import Declaration

if TYPE_CHECKING:
    from reports.load import StudyData

GREEDY = -1
"""The number of the greedy completion in a table of problems."""


class Results:
    """Read access to the runs of the declared cells.

    One run stands for a cell: of the runs with the declared configuration a complete one before any other, then the
    latest. Runs of arms, seeds or configurations that were not declared are left out and listed in `left_out`.
    """

    def __init__(self, declared: Declaration, data: StudyData) -> None:
        self.declared = declared
        self.data = data
        self.left_out: list[dict[str, str]] = []
        self.all_runs: list[dict[str, Any]] = records(data.runs)
        self._runs = self._choose()
        chosen = {run["run_id"] for run in self._runs.values()}
        history = data.history[data.history["run_id"].isin(chosen)]
        self._series: dict[tuple[str, str], dict[int, float]] = {}
        for row in records(history.sort_values("step", kind="stable")):
            self._series.setdefault((row["run_id"], row["metric"]), {})[int(row["step"])] = float(row["value"])

    def _choose(self) -> dict[tuple[str, int], dict[str, Any]]:
        identities = {(cell.arm, cell.seed): cell.fingerprint for cell in self.declared.cells if cell.fingerprint}
        arms, seeds = {arm.name for arm in self.declared.arms}, set(self.declared.seeds)
        best: dict[tuple[str, int], dict[str, Any]] = {}
        for run in sorted(self.all_runs, key=lambda run: (str(run["started_at"]), str(run["run_id"]))):
            cell = (str(run["arm"]), int(run["seed"]))
            study = (run["config"] or {}).get("study")
            if self.declared.found and study not in (None, self.declared.name):
                self._leave_out(run, f"it is of another study, {study!r}")
            elif cell[0] not in arms or cell[1] not in seeds:
                self._leave_out(run, "its arm or seed is not declared in the study")
            elif identities.get(cell, run["fingerprint"]) != run["fingerprint"]:
                self._leave_out(run, "its configuration is not the one that the study declares now")
            else:
                old = best.get(cell)
                if old is not None:
                    worse = old if complete(run) >= complete(old) else run
                    self._leave_out(worse, "another run of the same cell stands for it")
                    run = run if worse is old else old
                best[cell] = run
        return best

    def _leave_out(self, run: dict[str, Any], why: str) -> None:
        self.left_out.append({"run": str(run["name"]), "run_id": str(run["run_id"]), "why": why})

    def run(self, arm: str, seed: int) -> dict[str, Any] | None:
        """The run that stands for a cell; None where there is none."""
        return self._runs.get((arm, seed))

    def runs(self, arm: str) -> list[dict[str, Any]]:
        """The runs that stand for an arm's cells, by seed, complete or not."""
        return [self._runs[cell] for cell in sorted(self._runs) if cell[0] == arm]

    def finished(self, arm: str) -> list[dict[str, Any]]:
        """The complete ones among `runs`."""
        return [run for run in self.runs(arm) if complete(run)]

    def series(self, run: dict[str, Any], metric: str) -> dict[int, float]:
        """step -> value, finite values only, by step; empty where the metric was not logged."""
        logged = self._series.get((run["run_id"], metric), {})
        return {step: value for step, value in logged.items() if math.isfinite(value)}

    def broken(self, run: dict[str, Any], metric: str) -> list[int]:
        """The steps at which a metric was logged as NaN or infinite."""
        logged = self._series.get((run["run_id"], metric), {})
        return [step for step, value in logged.items() if not math.isfinite(value)]

    def last_step(self, run: dict[str, Any]) -> int:
        """The optimizer step at which a run is done: its configured number, else the last step logged."""
        steps = ((run["config"] or {}).get("run") or {}).get("train", {}).get("steps")
        if steps is not None:
            return int(steps)
        return max((max(found) for (run_id, _), found in self._series.items() if run_id == run["run_id"]), default=0)

    def final(self, arm: str, metric: str) -> dict[int, float]:
        """seed -> value at a complete run's last step; runs that are not complete have none."""
        found = {}
        for run in self.finished(arm):
            value = self.series(run, metric).get(self.last_step(run))
            if value is not None:
                found[int(run["seed"])] = value
        return found

    def initial(self, arm: str, metric: str) -> dict[int, float]:
        """seed -> value before the first step, of every run that has one: the seed model's."""
        found = {}
        for run in self.runs(arm):
            value = self.series(run, metric).get(0)
            if value is not None:
                found[int(run["seed"])] = value
        return found

    def answers(self, arm: str, metric: str) -> pd.DataFrame:
        """The graded answers behind a metric at the last step of an arm's complete runs; empty where none were kept."""
        table = metric.rsplit("/", 1)[0] + "/problems"
        frame = self.data.tables
        if not len(frame):
            return frame
        last = {run["run_id"]: self.last_step(run) for run in self.finished(arm)}
        at_end = frame["run_id"].map(last) == frame["step"]
        found = frame[(frame["table"] == table) & frame["run_id"].isin(last) & at_end]
        # a table without numbered samples holds the greedy answers alone
        numbers = found["sample"].fillna(GREEDY) if "sample" in found else GREEDY
        found = found.assign(sample=numbers)
        # a resumed run logs a step again: the last word stands
        return found.drop_duplicates(["run_id", "uid", "sample"], keep="last")

    def matrix(self, arm: str, metric: str) -> pd.DataFrame:
        """seeds x problems; only problems that every seed answered.

        The value is the column that bears the metric's last name (a scored task's `reward` or `hidden_reward`), else 1
        where the greedy answer is right. Answers without a score are left out.
        """
        answers = self.answers(arm, metric)
        if not len(answers):
            return pd.DataFrame()
        greedy = answers[answers["sample"] == GREEDY]
        column = metric.rpartition("/")[2]
        values = greedy[column] if column in greedy else greedy["outcome"] == "right"
        valued = greedy.assign(value=values.astype(np.float64))
        return valued.pivot(index="seed", columns="uid", values="value").dropna(axis="columns")


def complete(run: dict[str, Any]) -> bool:
    """Whether a run ended by itself, without an error."""
    return bool(run["finished"]) and not pd.isna(run["exit_code"]) and int(run["exit_code"]) == 0


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame, each as column -> value."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
