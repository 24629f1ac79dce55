"""Everything that a report says, as one tree of plain values: pages, tables and figures only show what is in it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from reports import starts
from reports.claims import ClaimResult, decide
from reports.declared import DeclaredArm
from reports.results import Results, complete, records
from reports.stats import (
    CrossedInterval,
    crossed_difference,
    crossed_interval,
    holm,
    mean_interval,
    p_different,
    paired,
)
from suite.metrics import is_share
from suite.study import SEED_MODEL

LEVEL = 0.95
"""Level of every interval of the table; claims bring their own."""
MIN_SEEDS = 5
"""Seeds below which a mean is shown with its range instead of an interval, and no row is marked."""

CURVES = {
    "eval/validation/accuracy": ("Validation accuracy", "greedy accuracy on held-out validation problems"),
    "policy/entropy": ("Entropy", "next-token entropy of fresh samples on the fixed probe prompts, nats"),
    "policy/probe_length": ("Completion length", "tokens of fresh samples on the fixed probe prompts"),
}
"""The curves of the paper's figures: metric -> title, what it is."""

_TASK_CURVE = re.compile(r"eval/(?:(?P<task>.+)-)?validation/(?P<value>accuracy|reward|hidden_reward)")
_TASK_WORDS = {
    "accuracy": ("Validation accuracy", "greedy accuracy on held-out validation problems"),
    "reward": ("Validation reward", "score of the greedy completion on held-out validation prompts"),
    "hidden_reward": ("Hidden preference", "what the reward model stands for, on held-out validation prompts"),
}

COSTS = ("cost/generated_tokens", "cost/trained_tokens")
TIMES = ("time/sample_s", "time/reward_s", "time/train_s", "time/eval_s")


def curves(results: Results) -> dict[str, tuple[str, str]]:
    """The curves to draw: the paper's, with one of each task and kind of reward that the runs evaluated in place of
    the accuracy, if they were of a mixture or of a scored task."""
    tasks = {}
    for metric in sorted(results.data.history["metric"].unique()):
        found = _TASK_CURVE.fullmatch(metric)
        if found:
            title, what = _TASK_WORDS[found["value"]]
            tasks[metric] = (f"{title}, {found['task']}", what) if found["task"] else (title, what)
    first = next(iter(CURVES))
    return CURVES if not tasks else {**tasks, **{metric: words for metric, words in CURVES.items() if metric != first}}


def collect(results: Results, claims: Iterable[ClaimResult]) -> dict[str, Any]:
    """The numbers of a study: its declaration, verdicts, arms, curves, syncs, changes and costs."""
    claims, declared = list(claims), results.declared
    share = is_share(declared.metric)
    problems = {arm.name: problem_count(results, arm.name, declared.metric) for arm in declared.arms}
    return {
        "study": {
            "name": declared.name,
            "question": declared.question,
            "metric": declared.metric,
            "control": declared.control,
            "seeds": list(declared.seeds),
            "cells_declared": len(declared.arms) * len(declared.seeds),
            "cells_finished": sum(len(results.finished(arm.name)) for arm in declared.arms),
            "problems": max((n for n in problems.values() if n is not None), default=None),
            "commit": declared.commit,
            "dirty": declared.dirty,
            "versions": [{"name": name, "version": str(v)} for name, v in sorted(declared.versions.items())],
            "command": declared.command,
            "level": LEVEL,
            "min_seeds": MIN_SEEDS,
            "varied": starts.varied(results),
            "records_claims": declared.records_claims,
        },
        "units": {
            "value": "percent" if share else "number",
            "difference": "points" if share else "signed",
            "value_word": declared.metric.rsplit("/", 1)[-1] + (", %" if share else ""),
            "difference_word": "points" if share else declared.metric.rsplit("/", 1)[-1],
        },
        "verdicts": verdicts(results, claims),
        "arms": arm_rows(results, claims),
        "curves": [curve(results, metric, *words) for metric, words in curves(results).items()],
        "sync": [sync(results, arm) for arm in declared.arms],
        "changes": [changes(arm) for arm in declared.arms],
        "costs": [costs(results, arm) for arm in declared.arms],
    }


def problem_count(results: Results, arm: str, metric: str) -> int | None:
    """Problems behind one value of the metric: counted in the kept answers, else as configured, else None."""
    answers = results.answers(arm, metric)
    if len(answers):
        return int(answers["uid"].nunique())
    parts = metric.split("/")
    for run in results.runs(arm):
        evaluation = ((run["config"] or {}).get("run") or {}).get("eval", {})
        count = evaluation.get(f"{parts[1]}_problems", 0) if len(parts) > 2 else 0
        if count:
            return int(count)
    return None


