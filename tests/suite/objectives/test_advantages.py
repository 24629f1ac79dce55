"""Advantages: conventions that ten frameworks settle in ten ways, each fixed to a number."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import (
    BAD,
    GREEDY,
    GROUP,
    KL_REFERENCES,
    LEARNER,
    MASK,
    MASK_BT,
    NONE,
    REF,
    REWARDS,
    SAMPLER,
    TOKEN_REWARDS,
    VALUES,
    AdvantageCase,
    Rows,
    advantage_reference,
    make_batch,
    make_config,
    make_rollout,
    poisoned,
    tensor,
)

from suite.batch import collate
from suite.objectives import build
from suite.objectives.advantages import ADVANTAGES, AdvantageInputs, advantages, whiten
from suite.protocols import Completion


def inputs_of(
    rewards: Any, group: list[int], token_rewards: Any = None, mask: Any = None, **more: Any
) -> AdvantageInputs:
    mask_BT = torch.ones((len(group), 2), dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    tokens = torch.zeros(mask_BT.shape, dtype=torch.float64) if token_rewards is None else tensor(token_rewards)
    return AdvantageInputs(torch.as_tensor(rewards).double(), tokens, mask_BT, torch.tensor(group), **more)


def per_rollout(
    rewards: Any, group: list[int], token_rewards: Any = None, mask: Any = None, task: Any = None, **options: Any
) -> list[float]:
    """One advantage per rollout; each must be the same at all of its tokens."""
    targets = {} if task is None else {"task": torch.tensor(task)}
    inputs = inputs_of(rewards, group, token_rewards, mask, targets=targets)
    got = advantages(inputs, make_config(**options).objective)
    out = []
    for row, marks in zip(got.tolist(), inputs.mask_BT.tolist()):
        values = [v for v, m in zip(row, marks) if m]
        assert len(set(values)) <= 1
        out.append(values[0] if values else 0.0)
    return out


def in_case(token_rewards: Rows = TOKEN_REWARDS, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, the reference's) over the ragged case, 0 at masked positions."""
    objective = make_config(**options).objective
    inputs = AdvantageInputs(
        tensor(REWARDS), torch.where(MASK_BT, tensor(token_rewards), 0.0), MASK_BT, torch.tensor(GROUP),
        values_BT=tensor(VALUES), baseline_B=tensor(GREEDY),
    )  # fmt: skip
    case = AdvantageCase(REWARDS, GROUP, MASK, token_rewards, objective, GREEDY, VALUES)
    return advantages(inputs, objective), torch.where(MASK_BT, tensor(advantage_reference(case)), 0.0)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("token_rewards", [NONE, TOKEN_REWARDS], ids=["scalar", "per token"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("whitened", [False, True])
def test_equals_the_formula_with_ragged_groups(
    name: str, token_rewards: Rows, gamma: float, ddof: int, whitened: bool
) -> None:
    got, expected = in_case(
        token_rewards, advantage=name, gamma=gamma, advantage_ddof=ddof, advantage_eps=1e-2,
        whiten_advantages=whitened and not ADVANTAGES[name].whitens,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_every_scale_equals_the_formula(scale: str, ddof: int) -> None:
    got, expected = in_case(scale_rewards=scale, advantage_ddof=ddof, advantage_eps=1e-2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("bad", BAD)
def test_masked_values_reach_no_advantage(name: str, bad: float) -> None:
    config = make_config(advantage=name, kl="reward", kl_coef=0.3, gamma=0.9, kl_estimator="k1")
    found = []
    for poison in (0.0, bad):
        batch = make_batch(
            learner_logprobs_BT=poisoned(LEARNER, poison), ref_logprobs_BT=poisoned(REF, poison),
            token_rewards_BT=poisoned(TOKEN_REWARDS, poison), values_BT=poisoned(VALUES, poison),
        )  # fmt: skip
        build(config).prepare(batch)
        assert batch.advantages_BT is not None
        assert bool(batch.advantages_BT[MASK_BT].any())
        assert not batch.advantages_BT[~MASK_BT].any()
        found.append(batch.advantages_BT)
    assert torch.equal(*found)


def test_worked_by_hand_one_right_in_four() -> None:
    # mean .25, deviation .5 (ddof 1) or .4330 (ddof 0): .75 / .5001 and .75 / .4331; RLOO 1 - 0 and 0 - 1/3
    right = [1.0, 0.0, 0.0, 0.0]
    got = per_rollout(right, [0] * 4, advantage_eps=1e-4)
    assert got == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=5e-5)
    got = per_rollout(right, [0] * 4, advantage_eps=0.0, advantage_ddof=0)
    assert got == pytest.approx([1.7321, -0.5774, -0.5774, -0.5774], abs=5e-5)
    assert per_rollout(right, [0] * 4, scale_rewards="none") == [0.75, -0.25, -0.25, -0.25]
    for name in ("rloo", "rloo_token"):
        assert per_rollout(right, [0] * 4, advantage=name) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-12)


@pytest.mark.parametrize("eps", [0.0, 1e-9, 1e-6, 1e-4])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("name", [name for name in ADVANTAGES if ADVANTAGES[name].within_group])
@pytest.mark.parametrize("whitened", [False, True])
def test_seven_equal_float32_rewards_have_exactly_no_advantage(
    eps: float, scale: str, name: str, whitened: bool
) -> None:
    rewards = torch.cat([torch.full((7,), 0.1), torch.tensor([1.0, 0.0, 0.0])])
    mask = [[1, 1]] * 8 + [[1, 0]] * 2  # unequal lengths, so that the mean over tokens is not 0
    options = {"scale_rewards": scale} if name == "group" else {}
    got = per_rollout(
        rewards, [0] * 7 + [1] * 3, mask=mask, advantage=name, advantage_eps=eps,
        whiten_advantages=whitened and not ADVANTAGES[name].whitens, **options,
    )  # fmt: skip
    assert got[:7] == [0.0] * 7
    assert got[7] > 0.4


def test_constant_is_judged_on_the_group_even_when_the_batch_scales() -> None:
    got = per_rollout([1.0, 1.0 + 1e-7, 0.0, 0.5], [0, 0, 1, 1], scale_rewards="batch")
    assert got[:2] == [0.0, 0.0]
    assert got[2:] == pytest.approx([-0.25 / 0.478713, 0.25 / 0.478713], rel=1e-5)


def test_rounding_of_large_rewards_is_no_spread() -> None:
    large = torch.tensor([1000.0, 1000.0001])
    assert float(large[1] - large[0]) > 5e-5
    assert per_rollout(large, [0, 0]) == [0.0, 0.0]
    assert per_rollout([0.0, 1e-4], [0, 0]) == pytest.approx([-0.7, 0.7], abs=0.05)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if ADVANTAGES[name].within_group])
