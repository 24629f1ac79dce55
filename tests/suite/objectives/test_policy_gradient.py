"""The policy-gradient step as a whole: every combination of slots against one plain-Python loss."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import (
    BAD,
    ENTROPY,
    LEARNER,
    LOGPROBS,
    MASK,
    MASK_BT,
    REF,
    SAMPLER,
    VALUES,
    Rows,
    advantages,
    make_batch,
    make_config,
    make_rollout,
    numeric_gradient,
    poisoned,
    policy_gradient_reference,
    prepared,
    step,
    tensor,
)

from suite.config import apply
from suite.objectives import AGGREGATIONS, KL_ESTIMATORS, TRUST_REGIONS, build, ratio_is_one, resolve_ratio_reference

SLOTS = list(itertools.product(AGGREGATIONS, TRUST_REGIONS, ["none", "loss"], [0.0, 0.05], ["learner", "generator"]))


@pytest.mark.parametrize(("mode", "region", "kl", "entropy", "reference"), SLOTS)
def test_equals_the_formula(mode: str, region: str, kl: str, entropy: float, reference: str) -> None:
    config = make_config(
        loss_agg_mode=mode, trust_region=region, kl=kl, kl_coef=0.3, entropy_coef=entropy, ratio_reference=reference
    )
    objective, batch = prepared(config)
    old = LEARNER if reference == "learner" else SAMPLER

    def whole(logprobs: Rows) -> dict[str, float]:
        return policy_gradient_reference(config, logprobs, old, ENTROPY, advantages(config))

    loss, gradient, _, sums, maxima = step(objective, batch)
    got = sums | maxima | {"loss": loss}
    expected = whole(LOGPROBS) | {"loss/trained_tokens": 18, "loss/trained_sequences": 6}
    assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)
    by_token = numeric_gradient(lambda rows: whole(rows)["loss"], LOGPROBS)
    torch.testing.assert_close(gradient, by_token, rtol=1e-5, atol=1e-7)
    if region == "clip":
        assert min(expected["loss/clip_frac_low"], expected["loss/clip_frac_high"]) > 0
        assert expected["loss/clip_frac_low"] != expected["loss/clip_frac_high"]


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_micro_batches_change_neither_loss_nor_gradient(mode: str, size: int, estimator: str) -> None:
    config = make_config(loss_agg_mode=mode, kl="loss", kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1)
    objective, batch = prepared(config)
    whole, split = step(objective, batch), step(objective, batch, size=size)
    assert split[0] == pytest.approx(whole[0], rel=1e-12)
    for got, expected in zip(split[1:3], whole[1:3]):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
    assert split[3] == pytest.approx(whole[3], rel=1e-12)
    assert split[4] == whole[4]


@pytest.mark.parametrize(
    ("kl", "estimator"),
    [(kl, name) for kl in ("loss", "reward") for name in KL_ESTIMATORS if (kl, name) != ("loss", "k1")],
)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_masked_values_reach_neither_value_nor_gradient(kl: str, estimator: str, bad: float, mode: str) -> None:
    config = make_config(loss_agg_mode=mode, kl=kl, kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1)
    clean = step(*prepared(config))
    objective, batch = prepared(config, learner_logprobs_BT=poisoned(LEARNER, bad), ref_logprobs_BT=poisoned(REF, bad))
    assert batch.advantages_BT is not None
    batch.advantages_BT = poisoned(batch.advantages_BT, bad)
    dirty = step(objective, batch, poisoned(LOGPROBS, bad).tolist(), poisoned(ENTROPY, bad).tolist())
    assert dirty[0] == clean[0]
    assert dirty[3:] == clean[3:]
    for got, expected in zip(dirty[1:3], clean[1:3]):
        assert torch.equal(got, expected)
        assert not got[~MASK_BT].any()
        assert bool(got[MASK_BT].any())


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("kl", ["none", "loss", "reward"])
def test_masked_sequences_leave_both_and_all_masked_is_exactly_0(mode: str, kl: str) -> None:
    config = make_config(loss_agg_mode=mode, kl=kl, entropy_coef=0.1)
    objective, batch = prepared(config)
    assert objective.denominators(batch)["sequences"] == 6
    # one of two completions masked: the step is that of the other one alone, divided by 1 sequence and its tokens
    masked = replace(batch.take([0, 1]), mask_BT=torch.stack([MASK_BT[0], torch.zeros(5, dtype=torch.bool)]))
    alone = step(objective, batch.take([0]), LOGPROBS[:1], ENTROPY[:1])
    both = step(objective, masked, LOGPROBS[:2], ENTROPY[:2])
    assert both[0] == pytest.approx(alone[0], rel=1e-12)
    torch.testing.assert_close(both[1][:1], alone[1], rtol=1e-12, atol=0)
    nothing = torch.zeros_like(MASK_BT)
    objective, batch = prepared(config, mask_BT=nothing)
    loss, gradient, of_entropy, sums, maxima = step(objective, batch)
    assert loss == 0.0
    assert not gradient.any()
    assert not of_entropy.any()
    assert set(sums.values()) == {0.0}
    assert maxima == {}


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_wider_padding_changes_nothing(mode: str) -> None:
    config = make_config(loss_agg_mode=mode, kl="loss", entropy_coef=0.1)
    expected = step(*prepared(config))

    def wide(rows: Any) -> torch.Tensor:
        return torch.nn.functional.pad(torch.as_tensor(rows, dtype=torch.float64), (0, 6), value=-3.0)

    changes = {"learner_logprobs_BT": wide(LEARNER), "ref_logprobs_BT": wide(REF), "mask_BT": wide(MASK) > 0}
    changes["values_BT"] = wide(VALUES)
    got = step(*prepared(config, **changes), wide(LOGPROBS).tolist(), wide(ENTROPY).tolist())
    assert got[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(got[1][:, :5], expected[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_optimizer_step_does_not_depend_on_how_much_was_generated(mode: str) -> None:
    config = make_config(loss_agg_mode=mode)
    objective, batch = prepared(config)
    first = batch.take(range(4))
    alone = make_batch().take(range(4))
    objective.prepare(alone)
    got, expected = (step(objective, b, LOGPROBS[:4], ENTROPY[:4]) for b in (first, alone))
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])


def test_worked_by_hand() -> None:
    # group [1, 0]: advantages +-.7071 / (.7071) = +-1 without eps; ratio e^0 = 1 with one update.
    # token-mean over 3 tokens: (-1 -1 +1) / 3; its gradient -1/3, -1/3 and +1/3.
    config = make_config(num_minibatches=1, advantage_eps=1e-12, scale_rewards="group", loss_agg_mode="token-mean")
    config = apply(config, {"rollout.sync_period": 1})
    objective = build(config)
    batch = make_batch([[1, 1], [1, 0]], rewards_B=tensor([1.0, 0.0]), group_B=torch.tensor([0, 0]))
    objective.prepare(batch)
    loss, gradient, _, sums, _ = step(objective, batch, [[-0.5, -1.0], [-2.0, 0.0]], [[0.0] * 2] * 2)
    half = 0.5 / math.sqrt(0.5)
    assert loss == pytest.approx(-half / 3, rel=1e-6)
    torch.testing.assert_close(gradient, tensor([[-half / 3] * 2, [half / 3, 0.0]]), rtol=1e-6, atol=0)
    assert sums["loss/ratio_mean"] == 1.0


@pytest.mark.parametrize("epsilons", [(0.0, 0.0), (0.2, 0.28)])
def test_with_one_update_the_ratio_is_exactly_1_and_clipping_is_inert(epsilons: tuple[float, float]) -> None:
    options = {"num_minibatches": 1, "epsilon_low": epsilons[0], "epsilon_high": epsilons[1]}
    config = apply(make_config(**options), {"rollout.sync_period": 1})
    assert ratio_is_one(config)
    # learner_logprobs from another micro-batch split, off by rounding: they do not enter
    objective, batch = prepared(config, learner_logprobs_BT=tensor(LOGPROBS) + 1e-7)
    loss, gradient, _, sums, maxima = step(objective, batch, size=3)
    assert maxima == {"loss/ratio_max": 1.0}
    assert sums["loss/ratio_mean"] == pytest.approx(1.0, rel=1e-15)
    assert sums["loss/clip_frac"] == 0.0
    unclipped, batch = prepared(apply(config, {"objective.trust_region": "none"}))
    expected = step(unclipped, batch, size=3)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])


def test_with_several_updates_the_first_is_exactly_1_and_later_ones_clip() -> None:
    config = make_config()
    assert not ratio_is_one(config)
    objective, batch = prepared(config)
    assert step(objective, batch)[3]["loss/clip_frac"] > 0
    first = step(objective, replace(batch, learner_logprobs_BT=None))
    assert first[4] == {"loss/ratio_max": 1.0}
    assert first[3]["loss/clip_frac"] == 0.0
    same = step(objective, batch, LEARNER)
    assert same[4] == {"loss/ratio_max": 1.0}
    with pytest.raises(AssertionError):
        prepared(config, learner_logprobs_BT=None)


@pytest.mark.parametrize(
    ("period", "minibatches", "choice", "expected"),
    [
        (1, 1, "auto", "learner"),
        (4, 4, "auto", "learner"),
        (4, 2, "auto", "generator"),
        (10, 1, "auto", "generator"),
        ("inf", 1, "auto", "generator"),
        ("inf", 1, "learner", "learner"),
        (1, 1, "generator", "generator"),
    ],
)
def test_auto_takes_the_generator_when_it_lags(period: Any, minibatches: int, choice: str, expected: str) -> None:
    config = apply(make_config(num_minibatches=minibatches, ratio_reference=choice), {"rollout.sync_period": period})
    assert resolve_ratio_reference(config) == expected
    assert ratio_is_one(config) is (expected == "learner" and minibatches == 1)


def test_select_takes_every_rollout_as_a_unit_of_its_own() -> None:
    groups = [[make_rollout(1.0, 0), make_rollout(0.0, 1)], [make_rollout(0.5, 0, "p1")]]
    selected = build(make_config()).select(groups, (0, 1))
    assert selected.rollouts == [*groups[0], *groups[1]]
    assert selected.units == [[0], [1], [2]]
    assert (selected.targets, selected.metrics) == ({}, {})


def test_needs() -> None:
    assert [build(make_config(kl=kl)).needs_reference for kl in ("none", "reward", "loss")] == [False, True, True]


def test_the_constant_divisor_is_the_completion_budget() -> None:
    config = apply(make_config(loss_agg_mode="seq-mean-token-sum-norm"), {"rollout.max_completion_length": 0})
    with pytest.raises(ValueError, match=r"divides by the completion budget; set rollout.max_completion_length"):
        build(config)
    losses = []
    for budget in (10, 40):
        objective = build(config, completion_budget=budget)
        batch = make_batch()
        objective.prepare(batch)
        losses.append(step(objective, batch)[0])
    assert losses[0] == pytest.approx(4 * losses[1], rel=1e-12)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reference", ["learner", "generator"])
def test_a_surrogate_sees_nothing_of_masked_positions(bad: float, reference: str) -> None:
    # so that a new one may add up over tokens without a mask of its own
    objective, batch = prepared(
        make_config(ratio_reference=reference),
        learner_logprobs_BT=poisoned(LEARNER, bad),
        sampler_logprobs_BT=poisoned(SAMPLER, bad),
    )
    batch.advantages_BT = poisoned(advantages(make_config()), bad)
    tokens = objective._tokens(batch, poisoned(LOGPROBS, bad))
    for values in (tokens.logprobs_BT, tokens.old_logprobs_BT, tokens.ratio_BT - 1, tokens.advantages_BT):
        assert not values[~MASK_BT].any()
        assert bool(values[MASK_BT].all())
