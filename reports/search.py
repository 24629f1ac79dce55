"""The search behind a study's arms: every trial, the budget, what mattered, and how much of a score was selection."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scipy import integrate, stats

from reports.numbers import summary
from reports.results import Results
from suite.metrics import is_share
from suite.search import FILE

STATES = ("complete", "diverged", "pruned", "failed", "running")


def best_of(count: int) -> float:
    """The expected maximum of `count` independent standard normal values: how much better, in standard deviations of a
    score, the best of equally good settings looks. 0 for one; 1.42 for eight, 1.77 for sixteen."""
    if count < 2:
        return 0.0
    density = stats.norm.pdf
    found = integrate.quad(lambda x: x * count * density(x) * stats.norm.cdf(x) ** (count - 1), -12, 12, limit=200)
    return float(found[0])


def search(folder: Path, results: Results) -> dict[str, Any] | None:
    """What the report says about the search of the study in `folder`; None if it had none.

    Raises ValueError, naming the file, for a record that is none.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        arms = [_arm(arm, raw, results) for arm in raw["arms"]]
        kept = {name: raw[name] for name in ("trials", "sampler", "pruner", "batch", "startup", "metric", "seeds")}
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path} has no key {error}; it is not the record of a search") from error
    share = is_share(raw["metric"])
    found = {
        **kept,
        "done": bool(raw["done"]),
        "steps": raw["steps"],
        "fresh_seeds": list(results.declared.seeds),
        "unit": "percent" if share else "number",
        "difference_unit": "points" if share else "signed",
        "best_of": best_of(int(raw["trials"])),
        "arms": arms,
    }
    return {**found, "sentences": _sentences(found, raw)}


def _arm(raw: Mapping[str, Any], search: Mapping[str, Any], results: Results) -> dict[str, Any]:
    trials = [_trial(trial, raw) for trial in raw["trials"]]
    counts = {state: sum(trial["state"] == state for trial in trials) for state in STATES}
    scored = counts["complete"] + counts["diverged"]
    importance = raw["importance"]
    return {
        "name": raw["name"],
        "label": raw["label"],
        "ranges": [{"option": option, "range": words} for option, words in raw["ranges"].items()],
        "options": len(raw["ranges"]),
        "trials": trials,
        "started": len(trials),
        "counts": counts,
        "scored": scored,
        "runs": sum(len(trial["scores"]) for trial in trials if trial["repeats"] is None),
        "tokens": math.fsum(trial["tokens"] for trial in trials),
        "seconds": math.fsum(trial["seconds"] for trial in trials),
        "importance": None if importance is None else [
            {"option": option, "share": share} for option, share in importance.items()
        ],
        "importance_words": _importance_words(importance, len(raw["ranges"]), scored, search["min_importance"]),
        "winner": raw["winner"],
        "params": _params(raw["params"] or {}),
        "selection": _selection(raw, search, results),
    }  # fmt: skip


def _trial(raw: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    note = f"the same configuration as {raw['repeats']}, not run again" if raw["repeats"] else raw["reason"]
    return {
        **{name: raw[name] for name in ("number", "state", "score", "scores", "tokens", "seconds", "repeats")},
        "params": _params(raw["params"]),
        "note": note,
        "winner": arm["winner"] == raw["number"],
    }


def _params(params: Mapping[str, Any]) -> list[dict[str, str]]:
    written = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in params.items()}
    return [{"option": name, "value": value} for name, value in written.items()]


def _importance_words(importance: Mapping[str, float] | None, options: int, scored: int, least: int) -> str:
    if importance is not None:
        return "PED-ANOVA, for reaching the best quarter of the trials"
    if options < 2:
        return "one option was searched"
    return f"too few trials to tell: {scored} have a score, and it takes {least}"


def _selection(raw: Mapping[str, Any], search: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """The winner's score in the search, the mean of its fresh runs on the same problems, and the difference.

    The search's score is a number that is known; what is uncertain is the mean over training seeds that it stands for,
    so the interval is that of the fresh runs. Empty where the runs at hand are not of the winner.
    """
    nothing = {"search": None, "fresh": summary({}), "difference": summary({}), "note": ""}
    if raw["winner"] is None:
        return nothing | {"note": "there is no winner yet" if not search["done"] else "there is no winner"}
    score = next(trial["score"] for trial in raw["trials"] if trial["number"] == raw["winner"])
    declared = {cell.seed: cell.fingerprint for cell in results.declared.cells if cell.arm == raw["name"]}
    if any(declared.get(int(seed), identity) not in ("", identity) for seed, identity in raw["cells"].items()):
        return nothing | {"search": score, "note": "the runs that are compared are not of this winner"}
    fresh = results.final(raw["name"], search["metric"])
    gaps = {seed: score - value for seed, value in fresh.items()}
    return {"search": score, "fresh": summary(fresh), "difference": summary(gaps), "note": ""}


def _sentences(found: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    """What a reader must know to read the search, one sentence each."""
    seeds = ", ".join(map(str, found["seeds"]))
    times = "1 trial" if found["trials"] == 1 else f"{found['trials']} trials"
    out = [
        f"Every arm had the same budget: {times} of {found['steps']} optimizer steps, each under search "
        f"seed{'' if len(found['seeds']) == 1 else 's'} {seeds}; scores are {found['metric']} at the last step, mean "
        "over these seeds, and no test score was used.",
        f"Only the runs of the winners under other seeds ({', '.join(map(str, found['fresh_seeds']))}) enter the "
        "verdicts and the table of arms.",
    ]
    if found["trials"] > 1:
        out.append(
            f"The best of {found['trials']} equally good settings looks better than it is by about "
            f"{found['best_of']:.1f} standard deviations of a score, so a winner's score in the search is no result."
        )
    states = {state for arm in found["arms"] for state, count in arm["counts"].items() if count}
    if "pruned" in states:
        out.append(
            "A pruned trial was given up when its answers were worse than the best earlier trial's (signed-rank test, "
            f"p < {raw['prune_p']:g}); what it had scored until then is censored and in no mean."
        )
    if "diverged" in states:
        out.append("A run whose loss was no number counts as a score of 0, and such a trial cannot win.")
    if "failed" in states:
        out.append("A failed trial counts as one of the arm's trials and has no score.")
    codes = sorted({trial["code"] for arm in raw["arms"] for trial in arm["trials"]} - {""})
    if len(codes) > 1:
        out.append(f"Trials were ended by different code: {', '.join(codes)}.")
    if not found["done"]:
        out.append("The search is not finished.")
    return out
