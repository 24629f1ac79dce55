"""What adapts while a run trains: its rule by hand, and a resumed objective that goes on as the uninterrupted one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import BAD, CORRECT, LOGPROBS, MASK, MASK_BT, make_batch, make_config, poisoned, step, tensor

from suite.objectives import AGGREGATIONS, build
from suite.objectives.controllers import EntropyCoefficient, MovingBaseline, PenaltyCoefficient


def test_the_moving_baseline_by_hand() -> None:
    one = torch.zeros(2)
    plain = MovingBaseline(make_config().objective, 1)
    # means 1, 4, 1: before any batch its own, then 1, then (1 + 4) / 2
    assert [plain.take(tensor(r), one).tolist() for r in ([0.0, 2.0], [3.0, 5.0], [0.0, 2.0])] == [
        [1, 1],
        [1, 1],
        [2.5, 2.5],
    ]
    fading = MovingBaseline(make_config(baseline_decay=0.5).objective, 1)
    found = [float(fading.take(tensor(r), one)[0]) for r in ([0.0, 2.0], [3.0, 5.0], [0.0, 2.0], [0.0, 0.0])]
    # (.5 + 4) / 1.5, then (.25 + 2 + 1) / 1.75
    assert found == pytest.approx([1, 1, 3.0, 3.25 / 1.75])


def test_each_task_of_a_mixture_has_a_baseline_of_its_own() -> None:
    baseline = MovingBaseline(make_config().objective, 2)
    baseline.take(tensor([1.0, 50.0, 0.0]), torch.tensor([0, 1, 0]))
    assert baseline.take(tensor([7.0, 70.0]), torch.tensor([1, 0])).tolist() == [50.0, 0.5]


def test_the_entropy_coefficient_by_hand() -> None:
    config = make_config(entropy_coef=0.01, entropy_target=1.0, entropy_coef_delta=0.02, entropy_coef_max=0.05)
    coefficient, applied = EntropyCoefficient(config.objective), []
    for entropy in (0.5, 0.6, 0.4, 1.0, 3.0, 2.5, 0.9, 0.9):
        applied.append(coefficient.applied)
        coefficient.observe({"loss/entropy": entropy, "loss/trained_tokens": 3.0})
    # 1.0 is not below the target: .05 - .02, then .01, then 0
    assert applied == pytest.approx([0, 0.03, 0.05, 0.05, 0, 0, 0, 0.02])
    before = coefficient.state()
    coefficient.observe({})
    coefficient.observe({"loss/entropy": 0.0, "loss/trained_tokens": 0.0})
    assert coefficient.state() == before


def test_a_fixed_coefficient_never_moves() -> None:
    coefficient = EntropyCoefficient(make_config(entropy_coef=0.3).objective)
    for entropy in (0.0, 9.0):
        coefficient.observe({"loss/entropy": entropy, "loss/trained_tokens": 3.0})
    penalty = PenaltyCoefficient(make_config(kl_penalty_coef=0.7).objective)
    for _ in range(8):
        penalty.observe({"loss/kl_old": 9.0, "loss/trained_tokens": 3.0})
    assert (coefficient.applied, penalty.value) == (0.3, 0.7)


@pytest.mark.parametrize(
    ("divergences", "expected"),
    [
        # two minibatches, two epochs: the mean of the last two counts; target .3, so below .2 and above .45
        ([9.0, 9.0, 0.1, 0.28], 1.0),
        ([9.0, 9.0, 0.2, 0.3], 2.0),
        ([0.0, 0.0, 0.4, 0.44], 2.0),
        ([0.0, 0.0, 0.5, 0.44], 4.0),
    ],
)
def test_the_penalty_coefficient_by_hand(divergences: list[float], expected: float) -> None:
    config = make_config(kl_penalty_coef=2.0, kl_penalty_target=0.3, num_minibatches=2, num_epochs=2)
    penalty = PenaltyCoefficient(config.objective)
    for _ in range(2):
        penalty.value = 2.0
        penalty.start()
        for place, divergence in enumerate(divergences):
            assert penalty.value == 2.0, place
            penalty.observe({"loss/kl_old": divergence, "loss/trained_tokens": 3.0})
        assert penalty.value == expected


def test_steps_without_trained_tokens_do_not_count_for_the_penalty() -> None:
    penalty = PenaltyCoefficient(make_config(kl_penalty_target=0.3, num_minibatches=2, num_epochs=1).objective)
    for _ in range(2):
        penalty.observe({})
    assert penalty.value == 1.0
    penalty.start()
    penalty.observe({"loss/kl_old": 0.9, "loss/trained_tokens": 3.0})
    penalty.observe({})
    assert penalty.value == 2.0


ADAPTIVE: dict[str, Any] = {
    "advantage": "reinforce", "baseline_decay": 0.5, "trust_region": "kl_penalty", "kl_penalty_target": 1e-3,
    "entropy_target": 5.0, "num_minibatches": 1, "num_epochs": 1, "ratio_reference": "generator",
}  # fmt: skip


def advance(objective: Any, batches: int, first: int = 0) -> list[tuple[float, torch.Tensor]]:
    """Rollout batches of changing rewards, one optimizer step each: losses and gradients."""
    found = []
    for number in range(first, first + batches):
        batch = make_batch(rewards_B=tensor([0.1 * number, 1.0, 0.0, 0.3, 0.2, 0.5 * number, -1.0]))
        objective.prepare(batch)
        loss, gradient, _, sums, _ = step(objective, batch)
        objective.observe(sums)
        found.append((loss, gradient))
    return found


def test_a_resumed_objective_is_the_uninterrupted_one() -> None:
    config = make_config(**ADAPTIVE)
    whole = advance(build(config), 5)
    first = build(config)
    advance(first, 2)
    assert set(first.state()) == {
        "baseline.total.0",
        "baseline.weight.0",
        "penalty.coef",
        "entropy.coef",
        "entropy.entropy",
    }
    state = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in first.state().items()}
    resumed, blank = build(config), build(config)
    resumed.load_state(state)
    for got, expected in zip(advance(resumed, 3, 2), whole[2:]):
        assert got[0] == expected[0]
        assert torch.equal(got[1], expected[1])
    assert advance(blank, 1, 2)[0][0] != whole[2][0]
    assert resumed.state()["penalty.coef"] == 2**5
    assert resumed.state()["entropy.coef"] == pytest.approx(5e-4)


def test_objectives_that_adapt_nothing_hold_nothing() -> None:
    for options in ({}, {"name": "dpo"}, {"name": "sft"}, {"trust_region": "clip", "kl": "loss"}):
        assert build(make_config(**options)).state() == {}
    for name in ("dpo", "sft", "policy_gradient"):
        assert build(make_config(name=name, entropy_target=1.0)).state() == {
            "entropy.coef": 0.0,
            "entropy.entropy": math.inf,
        }


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_the_nll_of_correct_rollouts_is_a_mean_over_their_tokens(mode: str, size: int) -> None:
    plain, with_nll = (make_config(loss_agg_mode=mode, positive_nll_coef=c) for c in (0.0, 0.25))
    steps = []
    for config in (plain, with_nll):
        objective, batch = build(config), make_batch()
        objective.prepare(batch)
        steps.append(step(objective, batch, size=size))
    right = tensor(CORRECT)[:, None] * tensor(MASK)
    assert int(right.sum()) == 8  # of 18 trained tokens: 5 + 1 + 0 + 2
    expected = -float((tensor(LOGPROBS) * right).sum()) / 8
    assert steps[1][3]["loss/positive_nll"] == pytest.approx(expected, rel=1e-12)
    assert steps[1][0] - steps[0][0] == pytest.approx(0.25 * expected, rel=1e-9)
    torch.testing.assert_close(steps[1][1] - steps[0][1], -0.25 / 8 * right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", BAD)
def test_nothing_masked_reaches_the_new_terms_and_all_masked_is_0(bad: float) -> None:
    config = make_config(trust_region="kl_penalty", positive_nll_coef=0.25)
    objective, batch = build(config), make_batch()
    objective.prepare(batch)
    clean, dirty = step(objective, batch), step(objective, batch, poisoned(LOGPROBS, bad).tolist())
    assert clean[0] == dirty[0]
    assert torch.equal(clean[1], dirty[1])
    nothing = replace(batch, mask_BT=torch.zeros_like(MASK_BT))
    loss, gradient, _, sums, _ = step(objective, nothing, poisoned(LOGPROBS, bad, [[0] * 5] * 7).tolist())
    assert loss == 0.0
    assert not gradient.any()
    assert set(sums.values()) == {0.0}
    wrong = replace(batch, targets={"correct": torch.zeros(7)})
    assert step(objective, wrong)[3]["loss/positive_nll"] == 0.0
