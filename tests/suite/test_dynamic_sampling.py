"""Dynamic sampling: what is dropped, what fills its place, what it costs; the next batches are not disturbed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from fakes import POLICY_GRADIENT, small, trained

from suite.config import RunConfig, apply
from suite.grading import Verdict
from suite.protocols import Collected, Completion, Group, Prompt, Rollout
from suite.rollout.dynamic import fill, refill_seed
from suite.run import Interrupted
from suite.tasks.encoding import draw
from suite.validate import validate

TOKENS = 3
"""Tokens of every stand-in completion."""


class Numbers:
    """A task of numbered prompts; the groups of a prompt's number come from a table of rewards."""

    def __init__(self, rewards: dict[str, list[float]], size: int = 40, task: str = "") -> None:
        self.prompts = [Prompt(str(i), str(i), "", task=task) for i in range(size)]
        self.rewards = rewards
        self.asked: list[list[str]] = []
        self.places: list[int] = []

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        return draw(self.prompts, seed, batch, count)

    def sample(self, prompts: Sequence[Prompt], batch: int, first: int) -> list[Group]:
        self.asked.append([prompt.uid for prompt in prompts])
        self.places.append(first)
        return [[rollout(prompt, reward) for reward in self.rewards.get(prompt.uid, [1.0, 0.0])] for prompt in prompts]


def rollout(prompt: Prompt, reward: float) -> Rollout:
    completion = Completion((5,) * TOKENS, (-1.0,) * TOKENS, "stop", 0)
    return Rollout(prompt, (1,), completion, "", Verdict("scored", None, None, reward), reward, 0, 8)


def config_of(**rollout_options: object) -> RunConfig:
    options = {"num_prompts": 4, "num_generations": 2, "dynamic_sampling": True, **rollout_options}
    return apply(RunConfig(), {f"rollout.{name}": value for name, value in options.items()})


def uids(found: Collected) -> list[str]:
    return [group[0].prompt.uid for group in found.groups]


def test_a_full_batch_is_the_one_without_dynamic_sampling() -> None:
    task, config = Numbers({}), config_of()
    found = fill(config, task, task.sample, 3)
    assert uids(found) == [prompt.uid for prompt in task.draw(config.seed, 3, 4)]
    assert (found.prompts, found.generated_tokens) == (4, 4 * 2 * TOKENS)
    assert found.metrics == {
        "rollout/gen_batches": 1.0, "rollout/dropped_groups": 0.0, "rollout/unfilled_groups": 0.0,
    }  # fmt: skip


def test_constant_groups_make_room_by_hand() -> None:
    plain = Numbers({})
    first = [prompt.uid for prompt in plain.draw(0, 0, 4)]
    further = [p.uid for p in plain.draw(refill_seed(0), 0, 4) if p.uid not in first]
    task = Numbers({first[1]: [1.0, 1.0], first[2]: [0.0, 0.0], further[0]: [0.1, 0.1]})
    found = fill(config_of(max_gen_batches=6), task, task.sample, 0)
    # two of four are kept: two more promise to need four prompts; what the round has beyond the batch is thrown away
    assert task.asked[0] == first
    assert task.asked[1] == further[:4]
    assert uids(found) == [first[0], first[3], *further[1:3]]
    asked = 4 + len(further[:4])
    assert found.prompts == asked
    assert found.generated_tokens == asked * 2 * TOKENS
    assert found.metrics["rollout/dropped_groups"] == asked - 4
    assert found.metrics["rollout/gen_batches"] == 2
    assert task.places == [0, 4]


def test_no_prompt_twice_in_a_batch_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    rewards = {str(i): [0.0, 0.0] for i in range(40)} | {"7": [0.0, 1.0]}
    task, config = Numbers(rewards), config_of(max_gen_batches=3)
    with caplog.at_level(logging.WARNING):
        found = fill(config, task, task.sample, 0)
    asked = [uid for round_ in task.asked for uid in round_]
    assert len(asked) == len(set(asked)) <= 12
    assert len(task.asked) == 3
    kept = int("7" in asked)
    assert found.metrics["rollout/unfilled_groups"] == 4 - kept == 4 - len(found.groups)
    assert len(caplog.messages) == 1
    assert f"{4 - kept} of 4 groups missing after 3 rounds" in caplog.text


def test_one_round_only_drops() -> None:
    first = [prompt.uid for prompt in Numbers({}).draw(0, 0, 4)]
    task = Numbers({first[0]: [2.5, 2.5]})
    found = fill(config_of(max_gen_batches=1), task, task.sample, 0)
    assert uids(found) == first[1:]
    assert found.metrics["rollout/unfilled_groups"] == 1


