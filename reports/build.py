"""The report of a study: one page, Markdown, CSV, LaTeX, figures, and report.json with every number that they show."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from reports import figures
from reports.claims import ClaimResult
from reports.declared import declaration
from reports.evidence import evidence, missing
from reports.load import StudyData, load_study
from reports.numbers import collect, decided
from reports.results import Results
from reports.search import search
from reports.starts import unequal
from reports.tables import (
    caption,
    escape_markdown,
    interval_header,
    interval_words,
    seeds_words,
    show,
    signed_interval,
    terminal_lines,
    to_csv,
    to_latex,
)

FORMATS = ("html", "md", "csv", "latex", "json")
_FILES = {"html": "index.html", "md": "report.md", "csv": "table.csv", "latex": "table.tex", "json": "report.json"}


@dataclass(frozen=True)
class Report:
    """What was written, and what it says in short."""

    folder: Path
    index: Path
    """The page; of the other formats alone, the first file that was written."""
    verdicts: list[ClaimResult]
    lines: list[str]
    """The verdicts for a terminal, one line each."""


def build(
    study_folder: Path,
    out: Path | None = None,
    *,
    formats: Collection[str] = FORMATS,
    source: StudyData | None = None,
    facts: Iterable[Mapping[str, str]] = (),
) -> Report:
    """Write the report of the study in `study_folder` into `out` (by default its folder `report`).

    Works at any time: a study without a finished cell gives a page that says what is missing. Equal inputs give
    byte-identical files. `facts` (kind, what, why) join what the reader must know. `source` replaces the W&B files
    below the folder. Figures are written with `html` or `md`.
    Raises ValueError for an unknown format, or a folder with neither a declaration (study.json) nor W&B files.
    """
    wrong = sorted(set(formats) - set(FORMATS))
    if wrong or not formats:
        raise ValueError(f"report format {', '.join(map(repr, wrong)) or 'missing'}: choose from {', '.join(FORMATS)}")
    data, unread = (source, "") if source is not None else _read(study_folder)
    results = Results(declaration(study_folder, data), data)
    claims = decided(results)
    report = _tree(results, claims, study_folder, unread, facts)
    folder = out if out is not None else study_folder / "report"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = figures.draw(report) if {"html", "md"} & set(formats) else []
    for item in drawn:
        (folder / "figures").mkdir(exist_ok=True)
        (folder / "figures" / f"{item['name']}.svg").write_bytes(item["svg"])
        (folder / "figures" / f"{item['name']}.png").write_bytes(item["png"])
    texts = {
        "html": lambda: _page(report, drawn),
        "md": lambda: _markdown(report, drawn),
        "csv": lambda: to_csv(report),
        "latex": lambda: to_latex(report),
        "json": lambda: json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    }
    written = [form for form in FORMATS if form in formats]
    for form in written:
        (folder / _FILES[form]).write_text(texts[form](), encoding="utf-8", newline="\n")
    return Report(folder, folder / _FILES[written[0]], claims, terminal_lines(report))


def _read(folder: Path) -> tuple[StudyData, str]:
    """The study's frames; empty ones, and why, where a declared study has no W&B file yet."""
    if not any(folder.rglob("run-*.wandb")) and (folder / "study.json").is_file():
        runs = pd.DataFrame(columns=["run_id", "arm", "seed", "name", "seconds", "started_at", "config"])
        history = pd.DataFrame(columns=["arm", "seed", "run_id", "step", "metric", "value"])
        tables = pd.DataFrame(columns=["run_id", "arm", "seed", "step", "table"])
        empty = StudyData(history, runs, tables, runs.assign(instead=""), pd.DataFrame(columns=["path", "reason"]))
        return empty, "there are no W&B files yet: no cell has started"
    return load_study(folder), ""


def _tree(
    results: Results, claims: Iterable[ClaimResult], folder: Path, unread: str, facts: Iterable[Mapping[str, str]]
) -> dict[str, Any]:
    """Everything that the report shows, as plain values."""
    labels = {arm.name: arm.label for arm in results.declared.arms}
    report = collect(results, claims)
    report["search"] = search(folder, results)
    report["missing"] = [*map(dict, facts)] + (
        ([{"kind": "file", "what": "runs", "why": unread}] if unread else []) + unequal(results) + missing(results)
    )
    report["evidence"] = [
        {"label": labels[arm.name], **evidence(results, arm.name, folder)} for arm in results.declared.arms
    ]
    report = plain(report)
    report["caption"] = caption(report)
    for verdict in report["verdicts"]:
        verdict["seeds_words"] = seeds_words(verdict)
    return report


def plain(value: Any) -> Any:
    """The same tree in JSON's types: floats at 10 significant digits, so no last bit changes a file; NaN is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    assert value is None or isinstance(value, (str, bool, int)), f"{value!r} is no plain value"
    return value


def lookup(report: Any, path: str) -> Any:
    """The value at a path such as `arms/0/value/mean`; None below a value that is absent."""
    for part in path.split("/"):
        if report is None:
            return None
        report = report[int(part)] if isinstance(report, list) else report[part]
    return report


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    environment.filters["as"] = show
    environment.filters["md"] = escape_markdown
    return environment


def _page(report: dict[str, Any], drawn: list[dict[str, Any]]) -> str:
    environment = _environment()

    def number(path: str, form: str) -> Markup:
        """A value of the tree, marked with where it came from."""
        text = show(lookup(report, path), form)
        return Markup('<span data-from="{}" data-as="{}">{}</span>').format(path, form, text)

    names = [arm["name"] for arm in report["arms"] if arm["role"] != "seed_model"]
    loader = environment.loader
    assert loader is not None
    return environment.get_template("page.html.j2").render(
        report=report,
        v=number,
        beside=interval_header(report),
        colours={name: look[0] for name, look in figures.colours(names).items()},
        figures=[{**item, "base64": base64.b64encode(item["svg"]).decode()} for item in drawn],
        css=Markup(loader.get_source(environment, "style.css")[0]),  # the project's own files, nothing of a study
        js=Markup(loader.get_source(environment, "page.js")[0]),
    )


def _markdown(report: dict[str, Any], drawn: list[dict[str, Any]]) -> str:
    template = _environment().get_template("report.md.j2")
    return template.render(
        report=report,
        figures=drawn,
        words=interval_words,
        claim_interval=signed_interval,
        beside=interval_header(report),
    )
