"""Mixtures: counts of every batch, order, budgets, pair rules, grading and evaluation task by task."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from fakes import POLICY_GRADIENT, small, trained

from suite.config import RunConfig, apply
from suite.protocols import Task
from suite.seed_model import tokenizer
from suite.tasks import build, parts_of
from suite.tasks.mixture import Mixture, counts
from suite.validate import validate

MIXED = {"task__name": "mixture", "task__mixture": "addition=3,sums=1"}


def mixture_of(**options: object) -> Mixture:
    base = {"task.name": "mixture", "task.mixture": "addition=1,sums=1"}
    task = build(apply(RunConfig(), {**base, **options}), tokenizer())
    assert isinstance(task, Mixture)
    return task


@pytest.mark.parametrize(
    ("shares", "total", "wanted"),
    [({"a": 1, "b": 2}, 8, {"a": 3, "b": 5}), ({"a": 2, "b": 1}, 3, {"a": 2, "b": 1}),
     ({"a": 1, "b": 1, "c": 1}, 8, {"a": 3, "b": 3, "c": 2}), ({"a": 0, "b": 1}, 5, {"a": 0, "b": 5}),
     ({"a": 1e5, "b": 5e4}, 32, {"a": 21, "b": 11}), ({"a": 0.49, "b": 0.3, "c": 0.21}, 10, {"a": 5, "b": 3, "c": 2})],
)  # fmt: skip
def test_counts_by_largest_remainder(shares: dict[str, float], total: int, wanted: dict[str, int]) -> None:
    assert counts(shares, total) == wanted


def test_every_batch_holds_its_counts_and_each_task_its_own_order() -> None:
    task = mixture_of(**{"task.mixture": "addition=3,sums=1", "task.pair_rules": "sums=best_worst"})
    assert isinstance(task, Task)
    alone = {name: build(apply(RunConfig(), {"task.name": name}), tokenizer()) for name in ("addition", "sums")}
    places = []
    for batch in range(6):
        prompts = task.draw(5, batch, 8)
        assert Counter(prompt.task for prompt in prompts) == {"addition": 6, "sums": 2}
        assert task.draw(5, batch, 8) == prompts
        for name, count in (("addition", 6), ("sums", 2)):
            mine = {prompt.uid for prompt in prompts if prompt.task == name}
            assert mine == {prompt.uid for prompt in alone[name].draw(5, batch, count)}
        assert {p.pair_rule for p in prompts if p.task == "sums"} == {"best_worst"}
        assert {p.pair_rule for p in prompts if p.task == "addition"} == {""}
        places.append([prompt.task for prompt in prompts])
    assert len(set(map(tuple, places))) > 1
    assert task.draw(6, 0, 8) != task.draw(5, 0, 8)


def test_budgets_and_grading_are_the_tasks_own() -> None:
    task = mixture_of(**{"task.lengths": "sums=14"})
    assert {name: part.max_completion_length for name, part in parts_of(task).items()} == {"addition": 5, "sums": 14}
    assert task.max_completion_length == 14
    prompts = task.held_out("test", 1)
    assert [prompt.task for prompt in prompts] == ["addition", "sums"]
    # the box is an answer to a sum, and no answer to an addition
    box = [f"\\boxed{{{prompt.gold}}}" for prompt in prompts]
    assert [verdict.outcome for verdict in task.grade(prompts, box)] == ["no_answer", "right"]
    back = [prompt.gold[::-1] for prompt in prompts]
    assert [verdict.outcome for verdict in task.grade(prompts, back)] == ["right", "no_answer"]
    assert {p.max_completion_length for p in mixture_of(**{"rollout.max_completion_length": 7}).parts.values()} == {7}


@pytest.mark.parametrize("options", [POLICY_GRADIENT, {}], ids=["grpo", "dpo"])
def test_a_run_logs_every_task_by_itself(options: dict[str, object], tmp_path: Path) -> None:
    # so hot that every token is about as likely as any other: completions reach their budgets
    hot = {"task__lengths": "addition=4,sums=9", "rollout__temperature": 50.0}
    config = small(**options, **MIXED, **hot, train__steps=2, eval__num_samples=2)
    validate(config)
    _, tracker = trained(config, tmp_path)
    assert tracker.column("task/addition/groups") == [6, 6]
    assert tracker.column("task/sums/groups") == [2, 2]
    assert "reward/mean" not in tracker.rows[1]
    rows = pd.read_parquet(tmp_path / "rollouts" / "batch-000000.parquet")
    lengths = rows.assign(task=rows["uid"].str.split("/").str[0], n=rows["token_ids"].map(len)).groupby("task")["n"]
    assert lengths.max().to_dict() == {"addition": 4, "sums": 9}
    for step in (0, 2):
        for name in ("addition", "sums"):
            for split in ("validation", "test"):
                assert f"eval/{name}-{split}/accuracy" in tracker.rows[step]
                assert f"eval/{name}-{split}/avg@2" in tracker.rows[step]
            assert f"task/{name}/entropy" in tracker.rows[step]
        assert "eval/validation/accuracy" not in tracker.rows[step]
    assert {name for _, name in tracker.tables} == {"eval/addition-test/problems", "eval/sums-test/problems"}
    own = [tracker.rows[0][f"task/{name}/entropy"] for name in ("addition", "sums")]
    assert min(own) < tracker.rows[0]["policy/entropy"] < max(own)


def test_a_task_of_proportion_0_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    _, tracker = trained(small(**{**MIXED, "task__mixture": "addition=1,sums=0"}, train__steps=1), tmp_path)
    assert tracker.column("task/addition/groups") == [8]
    assert "task/sums/groups" not in tracker.rows[1]
    assert "eval/sums-test/accuracy" in tracker.rows[0]
    # what it trains on is what it would train on alone, in another order within a batch
    rows = pd.read_parquet(tmp_path / "rollouts" / "batch-000000.parquet")
    alone = build(RunConfig(), tokenizer()).draw(0, 0, 8)
    assert set(rows["uid"]) == {prompt.uid for prompt in alone}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"task.mixture": "addition=1,summs=1"}, "unknown task 'summs' in task.mixture; did you mean 'sums'"),
        ({"task.mixture": "addition=1,mixture=1"}, "unknown task 'mixture'"),
        ({"task.mixture": "addition,sums"}, "'addition' must be written as name=value"),
        ({"task.mixture": "addition=1,addition=2"}, "names 'addition' twice"),
        ({"task.mixture": "addition=-1,sums=1"}, "proportion of 'addition' is '-1' and must be a number of at least 0"),
        ({"task.mixture": "addition=nan,sums=1"}, "proportion of 'addition' is 'nan'"),
        ({"task.mixture": "addition=0"}, "must name a task with a proportion above 0"),
        ({"task.mixture": "addition=100,sums=1"}, "of which task 'sums' of task.mixture gets none"),
        ({"task.lengths": "file=3"}, "unknown task 'file' in task.lengths"),
        ({"task.lengths": "sums=3.5"}, "must be a whole number of at least 1"),
        ({"task.pair_rules": "sums=randon"}, "unknown pair rule 'randon' in task.pair_rules; did you mean 'random'"),
        ({"task.pair_rules": "sums=random", "objective.name": "policy_gradient"}, "task.pair_rules is"),
        ({"task.source": "x.jsonl"}, "task.source is 'x.jsonl', but nothing reads it"),
        ({"task.mixture": "addition=1,file=1", "task.source": ""}, "task.source is empty"),
    ],
)
def test_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        validate(apply(RunConfig(), {"task.name": "mixture", "task.mixture": "addition=1,sums=1", **options}))


def test_a_mixture_option_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"nothing reads it here; it is read with task.name = mixture"):
        validate(apply(RunConfig(), {"task.lengths": "addition=4"}))
