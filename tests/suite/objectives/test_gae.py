"""GAE against its formula, its limits, and values where there are none."""

from __future__ import annotations

import math
import random

import pytest
import torch
from objective_cases import BAD, MASK, MASK_BT, gae_reference, make_batch, make_config, poisoned, rows, tensor

from suite.objectives import ADVANTAGES, build
from suite.objectives.advantages import AdvantageInputs
from suite.objectives.gae import gae, length_adaptive_lambda, value_targets

VALUES, TOKEN_REWARDS = rows(11, -1.0, 2.0), rows(12, -0.5, 0.5)


def spread(per_row: list[list[float]]) -> torch.Tensor:
    """One list per row of trained tokens, as (B, T) with 0 elsewhere."""
    out = torch.zeros(MASK_BT.shape, dtype=torch.float64)
    out[MASK_BT] = tensor([value for row in per_row for value in row])
    return out


def expected(gamma: float, lambdas: list[float]) -> torch.Tensor:
    kept = [
        ([r for r, m in zip(rewards, marks) if m], [v for v, m in zip(values, marks) if m])
        for rewards, values, marks in zip(TOKEN_REWARDS, VALUES, MASK)
    ]
    return spread([gae_reference(r, v, gamma, lam) for (r, v), lam in zip(kept, lambdas)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7), (0.99, 1.0), (0.8, 0.0)])
def test_equals_the_double_sum(gamma: float, lam: float) -> None:
    lambdas = [lam] * len(MASK)
    got = gae(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, gamma, tensor(lambdas))
    torch.testing.assert_close(got, expected(gamma, lambdas), rtol=1e-12, atol=1e-12)


def test_rows_may_have_lambdas_of_their_own() -> None:
    lambdas = [0.1 * row for row in range(len(MASK))]
    got = gae(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, 0.9, tensor(lambdas))
    torch.testing.assert_close(got, expected(0.9, lambdas), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bad", [100.0, *BAD])
def test_a_padded_value_leaks_nowhere(bad: float) -> None:
    """With the padding's 100 leaking in, the advantages would be [5.7, 6, 0]."""
    mask_BT = torch.tensor([[1, 1, 0]], dtype=torch.bool)
    rewards, values = tensor([[0.0, 1.0, 0.0]]), tensor([[0.0, 0.0, bad]])
    got = gae(rewards, values, mask_BT, 1.0, tensor([0.95]))
    assert got[0].tolist() == [0.95, 1.0, 0.0]
    assert value_targets(rewards, values, mask_BT, 1.0, 0.95)[0].tolist() == [0.95, 1.0, 0.0]


@pytest.mark.parametrize("bad", BAD)
def test_masked_positions_change_nothing(bad: float) -> None:
    lambdas = tensor([0.8] * len(MASK))
    clean = gae(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, 0.9, lambdas)
    assert torch.equal(clean, gae(poisoned(TOKEN_REWARDS, bad), poisoned(VALUES, bad), MASK_BT, 0.9, lambdas))
    targets = value_targets(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, 0.9, 0.8)
    poison = value_targets(poisoned(TOKEN_REWARDS, bad), poisoned(VALUES, bad), MASK_BT, 0.9, 0.8)
    assert torch.equal(targets, poison)


def test_lambda_1_is_the_return_minus_the_value_and_lambda_0_one_step() -> None:
    # rewards 1, 2, 4 discounted by half: returns 1 + .5 (2 + .5 x 4) = 3, 2 + .5 x 4 = 4, 4
    mask_BT = torch.ones((1, 3), dtype=torch.bool)
    rewards, values = tensor([[1.0, 2.0, 4.0]]), tensor([[10.0, 20.0, 40.0]])
    assert gae(rewards, values, mask_BT, 0.5, tensor([1.0]))[0].tolist() == [-7.0, -16.0, -36.0]
    assert value_targets(rewards, values, mask_BT, 0.5, 1.0)[0].tolist() == [3.0, 4.0, 4.0]
    # 1 + .5 x 20 - 10, 2 + .5 x 40 - 20, 4 - 40
    assert gae(rewards, values, mask_BT, 0.5, tensor([0.0]))[0].tolist() == [1.0, 2.0, -36.0]
    assert value_targets(rewards, values, mask_BT, 0.5, 0.0)[0].tolist() == [11.0, 22.0, 4.0]


def test_monte_carlo_targets_do_not_depend_on_the_values() -> None:
    one = value_targets(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, 0.9, 1.0)
    other = value_targets(tensor(TOKEN_REWARDS), tensor(VALUES) * -7 + 3, MASK_BT, 0.9, 1.0)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(one, value_targets(tensor(TOKEN_REWARDS), tensor(VALUES), MASK_BT, 0.9, 0.99))


def test_length_adaptive_lambda_by_hand() -> None:
    mask_BT = torch.zeros((4, 40), dtype=torch.bool)
    for row, length in enumerate([40, 25, 1, 0]):
        mask_BT[row, :length] = True
    # 1 - 1 / (.05 x 40) = .5, 1 - 1 / (.05 x 25) = .2; a single token and an empty row have no use for theirs
    assert length_adaptive_lambda(mask_BT, 0.05).tolist() == pytest.approx([0.5, 0.2, 0.0, 0.0])
    assert length_adaptive_lambda(mask_BT[:, :2], 0.5).tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0])


