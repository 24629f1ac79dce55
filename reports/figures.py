"""The report's figures, drawn from its numbers alone: equal numbers give byte-identical SVG."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from reports.tables import show

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#56B4E9", "#333333")
"""After Okabe & Ito (2008), told apart by colour-blind readers; darker where thin lines would be pale on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)))
INK, PALE = "#1a1a1a", "#767676"
SHOW_SEEDS = 5
"""Most seeds whose own lines are drawn."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": PALE,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "suite",
    "svg.fonttype": "path",
}


def colours(names: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Colour and dash of every arm, by its place in the study: the same in every figure."""
    size = len(PALETTE)
    return {name: (PALETTE[i % size], DASHES[i // size % len(DASHES)]) for i, name in enumerate(names)}


def draw(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every figure for which there are numbers: name, title, caption, alt text, `svg` and `png` (bytes)."""
    with mpl.rc_context(_STYLE):
        found = [_results(report), _effects(report)]
        found += [_curve(report, curve, "step") for curve in report["curves"]]
        found += [_curve(report, report["curves"][0], "tokens"), _sync(report)]
        figures = []
        for item in found:
            if item is not None:
                figure = item.pop("figure")
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, for both files
                figures.append({**item, "svg": _bytes(figure, "svg"), "png": _bytes(figure, "png")})
    return figures


def _bytes(figure: Figure, form: str) -> bytes:
    out = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, metadata=metadata, dpi=160)
    return out.getvalue()


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _percent_axis(axis: Any, share: bool, signed: bool = False) -> None:
    if share:
        sign = "+" if signed else ""
        axis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:{sign if value else ''}.10g}".replace("-", "−"))
        )


def _arms(report: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    return colours([arm["name"] for arm in report["arms"] if arm["role"] != "seed_model"])


def _label(text: str, width: int = 26) -> str:
    # a dollar sign would start mathematics
    return textwrap.fill(textwrap.shorten(text, 80, placeholder=" ..."), width).replace("$", r"\$")


def _results(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Mean and interval per arm, every seed a point."""
    rows = [arm for arm in report["arms"] if arm["value"]["n"]]
    if not rows:
        return None
    look, share = _arms(report), report["units"]["value"] == "percent"
    figure = _figure(6.4, 0.9 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for y, arm in enumerate(reversed(rows)):
        value, colour = arm["value"], look.get(arm["name"], (PALE, "-"))[0]
        points = [item["value"] for item in value["seeds"]]
        axes.plot(points, [y] * len(points), "o", color=colour, alpha=0.35, markersize=4, markeredgewidth=0)
        if value["low"] is not None:
            axes.plot([value["low"], value["high"]], [y, y], "-", color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot([value["mean"]], [y], "D", color=colour, markersize=6)
    axes.set_yticks(range(len(rows)), [_label(arm["label"], 34) for arm in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x")
    axes.set_xlabel(_metric_label(report["study"]["metric"], share))
    _percent_axis(axes.xaxis, share)
    kinds = {arm["value"]["kind"] for arm in rows}
    bar = (
        f"the {show(report['study']['level'], 'level')} t interval over seeds"
        if "t" in kinds
        else "the range over seeds"
    )
    return {
        "figure": figure,
        "name": "results",
        "title": "Every arm, every seed",
        "caption": f"Diamond: mean over seeds. Bar: {bar}. Points: single seeds.",
        "alt": "Mean, interval and single seeds of every arm",
    }


def _metric_label(metric: str, share: bool) -> str:
    return f"{metric}{', %' if share else ''}"


def _effects(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """A forest of the claims: the difference with its interval against the smallest effect of interest."""
    rows = [verdict for verdict in report["verdicts"] if verdict["difference"] is not None]
    if not rows or len({verdict["unit"] for verdict in rows}) > 1:
        return None
    figure = _figure(6.4, 0.9 + 0.5 * len(rows))
    axes = figure.add_subplot()
    axes.axvline(0, color=INK, linewidth=0.8)
    look = {"supported": "#00694E", "contradicted": "#B03A00", "undecided": "#5c5c5c"}
    for y, verdict in enumerate(reversed(rows)):
        colour, effect = look[verdict["verdict"]], verdict["smallest_effect"]
        if verdict["kind"] == "equivalent":
            axes.fill_between([-effect, effect], y - 0.36, y + 0.36, color="#e9e9e9", linewidth=0)
        else:
            for at in (effect, -effect)[: 2 if verdict["kind"] == "different" else 1]:
                axes.plot([at, at], [y - 0.3, y + 0.3], color=PALE, linewidth=1, linestyle=(0, (2, 1.5)))
        if verdict["low"] is not None:
            axes.plot([verdict["low"], verdict["high"]], [y, y], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([verdict["difference"]], [y], "D", color=colour, markersize=6)
    axes.set_yticks(range(len(rows)), [f"{_label(v['name'], 34)}\n{v['verdict']}" for v in reversed(rows)])
    for tick, verdict in zip(axes.get_yticklabels(), reversed(rows)):
        tick.set_color(look[verdict["verdict"]])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False)
    share = rows[0]["unit"] == "points"
    axes.set_xlabel("difference, points" if share else "difference")
    _percent_axis(axes.xaxis, share, signed=True)
    return {
        "figure": figure,
        "name": "effects",
        "title": "Effects behind the verdicts",
        "caption": "Bar: interval of the paired difference (90 % for equivalence, else 95 %). Dashed: the smallest "
        "effect of interest, declared beforehand. Grey band: the margin within which arms count as equivalent.",
        "alt": "Paired difference and interval of every claim",
    }


def _curve(report: Mapping[str, Any], curve: Mapping[str, Any], x: str) -> dict[str, Any] | None:
    """One metric over steps or generated tokens: mean, band, and thin lines of single seeds."""
    arms = [arm for arm in curve["arms"] if any(x == "step" or line["tokens"] for line in arm["lines"])]
    if not arms:
        return None
    look = _arms(report)
    figure = _figure(6.4, 3.7)
    axes = figure.add_subplot()
    ends: list[tuple[float, str, str]] = []
    for arm in arms:
        colour, dash = look[arm["name"]]
        _seed_lines(axes, arm, colour, x)
        points = [point for point in arm["points"] if point["step" if x == "step" else "tokens"] is not None]
        if points:
            at = [point[x] for point in points]
            means = [point["mean"] for point in points]
            axes.plot(at, means, color=colour, linestyle=dash, linewidth=2, zorder=3)
            if arm["kind"] in ("t", "range"):
                lows, highs = [p["low"] for p in points], [p["high"] for p in points]
                axes.fill_between(at, lows, highs, color=colour, alpha=0.13, linewidth=0)
        end = points[-1]["mean"] if points else arm["lines"][-1]["values"][-1]
        ends.append((end, arm["label"], colour))
    _percent_axis(axes.yaxis, curve["share"])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if x == "tokens":
        top = max(line["tokens"][-1] for arm in arms for line in arm["lines"] if line["tokens"])
        scale, word = (1e6, "million ") if top >= 2e6 else (1e3, "thousand ")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:.10g}"))
        axes.set_xlabel(f"generated tokens, {word.strip()}s")
    else:
        axes.set_xlabel("optimizer step")
    axes.set_ylabel(f"{curve['title'].lower()}{', %' if curve['share'] else _unit(curve['metric'])}")
    axes.margins(x=0.02)
    _direct_labels(axes, ends)
    against = "generated tokens" if x == "tokens" else "steps"
    return {
        "figure": figure,
        "name": curve["metric"].replace("/", "_").replace("@", "_at_") + ("_by_tokens" if x == "tokens" else ""),
        "title": f"{curve['title']} by {against}" if x == "tokens" else curve["title"],
        "caption": f"{curve['what'][0].upper()}{curve['what'][1:]}. {_band_words(report, arms)}",
        "alt": f"{curve['title']} over {against}, one line per arm",
    }


def _unit(metric: str) -> str:
    return {"policy/entropy": ", nats", "policy/probe_length": ", tokens"}.get(metric, "")


def _seed_lines(axes: Axes, arm: Mapping[str, Any], colour: str, x: str) -> None:
    for line in arm["lines"]:
        at = line["steps"] if x == "step" else line["tokens"]
        if not at:
            continue
        if not line["complete"]:
            axes.plot(at, line["values"], color=colour, linewidth=0.8, alpha=0.6, linestyle=(0, (3, 2)))
            axes.plot(at[-1:], line["values"][-1:], "x", color=colour, markersize=7, markeredgewidth=1.8)
        elif arm["n"] <= SHOW_SEEDS:
            axes.plot(at, line["values"], color=colour, linewidth=0.6, alpha=0.45)


def _band_words(report: Mapping[str, Any], arms: Sequence[Mapping[str, Any]]) -> str:
    kinds = {arm["kind"] for arm in arms}
    words = []
    if kinds & {"t", "range"}:
        words.append("Line: mean over seeds.")
    if "t" in kinds:
        words.append(f"Band: {show(report['study']['level'], 'level')} t interval over seeds at each step.")
    if "range" in kinds:
        words.append("Band: range over seeds.")
    if "anecdote" in kinds:
        words.append("One seed: a single line, an anecdote.")
    if any(arm["n"] <= SHOW_SEEDS for arm in arms) and kinds & {"t", "range"}:
        words.append("Thin: single seeds.")
    if any(not line["complete"] for arm in arms for line in arm["lines"]):
        words.append("Dashed with a cross: a run that did not finish, not in the mean.")
    return " ".join(words)


def _direct_labels(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names at the lines' ends, moved apart where they would overlap, tied to their line by a thin leader."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    order = sorted(ends, key=lambda end: end[0])
    texts = [_label(label) for _, label, _ in order]
    heights = [0.062 * (1 + text.count("\n")) for text in texts]
    places: list[float] = []
    for (value, _, _), height in zip(order, heights):
        want = (value - low) / (high - low)
        floor = places[-1] + (heights[len(places) - 1] + height) / 2 if places else height / 2
        places.append(max(want, floor))
    over = max(0.0, places[-1] + heights[-1] / 2 - 1.04) if places else 0.0
    for i in range(len(places) - 1, -1, -1):
        top = places[i + 1] - (heights[i + 1] + heights[i]) / 2 if i + 1 < len(places) else places[i] - over
        places[i] = min(places[i], top)
    for (value, _, colour), text, place in zip(order, texts, places):
        at = [(value - low) / (high - low), place]
        axes.plot([1.0, 1.03], at, transform=axes.transAxes, color=colour, linewidth=0.6, clip_on=False)
        axes.text(1.035, place, text, transform=axes.transAxes, color=colour, va="center", fontsize=9)


def _sync(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """What s means: the learner moves on, the sampler stands still between loads; the gap is the staleness."""
    arms = [arm for arm in report["sync"] if arm["steps"]]
    if not arms:
        return None
    look = _arms(report)
    columns = min(len(arms), 2)
    rows = -(-len(arms) // columns)
    figure = _figure(6.4, 0.5 + 2.15 * rows)
    first: Axes | None = None
    for i, arm in enumerate(arms):
        axes = figure.add_subplot(rows, columns, i + 1, sharex=first, sharey=first)
        first = first or axes
        colour = look[arm["name"]][0]
        steps, versions = arm["steps"], arm["versions"]
        edges = [*steps, steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1)]
        stairs = [*versions, versions[-1]]
        axes.step(edges, [*steps, steps[-1]], where="post", color=PALE, linewidth=1, linestyle=(0, (3, 2)))
        axes.fill_between(edges, stairs, [*steps, steps[-1]], step="post", color=colour, alpha=0.16, linewidth=0)
        axes.step(edges, stairs, where="post", color=colour, linewidth=2)
        loads = [step for j, step in enumerate(steps) if j == 0 or versions[j] != versions[j - 1]]
        axes.plot(loads, [-0.06] * len(loads), "|", transform=axes.get_xaxis_transform(), color=INK, clip_on=False)
        axes.set_title(_label(arm["label"], 34))
        axes.text(
            0.03,
            0.95,
            f"{arm['loads']} load{'' if arm['loads'] == 1 else 's'}\nmean age {arm['mean_staleness']:.1f}",
            transform=axes.transAxes,
            va="top",
            fontsize=9,
            color=INK,
        )
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.tick_params(axis="x", pad=9)
        axes.tick_params(labelbottom=i + columns >= len(arms), labelleft=i % columns == 0)
    figure.supxlabel("optimizer step", fontsize=10)
    figure.supylabel("version of the weights", fontsize=10)
    return {
        "figure": figure,
        "name": "sync",
        "title": "What the sync period means",
        "caption": "Coloured stair: the version of the weights that sampled each step's rollouts. Dashed: the "
        "learner's own version. Shaded: the staleness between them. Ticks under the axis: loads of the generator.",
        "alt": "Version of the sampling weights over optimizer steps, one panel per arm",
    }
