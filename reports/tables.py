"""Numbers as a reader sees them, and the table of arms as CSV, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping
from typing import Any

from reports.claims import FEW, LEAST

MINUS = "−"
NOTHING = "–"


def _percent(value: float) -> str:
    return _signless(f"{100 * value:.1f}")


def _points(value: float) -> str:
    return _signless(f"{100 * value:+.1f}")


def _number(value: float) -> str:
    return _signless(f"{value:.3f}")


def _signed(value: float) -> str:
    return _signless(f"{value:+.3f}")


def _signless(text: str) -> str:
    """A typographic minus, and no sign on a rounded zero."""
    return text.lstrip("+-") if not text.strip("+-0.") else text.replace("-", MINUS)


def _p(value: float) -> str:
    if value < 0.0001:
        return "< .0001"
    return f"{value:.{4 if value < 0.001 else 3}f}".lstrip("0") if value < 0.9995 else "1"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _tokens(value: float) -> str:
    return f"{value / 1e6:,.2f} M" if value >= 1e6 else f"{value / 1e3:,.1f} k" if value >= 1e4 else f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


FORMATS: dict[str, Callable[[Any], str]] = {
    "percent": _percent,
    "points": _points,
    "number": _number,
    "signed": _signed,
    "p": _p,
    "count": _count,
    "tokens": _tokens,
    "seconds": _seconds,
    "decimal": lambda value: f"{value:.1f}",
    "level": lambda value: f"{100 * value:.0f} %",
    "commit": lambda value: str(value)[:10],
    "text": str,
}
"""How a number is written: name -> function. Shares are shown in percent, their differences in points."""


def show(value: Any, form: str) -> str:
    """A value in the named form; a dash where there is none."""
    return NOTHING if value is None else FORMATS[form](value)


def interval_words(summary: Mapping[str, Any] | None, form: str) -> str:
    """What stands beside a mean: an interval, or below five seeds the range, or the word `anecdote` for one seed."""
    if summary is None or summary["kind"] == "none":
        return NOTHING
    if summary["kind"] in ("anecdote", "constant"):
        return {"anecdote": "anecdote: one seed", "constant": "one model"}[summary["kind"]]
    low, high = show(summary["low"], form), show(summary["high"], form)
    return f"[{low}, {high}]" if summary["kind"] == "t" else f"range {low} to {high}"


CSV_COLUMNS = [
    *("arm", "label", "metric", "n", "mean", "low", "high", "interval", "sd"),
    *("new_problems_low", "new_problems_high", "problems"),
    *("difference_n", "difference", "difference_low", "difference_high", "difference_interval", "difference_sd"),
    *("among_best", "p_holm_to_best", "cells_declared", "cells_finished", "cells_failed", "inert"),
]


def to_csv(report: Mapping[str, Any]) -> str:
    """The table of arms, one row per arm, in the metric's own unit and unrounded; absent values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for arm in report["arms"]:
        value, gap, cells = arm["value"], arm["difference"] or {}, arm["cells"] or {}
        wider = arm["new_problems"] or {}
        writer.writerow(
            {
                "arm": arm["name"],
                "label": arm["label"],
                "metric": report["study"]["metric"],
                **{key: value[key] for key in ("n", "mean", "low", "high", "sd")},
                "interval": value["kind"],
                "new_problems_low": wider.get("low"),
                "new_problems_high": wider.get("high"),
                "problems": report["study"]["problems"],
                **{f"difference_{key}": gap.get(key) for key in ("n", "low", "high", "sd")},
                "difference": gap.get("mean"),
                "difference_interval": gap.get("kind"),
                "among_best": arm["best"],
                "p_holm_to_best": arm["p_best"],
                **{f"cells_{key}": cells.get(key) for key in ("declared", "finished", "failed")},
                "inert": arm["inert"],
            }
        )
    return out.getvalue()


_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "[": "{[}",  # after a line's end, a bare bracket would be read as an option of \\
    "]": "{]}",
    "\n": " ",
    MINUS: "$-$",
    NOTHING: "--",
    "∞": r"$\infty$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "Δ": r"$\Delta$",
    "†": r"$\dagger$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "ε": r"$\epsilon$",
    "λ": r"$\lambda$",
    "π": r"$\pi$",
    "τ": r"$\tau$",
}


def escape_latex(text: str) -> str:
    """Text as LaTeX shows it letter by letter: nothing in it is a command. Other letters than these pass unchanged."""
    return "".join(_LATEX.get(char, char) for char in text)


def to_latex(report: Mapping[str, Any]) -> str:
    """The table of arms as a booktabs table; the caption says what varies and what the interval covers."""
    units, beside = report["units"], escape_latex(interval_header(report))
    word = escape_latex(units["difference_word"])
    header = [
        escape_latex(units["value_word"][0].upper() + units["value_word"][1:]),
        beside,
        "$n$",
        f"$\\Delta$ ({word})",
    ]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{latex_caption(report)}}}",
        f"  \\label{{tab:{re.sub(r'[^A-Za-z0-9]+', '-', report['study']['name']).strip('-').lower()}}}",
        "  \\begin{tabular}{lrlrrl}",
        "    \\toprule",
        f"    Arm & {' & '.join(header)} & {beside} \\\\",
        "    \\midrule",
    ]
    for arm in report["arms"]:
        value, gap = arm["value"], arm["difference"]
        mean = escape_latex(show(value["mean"], units["value"]))
        cells = [
            escape_latex(arm["label"] + (" (inert)" if arm["inert"] else ""))
            + ("$^\\dagger$" if arm["dagger"] else ""),
            f"\\textbf{{{mean}}}" if arm["best"] else mean,
            escape_latex(interval_words(value, units["value"])),
            str(value["n"]),
            escape_latex(show(gap["mean"], units["difference"]) if gap else "control"),
            escape_latex(interval_words(gap, units["difference"]) if gap else ""),
        ]
        lines.append(f"    {' & '.join(cells)} \\\\")
        if arm["role"] == "seed_model":
            lines.append("    \\midrule")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def latex_caption(report: Mapping[str, Any]) -> str:
    """What varies, how many of it, what the intervals cover, and what the marks mean."""
    return " ".join(escape_latex(sentence) for sentence in caption(report))


