"""DPO: the loss on pairs against its formula, and which pairs there are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from objective_cases import (
    BAD,
    ENTROPY,
    LOGPROBS,
    MASK,
    REF,
    Rows,
    make_batch,
    make_config,
    make_rollout,
    mean,
    numeric_gradient,
    poisoned,
    step,
    tensor,
    trained,
)

from suite.batch import Batch, collate
from suite.objectives import build
from suite.objectives.pairs import PAIR_RULES

PAIRS = [[0, 1], [6, 5], [4, 2]]
MASKED_PAIR = [2, 3]
BETA = 0.3


def pair_batch(pairs: list[list[int]] = PAIRS, **changes: Any) -> Batch:
    """The case's rows as pairs: (chosen, rejected) of each, in order."""
    order = [row for pair in pairs for row in pair]
    batch = make_batch(**changes)
    batch = replace(batch, units=[[row] for row in range(len(MASK))]).take(order)
    return replace(
        batch,
        units=[[2 * i, 2 * i + 1] for i in range(len(pairs))],
        targets={"sign": torch.tensor([1.0, -1.0] * len(pairs))},
    )


def values(rows: Rows, pairs: list[list[int]] = PAIRS) -> Rows:
    return [rows[row] for pair in pairs for row in pair]


def dpo(**options: Any) -> Any:
    return build(make_config(**({"name": "dpo", "beta": BETA} | options)))


def reference(logprobs: Rows, pairs: list[list[int]] = PAIRS, beta: float = BETA) -> dict[str, float]:
    """Rafailov et al. 2023, eq. 7, pair by pair; `logprobs` in the order of the rows of the case."""

    def total(rows: Rows, row: int) -> float:
        return math.fsum(v for v, m in zip(rows[row], MASK[row]) if m)

    margins = [
        beta * (total(logprobs, c) - total(REF, c)) - beta * (total(logprobs, r) - total(REF, r)) for c, r in pairs
    ]
    return {
        "loss/preference": mean(math.log(1 + math.exp(-m)) for m in margins),
        "dpo/accuracy": mean(float(m > 0) for m in margins),
        "dpo/margin": mean(margins),
        "dpo/chosen_logprob": mean(total(logprobs, c) for c, _ in pairs),
        "dpo/rejected_logprob": mean(total(logprobs, r) for _, r in pairs),
    }


@pytest.mark.parametrize("size", [0, 2, 3, 4])
def test_equals_the_formula_however_it_is_split(size: int) -> None:
    loss, gradient, _, sums, _ = step(dpo(), pair_batch(), values(LOGPROBS), values(ENTROPY), size)
    expected = reference(LOGPROBS)
    assert loss == pytest.approx(expected["loss/preference"], rel=1e-12)
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert 0 < expected["dpo/accuracy"] < 1
    by_row = numeric_gradient(lambda rows: reference(rows)["loss/preference"], LOGPROBS)
    torch.testing.assert_close(gradient, tensor(values(by_row.tolist())), rtol=1e-6, atol=1e-9)
    rows = values(MASK)
    assert (sums["loss/trained_tokens"], sums["loss/trained_sequences"]) == (sum(map(sum, rows)), 6)


def test_worked_by_hand() -> None:
    # beta .1 and summed log-ratios of 3 and -1: a margin of .4, so -log sigmoid(.4) = log(1 + e^-.4) = .513015
    mask = [[1, 1], [1, 0]]
    batch = make_batch(
        mask,
        ref_logprobs_BT=tensor([[-3.0, -3.0], [-1.0, 50.0]]),
        units=[[0, 1]],
        targets={"sign": torch.tensor([1.0, -1.0])},
    )
    loss, gradient, _, sums, _ = step(dpo(beta=0.1), batch, [[-1.0, -2.0], [-2.0, 9.0]], [[0.0] * 2] * 2)
    assert loss == pytest.approx(0.513015, abs=1e-6)
    assert sums["dpo/margin"] == pytest.approx(0.4)
    # d/d margin = -sigmoid(-.4) = -.401312, times beta, for each trained token alike
    torch.testing.assert_close(gradient, tensor([[-0.0401312] * 2, [0.0401312, 0.0]]), rtol=1e-5, atol=0)