def decided(results: Results) -> list[ClaimResult]:
    """The study's claims, decided, in the order of declaration."""
    return decide(
        results.declared.claims,
        lambda metric, arm: results.final(arm, metric),
        lambda metric, arm: results.initial(arm, metric),
        seeds=results.declared.seeds,
        exploratory=results.declared.exploratory,
        failed={arm.name: failed_seeds(results, arm.name) for arm in results.declared.arms},
    )


def verdicts(results: Results, claims: Iterable[ClaimResult]) -> list[dict[str, Any]]:
    """What is shown of every claim."""
    labels = {arm.name: arm.label for arm in results.declared.arms} | {SEED_MODEL: SEED_MODEL}
    rows = []
    for result in claims:
        claim = result.claim
        found = dataclasses.asdict(result)
        again = result.with_failed
        del found["claim"]
        keys = ("verdict", "n", "difference", "low", "high", "level")
        found["with_failed"] = None if again is None else {key: getattr(again, key) for key in keys}
        found["fixed"] = results.declared.fixed.get(claim.name)
        contradicted = result.verdict == "contradicted"
        rows.append(
            {
                **dataclasses.asdict(claim),
                "arm_label": labels[claim.arm],
                "than_label": labels[claim.than],
                "unit": "points" if is_share(claim.metric) else "signed",
                "value_unit": "percent" if is_share(claim.metric) else "number",
                **found,
                "p_shown": result.p_opposite_holm if contradicted else result.p_holm,
            }
        )
    return rows


def summary(values: Mapping[int, float]) -> dict[str, Any]:
    """The mean over seeds with what can honestly stand beside it.

    `kind` says what `low` and `high` are: `t` an interval over seeds (from MIN_SEEDS on), `range` the smallest and
    largest value, `anecdote` nothing (one seed), `none` nothing at all. (`constant`: the seed model's row.)
    """
    numbers = [values[seed] for seed in sorted(values)]
    found: dict[str, Any] = {
        "n": len(numbers),
        "seeds": [{"seed": seed, "value": values[seed]} for seed in sorted(values)],
        "mean": math.fsum(numbers) / len(numbers) if numbers else None,
        "low": None,
        "high": None,
        "sd": None,
        "kind": ("none", "anecdote")[len(numbers)] if len(numbers) < 2 else "range",
    }
    if len(numbers) > 1:
        interval = mean_interval(numbers, LEVEL)
        found |= {"sd": interval.sd, "low": min(numbers), "high": max(numbers)}
        if len(numbers) >= MIN_SEEDS:
            found |= {"low": interval.low, "high": interval.high, "kind": "t"}
    return found


def difference(arm: Mapping[int, float], than: Mapping[int, float]) -> dict[str, Any]:
    """arm - than, paired by seed, summarised as `summary` does; seeds that only one side has are left out."""
    pair = paired(arm, than, LEVEL)
    found = summary(dict(zip(pair.seeds, pair.differences)))
    return found | ({"sd": pair.sd, "low": pair.low, "high": pair.high} if found["kind"] == "t" else {})