def test_a_negative_lambda_is_refused_with_what_would_be_right() -> None:
    mask_BT = torch.zeros((3, 40), dtype=torch.bool)
    for row, length in enumerate([40, 8, 1]):
        mask_BT[row, :length] = True
    with pytest.raises(ValueError) as caught:
        length_adaptive_lambda(mask_BT, 0.05)
    text = str(caught.value)
    assert bool((length_adaptive_lambda(mask_BT, 0.125) >= 0).all())
    for words in (
        "objective.length_adaptive_alpha is 0.05",
        "8 trained tokens",
        "= -1.5",
        "at least 0.125",
        "or 1 for",
    ):
        assert words in text


def inputs(mask: list[list[int]] = MASK) -> AdvantageInputs:
    rng = random.Random(3)
    rewards = tensor([rng.random() for _ in mask])
    mask_BT = torch.tensor(mask, dtype=torch.bool)
    return AdvantageInputs(
        rewards, tensor(TOKEN_REWARDS) * mask_BT, mask_BT, torch.zeros(len(mask)), {}, values_BT=tensor(VALUES)
    )


def test_the_length_adaptive_lambda_replaces_the_fixed_one() -> None:
    compute = ADVANTAGES["gae"].compute
    lengths = [sum(marks) for marks in MASK]
    adaptive = compute(inputs(), make_config(advantage="gae", length_adaptive_alpha=1.5).objective)
    for row, length in enumerate(lengths):
        lam = 1 - 1 / (1.5 * length) if length else 0.0
        fixed = compute(inputs(), make_config(advantage="gae", gae_lambda_policy=lam).objective)
        torch.testing.assert_close(adaptive[row], fixed[row], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(adaptive, compute(inputs(), make_config(advantage="gae").objective))


@pytest.mark.parametrize("bad", BAD)
def test_the_objective_sees_penalty_and_score_token_by_token(bad: float) -> None:
    """KL in the reward enters each delta; the scalar sits on the last trained token."""
    config = make_config(advantage="gae", kl="reward", kl_coef=0.3, kl_estimator="k1", gamma=0.9, gae_lambda_policy=0.8)
    batch = make_batch(values_BT=poisoned(VALUES, bad))
    build(config).prepare(batch)
    assert batch.rewards_BT is not None
    assert batch.advantages_BT is not None
    sampled, ref = batch.learner_logprobs_BT, batch.ref_logprobs_BT
    assert sampled is not None
    assert ref is not None
    for row, marks in enumerate(MASK):
        places = [t for t, m in enumerate(marks) if m]
        paid = [-0.3 * float(sampled[row, t] - ref[row, t]) for t in places]
        if paid:
            paid[-1] += float(batch.rewards_B[row])
        assert batch.rewards_BT[row, places].tolist() == pytest.approx(paid)
        want = gae_reference(paid, [VALUES[row][t] for t in places], 0.9, 0.8)
        assert batch.advantages_BT[row, places].tolist() == pytest.approx(want, rel=1e-5)
    assert math.isfinite(float(batch.advantages_BT.sum()))
    assert not batch.advantages_BT[~MASK_BT].any()


def test_advantages_may_be_whitened() -> None:
    config = make_config(advantage="gae", whiten_advantages=True, advantage_eps=0.0)
    batch = make_batch(values_BT=poisoned(VALUES, math.nan))
    build(config).prepare(batch)
    assert batch.advantages_BT is not None
    trained = batch.advantages_BT[MASK_BT].double()
    assert float(trained.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(trained.std(correction=1)) == pytest.approx(1.0, rel=1e-6)
