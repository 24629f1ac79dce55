"""Rewards: soft overlong punishment, statistics over what was scored, truncated completions out of the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fakes import POLICY_GRADIENT, small, trained

from suite.batch import collate
from suite.config import RewardConfig
from suite.grading import Verdict
from suite.inert import effective, inert_reason
from suite.protocols import Completion, Group, Prompt, Rollout, Selected
from suite.rewards import SHAPINGS, overlong_punishment, statistics
from suite.validate import validate


def rollout(
    reward: float, tokens: int = 3, *, task: str = "", budget: int = 10, reason: str = "stop", **measures: float
) -> Rollout:
    completion = Completion((7,) * tokens, (-0.5,) * tokens, reason, 0)  # type: ignore[arg-type]
    score = None if reward in (0.0, 1.0) else reward
    outcome = "right" if reward == 1.0 else "wrong" if reward == 0.0 else "scored"
    verdict = Verdict(outcome, None, None, score, measures)  # type: ignore[arg-type]
    return Rollout(Prompt("p", "", "", task=task), (1,), completion, "", verdict, reward, 0, budget)


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (17408, -0.25), (20480, -1.0), (20481, -1.0), (99999, -1.0)],
)
def test_dapo_s_numbers(length: int, wanted: float) -> None:
    assert overlong_punishment(length, 20480, 4096) == pytest.approx(wanted, abs=1e-12)


def test_the_shares_give_dapo_s_constants_at_dapo_s_budget_and_scale_with_another() -> None:
    reward = RewardConfig("soft_overlong", 1.0)
    groups = [[rollout(1.0, 17408, budget=20480), rollout(0.0, 20480, budget=20480)],
              [rollout(1.0, 17, budget=20), rollout(1.0, 16, budget=20)]]  # fmt: skip
    SHAPINGS["soft_overlong"](groups, reward)
    assert [[r.reward for r in group] for group in groups] == [
        pytest.approx([0.75, -1.0]), pytest.approx([0.75, 1.0]),
    ]  # fmt: skip


def test_the_maximum_and_the_cache_are_not_swapped() -> None:
    groups = [[rollout(1.0, n, budget=100) for n in (40, 45, 50, 60)]]
    SHAPINGS["soft_overlong"](groups, RewardConfig("soft_overlong", 0.5, soft_punish_max=0.5, soft_punish_cache=0.1))
    assert [r.reward for r in groups[0]] == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_an_abstention_stays_one() -> None:
    groups = [[rollout(math.nan, 10)]]
    SHAPINGS["soft_overlong"](groups, RewardConfig("soft_overlong", 1.0))
    assert math.isnan(groups[0][0].reward)


def test_a_cache_above_the_maximum_is_refused_and_strength_0_is_inert() -> None:
    with pytest.raises(ValueError, match=r"must be at most reward.soft_punish_max, 0.5"):
        validate(small(reward__shaping="soft_overlong", reward__soft_punish_max=0.5, reward__soft_punish_cache=0.6))
    with pytest.raises(ValueError, match="nothing reads it"):
        validate(small(reward__soft_punish_max=0.5))
    arm = small(reward__shaping="soft_overlong", reward__soft_punish_cache=0.5)
    assert effective(arm)[0] == effective(small())[0]
    assert "shaping_coef is 0" in str(inert_reason(arm, small()))
    assert inert_reason(small(reward__shaping="soft_overlong", reward__shaping_coef=0.5), small()) is None


def test_statistics_by_hand_leave_abstentions_out() -> None:
    nan = math.nan
    groups: list[Group] = [
        [rollout(3.0, hidden=1.0), rollout(5.0, hidden=2.0), rollout(nan, hidden=6.0)],
        [rollout(2.0), rollout(nan), rollout(nan)],
        [rollout(nan), rollout(nan), rollout(nan)],
    ]
    found = statistics(groups)
    assert found["reward/mean"] == pytest.approx((3 + 5 + 2) / 3)
    assert found["reward/std"] == pytest.approx((math.sqrt(2) + 0) / 2)  # the group of abstentions has none
    assert found["reward/scored_frac"] == pytest.approx(3 / 9)
    assert found["reward/frac_groups_zero_std"] == pytest.approx(2 / 3)
    assert found["measure/hidden"] == 3.0
    assert not any(name.startswith("task/") for name in found)
    everything_abstains = statistics(groups[2:])
    assert "reward/mean" not in everything_abstains
    assert everything_abstains["reward/scored_frac"] == 0
    assert statistics([]) == {}


def test_rewards_of_unlike_units_are_never_averaged() -> None:
    groups: list[Group] = [
        [rollout(1.0, 2, task="sums"), rollout(0.0, 4, task="sums", reason="length")],
        [rollout(-7.5, 6, task="chat"), rollout(-2.5, 8, task="chat")],
        [rollout(1.0, 2, task="sums"), rollout(1.0, 2, task="sums")],
    ]
    found = statistics(groups)
    assert "reward/mean" not in found
    assert "reward/std" not in found
    assert found["task/sums/reward_mean"] == 0.75
    assert found["task/chat/reward_mean"] == -5.0
    assert found["task/chat/reward_std"] == pytest.approx(math.sqrt(12.5))
    assert found["task/sums/frac_groups_zero_std"] == 0.5
    assert found["task/sums/truncated_frac"] == 0.25
    assert (found["task/sums/mean_tokens"], found["task/chat/mean_tokens"]) == (2.5, 7)
    assert (found["task/sums/groups"], found["task/chat/groups"]) == (2, 1)


def test_truncated_rows_lose_their_mask_and_nothing_else() -> None:
    rows = [rollout(1.0, 2), rollout(0.0, 5, reason="length")]
    plain = collate(Selected(rows, [[0], [1]]), 0, [0, 0])
    masked = collate(Selected(rows, [[0], [1]]), 0, [0, 0], mask_truncated=True)
    assert plain.mask_BT.sum(1).tolist() == [2, 5]
    assert masked.mask_BT.sum(1).tolist() == [2, 0]
    assert torch.equal(plain.input_ids_BL, masked.input_ids_BL)
    assert torch.equal(plain.rewards_B, masked.rewards_B)


@pytest.mark.parametrize("options", [POLICY_GRADIENT, {}], ids=["grpo", "dpo"])
def test_overlong_filtering_counts_what_ended_and_a_step_without_any_moves_nothing(
    options: dict[str, object], tmp_path: Path
) -> None:
    budget = {"rollout__max_completion_length": 3, "train__steps": 3}
    _, tracker = trained(small(**options, **budget, rollout__mask_truncated_completions=True), tmp_path / "on")
    _, without = trained(small(**options, **budget), tmp_path / "off")
    assert 0 < tracker.column("length/truncated_frac")[0] < 1
    assert tracker.column("loss/trained_tokens")[0] < without.column("loss/trained_tokens")[0]
    if options:
        ended = 32 * (1 - tracker.column("length/truncated_frac")[0])
        assert tracker.column("loss/trained_sequences")[0] == pytest.approx(ended)
    # one token is never enough for an answer and the end token
    short = {"rollout__max_completion_length": 1, "train__steps": 2, "rollout__mask_truncated_completions": True}
    _, none = trained(small(**options, **short), tmp_path / "none")
    assert none.column("length/truncated_frac") == [1, 1]
    assert none.column("cost/trained_tokens") == [0, 0]
    assert all(math.isfinite(value) for row in none.rows.values() for value in row.values())