def test_alone_a_rollout_has_no_advantage_and_never_its_raw_reward(name: str) -> None:
    got = per_rollout(
        [1.0, 0.0, 1.0], [0, 0, 1], advantage=name, **({"scale_rewards": "none"} if name == "group" else {})
    )
    assert got[2] == 0.0
    assert got[0] > 0 > got[1]


def test_group_statistics_are_of_reward_plus_summed_penalty() -> None:
    # returns 1 - .3 and 0 - .1: mean .3, so .4 and -.4 for every token alike
    got = per_rollout([1.0, 0.0], [0, 0], token_rewards=[[-0.1, -0.2], [-0.1, 0.0]], scale_rewards="none")
    assert got == pytest.approx([0.4, -0.4])


def test_a_penalty_still_acts_where_all_rewards_are_equal() -> None:
    got = per_rollout([1.0, 1.0], [0, 0], token_rewards=[[-0.1, -0.2], [-0.1, 0.0]], scale_rewards="none")
    assert got == pytest.approx([-0.1, 0.1])


def test_token_level_rloo_by_hand() -> None:
    # row 0 is paid .5, then 1; row 1 nothing, then .25, over a masked token. To go: 1.5, 1 and .25, .25.
    # The other one's return is .25 for row 0 and 1.5 for row 1.
    inputs = inputs_of([1.0, 0.25], [0, 0], [[0.5, 0.0, 0.0], [0.0, 7.0, 0.0]], [[1, 1, 0], [1, 0, 1]])
    inputs = replace(inputs, token_rewards_BT=inputs.token_rewards_BT * inputs.mask_BT)
    got = advantages(inputs, make_config(advantage="rloo_token").objective)
    assert got.tolist() == [[1.25, 0.75, 0.0], [-1.25, 0.0, -1.25]]


