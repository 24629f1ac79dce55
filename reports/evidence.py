"""What stands behind the numbers: the runs, the configurations, the graded answers, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from reports.declared import known_commit
from reports.numbers import curves, problem_count
from reports.results import GREEDY, Results, complete, records
from suite.randomness import permutation

ANSWERS_SHOWN = 10
"""Sampled answers shown of each kind, per arm."""
OUTCOMES = ("right", "wrong", "no_answer", "timeout")
_LONGEST = 600


def evidence(results: Results, arm: str, folder: Path) -> dict[str, Any]:
    """Behind an arm's numbers: its runs with values and commands, its whole configuration, outcomes, graded answers."""
    declared, metric = results.declared, results.declared.metric
    final, before = results.final(arm, metric), results.initial(arm, metric)
    control = results.final(declared.control, metric)
    rows = []
    for seed in declared.seeds:
        run = results.run(arm, seed)
        row: dict[str, Any] = {
            "seed": seed,
            "value": final.get(seed),
            "control": control.get(seed),
            "difference": final[seed] - control[seed] if seed in final and seed in control else None,
            "seed_model": before.get(seed),
            "name": None,
            "command": declared.reproduce(arm, seed),
        }
        if run is not None:
            row |= {
                "name": _text(run["name"]),
                "run_id": _text(run["run_id"]),
                "fingerprint": _text(run["fingerprint"]),
                "commit": _text(run["commit"]),
                "dirty": bool(run["dirty"]) if not pd.isna(run["dirty"]) else None,
                "complete": complete(run),
                "started_at": None if pd.isna(run["started_at"]) else f"{run['started_at']:%Y-%m-%d %H:%M} UTC",
                "seconds": None if pd.isna(run["seconds"]) else float(run["seconds"]),
                "path": _relative(run["path"], folder),
            }
        rows.append(row)
    runs = results.finished(arm) or results.runs(arm)
    resolved = (runs[0]["config"] or {}).get("run") if runs else None
    return {
        "name": arm,
        "runs": rows,
        "problems": problem_count(results, arm, metric),
        "config": _flat(resolved or {}),
        "outcomes": outcomes(results, arm),
        **answers(results, arm),
    }


def outcomes(results: Results, arm: str) -> dict[str, Any] | None:
    """Shares of the greedy answers at the last step by outcome, and of those cut off by the budget, over all seeds."""
    graded = results.answers(arm, results.declared.metric)
    graded = graded[graded["sample"] == GREEDY] if len(graded) else graded
    if not len(graded):
        return None
    shares = {outcome: float((graded["outcome"] == outcome).mean()) for outcome in OUTCOMES}
    truncated = float(graded["truncated"].astype(float).mean()) if "truncated" in graded else None
    return {"answers": len(graded), **shares, "truncated": truncated}


def answers(results: Results, arm: str) -> dict[str, list[dict[str, Any]]]:
    """Ten answers graded right and ten that were not, drawn by a keyed permutation of all answers at the last step."""
    graded = results.answers(arm, results.declared.metric)
    if not len(graded):
        return {"right": [], "not_right": []}
    graded = graded.sort_values(["seed", "uid", "sample"], kind="stable")
    right = graded["outcome"] == "right"
    found = {}
    for kind, rows in (("right", graded[right]), ("not_right", graded[~right])):
        order = permutation(len(rows), "report", results.declared.name, arm, kind)[:ANSWERS_SHOWN]
        found[kind] = [_answer(row) for row in records(rows.iloc[order])]
    return found


def _answer(row: dict[str, Any]) -> dict[str, Any]:
    texts = {}
    for column in ("prompt", "completion", "gold", "answer"):
        value = row.get(column)
        text = None if value is None or (isinstance(value, float) and pd.isna(value)) else str(value)
        texts[column] = text if text is None or len(text) <= _LONGEST else text[:_LONGEST] + " [...]"
    return {
        "seed": int(row["seed"]),
        "uid": str(row["uid"]),
        "sample": "greedy" if row["sample"] == GREEDY else f"sample {int(row['sample'])}",
        "outcome": str(row["outcome"]).replace("_", " "),
        "truncated": bool(row.get("truncated")),
        **texts,
    }


