"""Preferences: read from files and tasks, grouped by prompt, held out by a hash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from suite.cli import main
from suite.preferences import Preference, from_task, group_by_prompt, length_accuracy, load, split
from suite.reward_config import RewardModelConfig


def written(path: Path, rows: Any) -> str:
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return str(path)


def test_a_ranking_is_all_its_pairs() -> None:
    ranked = Preference.ranked("p", ["a", "b", "c", "d"])
    assert ranked.pairs == ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def test_rows_of_one_prompt_are_one_element() -> None:
    rows = [
        Preference.ranked("p", ["a", "b"]),
        Preference.ranked("q", ["x", "x"]),
        Preference.ranked("p", ["c", "a", "c"]),
        Preference.ranked("p", ["a", "b"]),
    ]
    (only,) = group_by_prompt(rows)
    assert only.answers == ("a", "b", "c")
    # c over a, a over c (the ranking holds both), and a over b once
    assert only.pairs == ((0, 1), (2, 0), (0, 2))


def test_held_out_prompts_do_not_depend_on_order_and_their_share_is_kept() -> None:
    preferences = [Preference.ranked(f"prompt {i}", ["a", "b"]) for i in range(4000)]
    learnt, held_out = split(preferences, 0.25)
    assert len(learnt) + len(held_out) == 4000
    # the deviation of 4000 draws at 1/4 is 27
    assert abs(len(held_out) - 1000) < 140
    assert sorted(p.prompt for p in split(preferences[::-1], 0.25)[1]) == sorted(p.prompt for p in held_out)
    assert split(preferences, 0.0) == (preferences, [])


def test_length_alone() -> None:
    preferences = [Preference.ranked("p", ["aaa", "b", "cc"]), Preference.ranked("q", ["a", "b"])]
    assert length_accuracy(preferences) == (1 + 1 + 0 + 0.5) / 4
    assert math.isnan(length_accuracy([]))


def test_columns_of_a_file(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "c", "rejected": "d"}]
    for name in ("x.jsonl", "x.json"):
        found = load(RewardModelConfig(data=written(tmp_path / name, rows)))
        assert found == [Preference("p", ("a", "b"), ((0, 1),)), Preference("q", ("c", "d"), ((0, 1),))]
    ranked = written(tmp_path / "r.jsonl", [{"ask": "p", "all": ["a", "b", "c"]}])
    assert load(RewardModelConfig(data=ranked, prompt_column="ask", ranked_column="all")) == [
        Preference("p", ("a", "b", "c"), ((0, 1), (0, 2), (1, 2)))
    ]


JUDGED = {"chosen_column": "output_1", "rejected_column": "output_2", "preference_column": "preference"}


def test_annotations_between_1_and_2(tmp_path: Path) -> None:
    values = [1, 1.2, 1.49, 1.5, 0, None, 1.51, 2.0]
    rows = [{"prompt": f"p{i}", "output_1": "a", "output_2": "b", "preference": v} for i, v in enumerate(values)]
    found = load(RewardModelConfig(data=written(tmp_path / "x.json", rows), **JUDGED))
    assert [(p.prompt, p.answers) for p in found] == [
        ("p0", ("a", "b")), ("p1", ("a", "b")), ("p2", ("a", "b")), ("p6", ("b", "a")), ("p7", ("b", "a"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"prompt": "p", "chosen": "a"}], {}, "unknown column 'rejected' in .*, row 1"),
        ([{"prompt": "p", "chosen": "a", "rejected": None}], {}, "row 1: column 'rejected' is empty"),
        ([{"prompt": "p", "chosen": "a", "rejected": "a"}], {}, "gives no pair of different answers"),
        ([{"prompt": "p", "output_1": "a", "output_2": "b", "preference": 3}], JUDGED, "is 3 and must be from 1 to 2"),
        ([{"prompt": "p", "chosen": ["a"]}], {"ranked_column": "chosen"}, "a list of at least two answers"),
        ([3], {}, "a list of objects is expected"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, rows: Any, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(RewardModelConfig(data=written(tmp_path / "x.json", rows), **options))


def test_one_source_is_asked_for(tmp_path: Path) -> None:
    for options in ({}, {"data": "x.json", "task": "addition"}):
        with pytest.raises(ValueError, match="give either data"):
            load(RewardModelConfig(**options))
    with pytest.raises(ValueError, match="there is no file"):
        load(RewardModelConfig(data=str(tmp_path / "no.json")))


@pytest.mark.parametrize("task", ["addition", "sums", "replies"])
def test_embedded_tasks_give_pairs(task: str) -> None:
    found = from_task(task, 50)
    assert len(found) == 50
    assert all(len(p.answers) == 2 and p.answers[0] != p.answers[1] and p.pairs == ((0, 1),) for p in found)
    assert from_task(task, 50) == found


def test_the_command_trains_and_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from test_reward_model import llama, saved, vowels
    from transformers import LlamaForCausalLM

    saved(tmp_path / "base", llama(LlamaForCausalLM))
    rows = [{"prompt": p.prompt, "answers": p.answers} for p in vowels(60)]
    data = ["--data", written(tmp_path / "x.jsonl", rows), "--ranked-column", "answers"]
    made = ["--folder", str(tmp_path / "rm"), "--model", str(tmp_path / "base")]
    assert main(["reward-model", "train", *made, *data, "--held-out", "0.3", "--lr", "0.003"]) == 0
    assert "length_accuracy" in capsys.readouterr().out
    assert main(["reward-model", "eval", "--model", str(tmp_path / "rm"), *data]) == 0
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(shown["pairs"]) == sum(len(p.pairs) for p in vowels(60))
    assert main(["reward-model", "eval", "--model", str(tmp_path / "base"), *data]) == 2
    assert "is no reward model" in capsys.readouterr().err
