"""One ragged rollout batch with unequal values everywhere, and every slot's formula in plain Python floats.

The references are written from the papers, token by token; they share no code with the package.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from suite.batch import Batch
from suite.config import ObjectiveConfig, RunConfig, apply
from suite.grading import Verdict
from suite.objectives import build
from suite.protocols import Completion, Prompt, Rollout

Rows = list[list[float]]

MASK = [
    [1, 1, 1, 1, 1],
    [1, 1, 1, 0, 0],
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [1, 1, 0, 1, 0],
    [1, 1, 0, 0, 0],
    [1, 1, 1, 1, 0],
]
MASK_BT = torch.tensor(MASK, dtype=torch.bool)
NONE = [[0.0] * len(row) for row in MASK]
GROUP = [0, 0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 1.0, 0.25, 0.5, 0.0, -0.75]
BUDGET = 9
BAD = (math.nan, 1e9, math.inf)


def rows(seed: int, low: float, high: float) -> Rows:
    """Reproducible values for every position."""
    rng = random.Random(seed)
    return [[rng.uniform(low, high) for _ in row] for row in MASK]


LOGPROBS, LEARNER, SAMPLER, REF = (rows(seed, -2.5, -0.2) for seed in range(4))
ENTROPY = rows(4, 0.1, 2.0)
VALUES, TOKEN_REWARDS = rows(5, -1.0, 1.0), rows(6, -0.4, 0.3)
CORRECT = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
GREEDY = [0.5, 0.5, 0.5, 0.5, -0.25, -0.25, -0.25]


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_batch(mask: list[list[int]] = MASK, **changes: Any) -> Batch:
    """The case as a batch in float64, one unit per row."""
    batch = Batch(
        input_ids_BL=torch.zeros((len(mask), len(mask[0]) + 2), dtype=torch.long),
        attention_mask_BL=torch.ones((len(mask), len(mask[0]) + 2), dtype=torch.long),
        mask_BT=torch.tensor(mask, dtype=torch.bool),
        sampler_logprobs_BT=tensor(SAMPLER),
        rewards_B=tensor(REWARDS),
        group_B=torch.tensor(GROUP),
        truncated_B=torch.zeros(len(mask), dtype=torch.bool),
        units=[[row] for row in range(len(mask))],
        learner_logprobs_BT=tensor(LEARNER),
        ref_logprobs_BT=tensor(REF),
        targets={"correct": tensor(CORRECT[: len(mask)]), "greedy_reward": tensor(GREEDY[: len(mask)])},
        values_BT=tensor(VALUES) if mask is MASK else None,
    )
    return replace(batch, **changes)


def make_config(**objective: Any) -> RunConfig:
    """Policy gradient unless named otherwise, with four updates per batch, so that the ratio is not 1."""
    options: dict[str, Any] = {
        "objective.name": "policy_gradient",
        "objective.num_minibatches": 4,
        "rollout.sync_period": 4,
        "rollout.max_completion_length": BUDGET,
        "objective.epsilon_low": 0.1,
        "objective.epsilon_high": 0.4,
    }
    return apply(RunConfig(), options | {f"objective.{name}": value for name, value in objective.items()})


def make_rollout(reward: float, sample: int = 0, uid: str = "p0") -> Rollout:
    completion = Completion((5, 6), (-0.5, -0.25), "stop", 0)
    return Rollout(Prompt(uid, "1+1", "2"), (3,), completion, "2", Verdict("right", "2", None), reward, sample)


def step(objective: Any, batch: Batch, logprobs: Any = LOGPROBS, entropy: Any = ENTROPY, size: int = 0) -> Any:
    """A whole step in micro-batches of `size` rows: (loss, d loss/d logprobs, d loss/d entropy, sums, maxima)."""
    leaves = [tensor(logprobs).requires_grad_(), tensor(entropy).requires_grad_()]
    denominators = objective.denominators(batch)
    batch = replace(batch, targets=batch.targets | {"row": torch.arange(len(batch))})
    loss, sums, maxima = torch.zeros((), dtype=torch.float64), {}, {}
    for micro in batch.micro_batches(size):
        index = micro.targets["row"]
        part = objective.loss(micro, leaves[0][index], leaves[1][index], denominators)
        part.loss.backward()
        loss += part.loss.detach()
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            maxima[name] = max(maxima.get(name, -math.inf), value)
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return float(loss), grads[0], grads[1], sums, maxima


def poisoned(values: Any, bad: float, mask: list[list[int]] = MASK) -> torch.Tensor:
    """The values with something impossible at every masked position."""
    values = values if isinstance(values, torch.Tensor) else tensor(values)
    return torch.where(torch.tensor(mask, dtype=torch.bool), values, torch.full_like(values, bad))


def reference_for(table: dict[str, Any], name: str, kind: str) -> Any:
    """The entry's reference; a new entry without one fails, saying where it belongs."""
    if name not in table:
        pytest.fail(f"{kind} {name!r} has no plain-Python reference; add it to the table in objective_cases.py")
    return table[name]