def crossed(interval: CrossedInterval, value: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is shown of an interval for new problems too; None below MIN_SEEDS seeds or without an interval.

    None too where the kept answers do not give the logged value: an interval of other numbers would mislead.
    """
    if interval.low is None or interval.n < MIN_SEEDS or value["mean"] is None:
        return None
    if interval.n != value["n"] or abs(interval.mean - value["mean"]) > 1e-6:
        return None
    return {"low": interval.low, "high": interval.high, "problems": interval.problems}


def arm_rows(results: Results, claims: Iterable[ClaimResult] = ()) -> list[dict[str, Any]]:
    """The rows of the table of arms; the first is the seed model, each run's own evaluation before its first step."""
    declared, metric = results.declared, results.declared.metric
    control = results.final(declared.control, metric)
    before: dict[int, list[float]] = {}
    for arm in declared.arms:
        for seed, value in results.initial(arm.name, metric).items():
            before.setdefault(seed, []).append(value)
    seed_model = {seed: math.fsum(values) / len(values) for seed, values in before.items()}
    rows = [_row(SEED_MODEL, SEED_MODEL, "seed_model", seed_model, control)]
    if rows[0]["value"]["n"] == 1 or rows[0]["value"]["sd"] == 0:
        # one model, evaluated once per run: an interval over training seeds would be of width 0 and mean nothing
        rows[0]["value"] |= {"low": None, "high": None, "kind": "constant"}
    matrices = {arm.name: results.matrix(arm.name, metric) for arm in declared.arms}
    for arm in declared.arms:
        values = results.final(arm.name, metric)
        row = _row(arm.name, arm.label, "control" if arm.name == declared.control else "arm", values, control)
        matrix = matrices[arm.name]
        if matrix.size:
            row["new_problems"] = crossed(crossed_interval(matrix.to_numpy(), LEVEL), row["value"])
        if row["difference"]:
            ours, theirs = matrix.align(matrices[declared.control], join="inner")
            if ours.size:
                interval = crossed_difference(ours.to_numpy(), theirs.to_numpy(), LEVEL)
                row["difference"]["new_problems"] = crossed(interval, row["difference"])
        row["sampled"] = sampled(results, arm.name)
        row["inert"] = arm.inert
        row["cells"] = _cells(results, arm.name)
        row["dagger"] = row["cells"]["failed"] > 0
        rows.append(row)
    told = {
        frozenset((found.claim.arm, found.claim.than)): found.verdict != "undecided"
        for found in claims
        if found.claim.metric == metric and found.claim.kind != "equivalent" and not found.exploratory
    }
    _mark_best(rows, told)
    return rows


def _row(name: str, label: str, role: str, values: Mapping[int, float], control: Mapping[int, float]) -> dict[str, Any]:
    gap = None if role == "control" else {**difference(values, control), "new_problems": None}
    return {
        "name": name,
        "label": label,
        "role": role,
        "value": summary(values),
        "new_problems": None,
        "difference": gap,
        "sampled": None,
        "inert": None,
        "cells": None,
        "dagger": False,
        "best": False,
        "p_best": None,
    }


def failed_seeds(results: Results, arm: str) -> set[int]:
    """The seeds under which an arm's cell failed and no run of it is complete."""
    failed = {cell.seed for cell in results.declared.cells if cell.arm == arm and cell.status == "failed"}
    failed |= {int(run["seed"]) for run in results.runs(arm) if not complete(run) and _nonzero(run["exit_code"])}
    return failed - {int(run["seed"]) for run in results.finished(arm)}


def _cells(results: Results, arm: str) -> dict[str, int]:
    done = {int(run["seed"]) for run in results.finished(arm)}
    failed = failed_seeds(results, arm)
    return {"declared": len(results.declared.seeds), "finished": len(done), "failed": len(failed)}


def _nonzero(code: Any) -> bool:
    return not pd.isna(code) and int(code) != 0


def _mark_best(rows: list[dict[str, Any]], told: Mapping[frozenset[str], bool]) -> None:
    """Mark the row with the highest mean and all that are not told from it: by the verdict of a declared claim on the
    two (`told`), else by a paired t-test, Holm over the rows."""
    able = [row for row in rows if row["value"]["n"] >= MIN_SEEDS]
    if len(able) < 2:
        return
    best = max(able, key=lambda row: row["value"]["mean"])
    values = {row["name"]: {item["seed"]: item["value"] for item in row["value"]["seeds"]} for row in able}
    pairs = {row["name"]: paired(values[best["name"]], values[row["name"]], LEVEL) for row in able if row is not best}
    tested = [name for name, pair in pairs.items() if pair.n >= MIN_SEEDS]
    adjusted = dict(zip(tested, holm([p_different(pairs[name]) for name in tested])))
    for row in able:
        row["p_best"] = adjusted.get(row["name"])
        apart = None if row["p_best"] is None else row["p_best"] <= 1 - LEVEL
        row["best"] = row is best or told.get(frozenset((best["name"], row["name"])), apart) is False


def sampled(results: Results, arm: str) -> dict[str, Any] | None:
    """avg@k on the benchmark of the study's metric; None where it was not logged."""
    benchmark = results.declared.metric.rsplit("/", 1)[0]
    for run in results.finished(arm):
        samples = ((run["config"] or {}).get("run") or {}).get("eval", {}).get("num_samples")
        values = results.final(arm, f"{benchmark}/avg@{samples}")
        if values:
            return {"k": samples, **summary(values)}
    return None


def curve(results: Results, metric: str, title: str, what: str) -> dict[str, Any]:
    """A metric over the steps, per arm: the mean over complete runs, its band, and every seed's own line."""
    arms = []
    for arm in results.declared.arms:
        lines = []
        for run in results.runs(arm.name):
            series = results.series(run, metric)
            if series:
                tokens = results.series(run, "cost/generated_tokens")
                lines.append(
                    {
                        "seed": int(run["seed"]),
                        "complete": complete(run),
                        "steps": list(series),
                        "values": list(series.values()),
                        "tokens": [_so_far(tokens, step) for step in series] if tokens else None,
                    }
                )
        arms.append({"name": arm.name, "label": arm.label, "lines": lines, **_band(lines)})
    return {"metric": metric, "title": title, "what": what, "share": is_share(metric), "arms": arms}


def _so_far(series: Mapping[int, float], step: int) -> float:
    return max((value for at, value in series.items() if at <= step), default=0.0)


def _band(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Mean and band at the steps that every complete run has, so that no survivor drags the mean."""
    whole = [line for line in lines if line["complete"]]
    common = sorted(set.intersection(*(set(line["steps"]) for line in whole))) if whole else []
    points = []
    for step in common:
        found = summary({line["seed"]: line["values"][line["steps"].index(step)] for line in whole})
        spent = [line["tokens"][line["steps"].index(step)] for line in whole if line["tokens"]]
        points.append({"step": step, "tokens": math.fsum(spent) / len(spent) if spent else None, **found})
    for point in points:
        del point["seeds"]
    return {"points": points, "n": len(whole), "kind": points[0]["kind"] if points else "none"}


def sync(results: Results, arm: DeclaredArm) -> dict[str, Any]:
    """Which weights sampled each step, of the arm's first run that logged it."""
    found: dict[str, Any] = {"name": arm.name, "label": arm.label, "seed": None, "steps": [], "versions": []}
    found |= {"loads": None, "period": None, "mean_staleness": None, "max_staleness": None}
    for run in results.finished(arm.name) + results.runs(arm.name):
        versions = results.series(run, "sync/version")
        if not versions:
            continue
        staleness = results.series(run, "sync/staleness")
        # one entry per rollout batch, at the learner's step when it was sampled
        drawn = {int(v + staleness[at]) if at in staleness else at: int(v) for at, v in versions.items()}
        ages = [step - version for step, version in drawn.items()]
        rollout = ((run["config"] or {}).get("run") or {}).get("rollout", {})
        return found | {
            "seed": int(run["seed"]),
            "steps": list(drawn),
            "versions": list(drawn.values()),
            "loads": len(set(drawn.values())),
            "period": rollout.get("sync_period"),
            "mean_staleness": math.fsum(ages) / len(ages),
            "max_staleness": max(ages),
        }
    return found


def changes(arm: DeclaredArm) -> dict[str, Any]:
    """What an arm changes against the control, option by option."""
    options = [{"option": name, "control": str(old), "arm": str(new)} for name, (old, new) in arm.differs.items()]
    return {"name": arm.name, "label": arm.label, "inert": arm.inert, "options": options}


def costs(results: Results, arm: DeclaredArm) -> dict[str, Any]:
    """Tokens and seconds: the mean over complete runs, and the total over every run, also those that do not count."""
    finished = results.finished(arm.name)
    spent: dict[str, Any] = {"name": arm.name, "label": arm.label, "n": len(finished)}
    for metric in COSTS:
        key = metric.split("/")[1]
        ends = {
            run["run_id"]: max(results.series(run, metric).values(), default=None) for run in results.runs(arm.name)
        }
        known = {run_id: end for run_id, end in ends.items() if end is not None}
        spent[key] = _mean([known[run["run_id"]] for run in finished if run["run_id"] in known])
        spent[f"{key}_total"] = math.fsum(known.values()) if known else None
    spent["seconds"] = _mean([float(run["seconds"]) for run in finished if not pd.isna(run["seconds"])])
    every = [run for run in results.all_runs if run["arm"] == arm.name]
    every += [run for run in records(results.data.duplicates) if run["arm"] == arm.name]
    seconds = [float(run["seconds"]) for run in every if not pd.isna(run["seconds"])]
    spent["seconds_total"] = math.fsum(seconds) if seconds else None
    for metric in TIMES:
        sums = [math.fsum(values.values()) for run in finished if (values := results.series(run, metric))]
        spent[metric.split("/")[1]] = _mean(sums)
    return spent


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
