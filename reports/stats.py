"""Intervals, paired tests and planning over per-seed values. docs/statistics.md says when to use which.

Values are in the metric's own unit (an accuracy is a share in [0, 1]); nothing is scaled or clipped here, so an
interval of a share may leave [0, 1]. Nothing draws random numbers.
Shape letters: S seeds, P problems, K samples per problem.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, special, stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import ttest_power
from statsmodels.stats.proportion import proportion_confint

Kind = Literal["better", "different", "equivalent"]

THESE_PROBLEMS = "for these test problems"
NEW_PROBLEMS = "for new test problems too"

_EQUAL = 1e-12
"""Relative spread below which values count as equal: 0.6 - 0.5 and 0.5 - 0.4 differ in their last bit."""
_NORMAL_FROM = 100_000
"""Seeds from which t and normal agree to five digits, and the exact integrals stop being exact."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its interval; `low` and `high` are None where one seed (or problem) cannot give one."""

    mean: float
    low: float | None
    high: float | None
    n: int
    """Seeds."""
    sd: float | None
    """Standard deviation of the per-seed values (ddof 1); None for one seed."""
    level: float = 0.95
    covers: str = THESE_PROBLEMS
    """What would be drawn anew if the study were repeated: seeds only, or problems too."""


@dataclass(frozen=True)
class CrossedInterval(Interval):
    """An interval for new seeds and new problems, with the variance components that make it."""

    problems: int = 0
    df: float | None = None
    """Satterthwaite degrees of freedom."""
    seed_variance: float | None = None
    problem_variance: float | None = None
    residual_variance: float | None = None
    """Seed-by-problem interaction and sampling noise together: one value per cell cannot part them."""


@dataclass(frozen=True)
class Paired:
    """The difference a - b over the seeds that both sides have; means are over those seeds only."""

    n: int
    seeds: tuple[int, ...]
    mean: float | None
    """None without a common seed."""
    sd: float | None
    """Of the differences (ddof 1), exactly 0 where they are equal up to rounding; None below two seeds."""
    low: float | None
    high: float | None
    level: float
    a_mean: float | None
    b_mean: float | None
    differences: tuple[float, ...]
    dropped: tuple[int, ...]
    """Seeds that only one side has."""


def mean_interval(values: Iterable[float], level: float = 0.95) -> Interval:
    """Mean and t interval over per-seed values: covers new training seeds *for these test problems*, not new problems.

    One value gives a mean without an interval; equal values give an interval of width 0.
    Raises ValueError for no values, values that are not finite, or a level outside (0, 1).
    """
    array = _finite(list(values), "values")
    if array.ndim != 1 or array.size == 0:
        raise ValueError("values must be a list of at least one number, one per seed")
    mean, sd = float(array.mean()), _sd(array, float(np.abs(array).max()))
    low, high = _t_interval(mean, sd, array.size, level)
    return Interval(mean, low, high, array.size, sd, level)


def paired(a: Mapping[int, float], b: Mapping[int, float], level: float = 0.95) -> Paired:
    """The difference a - b paired by seed, with its t interval; seeds that only one side has are dropped and named.

    Raises ValueError for values that are not finite (a diverged run needs a score or must be left out knowingly).
    """
    seeds = tuple(sorted(a.keys() & b.keys()))
    dropped = tuple(sorted(a.keys() ^ b.keys()))
    if not seeds:
        _check_share(level, "level")
        return Paired(0, (), None, None, None, None, level, None, None, (), dropped)
    a_S = _finite([a[seed] for seed in seeds], "values of the first side")
    b_S = _finite([b[seed] for seed in seeds], "values of the second side")
    differences = a_S - b_S
    sd = _sd(differences, float(max(np.abs(a_S).max(), np.abs(b_S).max())))
    mean = float(differences.mean())
    low, high = _t_interval(mean, sd, len(seeds), level)
    return Paired(
        n=len(seeds),
        seeds=seeds,
        mean=mean,
        sd=sd,
        low=low,
        high=high,
        level=level,
        a_mean=float(a_S.mean()),
        b_mean=float(b_S.mean()),
        differences=tuple(float(d) for d in differences),
        dropped=dropped,
    )