def test_where_policy_and_reference_agree_the_loss_is_log_2() -> None:
    loss, _, _, sums, _ = step(dpo(), pair_batch(), values(REF), values(ENTROPY))
    assert loss == pytest.approx(math.log(2), rel=1e-12)
    assert sums["dpo/accuracy"] == 0.0


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_margins_are_stable_in_float32(sign: int) -> None:
    batch = pair_batch(ref_logprobs_BT=torch.zeros((7, 5)))
    logprobs = torch.tensor([[s * sign * -1e4] * 5 for s in [-1, 1] * 3], requires_grad=True)
    objective = dpo()
    part = objective.loss(batch, logprobs, None, objective.denominators(batch))
    part.loss.backward()
    assert part.loss.dtype == torch.float32
    assert logprobs.grad is not None
    assert bool(logprobs.grad.isfinite().all())
    assert float(part.loss.detach()) == pytest.approx(0.0 if sign > 0 else -part.sums["dpo/margin"], rel=1e-6)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("over", ["all", "chosen"])
def test_masked_values_reach_neither_value_nor_gradient(bad: float, over: str) -> None:
    objective = dpo(entropy_coef=0.2, entropy_over=over)
    clean = step(objective, pair_batch(), values(LOGPROBS), values(ENTROPY))
    mask = values(MASK)
    logprobs, entropy = (poisoned(values(rows), bad, mask).tolist() for rows in (LOGPROBS, ENTROPY))
    dirty = step(objective, pair_batch(ref_logprobs_BT=poisoned(REF, bad)), logprobs, entropy)
    assert dirty[0] == clean[0]
    assert dirty[3] == clean[3]
    for got, expected in zip(dirty[1:3], clean[1:3]):
        assert torch.equal(got, expected)
        assert not got[torch.tensor(mask) == 0].any()


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("masked", [MASKED_PAIR, MASKED_PAIR[::-1]])
def test_a_pair_with_a_masked_side_leaves_numerator_and_denominator(size: int, masked: list[int]) -> None:
    pairs = [*PAIRS[:2], masked, PAIRS[2]]
    objective = dpo()
    assert objective.denominators(pair_batch(pairs)) == {"pairs": 3.0}
    loss, gradient, _, sums, _ = step(
        objective, pair_batch(pairs), values(LOGPROBS, pairs), values(ENTROPY, pairs), size
    )
    expected = reference(LOGPROBS)
    assert loss == pytest.approx(expected["loss/preference"], rel=1e-12)
    assert sums["dpo/margin"] == pytest.approx(expected["dpo/margin"], rel=1e-12)
    assert not gradient[4:6].any()


def test_without_pairs_the_loss_is_exactly_0_with_a_graph() -> None:
    objective = dpo(entropy_coef=0.1)
    only_masked = pair_batch([MASKED_PAIR], mask_BT=torch.zeros((7, 5), dtype=torch.bool))
    loss, gradient, of_entropy, sums, _ = step(
        objective, only_masked, values(LOGPROBS, [MASKED_PAIR]), values(ENTROPY, [MASKED_PAIR])
    )
    assert loss == 0.0
    assert not gradient.any()
    assert not of_entropy.any()
    assert set(sums.values()) == {0.0}
    empty = collate(objective.select([[make_rollout(1.0)]], ("key",)), pad_id=0, group_of=[])
    empty.ref_logprobs_BT = torch.zeros(empty.mask_BT.shape)
    logprobs = torch.zeros(empty.mask_BT.shape, requires_grad=True)
    part = objective.loss(empty, logprobs, torch.zeros_like(logprobs), objective.denominators(empty))
    part.loss.backward()
    assert float(part.loss.detach()) == 0.0


