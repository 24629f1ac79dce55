"""The greedy completion as a baseline: sampled once per prompt, graded, shaped, stored and paid for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from fakes import small, trained

from suite.commands.cost import cost
from suite.config import apply
from suite.rewards import SHAPINGS
from suite.rollout.greedy import needs_greedy

REMAX = {"objective.name": "policy_gradient", "objective.advantage": "remax"}


def stored(folder: Path) -> Any:
    return pyarrow.parquet.read_table(folder / "rollouts").to_pandas()


def test_only_its_objective_asks_for_it() -> None:
    assert needs_greedy(apply(small(), REMAX))
    assert not needs_greedy(apply(small(), {**REMAX, "objective.advantage": "rloo"}))
    assert not needs_greedy(apply(small(), {"objective.advantage": "remax"}))  # DPO without a GRPO part
    assert needs_greedy(apply(small(), {"objective.advantage": "remax", "objective.grpo_coef": 0.1}))


def test_one_per_prompt_of_the_weights_that_sampled_the_group(tmp_path: Path) -> None:
    config = apply(small(train__steps=3), REMAX)
    _, tracker = trained(config, tmp_path)
    rows = stored(tmp_path)
    greedy, sampled = rows[rows["sample"] == -1], rows[rows["sample"] >= 0]
    assert len(greedy) == 3 * 8
    assert len(sampled) == 3 * 8 * 4
    assert sorted(set(greedy["uid"])) == sorted(set(sampled["uid"]))
    assert sorted(greedy["version"]) == [0] * 8 + [1] * 8 + [2] * 8
    # the most probable token each time: no sample of the same prompt and weights begins with a likelier one
    for row in greedy.itertuples():
        others = sampled[(sampled["uid"] == row.uid) & (sampled["version"] == row.version)]
        assert max(first[0] for first in others["sampler_logprobs"]) <= row.sampler_logprobs[0] + 1e-6
    assert tracker.column("cost/generated_tokens")[-1] == rows["token_ids"].map(len).sum()
    assert tracker.column("reward/baseline") == pytest.approx(greedy.groupby("version")["reward"].mean().tolist())
    assert tracker.column("reward/mean") == pytest.approx(sampled.groupby("version")["reward"].mean().tolist())


def test_its_cost_is_counted_before_the_run() -> None:
    assert cost(apply(small(), REMAX)).rollouts == 6 * 8 * 5
    assert cost(small()).rollouts == 6 * 8 * 4


def test_shaping_reaches_it_once_even_when_a_set_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_all(groups: Any, reward: Any) -> None:
        for group in groups:
            for rollout in group:
                rollout.reward += 10.0

    monkeypatch.setitem(SHAPINGS._entries, "none", type(SHAPINGS.entry("none"))("none", raise_all, frozenset()))
    options = {"rollout.source": "fixed", "rollout.fixed_batches": 1, "rollout.sync_period": "inf"}
    _, tracker = trained(apply(small(train__steps=3), {**REMAX, **options}), tmp_path)
    baselines = tracker.column("reward/baseline")
    assert 10.0 <= baselines[0] <= 11.0
    assert len(set(baselines)) == 1
    # the baseline moves with the rewards, so that what is added to both changes nothing
    monkeypatch.undo()
    _, plain = trained(apply(small(train__steps=3), {**REMAX, **options}), tmp_path / "plain")
    assert tracker.column("loss/policy") == pytest.approx(plain.column("loss/policy"), abs=1e-5)
