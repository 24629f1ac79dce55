"""Verdicts on a study's declared claims: supported, contradicted or undecided (docs/statistics.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from reports.stats import (
    Paired,
    holm,
    p_different,
    p_equivalent,
    p_greater,
    p_less,
    p_outside,
    paired,
    sd_upper,
    seeds_needed,
)
from suite.metrics import is_share
from suite.study import SEED_MODEL, Claim

ALPHA = 0.05
"""Level of every test, after Holm."""
LEAST, FEW = 3, 5
"""Replicates (seeds) from which a verdict is given, and below which it is shown with a warning."""
COLLAPSED = 0.5
"""Share of its own value before training below which a replicate's final value, where larger is better, is pointed
out as a collapse."""

Verdict = Literal["supported", "contradicted", "undecided"]
Values = Callable[[str, str], Mapping[int, float]]
"""(metric, arm) -> seed -> value."""


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its verdict and every number behind it, in the metric's own unit (shares stay shares)."""

    claim: Claim
    verdict: Verdict
    n: int
    """Seeds that both sides have."""
    seeds: tuple[int, ...]
    arm_mean: float | None
    than_mean: float | None
    """Both means over the common seeds only."""
    difference: float | None
    """arm - than."""
    low: float | None
    high: float | None
    """Two-sided t interval of the difference, for these test problems; not widened for the number of claims."""
    level: float
    """0.90 for `equivalent` (inside the margin exactly when both tests pass at .05 before Holm), else 0.95."""
    p: float | None
    """Of the test that could support the claim."""
    p_holm: float | None
    p_opposite: float | None
    """Of the test that could contradict it; None for `different`, which nothing contradicts."""
    p_opposite_holm: float | None
    sd: float | None
    """Of the paired differences."""
    seeds_needed: int | None
    """For 80 % power at the declared smallest effect; None where the SD is unknown or 0."""
    exploratory: bool
    """Decided after looking: the p values have lost their meaning as error rates."""
    missing: tuple[int, ...]
    """Seeds of the study, or of one side, that did not enter."""
    note: str
    with_failed: ClaimResult | None = None
    """The same, with failed cells at their value before training; None where no cell of either side failed."""


@dataclass(frozen=True)
class _Measured:
    claim: Claim
    pair: Paired
    missing: tuple[int, ...]
    notes: list[str] = field(default_factory=list)
    p: float | None = None
    p_opposite: float | None = None


def decide(
    claims: Sequence[Claim],
    values: Values,
    seed_values: Values,
    *,
    seeds: Collection[int] = (),
    exploratory: Mapping[str, str] | None = None,
    failed: Mapping[str, Collection[int]] | None = None,
) -> list[ClaimResult]:
    """One result per claim, in order; every verdict is the paired t-test's, Holm-corrected over `claims`.

    `values(metric, arm)` gives each seed's final value; `seed_values(metric, arm)` the value of the same runs at
    step 0, which stands for SEED_MODEL opposite that arm. `seeds` are the seeds the study declared, so that one that
    neither side has is named too. `exploratory` names the claims decided after looking at results, and says why.
    `failed`: arm -> seeds of which a cell failed. The verdicts are then given a second time, with those cells at the
    value that they had before training, since an arm that loses its bad runs looks better than it is.

    - `better`: supported if the one-sided paired t-test of arm > than is significant at .05, contradicted if that of
      arm < than is.
    - `different`: supported if the two-sided test is significant; never contradicted.
    - `equivalent`: supported if both one-sided tests at .05 put the difference inside +-smallest_effect (TOST);
      contradicted if |difference| <= smallest_effect is rejected (`stats.p_outside`).

    Holm runs twice over the declared claims: once over the tests that could support, once over those that could
    contradict. So at most 5 % of studies report any false "supported", and at most 5 % any false "contradicted". A
    claim that cannot be tested yet keeps its place in the family (p = 1), so that its seeds, when they come, make no
    other verdict stricter; exploratory claims keep theirs too.

    A seed enters only if both sides have a finite value; the others are named in `note` and `missing`. Fewer than
    LEAST common seeds, or differences that are all equal (a spread of 0 is no certainty): undecided. Raises
    ValueError for repeated claim names, an exploratory name that is no claim, or a claim that compares something with
    itself.
    """
    exploratory = exploratory or {}
    _check(claims, exploratory)
    results = _decided(claims, values, seed_values, seeds, exploratory)
    if not failed or not any(failed.values()):
        return results

    def filled(metric: str, arm: str) -> Mapping[int, float]:
        start = _start(metric, failed, seed_values)
        return {seed: start[seed] for seed in failed.get(arm, ()) if seed in start} | dict(values(metric, arm))

    def started(metric: str, arm: str) -> Mapping[int, float]:
        lost = {
            seed: value for seed, value in _start(metric, failed, seed_values).items() if seed in failed.get(arm, ())
        }
        return lost | dict(seed_values(metric, arm))

    again = _decided(claims, filled, started, seeds, exploratory)
    return [
        replace(one, with_failed=other) if failed.get(one.claim.arm) or failed.get(one.claim.than) else one
        for one, other in zip(results, again, strict=True)
    ]