def p_greater(difference: Paired, null: float = 0.0) -> float:
    """One-sided p value of a paired t-test against "the mean difference is at most `null`".

    Where all differences are equal (SD 0) it is the limit: 0 if they lie above `null`, else 1 (also at `null` itself,
    up to rounding). Raises ValueError below two seeds.
    """
    return _one_sided(difference, null, "greater")


def p_less(difference: Paired, null: float = 0.0) -> float:
    """`p_greater` mirrored: against "the mean difference is at least `null`"."""
    return _one_sided(difference, null, "less")


def p_different(difference: Paired) -> float:
    """Two-sided p value of the paired t-test against "the mean difference is 0"; 1 where all differences are 0."""
    return min(1.0, 2 * min(p_greater(difference), p_less(difference)))


def p_equivalent(difference: Paired, margin: float) -> float:
    """Two one-sided tests (Schuirmann 1987): small when the mean difference is shown to lie inside +-`margin`."""
    return max(p_greater(difference, -margin), p_less(difference, margin))


def p_outside(difference: Paired, margin: float) -> float:
    """Test against "|mean difference| <= `margin`": small when the difference is shown to exceed the margin.

    The tails beyond both margins are counted (TREAT; McCarthy & Smyth 2009), so that the error at the margin stays at
    the level even where the margin is small beside the noise; at margin 0 it is the two-sided t-test.
    """
    outward = p_greater if (difference.mean or 0.0) >= 0 else p_less
    return min(1.0, outward(difference, margin) + outward(difference, -margin))


def crossed_interval(outcomes_SP: ArrayLike, level: float = 0.95) -> CrossedInterval:
    """Interval of the mean for new seeds *and* new problems, which are crossed: every seed answers every problem.

    `outcomes_SP` has one number per seed and problem (right or wrong, or the mean of K samples). Two-way random effects
    without replication: with mean squares MS_S, MS_P and MS_E the variance of the grand mean is
    (max(MS_S, MS_E) + max(MS_P, MS_E) - MS_E) / (S P), that is, a negative estimate of the seed or the problem
    component is set to 0, as the analysis of variance usually does; degrees of freedom by Satterthwaite (1946) from
    the three mean squares. Setting to 0 errs to the wide side: simulated coverage of the 95 % interval is 0.93 to 0.99
    over 3 to 10 seeds and 40 to 400 problems, lowest at three seeds. Components are reported as used.

    One seed or one problem gives a mean without an interval. Raises ValueError for an array that is not two-dimensional
    or has a cell missing (NaN): seeds must have answered the same problems.
    """
    y_SP = _finite(outcomes_SP, "outcomes_SP")
    _check_share(level, "level")
    if y_SP.ndim != 2 or y_SP.size == 0:
        raise ValueError(f"outcomes_SP must have the shape (seeds, problems); it has {y_SP.shape}")
    seeds, problems = y_SP.shape
    mean, row_S, column_P = float(y_SP.mean()), y_SP.mean(axis=1), y_SP.mean(axis=0)
    sd = _sd(row_S, float(np.abs(y_SP).max()))
    if seeds < 2 or problems < 2:
        return CrossedInterval(mean, None, None, seeds, sd, level, NEW_PROBLEMS, problems)
    dfs = (seeds - 1, problems - 1, (seeds - 1) * (problems - 1))
    residual_SP = y_SP - row_S[:, None] - column_P[None, :] + mean
    sums = (problems * ((row_S - mean) ** 2).sum(), seeds * ((column_P - mean) ** 2).sum(), (residual_SP**2).sum())
    ms_s, ms_p, ms_e = (float(total) / df for total, df in zip(sums, dfs, strict=True))
    total = max(ms_s, ms_e) + max(ms_p, ms_e) - ms_e
    spread = sum(ms**2 / df for ms, df in zip((ms_s, ms_p, ms_e), dfs, strict=True))
    df = total**2 / spread if spread > 0 else float(dfs[0])
    half = float(stats.t.isf((1 - level) / 2, df)) * math.sqrt(total / (seeds * problems))
    return CrossedInterval(
        mean,
        mean - half,
        mean + half,
        seeds,
        sd,
        level,
        NEW_PROBLEMS,
        problems,
        df,
        seed_variance=max(ms_s - ms_e, 0.0) / problems,
        problem_variance=max(ms_p - ms_e, 0.0) / seeds,
        residual_variance=ms_e,
    )


