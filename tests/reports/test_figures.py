"""The figures: drawn from the numbers alone, the same bytes for the same numbers, the same colours everywhere."""

from __future__ import annotations

import copy
import itertools
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from synthetic import Synthetic
from synthetic_report import report_of

from reports.figures import PALETTE, _direct_labels, _figure, colours, draw


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(Synthetic(), "json")[0]


def test_same_numbers_same_bytes_and_another_number_another_figure(report: dict[str, Any]) -> None:
    first, second = draw(report), draw(copy.deepcopy(report))
    assert [item["name"] for item in first] == [
        "results", "effects", "eval_validation_accuracy", "policy_entropy", "policy_probe_length",
        "eval_validation_accuracy_by_tokens", "sync",
    ]  # fmt: skip
    for one, two in zip(first, second, strict=True):
        assert one["svg"] == two["svg"]
        assert one["png"] == two["png"]
        assert ET.fromstring(one["svg"]).tag.endswith("svg")
        assert b"<dc:date>" not in one["svg"]
    changed = copy.deepcopy(report)
    changed["sync"][1]["versions"][-1] = 3
    names = [a["name"] for a, b in zip(first, draw(changed), strict=True) if a["svg"] != b["svg"]]
    assert names == ["sync"]


def test_an_arm_has_one_colour_of_its_own_in_every_figure(report: dict[str, Any]) -> None:
    look = colours(["offline", "semi", "online", "grpo"])
    assert [colour for colour, _ in look.values()] == list(PALETTE[:4])
    for item in draw(report):
        if item["name"] not in ("effects",):
            svg = item["svg"].decode().lower()
            assert all(colour.lower() in svg for colour, _ in look.values()), item["name"]


def test_more_arms_than_colours_are_told_apart_by_dashes() -> None:
    look = colours([str(i) for i in range(2 * len(PALETTE))])
    assert len({(colour, str(dash)) for colour, dash in look.values()}) == 2 * len(PALETTE)


def test_labels_of_lines_that_end_together_do_not_overlap() -> None:
    axes = _figure(6, 4).add_subplot()
    axes.set_ylim(0, 1)
    _direct_labels(axes, [(0.5, "one", "k"), (0.5, "two", "k"), (0.501, "three", "k"), (0.98, "four", "k")])
    places = sorted(text.get_position()[1] for text in axes.texts)
    assert all(b - a >= 0.06 for a, b in itertools.pairwise(places))
    assert places[-1] < 1.04


def test_a_label_with_a_dollar_sign_is_text() -> None:
    study = Synthetic(
        arms=("offline", "online"), labels={"offline": "cost $1$ & <b>", "online": r"\frac_{$"}, claims=[]
    )
    assert draw(report_of(study, "json")[0])


def test_nothing_to_draw_gives_no_figure() -> None:
    study = Synthetic(absent=tuple((a, s) for a in Synthetic().arms for s in range(5)))
    assert draw(report_of(study, "json")[0]) == []