def _start(metric: str, arms: Collection[str], seed_values: Values) -> dict[int, float]:
    """seed -> value before training, as any of the arms has it: they share their starts."""
    return {seed: value for arm in arms for seed, value in seed_values(metric, arm).items()}


def _decided(
    claims: Sequence[Claim], values: Values, seed_values: Values, seeds: Collection[int], exploratory: Mapping[str, str]
) -> list[ClaimResult]:
    measured = [_measure(claim, values, seed_values, seeds) for claim in claims]
    p_holm = _family([m.p for m in measured])
    contradictable = [m for m in measured if m.claim.kind != "different"]
    opposite = iter(_family([m.p_opposite for m in contradictable]))
    results = []
    for m, p in zip(measured, p_holm, strict=True):
        q = None if m.claim.kind == "different" else next(opposite)
        results.append(_result(m, p, q, len(claims), exploratory.get(m.claim.name)))
    return results


def _measure(claim: Claim, values: Values, seed_values: Values, seeds: Collection[int]) -> _Measured:
    sides = []
    notes = []
    for name, other in ((claim.arm, claim.than), (claim.than, claim.arm)):
        found = seed_values(claim.metric, other) if name == SEED_MODEL else values(claim.metric, name)
        finite = {seed: float(value) for seed, value in found.items() if math.isfinite(value)}
        if lost := sorted(found.keys() - finite.keys()):
            notes.append(f"{name!r} has no finite {claim.metric} at {_seeds(lost)}")
        sides.append((name, finite, set(found)))
    wanted = set(seeds).union(*(present for _, _, present in sides))
    for name, _, present in sides:
        if absent := sorted(wanted - present):
            notes.append(f"{name!r} has no value at {_seeds(absent)}")
    pair = paired(sides[0][1], sides[1][1], level=0.90 if claim.kind == "equivalent" else 0.95)
    missing = tuple(sorted(wanted - set(pair.seeds)))
    for name, finite, _ in sides:
        if name != SEED_MODEL and is_share(claim.metric):
            before = seed_values(claim.metric, name)
            fell = [seed for seed in pair.seeds if finite[seed] < COLLAPSED * before.get(seed, -math.inf)]
            if fell:
                notes.append(f"{name!r} collapsed to less than half of its start at {_seeds(fell)}")
    if pair.n < LEAST:
        reason = f"{pair.n} common seed{'' if pair.n == 1 else 's'}; a verdict needs at least {LEAST}"
        return _Measured(claim, pair, missing, [reason, *notes])
    if _without_spread(pair):
        return _Measured(claim, pair, missing, notes)
    if claim.kind == "equivalent":
        p, opposite = p_equivalent(pair, claim.smallest_effect), p_outside(pair, claim.smallest_effect)
        return _Measured(claim, pair, missing, notes, p, opposite)
    if claim.kind == "different":
        return _Measured(claim, pair, missing, notes, p_different(pair))
    return _Measured(claim, pair, missing, notes, p_greater(pair), p_less(pair))


