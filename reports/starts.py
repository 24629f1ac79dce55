"""What the replicates of a study started from, and so what its results speak of."""

from __future__ import annotations

from typing import Any

from reports.results import Results
from suite.config import FROM_ARM, FROM_SEED

SAME = 0.01
"""Most that two evaluations of equal weights may differ, as a share: rounding turns single answers."""


def started_from(results: Results) -> dict[int, set[tuple[str, str]]]:
    """seed -> (name of the model, its weights) of all its complete runs that started from no other arm."""
    found: dict[int, set[tuple[str, str]]] = {}
    for arm in results.declared.arms:
        for run in results.finished(arm.name):
            model = ((run["config"] or {}).get("run") or {}).get("model", {})
            path = str(model.get("path", ""))
            if path and not path.startswith(FROM_ARM):
                found.setdefault(int(run["seed"]), set()).add((path, str(model.get("weights", ""))))
    return found


def varied(results: Results) -> dict[str, Any]:
    """What varied between replicates: `words` for a sentence, `unit` for a replicate, and the starts themselves."""
    found = started_from(results)
    every = sorted(set().union(*found.values()))
    kind = "seed model" if all(path.startswith(FROM_SEED) for path, _ in every) else "starting model"
    count, seeds = len(every), len(found)
    of_seeds = f"{seeds} training seed{'' if seeds == 1 else 's'}"
    if not found:
        words, unit = "", "training seeds"
    elif count == 1:
        path, weights = every[0]
        which = f"{path}, weights {weights[:16]}" if weights else f"{path}, weights not recorded"
        words, unit = f"for this {kind} ({which}) only, over {of_seeds}", "training seeds"
    elif count == seeds and all(len(mine) == 1 for mine in found.values()):
        words, unit = f"over {count} {kind}s, one training seed each", f"{kind}s, one training seed each"
    else:
        words, unit = f"over {count} {kind}s and {of_seeds}", f"{kind}s and training seeds"
    starts = [
        {"seed": seed, "path": path, "weights": weights}
        for seed in sorted(found)
        for path, weights in sorted(found[seed])
    ]
    return {"words": words, "unit": unit, "starts": starts}


def unequal(results: Results) -> list[dict[str, str]]:
    """Facts about arms that share a start under a seed, and yet evaluate unequally before the first step."""
    facts = []
    for seed in results.declared.seeds:
        values: dict[tuple[str, str], dict[str, float]] = {}
        for arm in results.declared.arms:
            run = results.run(arm.name, seed)
            model = ((run["config"] or {}).get("run") or {}).get("model", {}) if run is not None else {}
            value = results.initial(arm.name, results.declared.metric).get(seed)
            if value is not None and model.get("weights"):
                values.setdefault((model["path"], model["weights"]), {})[arm.label] = value
        for (path, _), mine in values.items():
            low, high = min(mine, key=mine.__getitem__), max(mine, key=mine.__getitem__)
            if mine[high] - mine[low] > SAME * max(1.0, abs(mine[high])):
                why = (
                    f"{low} and {high} share the start {path}, and {results.declared.metric} before the first step is "
                    f"{mine[low]:.4g} and {mine[high]:.4g}"
                )
                facts.append({"kind": "start", "what": f"seed {seed}", "why": why})
    return facts