def crossed_difference(a_SP: ArrayLike, b_SP: ArrayLike, level: float = 0.95) -> CrossedInterval:
    """`crossed_interval` of a - b, paired by seed and problem: rows and columns must stand for the same ones.

    Raises ValueError if the shapes differ.
    """
    a, b = _finite(a_SP, "a_SP"), _finite(b_SP, "b_SP")
    if a.shape != b.shape:
        raise ValueError(f"a paired difference needs the same seeds and problems; shapes are {a.shape} and {b.shape}")
    return crossed_interval(a - b, level)


def wilson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for k right of n independent problems, one sample each (statsmodels).

    For *one* run on new problems: it knows nothing of training seeds. Raises ValueError unless 0 <= k <= n and n > 0.
    """
    _check_share(level, "level")
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"wilson needs 0 <= k <= n and n > 0; k is {k} and n is {n}")
    low, high = proportion_confint(k, n, alpha=1 - level, method="wilson")
    return float(low), float(high)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p values in the given order (statsmodels); an empty family gives an empty list."""
    return [float(p) for p in multipletests(ps, method="holm")[1]] if len(ps) else []


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k samples is right, from c right of n: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (Codex), equation 1. Take n >= 2k or more: at n = k the estimate is only 0 or 1.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n; n is {n}, c is {c}, k is {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def avg_at_k(outcomes_PK: Sequence[Sequence[float]]) -> float:
    """Mean over problems of the mean over each problem's K samples: pass@1 in expectation.

    Raises ValueError for no problems, or problems with different numbers of samples (one K names the metric).
    """
    if len({len(samples) for samples in outcomes_PK}) != 1 or not len(outcomes_PK[0]):
        raise ValueError("avg@k needs at least one problem, and the same number of samples (at least one) for each")
    return float(_finite(outcomes_PK, "outcomes_PK").mean())


def sd_upper(sd: float, n: int, confidence: float = 0.8) -> float:
    """Upper confidence bound of a paired SD that n seeds estimated as `sd` (chi-square; normal differences).

    At five seeds and 80 % it is 1.56 times the estimate. Raises ValueError below two seeds or for a negative SD.
    """
    _check_share(confidence, "confidence")
    if n < 2 or not sd >= 0:
        raise ValueError(f"an upper bound needs an SD of at least 0 from at least two seeds; got {sd} from {n}")
    return sd * math.sqrt((n - 1) / float(stats.chi2.ppf(1 - confidence, n - 1)))


def power(kind: Kind, effect: float, sd: float, n: int, alpha: float = 0.05) -> float:
    """Chance that n seeds support a claim of this kind, if the paired differences are normal with SD `sd`.

    `better` (one-sided) and `different` (two-sided, found in the right direction): the true difference is `effect`.
    `equivalent` (two one-sided tests): `effect` is the margin and the true difference 0. Exact: noncentral t, and for
    `equivalent` its bivariate form (Owen 1965) by integration over the estimated SD. An SD of 0 gives 1.
    Raises ValueError for an unknown kind, effect <= 0, SD < 0, n < 2, or alpha outside (0, 1).
    """
    _check_plan(kind, effect, sd, alpha)
    if n < 2:
        raise ValueError(f"a paired t-test needs at least two seeds; n is {n}")
    return _chance(kind, effect, sd, n, alpha)


def tost_power(margin: float, df: float, alpha: float = 0.05, shift: float = 0.0) -> float:
    """Power of two one-sided t-tests at `alpha` each; margin and true difference `shift` in true standard errors.

    Both tests reject when |estimate| < margin - t s; the estimate is normal, s (estimated over true standard error)
    is chi / sqrt(df), and the two are independent.
    """
    critical = float(stats.t.isf(alpha, df))
    width = 10 / math.sqrt(2 * df)

    def given(s: NDArray[np.float64]) -> NDArray[np.float64]:
        reach = margin - critical * s
        inside = special.ndtr(reach - shift) - special.ndtr(-reach - shift)
        density: NDArray[np.float64] = stats.chi.pdf(s * math.sqrt(df), df) * math.sqrt(df)
        return inside * density

    start, stop = max(0.0, 1 - width), min(margin / critical, 1 + width)
    # smooth over at most 20 deviations: 100 points are exact to ten digits
    return float(integrate.fixed_quad(given, start, stop, n=100)[0]) if stop > start else 0.0


def seeds_needed(kind: Kind, effect: float, sd_upper: float, power: float = 0.8, alpha: float = 0.05) -> int:
    """The smallest number of seeds (at least 2) at which the claim's test reaches `power`; see `power` for the kinds.

    `effect` is the smallest effect of interest as declared (for `equivalent` the margin), never an observed one, and
    `sd_upper` an upper bound of the paired SD (`sd_upper`), because a small pilot underestimates it half the time.
    Above 100,000 the normal approximation answers. Raises ValueError as `power` does.
    """
    _check_plan(kind, effect, sd_upper, alpha)
    _check_share(power, "power")
    tail = (1 + power) / 2 if kind == "equivalent" else power
    reach = float(stats.norm.isf(alpha / 2 if kind == "different" else alpha) + stats.norm.ppf(tail))
    # A t-test never needs fewer than the z-test does, so this is a start from below.
    normal = (max(reach, 0.0) * sd_upper / effect) ** 2
    if normal > _NORMAL_FROM:
        return math.ceil(normal)
    n = max(2, math.floor(normal))
    while _chance(kind, effect, sd_upper, n, alpha) < power:
        n += 1
    return n


def _chance(kind: Kind, effect: float, sd: float, n: int, alpha: float) -> float:
    if sd == 0:
        return 1.0
    if kind == "equivalent":
        return tost_power(effect / sd * math.sqrt(n), n - 1, alpha)
    # Half of alpha in the right tail: statsmodels' two-sided form adds wrong-way findings, and its far tail is NaN.
    return float(ttest_power(effect / sd, n, alpha / 2 if kind == "different" else alpha, alternative="larger"))


def _one_sided(difference: Paired, null: float, alternative: Literal["greater", "less"]) -> float:
    mean, sd = difference.mean, difference.sd
    if mean is None or sd is None:
        raise ValueError(f"a paired test needs at least two common seeds; there are {difference.n}")
    if sd == 0:
        beyond = mean > null if alternative == "greater" else mean < null
        return 0.0 if beyond and not math.isclose(mean, null, rel_tol=1e-9, abs_tol=_EQUAL) else 1.0
    t = (mean - null) / (sd / math.sqrt(difference.n))
    return float(special.stdtr(difference.n - 1, -t if alternative == "greater" else t))


def _t_interval(mean: float, sd: float | None, n: int, level: float) -> tuple[float | None, float | None]:
    _check_share(level, "level")
    if sd is None:
        return None, None
    half = float(stats.t.isf((1 - level) / 2, n - 1)) * sd / math.sqrt(n)
    return mean - half, mean + half


def _sd(values: NDArray[np.float64], scale: float) -> float | None:
    """ddof 1; None for one value, exactly 0 where values differ by rounding of numbers as large as `scale`."""
    if values.size < 2:
        return None
    return 0.0 if np.ptp(values) <= _EQUAL * scale else float(values.std(ddof=1))


def _finite(values: Any, what: str) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{what} must be finite numbers; {int((~np.isfinite(array)).sum())} of {array.size} are not")
    return array


def _check_share(value: float, name: str) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} is {value} and must lie between 0 and 1 (0.95 for 95 %)")


def _check_plan(kind: str, effect: float, sd: float, alpha: float) -> None:
    _check_share(alpha, "alpha")
    if kind not in ("better", "different", "equivalent"):
        raise ValueError(f"kind is {kind!r} and must be 'better', 'different' or 'equivalent'")
    if not (effect > 0 and 0 <= sd < math.inf):
        raise ValueError(f"planning needs an effect above 0 and a finite SD of at least 0; got {effect} and {sd}")
