"""The correction for a sampler that is not quite the learner: each mode against plain Python, by hand, in a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small, trained
from objective_cases import (
    BAD,
    ENTROPY,
    LEARNER,
    LOGPROBS,
    MASK,
    MASK_BT,
    REF,
    SAMPLER,
    Rows,
    advantages,
    make_batch,
    make_config,
    mean,
    numeric_gradient,
    poisoned,
    policy_gradient_reference,
    prepared,
    reference_for,
    step,
    tensor,
)
from objective_cases import trained as kept

from suite.config import ObjectiveConfig, RunConfig
from suite.objectives import AGGREGATIONS, IMPORTANCE_SAMPLING_MODES, TRUST_REGIONS, build
from suite.rollout.in_process import InProcessSampler

LOW, HIGH = 0.4, 1.6
MODES = [name for name in IMPORTANCE_SAMPLING_MODES if name != "none"]


def tokens(learner: Rows, sampler: Rows) -> Rows:
    """pi_learner / pi_sampler of every trained token, 1 elsewhere."""
    return [[math.exp(p) / math.exp(q) if m else 1.0 for p, q, m in zip(*row)] for row in zip(learner, sampler, MASK)]


def sequences(learner: Rows, sampler: Rows) -> Rows:
    """The product of a sequence's ratios at each of its places."""
    return [[math.prod(row)] * len(row) for row in tokens(learner, sampler)]


def truncated(ratio: float) -> float:
    return min(max(ratio, LOW), HIGH)


def masked(ratio: float) -> float:
    return ratio if LOW <= ratio <= HIGH else 0.0


REFERENCES: dict[str, tuple[Callable[[Rows, Rows], Rows], Callable[[float], float]]] = {
    "token_truncate": (tokens, truncated),
    "token_mask": (tokens, masked),
    "sequence_truncate": (sequences, truncated),
    "sequence_mask": (sequences, masked),
}
"""The ratios of all places, and what a ratio becomes."""


def reference(mode: str, learner: Rows) -> tuple[Rows, dict[str, float]]:
    """The weights of all places, and what is logged of them."""
    ratios_of, becomes = reference_for(REFERENCES, mode, "importance sampling mode")
    ratios = ratios_of(learner, SAMPLER)
    weights = [[becomes(ratio) for ratio in row] for row in ratios]
    outside = [[float(not LOW <= ratio <= HIGH) for ratio in row] for row in ratios]
    by_sequence = ratios_of is sequences

    def values(rows: Rows) -> list[float]:
        return [v for row in kept(rows, MASK) for v in (row[:1] if by_sequence else row)]

    logged = {"mismatch/weight_mean": mean(values(weights)), "mismatch/touched_frac": mean(values(outside))}
    if by_sequence:
        logged |= {"mismatch/seq_ratio_mean": mean(values(ratios)), "mismatch/seq_ratio_max": max(values(ratios))}
    return weights, logged


def configured(mode: str, **options: Any) -> RunConfig:
    bounds = {"importance_sampling_clip_min": LOW, "importance_sampling_clip_max": HIGH} if mode != "none" else {}
    return make_config(importance_sampling_mode=mode, **bounds, **options)


@pytest.mark.parametrize(("mode", "region", "aggregation"), list(itertools.product(MODES, TRUST_REGIONS, AGGREGATIONS)))
def test_equals_the_formula(mode: str, region: str, aggregation: str) -> None:
    """Only the surrogate is weighted: the KL, the entropy and the likelihood of correct rollouts are as they were."""
    extras = {"kl": "loss", "kl_coef": 0.3, "entropy_coef": 0.05, "positive_nll_coef": 0.1}
    config = configured(mode, trust_region=region, loss_agg_mode=aggregation, **extras)
    weights, logged = reference(mode, LEARNER)

    def whole(logprobs: Rows) -> dict[str, float]:
        return policy_gradient_reference(config, logprobs, LEARNER, ENTROPY, advantages(config), weights=weights)

    loss, gradient, _, sums, maxima = step(*prepared(config))
    expected = whole(LOGPROBS) | logged | {"loss/trained_tokens": 18, "loss/trained_sequences": 6}
    assert sums | maxima | {"loss": loss} == pytest.approx(expected, rel=1e-6, abs=1e-7)
    by_token = numeric_gradient(lambda rows: whole(rows)["loss"], LOGPROBS)
    torch.testing.assert_close(gradient, by_token, rtol=1e-5, atol=1e-7)
    assert 0 < logged["mismatch/touched_frac"] < 1


