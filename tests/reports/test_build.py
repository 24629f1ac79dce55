"""The whole report: page and numbers agree, equal inputs give equal files, no study is too broken for a page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import LABELS, Synthetic

from reports.build import build, lookup
from reports.tables import show

NASTY = r"""50% off_peak & <script>alert(1)</script> "q" 'r' $x^2$ \cmd {y} | s=∞ `c`"""


class Page(HTMLParser):
    """Numbers marked with where they came from, ids, links, and the text of table cells outside such marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str]] = []
        self.loose: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.tags: list[str] = []
        self._mark: tuple[str, str] | None = None
        self._text = ""
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        self.sources += [found["src"]] if "src" in found else []
        self._cell = self._cell or tag == "td"
        if "data-from" in found:
            self._mark, self._text = (found["data-from"], found["data-as"]), ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self._mark:
            self.numbers.append((*self._mark, self._text))
            self._mark = None
        elif tag == "td":
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._mark:
            self._text += data
        elif self._cell:
            self.loose.append(data)


def built(study: Synthetic, folder: Path, **changes: Any) -> Path:
    return build(study.write(folder / "study", **changes), source=study.data()).folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(Synthetic(), tmp_path_factory.mktemp("whole"))


def read(folder: Path, name: str = "index.html") -> str:
    return (folder / name).read_text(encoding="utf-8")


def test_every_number_of_the_page_comes_from_report_json(whole: Path) -> None:
    page, report = Page(read(whole)), json.loads(read(whole, "report.json"))
    assert len(page.numbers) > 500
    for path, form, text in page.numbers:
        assert show(lookup(report, path), form) == text, path
    assert not [text for text in page.loose if re.search(r"\d", text)]
    assert ("arms/2/value/mean", "percent", "65.5") in page.numbers
    assert ("arms/2/difference/mean", "points", "+19.5") in page.numbers


def test_the_page_needs_nothing_from_outside_and_its_links_lead_somewhere(whole: Path) -> None:
    text = read(whole)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert page.tags.count("img") == 7
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "@import" not in text
    assert "url(" not in text
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (whole / link).is_file(), link
    assert {"#arm-2", "#arm-2-interval", "#arm-2-runs"} <= set(page.links)


def test_the_page_says_what_stands_behind_a_number(whole: Path) -> None:
    text = re.sub(r"<[^>]+>", "", read(whole))
    for words in (
        "suite run mini_sync --arm semi --seeds 3 --folder runs/mini_sync-again",
        "rollout.sync_period is 10 instead of inf",
        "for these test problems",
        "For new problems too: [",
        "two-way random-effects interval over seeds and 40 problems",
        "Graded right (10)",
        "Not graded right (10)",
        "c0ffee0000",
        "undecided",
        "About 41 fresh seeds would tell",
    ):
        assert words in text, words


def test_equal_inputs_give_equal_bytes(whole: Path, tmp_path: Path) -> None:
    again = built(Synthetic(), tmp_path)
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    assert {"index.html", "report.md", "table.csv", "table.tex", "report.json", "figures/sync.svg"} <= set(names)
    for name in names:
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name


def test_the_order_of_rows_changes_nothing(whole: Path, tmp_path: Path) -> None:
    study = Synthetic()
    data = study.data()
    for name in ("history", "runs", "tables"):
        setattr(data, name, getattr(data, name).sample(frac=1, random_state=3).reset_index(drop=True))
    again = build(study.write(tmp_path / "study"), source=data, formats=("json", "csv", "latex")).folder
    for name in ("report.json", "table.csv", "table.tex"):
        assert (whole / name).read_bytes() == (again / name).read_bytes()


def test_only_the_formats_asked_for_are_written(tmp_path: Path) -> None:
    study = Synthetic()
    found = build(study.write(tmp_path / "s"), tmp_path / "out", formats=("latex",), source=study.data())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table.tex"]
    assert found.index == tmp_path / "out" / "table.tex"
    with pytest.raises(ValueError, match=r"report format 'pdf': choose from html, md, csv, latex, json"):
        build(tmp_path / "s", formats=("pdf",), source=study.data())