@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("over", ["all", "chosen"])
@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_entropy_covers_all_or_chosen_rows(size: int, over: str, mode: str) -> None:
    objective = dpo(entropy_coef=0.2, entropy_over=over, entropy_mean=mode)
    loss, _, gradient, sums, _ = step(objective, pair_batch(), values(LOGPROBS), values(ENTROPY), size)
    rows = [row for pair in PAIRS for row in (pair if over == "all" else pair[:1])]
    sequences = trained([ENTROPY[row] for row in rows], [MASK[row] for row in rows])
    expected = mean(mean(s) for s in sequences) if mode == "sequence" else mean(v for s in sequences for v in s)
    assert sums["loss/entropy"] == pytest.approx(expected, rel=1e-12)
    assert loss == pytest.approx(reference(LOGPROBS)["loss/preference"] - 0.2 * expected, rel=1e-12)
    assert float(gradient.sum()) == pytest.approx(-0.2, rel=1e-12)
    assert bool(gradient[1::2].any()) is (over == "all")


def groups(rewards: list[list[float]]) -> list[list[Any]]:
    return [[make_rollout(r, i, uid=f"p{g}") for i, r in enumerate(row)] for g, row in enumerate(rewards)]


def test_select_pairs_right_with_wrong_and_counts_what_it_skips() -> None:
    selected = dpo().select(groups([[0.0, 1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]), (0, 1))
    assert selected.units == [[0, 1], [2, 3]]
    assert [r.reward for r in selected.rollouts] == [1.0, 0.0, 1.0, 0.0]
    assert [r.prompt.uid for r in selected.rollouts] == ["p0", "p0", "p3", "p3"]
    assert selected.targets == {"sign": [1.0, -1.0, 1.0, -1.0]}
    assert selected.metrics == {"dpo/pairs": 2.0, "dpo/skipped_groups": 2.0}


def test_a_draw_depends_on_key_and_prompt_only() -> None:
    many = groups([[float(i % 2) for i in range(50)] for _ in range(8)])
    whole = dpo().select(many, (3, 5)).rollouts
    assert dpo().select(many, (3, 5)).rollouts == whole
    assert dpo().select(many[4:], (3, 5)).rollouts == whole[8:]
    assert dpo().select(many, (3, 6)).rollouts != whole
    assert len({r.sample for r in whole[::2]}) > 3


def group_batch(**options: Any) -> tuple[Any, Batch, list[int]]:
    """A GroupDPO objective, and a step of two groups: two against three, and one against one."""
    objective = dpo(pair_rule="group", **options)
    selected = objective.select(groups([[1.0, 0.0, 1.0, 0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]), (0,))
    assert selected.units == [[0, 1, 2, 3, 4], [5, 6]]
    assert selected.targets["sign"] == [1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0]
    assert selected.metrics == {"dpo/pairs": 2.0, "dpo/skipped_groups": 1.0}
    order = [0, 2, 1, 4, 6, 5, 1]
    batch = replace(make_batch(), units=[[i] for i in range(7)]).take(order)
    sign = torch.tensor(selected.targets["sign"])
    return objective, replace(batch, units=selected.units, targets={"sign": sign}), order


@pytest.mark.parametrize("size", [0, 2, 5])
def test_a_group_is_the_mean_over_its_comparisons_and_one_unit(size: int) -> None:
    # arXiv 2506.21495, eq. 4: 1 / (|Y_c| |Y_r|) of the sum over all pairs, then the mean over prompts
    objective, batch, order = group_batch()
    loss, gradient, _, sums, _ = step(objective, batch, [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order], size)
    first = reference(LOGPROBS, [[c, r] for c in (0, 2) for r in (1, 4, 6)])
    second = reference(LOGPROBS, [[5, 1]])
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    assert loss == pytest.approx(expected["loss/preference"], rel=1e-12)
    assert {name: sums[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    whole = step(objective, batch, [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order])
    torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)


def smoothed(margin: float, share: float) -> float:
    return (1 - share) * math.log(1 + math.exp(-margin)) + share * math.log(1 + math.exp(margin))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.49])
def test_label_smoothing_is_the_mean_under_flipped_labels(share: float) -> None:
    loss, gradient, _, sums, _ = step(dpo(label_smoothing=share), pair_batch(), values(LOGPROBS), values(ENTROPY))
    margins = [reference(LOGPROBS, [pair])["dpo/margin"] for pair in PAIRS]
    expected = mean(smoothed(m, share) for m in margins)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert sums["loss/preference"] == loss
    plain = step(dpo(), pair_batch(), values(LOGPROBS), values(ENTROPY))
    # d/dm of the smoothed loss is sigmoid(m) - (1 - share)
    for i, m in enumerate(margins):
        factor = (1 / (1 + math.exp(-m)) - (1 - share)) / (1 / (1 + math.exp(-m)) - 1)
        torch.testing.assert_close(gradient[2 * i], factor * plain[1][2 * i], rtol=1e-9, atol=1e-12)


def test_label_smoothing_worked_by_hand() -> None:
    # at share e the loss is least where sigmoid(m) = 1 - e: at e = .2 the margin is log 4, not infinite
    mask = [[1], [1]]
    batch = make_batch(
        mask, ref_logprobs_BT=tensor([[-1.0], [-1.0]]), units=[[0, 1]], targets={"sign": torch.tensor([1.0, -1.0])}
    )
    best = math.log(4) - 1
    loss, gradient, *_ = step(dpo(beta=1.0, label_smoothing=0.2), batch, [[best], [-1.0]], [[0.0], [0.0]])
    assert loss == pytest.approx(0.8 * math.log(1.25) + 0.2 * math.log(5), rel=1e-12)
    torch.testing.assert_close(gradient, tensor([[0.0], [0.0]]), rtol=0, atol=1e-15)


def nll_reference(logprobs: Rows, pairs: list[list[int]], normalized: bool) -> float:
    rows = [[-v for v, m in zip(logprobs[c], MASK[c]) if m] for c, _ in pairs]
    return mean(v for row in rows for v in row) if normalized else mean(math.fsum(row) for row in rows)


@pytest.mark.parametrize("size", [0, 2, 4])
@pytest.mark.parametrize("normalized", [True, False])
def test_nll_of_the_chosen_under_both_normalisations(size: int, normalized: bool) -> None:
    pairs = [*PAIRS[:2], MASKED_PAIR, PAIRS[2]]
    objective = dpo(nll_coef=0.7, nll_length_normalized=normalized)
    loss, gradient, _, sums, _ = step(
        objective, pair_batch(pairs), values(LOGPROBS, pairs), values(ENTROPY, pairs), size
    )

    def total(rows: Rows) -> float:
        return reference(rows)["loss/preference"] + 0.7 * nll_reference(rows, PAIRS, normalized)

    # the chosen of the masked pair meets nobody: it is in neither numerator nor denominator
    assert sums["loss/nll"] == pytest.approx(nll_reference(LOGPROBS, PAIRS, normalized), rel=1e-12)
    assert loss == pytest.approx(total(LOGPROBS), rel=1e-12)
    by_row = numeric_gradient(total, LOGPROBS)
    kept = [0, 1, 2, 3, 6, 7]
    torch.testing.assert_close(gradient[kept], tensor(values(by_row.tolist())), rtol=1e-6, atol=1e-9)
    assert not gradient[4:6].any()


def test_nll_normalisations_worked_by_hand() -> None:
    # chosen of 2 tokens at log-prob -1 and of 6 at -3: over tokens (2 + 18) / 8 = 2.5, over pairs (2 + 18) / 2 = 10
    mask = [[1] * 2 + [0] * 4, [1] * 6, [1] * 6, [1] * 6]
    logprobs = [[-1.0] * 6, [-2.0] * 6, [-3.0] * 6, [-2.0] * 6]
    batch = make_batch(
        mask,
        ref_logprobs_BT=tensor(logprobs),
        units=[[0, 1], [2, 3]],
        targets={"sign": torch.tensor([1.0, -1.0] * 2)},
    )
    for normalized, expected in ((True, 2.5), (False, 10.0)):
        objective = dpo(nll_coef=1.0, nll_length_normalized=normalized)
        loss, _, _, sums, _ = step(objective, batch, logprobs, logprobs)
        assert sums["loss/nll"] == pytest.approx(expected, rel=1e-12)
        assert loss == pytest.approx(math.log(2) + expected, rel=1e-12)


def test_nll_of_a_group_weighs_each_chosen_alike_within_its_prompt() -> None:
    objective, batch, order = group_batch(nll_coef=1.0, nll_length_normalized=False)
    _, _, _, sums, _ = step(objective, batch, [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order])
    total = [-math.fsum(v for v, m in zip(LOGPROBS[i], MASK[i]) if m) for i in range(7)]
    assert sums["loss/nll"] == pytest.approx(((total[0] + total[2]) / 2 + total[5]) / 2, rel=1e-12)


@pytest.mark.parametrize("size", [0, 2, 5])
@pytest.mark.parametrize("kl", ["none", "reward", "loss"])
def test_group_dpo_with_grpo_is_the_weighted_sum_of_its_parts(size: int, kl: str) -> None:
    slots: dict[str, Any] = {"kl": kl, "loss_agg_mode": "seq-mean-token-sum", "positive_nll_coef": 0.5}
    if kl != "none":
        slots["kl_coef"] = 0.05
    combined, batch, order = group_batch(grpo_coef=0.3, **slots)
    alone, _, _ = group_batch()
    grpo = build(make_config(name="policy_gradient", **slots))
    batch.targets["correct"] = torch.tensor([1.0, 1, 0, 0, 0, 1, 0])
    logprobs, entropy = [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order]
    parts = [step(alone, batch, logprobs, entropy, size)]
    grpo.prepare(batch)
    parts.append(step(grpo, replace(batch, units=[[i] for i in range(7)]), logprobs, entropy))
    batch.advantages_BT = None
    combined.prepare(batch)
    loss, gradient, _, sums, maxima = step(combined, batch, logprobs, entropy, size)
    assert loss == pytest.approx(parts[0][0] + 0.3 * parts[1][0], rel=1e-12)
    torch.testing.assert_close(gradient, parts[0][1] + 0.3 * parts[1][1], rtol=1e-12, atol=1e-15)
    assert sums == pytest.approx(parts[1][3] | parts[0][3], rel=1e-9)
    assert maxima == parts[1][4]
    assert sums["loss/policy"] != 0
    assert parts[1][1].abs().sum() > 0


def test_with_grpo_the_entropy_enters_once_and_unscored_rollouts_do_not() -> None:
    both, batch, order = group_batch(grpo_coef=0.3, entropy_coef=0.2)
    logprobs, entropy = [LOGPROBS[i] for i in order], [ENTROPY[i] for i in order]
    both.prepare(batch)
    of_entropy = step(both, batch, logprobs, entropy)[2]
    assert float(of_entropy.sum()) == pytest.approx(-0.2, rel=1e-12)
    assert set(both.controllers) == {"entropy"}
    given = [[make_rollout(float("nan"), 0), make_rollout(1.0, 1)]]
    assert len(dpo(pair_rule="given").select(given, (0,)).rollouts) == 2
    assert not dpo(pair_rule="given", grpo_coef=0.1).select(given, (0,)).rollouts


def test_needs() -> None:
    assert dpo().needs_reference
    assert not dpo().needs_entropy
    assert dpo(entropy_coef=1e-4).needs_entropy
    assert list(PAIR_RULES) == ["best_worst", "given", "group", "judge", "random"]
    with pytest.raises(ValueError, match="unknown pair rule 'randon'; did you mean 'random'"):
        dpo(pair_rule="randon")