def test_remax_subtracts_the_greedy_reward_before_discounting() -> None:
    # 1 - .75 = .25 at the last of three tokens, then .5 of it per token before; -.4 is a token's own
    inputs = inputs_of([1.0], [0], [[0.0, -0.4, 0.0]], [[1, 1, 1]], baseline_B=tensor([0.75]))
    got = advantages(inputs, make_config(advantage="remax", gamma=0.5).objective)
    assert got[0].tolist() == pytest.approx([0.25 / 4 - 0.2, 0.25 / 2 - 0.4, 0.25])


def test_whitening_by_hand() -> None:
    # tokens 1, 1, 1 and -2: mean .25, deviation 1.5 (ddof 1) or 1.2990; the token that is masked plays no part
    mask_BT = torch.tensor([[1, 1], [1, 1]], dtype=torch.bool)
    got = whiten(tensor([[1.0, 1.0], [1.0, -2.0]]), mask_BT, 0.0)
    assert got.flatten().tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5])
    got = whiten(tensor([[1.0, 1.0], [1.0, -2.0]]), mask_BT, 0.2, ddof=0)
    assert float(got[1, 1]) == pytest.approx(-2.25 / 1.499038, rel=1e-6)
    one_masked = mask_BT & torch.tensor([[True, True], [True, False]])
    assert whiten(tensor([[1.0, 1.0], [1.0, math.nan]]), one_masked, 0.0).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert not whiten(tensor([[1.0]]), torch.tensor([[False]]), 0.0).any()


def test_reinforce_pp_keeps_a_group_that_is_all_right() -> None:
    # without a baseline of the group, a group of four right answers is above the batch's mean
    got = per_rollout([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], advantage="reinforce_pp", advantage_eps=0.0)
    assert got == pytest.approx([0.9354, 0.9354, -0.9354, -0.9354], abs=1e-4)  # 4 tokens of 1 and of 0: .5 / .5345
    assert per_rollout([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], advantage="reinforce_pp_baseline") == [0.0] * 4


@pytest.mark.parametrize("options", [{"scale_rewards": "batch"}, {"scale_rewards": "none", "whiten_advantages": True}])
def test_tasks_of_a_mixture_share_no_statistic(options: dict[str, Any]) -> None:
    rewards, group, task = [1.0, 0.0, 30.0, -10.0], [0, 0, 1, 1], [0, 0, 1, 1]
    mixed = per_rollout(rewards, group, task=task, **options)
    assert mixed[:2] == per_rollout(rewards[:2], group[:2], **options)
    assert mixed[2:] == per_rollout(rewards[2:], [0, 0], **options)
    assert mixed[0] != pytest.approx(per_rollout(rewards, group, **options)[0], rel=0.1)


def test_the_scalar_reward_sits_on_the_last_trained_token() -> None:
    mask_BT = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    penalties = torch.full((3, 5), -0.25, dtype=torch.float64) * mask_BT
    inputs = AdvantageInputs(tensor([2.0, 3.0, 4.0]), penalties, mask_BT, torch.zeros(3))
    assert inputs.rewards_BT.tolist() == [[-0.25, -0.25, 0, 1.75, 0], [-0.25, 2.75, 0, 0, 0], [0] * 5]
    assert inputs.returns_B.tolist() == [1.25, 2.5, 4.0]