def numeric_gradient(function: Callable[[Rows], float], at: Rows, eps: float = 1e-6) -> torch.Tensor:
    """Central differences of a plain-Python function of (B, T) values."""
    out = [[0.0] * len(row) for row in at]
    for b, row in enumerate(at):
        for t in range(len(row)):
            shifted = []
            for sign in (1, -1):
                moved = [list(r) for r in at]
                moved[b][t] += sign * eps
                shifted.append(function(moved))
            out[b][t] = (shifted[0] - shifted[1]) / (2 * eps)
    return tensor(out)


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def trained(values: Rows, mask: list[list[int]]) -> list[list[float]]:
    """The trained values of each sequence that has any."""
    kept = [[v for v, m in zip(row, marks) if m] for row, marks in zip(values, mask)]
    return [row for row in kept if row]


AGGREGATION_REFERENCES: dict[str, Callable[[list[list[float]]], float]] = {
    "token-mean": lambda sequences: mean(v for row in sequences for v in row),
    "seq-mean-token-mean": lambda sequences: mean(mean(row) for row in sequences),
    "seq-mean-token-sum": lambda sequences: mean(math.fsum(row) for row in sequences),
    "seq-mean-token-sum-norm": lambda sequences: mean(math.fsum(row) / BUDGET for row in sequences),
}

KL_REFERENCES: dict[str, Callable[[float, float], float]] = {
    "k1": lambda p, q: math.log(math.exp(p) / math.exp(q)),
    "k2": lambda p, q: math.log(math.exp(q) / math.exp(p)) ** 2 / 2,
    "k3": lambda p, q: math.exp(q) / math.exp(p) - math.log(math.exp(q) / math.exp(p)) - 1,
    "k3+": lambda p, q: math.exp(q) / math.exp(p) - math.log(math.exp(q) / math.exp(p)) - 1,
}


def _clip(ratio: float, advantage: float, o: ObjectiveConfig) -> tuple[float, bool, bool]:
    if advantage >= 0:
        return -min(ratio, 1 + o.epsilon_high) * advantage, False, ratio > 1 + o.epsilon_high and advantage > 0
    return -max(ratio, 1 - o.epsilon_low) * advantage, ratio < 1 - o.epsilon_low, False


def kl_old(ratio: float) -> float:
    """KL(old, pi) from one token of the old policy."""
    return ratio - 1 - math.log(ratio)


TRUST_REGION_REFERENCES: dict[str, Callable[[float, float, ObjectiveConfig], tuple[float, bool, bool]]] = {
    "none": lambda ratio, advantage, o: (-ratio * advantage, False, False),
    "clip": _clip,
    "kl_penalty": lambda ratio, advantage, o: (
        -ratio * advantage + o.kl_penalty_coef * kl_old(ratio),
        False,
        False,
    ),
}


