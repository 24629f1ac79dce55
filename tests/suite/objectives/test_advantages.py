"""Advantages: conventions that ten frameworks settle in ten ways, each fixed to a number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cases import (
    ADVANTAGE_REFERENCES,
    BAD,
    GROUP,
    KL_REFERENCES,
    LEARNER,
    MASK,
    REF,
    REWARDS,
    SAMPLER,
    make_batch,
    make_config,
    poisoned,
    reference_for,
    tensor,
)

from suite.objectives import build
from suite.objectives.advantages import ADVANTAGES, AdvantageInputs


def advantages(
    rewards: Any, group: list[int], token_rewards: Any = None, mask: Any = None, **options: Any
) -> list[float]:
    """One advantage per rollout; each must be the same at all of its tokens."""
    mask_BT = torch.ones((len(group), 2), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    tokens = torch.zeros(mask_BT.shape, dtype=torch.float64) if token_rewards is None else tensor(token_rewards)
    inputs = AdvantageInputs(torch.as_tensor(rewards).double(), tokens, mask_BT, torch.tensor(group))
    got = ADVANTAGES[options.pop("advantage", "group")](inputs, make_config(**options).objective)
    assert torch.equal(got, got[:, :1].expand_as(got))
    return [float(x) for x in got[:, 0]]


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equals_the_formula_with_ragged_groups(name: str, scale: str) -> None:
    reference = reference_for(ADVANTAGE_REFERENCES, name, "advantage estimator")
    got = advantages(REWARDS, GROUP, advantage=name, scale_rewards=scale, advantage_eps=1e-2)
    assert got == pytest.approx(reference(REWARDS, GROUP, scale, 1e-2), rel=1e-12)


def test_worked_by_hand_one_right_in_four() -> None:
    # mean .25, deviation .5 (ddof 1): .75 / .5001 and -.25 / .5001. With ddof 0 the first were 1.7321.
    got = advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, advantage_eps=1e-4)
    assert got == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=5e-5)
    assert advantages([1.0, 0.0, 0.0, 0.0], [0] * 4, scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-6, 1e-4])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_seven_equal_float32_rewards_have_exactly_no_advantage(eps: float, scale: str) -> None:
    rewards = torch.cat([torch.full((7,), 0.1), torch.tensor([1.0, 0.0])])
    got = advantages(rewards, [0] * 7 + [1] * 2, advantage_eps=eps, scale_rewards=scale)
    assert got[:7] == [0.0] * 7
    assert got[7] > 0.4


def test_constant_is_judged_on_the_group_even_when_the_batch_scales() -> None:
    got = advantages([1.0, 1.0 + 1e-7, 0.0, 0.5], [0, 0, 1, 1], scale_rewards="batch")
    assert got[:2] == [0.0, 0.0]
    assert got[2:] == pytest.approx([-0.25 / 0.478713, 0.25 / 0.478713], rel=1e-5)


def test_rounding_of_large_rewards_is_no_spread() -> None:
    large = torch.tensor([1000.0, 1000.0001])
    assert float(large[1] - large[0]) > 5e-5
    assert advantages(large, [0, 0]) == [0.0, 0.0]
    assert advantages([0.0, 1e-4], [0, 0]) == pytest.approx([-0.7, 0.7], abs=0.05)


def test_a_group_of_1_with_its_own_deviation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 rollouts per prompt: a group of 1 has no standard deviation"):
        advantages([1.0, 0.0, 1.0], [0, 0, 1])
    assert advantages([1.0, 0.0, 1.0], [0, 0, 1], scale_rewards="none") == [0.5, -0.5, 0.0]


def test_group_statistics_are_of_reward_plus_summed_penalty() -> None:
    # returns 1 - .3 and 0 - .1: mean .3, so .4 and -.4 for every token alike
    got = advantages([1.0, 0.0], [0, 0], token_rewards=[[-0.1, -0.2], [-0.1, 0.0]], scale_rewards="none")
    assert got == pytest.approx([0.4, -0.4])


def test_a_penalty_still_acts_where_all_rewards_are_equal() -> None:
    got = advantages([1.0, 1.0], [0, 0], token_rewards=[[-0.1, -0.2], [-0.1, 0.0]], scale_rewards="none")
    assert got == pytest.approx([-0.1, 0.1])


def test_the_scalar_reward_sits_on_the_last_trained_token() -> None:
    mask_BT = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    penalties = torch.full((3, 5), -0.25, dtype=torch.float64) * mask_BT
    inputs = AdvantageInputs(tensor([2.0, 3.0, 4.0]), penalties, mask_BT, torch.zeros(3))
    assert inputs.rewards_BT.tolist() == [[-0.25, -0.25, 0, 1.75, 0], [-0.25, 2.75, 0, 0, 0], [0] * 5]
    assert inputs.returns_B.tolist() == [1.25, 2.5, 4.0]


def test_a_sequence_without_trained_tokens_still_counts_in_its_group() -> None:
    assert advantages([1.0, 0.0], [0, 0], mask=[[1, 1], [0, 0]], scale_rewards="none") == [0.5, -0.5]


@pytest.mark.parametrize("reference", ["learner", "generator"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("bad", BAD)
def test_kl_in_the_reward_comes_from_the_policy_at_sampling_time(reference: str, estimator: str, bad: float) -> None:
    config = make_config(
        kl="reward", kl_coef=0.3, kl_estimator=estimator, ratio_reference=reference, scale_rewards="none"
    )
    sampled = LEARNER if reference == "learner" else SAMPLER
    k = KL_REFERENCES[estimator]
    returns = [
        reward - 0.3 * sum(k(p, q) for p, q, m in zip(*three) if m)
        for reward, *three in zip(REWARDS, sampled, REF, MASK)
    ]
    batch = make_batch(
        sampler_logprobs_BT=poisoned(SAMPLER, bad),
        learner_logprobs_BT=poisoned(LEARNER, bad).requires_grad_(),
        ref_logprobs_BT=poisoned(REF, bad),
    )
    assert build(config).prepare(batch) == {}
    assert batch.advantages_BT is not None
    assert not batch.advantages_BT.requires_grad
    expected = tensor(ADVANTAGE_REFERENCES["group"](returns, GROUP, "none", 0.0))[:, None] * tensor(MASK)
    torch.testing.assert_close(batch.advantages_BT.double(), expected, rtol=1e-6, atol=1e-7)