ALL = [(arm, seed) for arm in LABELS for seed in range(5)]
DEGENERATE: dict[str, tuple[Synthetic, str]] = {
    "no run at all": (Synthetic(absent=tuple(ALL)), "waiting"),
    "no finished cell": (Synthetic(unfinished=tuple(ALL)), "the loss is NaN at step 12"),
    "one seed": (Synthetic(seeds=(3,)), "anecdote"),
    "three seeds": (Synthetic(seeds=(0, 1, 2)), "no interval"),
    "one arm": (Synthetic(arms=("online",), claims=[]), "No claims were declared"),
    "no metric of the table": (Synthetic(drop_metrics=("eval/test/accuracy",)), "eval/test/accuracy was not logged"),
    "no curves": (
        Synthetic(drop_metrics=("eval/validation/accuracy", "policy/entropy", "policy/probe_length")),
        "No run logged a curve yet",
    ),
    "no syncs": (Synthetic(drop_metrics=("sync/version", "sync/staleness")), "the timeline cannot be drawn"),
    "no tokens": (Synthetic(drop_metrics=("cost/generated_tokens",)), "cost/generated_tokens was not logged"),
    "no tables": (Synthetic(with_tables=False), "none kept"),
    "every value NaN": (Synthetic(change=lambda *_: math.nan), "is not finite"),
    "infinite entropy": (
        Synthetic(change=lambda a, s, m, step, v: math.inf if m == "policy/entropy" else v),
        "policy/entropy is not finite",
    ),
    "arms of different lengths": (
        Synthetic(steps=lambda arm: 10 if arm == "semi" else 20),
        "different numbers of steps",
    ),
    "strange names": (Synthetic(labels=dict.fromkeys(LABELS, NASTY), question=NASTY), "cells finished"),
}


@pytest.mark.parametrize("case", list(DEGENERATE))
def test_a_study_that_is_not_whole_gives_a_page_that_says_so(case: str, tmp_path: Path) -> None:
    study, words = DEGENERATE[case]
    folder = built(study, tmp_path)
    text = read(folder)
    assert words in text
    assert "<script>alert" not in text
    assert ">nan" not in text.lower()
    report = json.loads(read(folder, "report.json"))
    page = Page(text)
    assert all(show(lookup(report, path), form) == shown for path, form, shown in page.numbers)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (folder / link).is_file()
    for line in read(folder, "report.md").splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_every_row_of_a_markdown_table_has_the_cells_of_its_header(tmp_path: Path) -> None:
    study = Synthetic(labels={**LABELS, "semi": NASTY}, unfinished=(("semi", 1),))
    width = 0
    for line in read(built(study, tmp_path), "report.md").splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert width in (0, cells) or cells == 0, line
        width = cells


def test_a_study_without_a_declaration_is_inferred_from_its_runs(tmp_path: Path) -> None:
    study = Synthetic()
    (tmp_path / "found").mkdir()
    folder = build(tmp_path / "found", source=study.data()).folder
    report = json.loads(read(folder, "report.json"))
    assert report["missing"][0]["what"] == "study.json"
    assert [arm["value"]["n"] for arm in report["arms"]] == [5] * 5


def test_a_folder_that_is_no_study_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no W&B files"):
        build(tmp_path)
    (tmp_path / "study.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"study\.json is not JSON"):
        build(tmp_path)
    (tmp_path / "study.json").write_text('{"name": "x"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"study\.json has no key"):
        build(tmp_path)


def test_a_declared_study_that_has_not_started_gives_a_page(tmp_path: Path) -> None:
    folder = build(Synthetic().write(tmp_path)).folder
    assert "there are no W&amp;B files yet" in read(folder)


def test_the_command_names_a_study_file_by_its_path(tmp_path: Path) -> None:
    study = Synthetic()
    command = "suite run 'my studies/mini.py' --axis kl --workers 2"
    folder = study.write(tmp_path, command=command)
    report = json.loads(read(build(folder, formats=("json",), source=study.data()).folder, "report.json"))
    wanted = "suite run 'my studies/mini.py' --axis kl --arm semi --seeds 0 --folder runs/mini_sync-again"
    assert report["evidence"][1]["runs"][0]["command"] == wanted


@pytest.fixture(scope="module")
def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser to open the page with: none of {', '.join(names)} is installed")
    return found


def opened(browser: str, page: Path, fragment: str, profile: Path) -> tuple[str, list[str]]:
    """The page's tree after loading, and what it wrote to the console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"]
    command = [browser, *flags, "--dump-dom", f"{page.as_uri()}{fragment}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return run.stdout, [line for line in run.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_opens_without_console_errors(chromium: str, whole: Path, tmp_path: Path) -> None:
    tree, console = opened(chromium, whole / "index.html", "#arm-2-runs", tmp_path)
    assert console == []
    assert re.search(r'<details id="arm-2"[^>]* open', tree)
    assert not re.search(r'<details id="arm-1"[^>]* open', tree)


def test_a_console_error_would_be_seen(chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<script>nothing.there()</script>", encoding="utf-8")
    assert opened(chromium, page, "", tmp_path / "profile")[1]