@dataclass
class AdvantageCase:
    """What the references see of a rollout batch."""

    rewards: list[float]
    group: list[int]
    mask: list[list[int]]
    token_rewards: Rows
    options: ObjectiveConfig
    baseline: list[float]
    values: Rows

    def returns(self) -> list[float]:
        return [
            r + math.fsum(v for v, m in zip(*row) if m) for r, *row in zip(self.rewards, self.token_rewards, self.mask)
        ]

    def to_go(self, scalars: list[float]) -> Rows:
        """Discounted returns-to-go: trained token by trained token, each summed on its own."""
        out = []
        for scalar, rewards, marks in zip(scalars, self.token_rewards, self.mask):
            places = [t for t, m in enumerate(marks) if m]
            paid = [rewards[t] + (scalar if t == places[-1] else 0.0) for t in places]
            row = [0.0] * len(marks)
            for k, t in enumerate(places):
                row[t] = math.fsum(self.options.gamma ** (i - k) * paid[i] for i in range(k, len(paid)))
            out.append(row)
        return out

    def spread(self, values: Rows) -> Rows:
        """Whitened over all trained tokens."""
        flat = [v for row in trained(values, self.mask) for v in row]
        scale = deviation(flat, self.options.advantage_ddof) + self.options.advantage_eps
        return [[(v - mean(flat)) / scale for v in row] for row in values]

    def every_token(self, per_row: list[float]) -> Rows:
        return [[value] * len(self.mask[0]) for value in per_row]


def deviation(values: list[float], ddof: int) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


def _others(case: AdvantageCase, values: list[float]) -> list[list[float]]:
    """The values of the other rollouts of each one's group."""
    return [
        [v for j, (v, g) in enumerate(zip(values, case.group)) if g == mine and j != i]
        for i, mine in enumerate(case.group)
    ]


def _group(case: AdvantageCase) -> Rows:
    returns, o = case.returns(), case.options
    out = []
    for value, others in zip(returns, _others(case, returns)):
        members = [value, *others]
        if max(members) - min(members) <= 1e-6:
            out.append(0.0)
            continue
        spread_of = members if o.scale_rewards == "group" else returns
        divisor = 1.0 if o.scale_rewards == "none" else deviation(spread_of, o.advantage_ddof) + o.advantage_eps
        out.append((value - mean(members)) / divisor)
    return case.every_token(out)


def _rloo(case: AdvantageCase) -> Rows:
    returns = case.returns()
    return case.every_token([r - mean(others) for r, others in zip(returns, _others(case, returns))])


def _rloo_token(case: AdvantageCase) -> Rows:
    to_go = case.to_go(case.rewards)
    firsts = [
        row[marks.index(1)] if 1 in marks else reward for row, marks, reward in zip(to_go, case.mask, case.rewards)
    ]
    return [[v - mean(others) for v in row] for row, others in zip(to_go, _others(case, firsts))]


def _reinforce_pp_baseline(case: AdvantageCase) -> Rows:
    returns = case.returns()
    return case.spread(case.every_token([r - mean([r, *others]) for r, others in zip(returns, _others(case, returns))]))