@pytest.mark.parametrize("mode", MODES)
def test_at_the_first_update_the_weights_are_of_its_own_log_probs_and_carry_no_gradient(mode: str) -> None:
    config = configured(mode)
    weights, logged = reference(mode, LOGPROBS)
    objective, batch = prepared(config)
    loss, gradient, _, sums, maxima = step(objective, replace(batch, learner_logprobs_BT=None), size=2)

    def whole(logprobs: Rows) -> float:
        old = LOGPROBS
        return policy_gradient_reference(config, logprobs, old, ENTROPY, advantages(config), weights=weights)["loss"]

    assert loss == pytest.approx(whole(LOGPROBS), rel=1e-6, abs=1e-7)
    assert logged == pytest.approx({name: (sums | maxima)[name] for name in logged}, rel=1e-9)
    torch.testing.assert_close(gradient, numeric_gradient(whole, LOGPROBS), rtol=1e-5, atol=1e-7)
    assert maxima["loss/ratio_max"] == 1.0


def test_worked_by_hand() -> None:
    # ratios 2, 1/4 | 3; products 1/2 | 3; bounds 0.4 and 1.6; the third row has no trained token
    learner, sampler = tensor([[0.5, 0.2], [0.9, 0.1], [0.3, 0.9]]).log(), tensor([[0.25, 0.8], [0.3, 0.7], [0.9, 0.1]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    options = ObjectiveConfig(importance_sampling_clip_min=LOW, importance_sampling_clip_max=HIGH)
    expected = {
        "token_truncate": ([[1.6, 0.4], [1.6, 1.0], [1.0, 1.0]], [[1, 1], [1, 0], [0, 0]]),
        "token_mask": ([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [[1, 1], [1, 0], [0, 0]]),
        "sequence_truncate": ([[0.5, 0.5], [1.6, 1.6], [1.0, 1.0]], [[0, 0], [1, 1], [0, 0]]),
        "sequence_mask": ([[0.5, 0.5], [0.0, 0.0], [1.0, 1.0]], [[0, 0], [1, 1], [0, 0]]),
    }
    assert set(expected) == set(MODES)
    for mode, (weights, touched) in expected.items():
        found = IMPORTANCE_SAMPLING_MODES[mode](learner.requires_grad_(), sampler.log(), mask, options)
        assert found is not None
        torch.testing.assert_close(found.weights_BT, tensor(weights), rtol=1e-12, atol=0)
        assert found.touched_BT.tolist() == torch.tensor(touched, dtype=torch.bool).tolist()
        assert not found.weights_BT.requires_grad
    assert IMPORTANCE_SAMPLING_MODES["none"](learner, sampler.log(), mask, options) is None


def test_ratios_at_the_bounds_are_within_and_long_products_do_not_overflow() -> None:
    options = ObjectiveConfig(importance_sampling_clip_min=0.5, importance_sampling_clip_max=2.0)
    mask = torch.ones((2, 1), dtype=torch.bool)
    for mode in MODES:
        found = IMPORTANCE_SAMPLING_MODES[mode](tensor([[0.0], [0.0]]), tensor([[2.0], [0.5]]).log(), mask, options)
        assert found is not None
        assert found.weights_BT.flatten().tolist() == pytest.approx([0.5, 2.0])
        assert not found.touched_BT.any()
    long = torch.full((1, 300), 0.5)  # a product of e^150 is infinite in float32
    found = IMPORTANCE_SAMPLING_MODES["sequence_truncate"](long, torch.zeros(1, 300), long > 0, options)
    assert found is not None
    assert found.maxima(long > 0)["mismatch/seq_ratio_max"] == pytest.approx(math.exp(150), rel=1e-6)
    assert set(found.weights_BT.flatten().tolist()) == {2.0}


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_the_sampler_give_the_learners_gradient(mode: str) -> None:
    """One-token answers in the sampler's proportions (a a b c): with wide bounds the mean is over the learner's."""
    sampler, learner, worth = [0.5, 0.5, 0.25, 0.25], [0.2, 0.2, 0.7, 0.1], [1.0, 1.0, -2.0, 0.5]
    objective = build(make_config(importance_sampling_mode=mode, importance_sampling_clip_max=100.0))
    batch = make_batch(
        [[1]] * 4, sampler_logprobs_BT=tensor(sampler)[:, None].log(), learner_logprobs_BT=None,
        rewards_B=tensor(worth), group_B=torch.tensor([0] * 4),
    )  # fmt: skip
    batch.advantages_BT = tensor(worth)[:, None]
    _, gradient, _, sums, _ = step(objective, batch, tensor(learner)[:, None].log().tolist(), [[0.0]] * 4)
    of_answer = [float(gradient[0] + gradient[1]), float(gradient[2]), float(gradient[3])]
    assert of_answer == pytest.approx([-0.2 * 1.0, -0.7 * -2.0, -0.1 * 0.5])  # -pi(a) A(a)
    assert sums["mismatch/weight_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_neither_loss_nor_gradient_nor_metrics(mode: str, size: int, aggregation: str) -> None:
    objective, batch = prepared(configured(mode, loss_agg_mode=aggregation))
    whole, split = step(objective, batch), step(objective, batch, size=size)
    assert split[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(split[1], whole[1], rtol=1e-12, atol=1e-15)
    assert split[3] == pytest.approx(whole[3], rel=1e-12)
    assert split[4] == whole[4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first", [False, True])
def test_masked_values_reach_neither_value_nor_gradient(mode: str, bad: float, first: bool) -> None:
    config = configured(mode, kl="loss")
    objective, batch = prepared(config)
    clean = step(objective, replace(batch, learner_logprobs_BT=None) if first else batch)
    objective, batch = prepared(
        config,
        sampler_logprobs_BT=poisoned(SAMPLER, bad),
        learner_logprobs_BT=poisoned(LEARNER, -bad),
        ref_logprobs_BT=poisoned(REF, bad),
    )
    batch = replace(batch, learner_logprobs_BT=None) if first else batch
    dirty = step(objective, batch, poisoned(LOGPROBS, bad).tolist())
    assert dirty[0] == clean[0]
    assert dirty[3:] == clean[3:]
    assert torch.equal(dirty[1], clean[1])
    assert not dirty[1][~MASK_BT].any()


@pytest.mark.parametrize("mode", MODES)
def test_wider_padding_and_masked_sequences_change_nothing(mode: str) -> None:
    objective, batch = prepared(configured(mode))
    expected = step(objective, batch)

    def wide(rows: Any, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(torch.as_tensor(rows, dtype=torch.float64), (0, 4), value=value)

    changes = {"learner_logprobs_BT": wide(LEARNER, -1.0), "sampler_logprobs_BT": wide(SAMPLER, -3.0)}
    changes |= {"mask_BT": wide(MASK, 0.0) > 0, "ref_logprobs_BT": wide(REF, 0.0), "values_BT": None}
    wider = step(*prepared(configured(mode), **changes), wide(LOGPROBS, -2.0).tolist(), wide(ENTROPY, 0.0).tolist())
    assert wider[0] == pytest.approx(expected[0], rel=1e-12)
    assert wider[3] == pytest.approx(expected[3], rel=1e-12)
    torch.testing.assert_close(wider[1][:, :5], expected[1], rtol=1e-12, atol=0)
    nothing = step(*prepared(configured(mode), mask_BT=torch.zeros_like(MASK_BT)))
    assert nothing[0] == 0.0
    assert set(nothing[3].values()) == {0.0}
    assert nothing[4] == {}


def test_a_grpo_part_of_a_preference_loss_is_corrected_too() -> None:
    units = {"units": [[0, 1], [4, 5]], "targets": {"sign": tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0, 0.0])}}
    found = [
        step(*prepared(configured(mode, name="dpo", grpo_coef=0.5), **units)) for mode in ("none", "sequence_truncate")
    ]
    assert "mismatch/weight_mean" in found[1][3]
    assert found[0][0] != found[1][0]


MODEL_OF_ITS_OWN = {
    "objective__name": "policy_gradient", "objective__num_minibatches": 2, "rollout__sync_period": 2, "optim__lr": 3e-4,
}  # fmt: skip


def test_in_process_every_weight_is_1_and_the_run_is_the_uncorrected_one(tmp_path: Path) -> None:
    """Over eight optimizer steps of which each batch serves two; temperature included."""
    runs = {}
    for mode in ("none", "token_truncate", "sequence_mask"):
        config = small(
            **MODEL_OF_ITS_OWN, objective__importance_sampling_mode=mode, train__steps=8, rollout__temperature=0.8
        )
        runs[mode] = trained(config, tmp_path / mode)[1]
    for mode in ("token_truncate", "sequence_mask"):
        log = runs[mode]
        assert log.column("mismatch/weight_mean") == pytest.approx([1.0] * 8, abs=1e-5)
        assert log.column("mismatch/touched_frac") == [0.0] * 8
        assert log.column("mismatch/ratio_max") == pytest.approx([1.0] * 4, abs=1e-4)
        for step_number, row in runs["none"].rows.items():
            theirs = {k: v for k, v in row.items() if not k.startswith("time/")}
            mine = {k: log.rows[step_number][k] for k in theirs}
            assert mine == pytest.approx(theirs, rel=2e-3, abs=1e-4)
    assert len(runs["none"].column("mismatch/ratio_mean")) == 4  # measured without a correction too
    assert "mismatch/weight_mean" not in runs["none"].rows[1]


def test_an_engine_that_is_off_shows_in_the_metrics_and_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler whose log-probs are 0.1 above the learner's, first token of each completion."""
    generate = InProcessSampler.generate

    def off(this: InProcessSampler, requests: Any, sampling: Any) -> Any:
        out = generate(this, requests, sampling)
        return [replace(c, logprobs=(c.logprobs[0] + 0.1, *c.logprobs[1:])) for c in out]

    monkeypatch.setattr(InProcessSampler, "generate", off)
    options = {"objective__name": "policy_gradient", "train__steps": 1}
    _, plain = trained(small(**options), tmp_path / "plain")
    _, corrected = trained(small(**options, objective__importance_sampling_mode="sequence_truncate"), tmp_path / "is")
    for log in (plain, corrected):
        share = log.column("loss/trained_sequences")[0] / log.column("loss/trained_tokens")[0]
        assert log.column("kl/sampler")[0] == pytest.approx(0.1 * share, abs=1e-5)
        assert log.column("mismatch/ratio_mean")[0] == pytest.approx(1 + share * math.expm1(-0.1), abs=1e-5)
        assert log.column("mismatch/ratio_max")[0] == pytest.approx(1.0, abs=1e-4)
    assert corrected.column("mismatch/seq_ratio_mean")[0] == pytest.approx(math.exp(-0.1), abs=1e-5)
    assert corrected.column("mismatch/weight_mean")[0] == pytest.approx(math.exp(-0.1), abs=1e-5)
    norms = [log.column("loss/grad_norm")[0] for log in (plain, corrected)]
    assert norms[1] == pytest.approx(norms[0] * math.exp(-0.1), rel=1e-4)
