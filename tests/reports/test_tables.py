"""How numbers are written, and the CSV and LaTeX table of arms."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import LABELS, Synthetic
from synthetic_report import report_of

from reports.build import build
from reports.tables import MINUS, escape_latex, escape_markdown, interval_words, seeds_words, show, terminal_lines


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.41049, "percent", "41.0"),
        (0.0976, "points", "+9.8"),
        (-0.0064, "points", f"{MINUS}0.6"),
        (-0.0004, "points", "0.0"),
        (0.0, "points", "0.0"),
        (-0.0371, "percent", f"{MINUS}3.7"),
        (0.4312, "number", "0.431"),
        (-0.0312, "signed", f"{MINUS}0.031"),
        (0.00004, "p", "< .0001"),
        (0.00043, "p", ".0004"),
        (0.0123, "p", ".012"),
        (1.0, "p", "1"),
        (12345, "count", "12,345"),
        (999, "tokens", "999"),
        (20400, "tokens", "20.4 k"),
        (3_456_789, "tokens", "3.46 M"),
        (42, "seconds", "42.0 s"),
        (210, "seconds", "3.5 min"),
        (9000, "seconds", "2.5 h"),
        (0.9, "level", "90 %"),
        (None, "percent", "–"),
    ],
)
def test_numbers_are_written_as_a_reader_expects(value: Any, form: str, text: str) -> None:
    assert show(value, form) == text


def test_what_stands_beside_a_mean_depends_on_the_seeds() -> None:
    summary = {"low": 0.381, "high": 0.442}
    assert interval_words({**summary, "kind": "t"}, "percent") == "[38.1, 44.2]"
    assert interval_words({**summary, "kind": "range"}, "percent") == "range 38.1 to 44.2"
    assert interval_words({**summary, "kind": "anecdote"}, "percent") == "anecdote: one seed"
    assert interval_words({**summary, "kind": "none"}, "percent") == "–"
    assert interval_words(None, "percent") == "–"


def test_seeds_needed_in_words() -> None:
    verdict = {
        "seeds_needed": 14, "smallest_effect": 0.03, "unit": "points", "value_unit": "percent", "metric": "a/accuracy",
        "kind": "different", "verdict": "undecided", "n": 5, "sd": 0.02,
    }  # fmt: skip
    assert seeds_words(verdict) == (
        "about 14 fresh seeds would tell (80 % power for an effect of 3.0 points); added to these, they are exploratory"
    )
    assert seeds_words({**verdict, "kind": "equivalent", "verdict": "supported"}).endswith("for a margin of 3.0 points")
    assert "unknown" in seeds_words({**verdict, "seeds_needed": None, "sd": None})
    assert "no spread" in seeds_words({**verdict, "seeds_needed": None, "sd": None, "n": 1})
    assert "is 0" in seeds_words({**verdict, "seeds_needed": None, "sd": 0.0})


def test_csv_holds_the_numbers_of_report_json_unrounded() -> None:
    report, files = report_of(Synthetic(), "csv")
    rows = list(csv.DictReader(io.StringIO(files["table.csv"])))
    assert [row["arm"] for row in rows] == ["seed model", *LABELS]
    for row, arm in zip(rows, report["arms"], strict=True):
        assert float(row["mean"]) == arm["value"]["mean"]
        assert int(row["n"]) == 5
        if arm["difference"]:
            assert float(row["difference_low"]) == arm["difference"]["low"]
    # offline: 18 of 40, shifted per seed by 0, 1, -1, 2, 0
    assert float(rows[1]["mean"]) == pytest.approx((18 * 5 + 2) / 5 / 40)
    assert rows[1]["difference"] == ""
    assert rows[1]["label"] == LABELS["offline"]


NASTY = r"50% off_peak #1 & $x^2$ {y} ~ \today <b>[z]</b> | s=∞"


def test_latex_escapes_every_special_character() -> None:
    escaped = escape_latex(NASTY)
    expected = (
        r"50\% off\_peak \#1 \& \$x\textasciicircum{}2\$ \{y\} \textasciitilde{} \textbackslash{}today "
        r"\textless{}b\textgreater{}{[}z{]}\textless{}/b\textgreater{} \textbar{} s=$\infty$"
    )
    assert escaped == expected


def test_latex_table_is_balanced_booktabs_whatever_the_names() -> None:
    study = Synthetic(labels={**LABELS, "semi": NASTY})
    _, files = report_of(study, "latex")
    text = files["table.tex"]
    assert re.findall(r"\\(toprule|midrule|bottomrule)", text) == [
        "toprule", "midrule", "midrule", "bottomrule",
    ]  # fmt: skip
    assert re.findall(r"\\begin\{(\w+)\}", text) == re.findall(r"\\end\{(\w+)\}", text)[::-1] == ["table", "tabular"]
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith("\\\\")]
    assert len(rows) == 1 + 1 + 4
    assert all(len(re.findall(r"(?<!\\)&", row)) == 5 for row in rows)
    assert not re.search(r"(?<!\\)[%#]", text.split("\n", 1)[1])
    assert escape_latex(NASTY) in text


def test_latex_caption_says_what_varies() -> None:
    _, files = report_of(Synthetic(), "latex")
    caption = next(line for line in files["table.tex"].splitlines() if "\\caption" in line)
    for words in ("40 held-out problems", "n = 5 replicates", r"95 \% t interval over training seeds", "Holm"):
        assert words in caption
    for_three = report_of(Synthetic(seeds=(0, 1, 2)), "latex")[1]["table.tex"]
    assert "no interval" in for_three
    assert "Brackets" not in for_three
    assert for_three.count("range over seeds") == 2


def test_bold_marks_every_arm_that_is_not_separable_from_the_best() -> None:
    report, files = report_of(Synthetic(), "latex")
    best = [arm["name"] for arm in report["arms"] if arm["best"]]
    assert best == ["semi", "online", "grpo"]
    assert files["table.tex"].count("\\textbf{") == 3
    assert not any(arm["best"] for arm in report_of(Synthetic(seeds=(0, 1, 2)), "json")[0]["arms"])


def test_dagger_marks_an_arm_with_failed_cells(tmp_path: Path) -> None:
    report, files = report_of(Synthetic(unfinished=(("semi", 3),)), "latex")
    assert [arm["dagger"] for arm in report["arms"]] == [False, False, True, False, False]
    assert f"{escape_latex(LABELS['semi'])}$^\\dagger$ &" in files["table.tex"]
    assert "1 of 5" in files["table.tex"]


def test_markdown_cells_hold_no_markup() -> None:
    assert escape_markdown("a|b *c* <i>\n`d`") == r"a\|b \*c\* &lt;i&gt; \`d\`"


def test_terminal_lines_say_verdict_effect_and_p_or_seeds(tmp_path: Path) -> None:
    study = Synthetic()
    lines = build(study.write(tmp_path), formats=("json",), source=study.data()).lines
    assert [line.split()[0] for line in lines] == ["supported", "supported", "supported", "undecided"]
    assert "+20.5 points [+16.5, +24.5]" in lines[0]
    assert "p = .0003" in lines[0]
    assert "(90 %)" in lines[1]
    assert "about 41 fresh seeds would tell" in lines[3]
    few = []
    for seeds in ((0, 1), (0, 1, 2)):
        small = Synthetic(seeds=seeds)
        few.append(build(small.write(tmp_path / str(len(seeds))), formats=("json",), source=small.data()))
    assert "2 seeds, and a verdict needs 3" in few[0].lines[0]
    assert "only 3 seeds, a hint" in few[1].lines[0]
    assert terminal_lines({"verdicts": [], "study": {"problems": 3, "varied": {"words": "over 2 seed models"}}}) == [
        "measured     over 2 seed models, 3 test problems"
    ]