def gae_reference(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The double sum of arXiv 1506.02438, eq. 16, over the trained tokens of one rollout."""
    ahead = [*values[1:], 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, ahead)]
    return [
        math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def _gae(case: AdvantageCase) -> Rows:
    o, out = case.options, []
    for scalar, rewards, values, marks in zip(case.rewards, case.token_rewards, case.values, case.mask):
        places = [t for t, m in enumerate(marks) if m]
        paid = [rewards[t] + (scalar if t == places[-1] else 0.0) for t in places]
        lam = 1 - 1 / (o.length_adaptive_alpha * len(places)) if o.length_adaptive_alpha and places else None
        lam = o.gae_lambda_policy if lam is None else lam
        row = [0.0] * len(marks)
        for t, advantage in zip(places, gae_reference(paid, [values[t] for t in places], o.gamma, lam)):
            row[t] = advantage
        out.append(row)
    return out


ADVANTAGE_REFERENCES: dict[str, Callable[[AdvantageCase], Rows]] = {
    "group": _group,
    "rloo": _rloo,
    "rloo_token": _rloo_token,
    "reinforce": lambda case: case.every_token([r - b for r, b in zip(case.returns(), case.baseline)]),
    "remax": lambda case: case.to_go([r - b for r, b in zip(case.rewards, case.baseline)]),
    "reinforce_pp": lambda case: case.spread(case.to_go(case.rewards)),
    "reinforce_pp_baseline": _reinforce_pp_baseline,
    "gae": _gae,
}
"""Rows of per-token advantages; what they hold at masked positions means nothing. Whitening included where it is the
estimator's own."""


def advantage_reference(case: AdvantageCase) -> Rows:
    """The configured estimator's advantages, whitened on top where the configuration asks for it."""
    rows = reference_for(ADVANTAGE_REFERENCES, case.options.advantage, "advantage estimator")(case)
    return case.spread(rows) if case.options.whiten_advantages else rows


def policy_gradient_reference(
    config: RunConfig,
    logprobs: Rows,
    old: Rows,
    entropy: Rows,
    advantages: Rows,
    mask: list[list[int]] = MASK,
    weights: Rows | None = None,
) -> dict[str, float]:
    """The whole step's loss and its parts; `weights` multiply the policy loss token by token."""
    o = config.objective
    aggregate = AGGREGATION_REFERENCES[o.loss_agg_mode]
    region = TRUST_REGION_REFERENCES[o.trust_region]
    cells = [[region(math.exp(p - q), a, o) for p, q, a in zip(*three)] for three in zip(logprobs, old, advantages)]

    def part(i: int) -> list[list[float]]:
        return trained([[float(cell[i]) for cell in row] for row in cells], mask)

    ratios = [
        r for row in trained([[math.exp(p - q) for p, q in zip(*two)] for two in zip(logprobs, old)], mask) for r in row
    ]
    weights = weights or [[1.0] * len(row) for row in mask]
    losses = [[w * cell[0] for w, cell in zip(*row)] for row in zip(weights, cells)]
    out = {
        "loss/policy": aggregate(trained(losses, mask)),
        "loss/clip_frac_low": mean(v for row in part(1) for v in row),
        "loss/clip_frac_high": mean(v for row in part(2) for v in row),
        "loss/ratio_mean": mean(ratios),
        "loss/ratio_max": max(ratios),
    }
    out["loss/clip_frac"] = out["loss/clip_frac_low"] + out["loss/clip_frac_high"]
    out["loss"] = out["loss/policy"]
    if o.trust_region == "kl_penalty":
        out |= {"loss/kl_old": mean(map(kl_old, ratios)), "loss/kl_penalty_coef": o.kl_penalty_coef}
    if o.positive_nll_coef:
        right = trained([row for row, c in zip(logprobs, CORRECT) if c], [row for row, c in zip(mask, CORRECT) if c])
        out["loss/positive_nll"] = -mean(v for row in right for v in row)
        out["loss"] += o.positive_nll_coef * out["loss/positive_nll"]
    if o.kl == "loss":
        k = KL_REFERENCES["k3" if o.kl_estimator == "auto" else o.kl_estimator]
        out["loss/kl"] = aggregate(trained([[k(p, q) for p, q in zip(*two)] for two in zip(logprobs, REF)], mask))
        out["loss"] += o.kl_coef * out["loss/kl"]
    if o.entropy_coef:
        mode = {"token": "token-mean", "sequence": "seq-mean-token-mean"}[o.entropy_mean]
        out["loss/entropy"] = AGGREGATION_REFERENCES[mode](trained(entropy, mask))
        out["loss"] -= o.entropy_coef * out["loss/entropy"]
    return out


def prepared(config: RunConfig, **changes: Any) -> tuple[Any, Batch]:
    """The objective of a configuration, and the cases' batch as it is trained on."""
    objective, batch = build(config), make_batch(**changes)
    objective.prepare(batch)
    return objective, batch


def advantages(config: RunConfig) -> Rows:
    """The advantages of the cases' rewards under a configuration."""
    return advantage_reference(AdvantageCase(REWARDS, GROUP, MASK, NONE, config.objective, GREEDY, NONE))