def test_a_sequence_without_trained_tokens_still_counts_in_its_group() -> None:
    for name in ("group", "rloo", "rloo_token"):
        options = {"scale_rewards": "none"} if name == "group" else {}
        got = per_rollout([1.0, 0.0], [0, 0], mask=[[1, 1], [0, 0]], advantage=name, **options)
        assert got == [0.5 if name == "group" else 1.0, 0.0]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rollouts_whose_reward_abstained_are_in_no_statistic_and_no_loss(name: str) -> None:
    objective = build(make_config(advantage=name))
    greedy = make_rollout(0.5)
    rewards = [1.0, math.nan, 0.0, 0.25, math.nan]
    groups = [[replace(make_rollout(r, i), greedy=greedy) for i, r in enumerate(rewards)]]
    selected = objective.select(groups, (0,))
    assert [rollout.reward for rollout in selected.rollouts] == [1.0, 0.0, 0.25]
    assert selected.units == [[0], [1], [2]]
    assert objective.select([[replace(make_rollout(math.nan), greedy=greedy)]], (0,)).rollouts == []
    if ADVANTAGES[name].baseline == "greedy":
        assert selected.targets == {"greedy_reward": [0.5] * 3}
        silent = replace(make_rollout(1.0), greedy=make_rollout(math.nan))
        assert objective.select([[silent]], (0,)).rollouts == []


def test_rewards_given_token_by_token_reach_the_advantages() -> None:
    config = make_config(advantage="rloo_token")
    completion = Completion((5, 6), (-0.5, -0.25), "stop", 0)
    first = replace(make_rollout(1.0, 0), completion=completion, token_rewards=(0.5, -0.25))
    objective = build(config)
    batch = collate(objective.select([[first, make_rollout(0.0, 1)]], (0,)), 0, [0, 0])
    batch.learner_logprobs_BT = torch.zeros(2, 2)
    objective.prepare(batch)
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.tolist() == [[1.25, 0.75], [-1.25, -1.25]]
    part = batch.take([1, 0])
    assert part.token_rewards_BT is not None
    assert part.token_rewards_BT.tolist() == [[0.0, 0.0], [0.5, -0.25]]


@pytest.mark.parametrize("reference", ["learner", "generator"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("name", ["group", "reinforce_pp"])
@pytest.mark.parametrize("bad", BAD)
def test_kl_in_the_reward_comes_from_the_policy_at_sampling_time(
    reference: str, estimator: str, name: str, bad: float
) -> None:
    config = make_config(
        advantage=name, kl="reward", kl_coef=0.3, kl_estimator=estimator, ratio_reference=reference,
        **({"scale_rewards": "none"} if name == "group" else {}),
    )  # fmt: skip
    sampled = LEARNER if reference == "learner" else SAMPLER
    k = KL_REFERENCES[estimator]
    charged = [[-0.3 * k(p, q) for p, q in zip(*two)] for two in zip(sampled, REF)]
    batch = make_batch(
        sampler_logprobs_BT=poisoned(SAMPLER, bad),
        learner_logprobs_BT=poisoned(LEARNER, bad).requires_grad_(),
        ref_logprobs_BT=poisoned(REF, bad),
    )
    assert build(config).prepare(batch) == {}
    assert batch.advantages_BT is not None
    assert not batch.advantages_BT.requires_grad
    case = AdvantageCase(REWARDS, GROUP, MASK, charged, config.objective, GREEDY, VALUES)
    expected = tensor(advantage_reference(case)) * tensor(MASK)
    torch.testing.assert_close(batch.advantages_BT, expected.float(), rtol=1e-6, atol=1e-6)