def interval_header(report: Mapping[str, Any]) -> str:
    """What the column beside the means holds."""
    kinds = {arm["value"]["kind"] for arm in report["arms"]}
    if "t" in kinds or "range" not in kinds:
        return f"{show(report['study']['level'], 'level')} interval" + (" or range" if "range" in kinds else "")
    return "range over seeds"


def caption(report: Mapping[str, Any]) -> list[str]:
    """The sentences under the table of arms."""
    study, arms = report["study"], report["arms"]
    trained = [arm for arm in arms if arm["role"] != "seed_model"]
    counts = sorted({arm["value"]["n"] for arm in trained})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "0"
    problems = f"{study['problems']:,}" if study["problems"] else "an unrecorded number of"
    control = next((arm["label"] for arm in arms if arm["role"] == "control"), "the control")
    kinds = {arm["value"]["kind"] for arm in trained} - {"none"}
    level, varied = show(study["level"], "level"), study["varied"]
    sentences = [
        f"{study['metric']} at the last step, {varied['words'] + ', ' if varied['words'] else ''}{problems} held-out "
        f"problems: mean over n = {seeds} replicate{'' if seeds == '1' else 's'} per arm."
    ]
    if "t" in kinds:
        sentences.append(f"Brackets: {level} t interval over {varied['unit']}, for these test problems.")
    if "range" in kinds:
        sentences.append(f"Below {study['min_seeds']} seeds: smallest to largest value over seeds, no interval.")
    if "anecdote" in kinds:
        sentences.append("One seed is an anecdote: no interval and no test.")
    sentences.append(f"Δ: difference to {control}, paired by seed.")
    if any(arm["best"] for arm in arms):
        sentences.append(
            "Bold: not separable from the best row (by a declared claim's verdict where there is one, else a paired "
            "t-test over seeds, Holm over the rows, p > .05)."
        )
    if any(arm["dagger"] for arm in arms):
        failed = "; ".join(
            f"{a['label']}: {a['cells']['failed']} of {a['cells']['declared']}" for a in trained if a["dagger"]
        )
        sentences.append(f"†: cells failed and are not in the mean, which may flatter the arm ({failed}).")
    return sentences


def escape_markdown(text: Any) -> str:
    """Text for a cell of a Markdown table: no markup, no cell boundary, one line."""
    flat = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\n", " ")
    return re.sub(r"([\\`*_|\[\]$~])", r"\\\1", flat)


def signed_interval(verdict: Mapping[str, Any]) -> str:
    """A claim's interval with its level where that is not the usual one."""
    if verdict["low"] is None:
        return "no interval"
    low, high = show(verdict["low"], verdict["unit"]), show(verdict["high"], verdict["unit"])
    return f"[{low}, {high}]" + (f" ({show(verdict['level'], 'level')})" if verdict["level"] != 0.95 else "")


def seeds_words(verdict: Mapping[str, Any]) -> str:
    """How many seeds would decide a claim, in words."""
    needed, effect = verdict["seeds_needed"], show(verdict["smallest_effect"], verdict["value_unit"])
    word = "points" if verdict["unit"] == "points" else verdict["metric"].rsplit("/", 1)[-1]
    if needed is None and verdict["n"] < 2:
        return "no spread over seeds is known yet, so no number of seeds can be named"
    if needed is None:
        spread = "unknown" if verdict["sd"] is None else "0"
        return f"the spread over seeds is {spread}, so no number of seeds can be named"
    aim = f"a margin of {effect} {word}" if verdict["kind"] == "equivalent" else f"an effect of {effect} {word}"
    if verdict["verdict"] == "undecided" and needed > verdict["n"]:
        return f"about {needed} fresh seeds would tell (80 % power for {aim}); added to these, they are exploratory"
    return f"{needed} seeds give 80 % power for {aim}"


def terminal_lines(report: Mapping[str, Any]) -> list[str]:
    """The verdicts, one line each, for the end of a run."""
    width = max((len(verdict["name"]) for verdict in report["verdicts"]), default=0)
    study = report["study"]
    problems = f", {study['problems']:,} test problems" if study["problems"] else ""
    lines = [f"measured     {study['varied']['words']}{problems}"] if study["varied"]["words"] else []
    for verdict in report["verdicts"]:
        word = " points" if verdict["unit"] == "points" else ""
        effect = f"{show(verdict['difference'], verdict['unit'])}{word} {signed_interval(verdict)}"
        p = show(verdict["p_shown"], "p")
        last = seeds_words(verdict) if verdict["verdict"] == "undecided" else f"p {p}" if p[0] == "<" else f"p = {p}"
        if verdict["n"] < LEAST:
            last = f"{verdict['n']} seeds, and a verdict needs {LEAST}"
        mark = "  exploratory" if verdict["exploratory"] else ""
        mark += f"  only {verdict['n']} seeds, a hint" if LEAST <= verdict["n"] < FEW else ""
        lines.append(f"{verdict['verdict']:<13}{verdict['name']:<{width}}  {effect:<30}  {last}{mark}".rstrip())
        if again := verdict["with_failed"]:
            shown = f"{show(again['difference'], verdict['unit'])}{word} {signed_interval({**verdict, **again})}"
            lines.append(f"  {again['verdict']} with failed cells at their value before training: {shown}")
    return lines
