"""Every metric and table that a run may log: what it is, in which unit, reduced over what.

A name is fixed (`loss/kl`) or a pattern: `<benchmark>` stands for one segment of a path, `@k` for a number of samples.
docs/metrics.md is `markdown()`; to write it anew after a change:
`python -c "from suite.metrics import markdown; print(markdown(), end='')" > docs/metrics.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache

from suite.metric_list import DESCRIBED, Metric
from suite.metric_list_sampler import SAMPLER
from suite.metric_list_sync import SYNC


@dataclass(frozen=True)
class TableKind:
    """A table that a run may log, with what its columns mean."""

    name: str
    columns: tuple[tuple[str, str], ...]


METRICS: dict[str, Metric] = {metric.name: metric for metric in (*DESCRIBED, *SAMPLER, *SYNC)}
"""Every metric by its name or pattern, in the order of docs/metrics.md."""

TABLES: dict[str, TableKind] = {
    "eval/<benchmark>/problems": TableKind(
        "eval/<benchmark>/problems",
        (
            ("uid", "the problem"),
            ("prompt", "its text"),
            ("gold", "the gold answer"),
            ("completion", "the greedy completion"),
            ("answer", "the answer found in it, empty if none"),
            ("outcome", "right, wrong, no_answer, timeout or error"),
            ("reward", "1 if right, else 0"),
            ("truncated", "stopped by the completion budget"),
            ("tokens", "tokens of the completion, the end token counted"),
            ("sampled_right", "how many of the sampled completions are right"),
            ("sampled", "k, the number of sampled completions"),
        ),
    )
}
"""Every table by its name or pattern."""


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.sub(r"<\w+>", "[^/]+", re.escape(name))
    return re.compile(re.sub(r"@k$", r"@(k|[1-9]\\d*)", escaped))


_PATTERNS = {name: _pattern(name) for name in (*METRICS, *TABLES)}


@lru_cache(maxsize=4096)
def _lookup(name: str, tables: bool) -> str:
    known: Iterable[str] = TABLES if tables else METRICS
    for candidate in known:
        if _PATTERNS[candidate].fullmatch(name):
            return candidate
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; near names: {', '.join(near)}" if near else ""
    kind, where = ("table", "suite.metrics.TABLES") if tables else ("metric", "suite.metric_list")
    raise ValueError(f"no {kind} is called {name!r}{hint} (describe a new one in {where})")


def describe(name: str) -> Metric:
    """The description of the metric logged as `name`, be it a fixed name or an instance of a pattern.

    Raises ValueError with near names where nothing describes it.
    """
    return METRICS[_lookup(name, False)]


def is_share(metric: str) -> bool:
    """Whether a metric is a share, 0 to 1, shown in percent and its differences in points."""
    last = metric.rsplit("/", 1)[-1]
    return last == "accuracy" or last.endswith("_frac") or ("@" in last and not last.startswith("reward"))


def describe_table(name: str) -> TableKind:
    """The description of the table logged as `name`. Raises ValueError with near names where nothing describes it."""
    return TABLES[_lookup(name, True)]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown() -> str:
    """The whole text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every value that a run logs to Weights & Biases, written from `suite/metrics.py`. `step`, the axis of all of",
        "them, counts optimizer steps; a row may hold several updates of one rollout batch. `trained` tokens are the",
        "completion tokens that carry a loss. Logarithms are natural. In a name, `<benchmark>` stands for the name of",
        "a benchmark and `@k` for the number of samples. The last two columns give the name that TRL and verl log the",
        "same quantity under; their reduction may differ.",
        "",
        _row(("name", "formula", "unit", "reduction", "TRL", "verl")),
        _row(["---"] * 6),
    ]
    for m in METRICS.values():
        names = [f"`{other}`" if other else "" for other in (m.trl, m.verl)]
        lines.append(_row([f"`{m.name}`", m.formula, m.unit, m.reduction, *names]))
    for table in TABLES.values():
        lines += ["", f"## Table `{table.name}`", "", _row(("column", "meaning")), _row(["---"] * 2)]
        lines += [_row((f"`{column}`", meaning)) for column, meaning in table.columns]
    return "\n".join(lines) + "\n"