def missing(results: Results) -> list[dict[str, str]]:
    """What the study lacks or what a reader must know of its runs: one entry per fact, kind, what, why."""
    declared = results.declared
    found: list[dict[str, str]] = []

    def add(kind: str, what: str, why: str) -> None:
        found.append({"kind": kind, "what": what, "why": why})

    if not declared.found:
        add("declaration", "study.json", "not found: arms and control are inferred from the runs, claims are unknown")
    if not declared.arms:
        add("arms", "arms", "none: nothing was declared and no run was found")
    _missing_cells(results, add)
    for run in (run for arm in declared.arms for run in results.runs(arm.name)):
        name = str(run["name"])
        damage = run.get("damage")
        if bool(run["truncated"]) or (isinstance(damage, str) and damage):
            torn = "ends in the middle" if bool(run["truncated"]) else "is damaged"
            add("file", name, f"its W&B file {torn}; read up to there{f' ({damage})' if damage else ''}")
        commit = known_commit(run["commit"])
        if declared.commit and commit and commit != declared.commit:
            add("commit", name, f"made by commit {commit[:10]}, the study stands at {declared.commit[:10]}")
        if not pd.isna(run["dirty"]) and bool(run["dirty"]):
            add("commit", name, "made with uncommitted changes")
        for metric in (declared.metric, *curves(results)):
            if broken := results.broken(run, metric):
                add("value", name, f"{metric} is not finite at step {', '.join(map(str, broken[:5]))}")
    _missing_metrics(results, add)
    for note in results.left_out:
        add("left out", note["run"], note["why"])
    for run in records(results.data.duplicates):
        add(
            "duplicate",
            str(run["name"]),
            f"run {run['run_id']} does not count, run {run['instead']} stands for the cell",
        )
    for row in records(results.data.unreadable):
        add("file", Path(str(row["path"])).name, str(row["reason"]))
    return _together(found)


def _together(facts: list[dict[str, str]]) -> list[dict[str, str]]:
    """Equal facts about the code of several runs as one, in the order of their first mention."""
    merged: list[dict[str, str]] = []
    for fact in facts:
        same = (old for old in merged if fact["kind"] == "commit" and old["why"] == fact["why"])
        old = next(same, None)
        if old is None:
            merged.append(dict(fact))
        else:
            old["what"] += f", {fact['what']}"
    return merged


def _missing_cells(results: Results, add: Any) -> None:
    declared = results.declared
    cells = {(cell.arm, cell.seed): cell for cell in declared.cells}
    stale: dict[str, list[str]] = {}
    for arm in declared.arms:
        for seed in declared.seeds:
            run, cell = results.run(arm.name, seed), cells.get((arm.name, seed))
            if run is not None and complete(run):
                if cell is not None and cell.status == "stale":
                    stale.setdefault(cell.error or "", []).append(f"{arm.label}, seed {seed}")
                continue
            status = cell.status if cell else "not finished" if run is not None else "no run"
            if status == "complete":
                status = "complete, but its W&B file is missing or ends before the run does"
            error = (cell.error or "").strip().splitlines() if cell else []
            add("cell", f"{arm.label}, seed {seed}", status + (f": {error[-1]}" if error else ""))
    for why, which in stale.items():
        shown = "; ".join(which[:4]) + (f" and {len(which) - 4} more" if len(which) > 4 else "")
        add("stale", shown, f"{why}; `suite run` with --rerun-stale runs them again")


def _missing_metrics(results: Results, add: Any) -> None:
    declared, ends = results.declared, {}
    for arm in declared.arms:
        finished = results.finished(arm.name)
        for metric in (declared.metric, *curves(results), "sync/version", "cost/generated_tokens"):
            without = [str(run["seed"]) for run in finished if not results.series(run, metric)]
            if without:
                add("metric", f"{arm.label}, seed {', '.join(without)}", f"{metric} was not logged")
        ends[arm.label] = {results.last_step(run) for run in finished}
        at_end = results.final(arm.name, declared.metric)
        for run in finished:
            rows, steps = len(results.series(run, "time/step_s")), results.last_step(run)
            if 0 < rows < steps:
                add("rows", f"{arm.label}, seed {run['seed']}", f"its W&B files hold {rows} of {steps} steps")
        idle = [str(seed) for seed, count in results.final(arm.name, "cost/trained_tokens").items() if count == 0]
        if idle:
            add(
                "training",
                f"{arm.label}, seed {', '.join(idle)}",
                "no token was trained: the model is the one it began as",
            )
        unfinished = [str(run["seed"]) for run in finished if int(run["seed"]) not in at_end]
        if unfinished and any(results.series(run, declared.metric) for run in finished):
            add("metric", f"{arm.label}, seed {', '.join(unfinished)}", f"no finite {declared.metric} at the last step")
    if len(set.union(set(), *ends.values())) > 1:
        spelled = "; ".join(f"{label}: {_numbers(steps)}" for label, steps in ends.items() if steps)
        add("budget", "number of steps", f"the runs were trained for different numbers of steps ({spelled})")


def _numbers(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(values))


def _relative(path: Any, folder: Path) -> str:
    try:
        return str(Path(str(path)).resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(path)


def _flat(tree: dict[str, Any], prefix: str = "") -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        rows += _flat(value, f"{name}.") if isinstance(value, dict) else [{"option": name, "value": str(value)}]
    return rows


def _text(value: Any) -> str | None:
    return None if value is None or pd.isna(value) else str(value)