def _result(
    m: _Measured, p_holm: float | None, p_opposite_holm: float | None, family: int, peeked: str | None
) -> ClaimResult:
    verdict: Verdict = "undecided"
    if p_holm is not None and p_holm <= ALPHA:
        verdict = "supported"
    elif p_opposite_holm is not None and p_opposite_holm <= ALPHA:
        verdict = "contradicted"
    pair, needed, flat = m.pair, None, _without_spread(m.pair)
    if pair.sd and not flat:
        # The strictest step of Holm: with this many seeds the claim is decided whatever becomes of the others.
        effect, bound = m.claim.smallest_effect, sd_upper(pair.sd, pair.n)
        needed = seeds_needed(m.claim.kind, effect, bound, alpha=ALPHA / family)
    return ClaimResult(
        claim=m.claim,
        verdict=verdict,
        n=pair.n,
        seeds=pair.seeds,
        arm_mean=pair.a_mean,
        than_mean=pair.b_mean,
        difference=pair.mean,
        low=None if flat else pair.low,
        high=None if flat else pair.high,
        level=pair.level,
        p=m.p,
        p_holm=p_holm,
        p_opposite=m.p_opposite,
        p_opposite_holm=p_opposite_holm,
        sd=pair.sd,
        seeds_needed=needed,
        exploratory=peeked is not None,
        missing=m.missing,
        note="; ".join([*m.notes, *_remarks(m, verdict, peeked)]),
    )


def _without_spread(pair: Paired) -> bool:
    """Whether the differences are equal at every seed but for rounding."""
    return pair.sd is not None and pair.sd <= 1e-12 * max(1.0, abs(pair.mean or 0.0))


def _remarks(m: _Measured, verdict: Verdict, peeked: str | None) -> list[str]:
    """What a reader must know beside the verdict; none of it changes the verdict."""
    pair, effect, out = m.pair, m.claim.smallest_effect, []
    if _without_spread(pair):
        out.append(
            "both sides are equal at every seed: check that the arm differs at all"
            if math.isclose(pair.mean or 0.0, 0.0, abs_tol=1e-12)
            else "the difference is the same at every seed (SD 0), which is no certainty: check that seeds matter"
        )
    if LEAST <= pair.n < FEW:
        out.append(f"only {pair.n} seeds: read it as a hint")
    if pair.low is not None and pair.high is not None and m.p is not None and m.claim.kind != "equivalent":
        if verdict != "undecided" and -effect < pair.low <= pair.high < effect:
            out.append(f"the whole interval is below the smallest effect of interest ({effect:g})")
        elif verdict == "undecided" and p_equivalent(pair, effect) <= ALPHA:
            out.append(f"a difference of {effect:g} or more either way is excluded (two one-sided tests at .05)")
    if peeked is not None:
        out.append(f"exploratory: {peeked or 'decided after looking'}; the p values are no error rates")
    return out


def _family(ps: Sequence[float | None]) -> list[float | None]:
    adjusted = holm([1.0 if p is None else p for p in ps])
    return [None if p is None else a for p, a in zip(ps, adjusted, strict=True)]


def _check(claims: Sequence[Claim], exploratory: Mapping[str, str]) -> None:
    names = [claim.name for claim in claims]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"claim names must differ; repeated: {', '.join(map(repr, repeated))}")
    if unknown := sorted(set(exploratory) - set(names)):
        raise ValueError(f"exploratory names claims out of {names}; got {', '.join(map(repr, unknown))}")
    for claim in claims:
        if claim.arm == claim.than:
            raise ValueError(f"claim {claim.name!r} compares {claim.arm!r} with itself")


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"