@pytest.mark.parametrize(
    ("rewards", "dropped"),
    [([0.1] * 7, True), ([0.3, 0.3 + 1e-9], True), ([1e6, 1e6 + 0.5], True), ([0.0, 1e-3], False),
     ([math.nan, 1.0], True), ([math.nan, 1.0, 0.0], False), ([math.nan, math.nan], True)],
)  # fmt: skip
def test_what_counts_as_constant(rewards: list[float], dropped: bool) -> None:
    first = Numbers({}).draw(0, 0, 4)[0].uid
    task = Numbers({first: rewards})
    found = fill(config_of(max_gen_batches=1), task, task.sample, 0)
    assert (first not in uids(found)) == dropped


def test_each_task_of_a_mixture_is_filled_from_itself() -> None:
    class Two(Numbers):
        def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
            halves = [
                [Prompt(f"{name}{p.uid}", "", "", task=name) for p in draw(self.prompts, seed, batch, count // 2)]
                for name in ("a", "b")
            ]
            return [*halves[0], *halves[1]]

    task = Two({f"a{i}": [1.0, 1.0] for i in range(0, 40, 2)})
    for batch in range(8):
        found = fill(config_of(max_gen_batches=20), task, task.sample, batch)
        names = [group[0].prompt.task for group in found.groups]
        assert sorted(names) == ["a", "a", "b", "b"], batch
    assert all(uid.startswith("a") for round_ in task.asked for uid in round_[4:])


OPTIONS = {
    **POLICY_GRADIENT, "rollout__dynamic_sampling": True, "rollout__max_gen_batches": 3, "rollout__num_generations": 2,
}  # fmt: skip


def stored(folder: Path) -> pd.DataFrame:
    files = sorted((folder / "rollouts").glob("batch-*.parquet"))
    return pd.concat([pd.read_parquet(f).assign(batch=f.stem) for f in files], ignore_index=True)


def test_a_run_counts_what_it_threw_away_and_resumes_exactly(tmp_path: Path) -> None:
    config = small(**OPTIONS)
    whole, tracker = trained(config, tmp_path / "whole")
    rows = stored(tmp_path / "whole")
    spread = rows.groupby(["batch", "uid"])["reward"].nunique()
    assert (spread == 2).all()
    sampled = rows["token_ids"].map(len).sum()
    assert tracker.column("cost/generated_tokens")[-1] > sampled  # what was dropped was generated too
    dropped = sum(tracker.column("rollout/dropped_groups"))
    kept = rows.groupby(["batch", "uid"]).ngroups
    assert dropped > 0
    assert tracker.column("cost/prompts")[-1] == dropped + kept
    assert kept + sum(tracker.column("rollout/unfilled_groups")) == 6 * 8

    polls = iter([False, False, True])
    with pytest.raises(Interrupted):
        trained(config, tmp_path / "cut", stop=lambda: next(polls))
    resumed, second = trained(config, tmp_path / "cut")
    assert resumed.weights == whole.weights
    assert second.column("cost/generated_tokens")[-1] == tracker.column("cost/generated_tokens")[-1]


def test_the_order_of_the_following_batches_is_that_of_a_run_without(tmp_path: Path) -> None:
    trained(small(**{**OPTIONS, "rollout__dynamic_sampling": False, "rollout__max_gen_batches": 10}), tmp_path / "off")
    trained(small(**{**OPTIONS, "rollout__max_gen_batches": 1}), tmp_path / "on")
    off, on = stored(tmp_path / "off"), stored(tmp_path / "on")
    for batch, rows in on.groupby("batch"):
        without = off[off["batch"] == batch]["uid"].drop_duplicates().tolist()
        kept = rows["uid"].drop_duplicates().tolist()
        assert kept == [uid for uid in without if uid in set(kept)]


def test_a_batch_of_which_nothing_is_left_changes_nothing(tmp_path: Path) -> None:
    # greedy in all but name: every group of 2 is constant
    config = small(**{**OPTIONS, "rollout__temperature": 1e-4, "train__steps": 2})
    _, tracker = trained(config, tmp_path)
    assert tracker.column("rollout/unfilled_groups") == [8, 8]
    assert tracker.column("cost/trained_tokens") == [0, 0]


def test_a_fixed_set_is_filled_once(tmp_path: Path) -> None:
    options = {**OPTIONS, "rollout__source": "fixed", "rollout__fixed_batches": 2, "rollout__sync_period": "inf"}
    _, tracker = trained(small(**options), tmp_path)
    tokens = tracker.column("cost/generated_tokens")
    assert tokens[0] < tokens[1] == tokens[-1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rollout__num_generations": 1, "objective__scale_rewards": "none"}, "dynamic sampling compares"),
        ({"rollout__dynamic_sampling": False}, "rollout.max_gen_batches is 3, but nothing reads it"),
        ({"rollout__max_gen_batches": 0}, "must be at least 1"),
    ],
)
def test_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        validate(small(**{**OPTIONS, **options}))


def test_given_pairs_are_not_sampled() -> None:
    config = small(rollout__source="external", rollout__sync_period="inf", rollout__dynamic_sampling=True)
    with pytest.raises(ValueError, match="samples nothing"):
        validate(config)
