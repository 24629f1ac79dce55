"""Intervals, tests and planning against published numbers, other libraries, hand-worked cases and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from reports import stats as ours

ONLINE = {1: 0.52, 2: 0.61, 3: 0.55, 4: 0.58, 5: 0.49}
OFFLINE = {1: 0.44, 2: 0.50, 3: 0.49, 4: 0.47, 5: 0.46}
"""Differences .08 .11 .06 .11 .03: mean .078, sum of squares about it .00468, SD sqrt(.00117) = .034205."""


# Intervals over seeds


def test_mean_interval_worked_by_hand():
    """1, 2, 4, 9: mean 4, sum of squares 38, SD sqrt(38/3), t(.975; 3) = 3.1824 from any table."""
    found = ours.mean_interval([1, 2, 4, 9])
    half = 3.182446 * math.sqrt(38 / 3) / 2
    assert (found.mean, found.n, found.covers) == (4.0, 4, "for these test problems")
    assert found.sd == pytest.approx(math.sqrt(38 / 3))
    assert (found.low, found.high) == pytest.approx((4 - half, 4 + half), rel=1e-6)


@pytest.mark.parametrize(("n", "half"), [(3, 2.484), (5, 1.242), (10, 0.715)])
def test_half_widths_in_units_of_the_seed_sd(n, half):
    """Published table values of t(.975; n-1) / sqrt(n); z = 1.96 would give 1.13 at three seeds."""
    values = np.arange(n) ** 2.0
    found = ours.mean_interval(values)
    assert (found.high - found.mean) / found.sd == pytest.approx(half, abs=1e-3)


def test_level_is_used_and_matches_scipy():
    values = list(ONLINE.values())
    for level in (0.8, 0.9, 0.99):
        found = ours.mean_interval(values, level)
        assert (found.low, found.high) == pytest.approx(
            stats.t.interval(level, 4, np.mean(values), stats.sem(values)), rel=1e-12
        )


def test_one_value_gives_no_interval_and_equal_values_a_point():
    one = ours.mean_interval([0.3])
    assert (one.mean, one.low, one.high, one.n, one.sd) == (0.3, None, None, 1, None)
    equal = ours.mean_interval([0.1 + 0.2, 0.3, 0.3])
    assert equal.sd == 0.0
    assert equal.low == equal.high == pytest.approx(0.3)


@pytest.mark.parametrize("values", [[], [0.1, math.nan], [0.1, math.inf], [[0.1], [0.2]]])
def test_bad_values_are_refused(values):
    with pytest.raises(ValueError, match="values must be"):
        ours.mean_interval(values)


@pytest.mark.parametrize("level", [0, 1, 95])
def test_bad_level_is_refused(level):
    with pytest.raises(ValueError, match="level is"):
        ours.mean_interval([0.1, 0.2], level)


# Pairs


def test_paired_worked_by_hand_on_the_common_seeds():
    found = ours.paired({**ONLINE, 9: 0.99}, {7: 0.01, **OFFLINE})
    assert (found.n, found.seeds, found.dropped) == (5, (1, 2, 3, 4, 5), (7, 9))
    assert (found.a_mean, found.b_mean, found.mean) == pytest.approx((0.55, 0.472, 0.078))
    assert found.sd == pytest.approx(math.sqrt(0.00117))
    half = 2.776445 * math.sqrt(0.00117 / 5)
    assert (found.low, found.high) == pytest.approx((0.078 - half, 0.078 + half), rel=1e-6)


def test_paired_pairs_by_seed_not_by_order():
    backwards = dict(reversed(OFFLINE.items()))
    assert ours.paired(ONLINE, backwards) == ours.paired(ONLINE, OFFLINE)


def test_paired_interval_is_scipys():
    result = stats.ttest_rel(list(ONLINE.values()), list(OFFLINE.values()))
    for level in (0.9, 0.95):
        reference = result.confidence_interval(level)
        found = ours.paired(ONLINE, OFFLINE, level)
        assert (found.low, found.high) == pytest.approx((reference.low, reference.high), rel=1e-12)


def test_paired_without_or_with_one_common_seed():
    none = ours.paired({1: 0.5}, {2: 0.4})
    assert (none.n, none.mean, none.sd, none.low, none.dropped) == (0, None, None, None, (1, 2))
    one = ours.paired({1: 0.5, 3: 0.1}, {1: 0.4})
    assert (one.n, one.sd, one.low, one.high, one.dropped) == (1, None, None, None, (3,))
    assert one.mean == pytest.approx(0.1)
    with pytest.raises(ValueError, match="two common seeds"):
        ours.p_greater(one)
    with pytest.raises(ValueError, match="not"):
        ours.paired({1: math.nan}, {1: 0.4})


# Tests


def test_p_values_are_the_libraries():
    a, b = np.array(list(ONLINE.values())), np.array(list(OFFLINE.values()))
    pair = ours.paired(ONLINE, OFFLINE)
    assert ours.p_greater(pair) == pytest.approx(stats.ttest_rel(a, b, alternative="greater").pvalue, rel=1e-12)
    assert ours.p_less(pair) == pytest.approx(stats.ttest_rel(a, b, alternative="less").pvalue, rel=1e-12)
    assert ours.p_different(pair) == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-9)
    for margin in (0.02, 0.05, 0.09, 0.2):
        assert ours.p_equivalent(pair, margin) == pytest.approx(ttost_paired(a, b, -margin, margin)[0], rel=1e-9)


def test_students_own_sleep_data():
    """Student 1908, ten patients: t = 4.0621 with 9 df, two-sided p = .002833, 95 % interval 0.7001 to 2.4599 (R)."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    pair = ours.paired(dict(enumerate(second)), dict(enumerate(first)))
    assert (pair.low, pair.high) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    assert ours.p_different(pair) == pytest.approx(0.00283289, abs=1e-7)


def test_equivalence_at_05_is_the_90_percent_interval_inside_the_margin():
    pair = ours.paired(ONLINE, OFFLINE, level=0.90)
    for margin, inside in ((pair.high + 1e-6, True), (pair.high - 1e-6, False)):
        assert (ours.p_equivalent(pair, margin) < 0.05) == inside


def test_outside_the_margin_counts_both_tails():
    """Differences 1, 2, 6: mean 3, SE sqrt(7/3); margin 1: tails of t(2) from 2/SE and from 4/SE."""
    se = math.sqrt(7 / 3)
    by_hand = sum(0.5 - t / (2 * math.sqrt(2 + t * t)) for t in (2 / se, 4 / se))  # t with 2 df in closed form
    up = ours.paired({1: 1, 2: 2, 3: 6}, {1: 0, 2: 0, 3: 0})
    down = ours.paired({1: 0, 2: 0, 3: 0}, {1: 1, 2: 2, 3: 6})
    assert ours.p_outside(up, 1) == pytest.approx(by_hand, rel=1e-9)
    assert ours.p_outside(down, 1) == pytest.approx(by_hand, rel=1e-9)
    assert ours.p_outside(up, 1e-12) == pytest.approx(ours.p_different(up), rel=1e-6)
    assert ours.p_outside(up, 1) > ours.p_greater(up, 1)


def test_equal_differences_give_limits_never_nan():
    """.6 - .5, .5 - .4 and .3 - .2 differ in the last bit; they are one number."""
    same = ours.paired({1: 0.6, 2: 0.5, 3: 0.3, 4: 0.9, 5: 0.8}, {1: 0.5, 2: 0.4, 3: 0.2, 4: 0.8, 5: 0.7})
    assert same.sd == 0.0
    assert same.low == same.high == pytest.approx(0.1)
    assert (ours.p_greater(same), ours.p_less(same), ours.p_different(same)) == (0.0, 1.0, 0.0)
    assert (ours.p_equivalent(same, 0.2), ours.p_outside(same, 0.2)) == (0.0, 1.0)
    assert (ours.p_equivalent(same, 0.05), ours.p_outside(same, 0.05)) == (1.0, 0.0)
    assert (ours.p_equivalent(same, 0.1), ours.p_outside(same, 0.1)) == (1.0, 1.0)
    nothing = ours.paired(ONLINE, ONLINE)
    assert (ours.p_greater(nothing), ours.p_less(nothing), ours.p_different(nothing)) == (1.0, 1.0, 1.0)
    assert (ours.p_equivalent(nothing, 0.01), ours.p_outside(nothing, 0.01)) == (0.0, 1.0)


def test_small_real_spread_is_not_rounding():
    """One problem in a million more is a spread."""
    pair = ours.paired({1: 0.5, 2: 0.500001, 3: 0.5}, {1: 0.4, 2: 0.4, 3: 0.4})
    assert pair.sd == pytest.approx(1e-6 / math.sqrt(3), rel=1e-6)


def test_rank_and_sign_tests_cannot_reach_05_with_five_pairs():
    """Even five differences of one sign: 2 / 2^5 = .0625. Hence neither ever decides."""
    differences = np.array([0.31, 0.12, 0.25, 0.19, 0.44])
    assert stats.wilcoxon(differences).pvalue == pytest.approx(0.0625)
    flips = [abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=5)]
    assert np.mean(np.array(flips) >= abs(differences.sum()) - 1e-12) == pytest.approx(0.0625)
    assert ours.p_different(ours.paired(dict(enumerate(differences)), dict.fromkeys(range(5), 0.0))) < 0.05


def test_holm_worked_by_hand():
    """Sorted .005 .01 .03 .04; times 4, 3, 2, 1: .02 .03 .06 .04; made monotone: .02 .03 .06 .06; put back in order."""
    assert ours.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert ours.holm([0.7, 0.6]) == [1.0, 1.0]
    assert ours.holm([]) == []


# Seeds crossed with problems


def test_crossed_interval_worked_by_hand():
    """Rows (1, 2, 6) and (3, 2, 10): MS_S = 6, MS_P = 24, MS_E = 2 by the textbook's sums of squares."""
    y = [[1.0, 2.0, 6.0], [3.0, 2.0, 10.0]]
    # grand mean 4; row means 3 and 5; column means 2, 2, 8
    ms_s = 3 * (1 + 1) / 1
    ms_p = 2 * (4 + 4 + 16) / 2
    residuals = [1 - 3 - 2 + 4, 2 - 3 - 2 + 4, 6 - 3 - 8 + 4]  # 0, 1, -1, and the negatives in the second row
    ms_e = 2 * sum(r * r for r in residuals) / 2
    assert (ms_s, ms_p, ms_e) == (6, 24, 2)
    total = ms_s + ms_p - ms_e
    df = total**2 / (ms_s**2 / 1 + ms_p**2 / 2 + ms_e**2 / 2)
    found = ours.crossed_interval(y, 0.9)
    half = stats.t.ppf(0.95, df) * math.sqrt(total / 6)
    assert (found.n, found.problems, found.covers) == (2, 3, "for new test problems too")
    assert found.df == pytest.approx(df)
    assert (found.mean, found.low, found.high) == pytest.approx((4, 4 - half, 4 + half))
    assert (found.seed_variance, found.problem_variance, found.residual_variance) == pytest.approx((4 / 3, 11, 2))


def test_negative_components_are_set_to_zero():
    """Equal row means: the seed estimate would be -MS_E / P; it counts as 0 and the variance is MS_P / (S P)."""
    y = np.array([[1.0, 0.0, 5.0], [0.0, 1.0, 5.0]])
    found = ours.crossed_interval(y)
    assert found.seed_variance == 0.0
    ms_p = 2 * ((y.mean(axis=0) - 2) ** 2).sum() / 2
    assert found.problem_variance == pytest.approx((ms_p - found.residual_variance) / 2)
    half = stats.t.isf(0.025, found.df) * math.sqrt(ms_p / 6)
    assert found.high - found.mean == pytest.approx(half)
    assert found.low < found.mean < found.high


def test_crossed_difference_pairs_seeds_and_problems():
    rng = np.random.default_rng(3)
    problems = rng.normal(size=(1, 50))
    a, b = (problems + rng.normal(size=(4, 50)) * 0.1 + shift for shift in (0.3, 0.1))
    found = ours.crossed_difference(a, b)
    assert found == ours.crossed_interval(a - b)
    assert found.mean == pytest.approx(0.2, abs=0.02)
    alone = ours.crossed_interval(a)
    assert found.high - found.low < (alone.high - alone.low) / 5


def test_crossed_refuses_what_is_not_crossed():
    assert ours.crossed_interval([[0.0, 1.0, 1.0]]).low is None
    assert ours.crossed_interval([[0.0], [1.0]]).high is None
    point = ours.crossed_interval(np.full((3, 4), 0.1))
    assert (point.low, point.high) == pytest.approx((0.1, 0.1))
    with pytest.raises(ValueError, match="not"):
        ours.crossed_interval([[0.0, math.nan], [1.0, 0.0]])
    with pytest.raises(ValueError, match="shape"):
        ours.crossed_interval([0.0, 1.0])
    with pytest.raises(ValueError, match="same seeds and problems"):
        ours.crossed_difference(np.zeros((2, 3)), np.zeros((2, 4)))


def _answers(rng: np.random.Generator, seeds: int, problems: int) -> np.ndarray:
    """Right or wrong: problems differ in difficulty, seeds in strength; the mean over both populations is 1/2."""
    strength_S1, difficulty_1P = rng.normal(0, 0.2, (seeds, 1)), rng.normal(0, 1.5, (1, problems))
    return (rng.random((seeds, problems)) < stats.logistic.cdf(strength_S1 + difficulty_1P)).astype(float)


def _nested_bootstrap(y_SP: np.ndarray, rng: np.random.Generator, draws: int = 300) -> tuple[float, float]:
    seeds, problems = y_SP.shape
    rows = rng.integers(seeds, size=(draws, seeds, 1))
    columns = rng.integers(problems, size=(draws, seeds, problems))  # anew within every seed: this is the mistake
    low, high = np.quantile(y_SP[rows, columns].mean(axis=(1, 2)), (0.025, 0.975))
    return float(low), float(high)


@pytest.mark.slow
def test_coverage_of_the_crossed_interval_and_what_it_replaces():
    """2000 studies of 5 seeds x 100 problems: crossed covers 0.963, t over seeds 0.856, nested bootstrap 0.900.

    The bootstrap is run on 500 of them, where crossed covers 0.970. Standard errors are 0.004, 0.008 and 0.013. The
    t interval keeps another promise (these problems), which is why it fails this one.
    """
    rng = np.random.default_rng(11)
    crossed = seeds_only = nested = nested_crossed = 0
    for study in range(2000):
        y = _answers(rng, 5, 100)
        found, over_seeds = ours.crossed_interval(y), ours.mean_interval(y.mean(axis=1))
        crossed += found.low <= 0.5 <= found.high
        seeds_only += over_seeds.low <= 0.5 <= over_seeds.high
        if study < 500:
            low, high = _nested_bootstrap(y, rng)
            nested += low <= 0.5 <= high
            nested_crossed += found.low <= 0.5 <= found.high
    assert 0.945 <= crossed / 2000 <= 0.98
    assert seeds_only / 2000 < 0.90
    assert nested / 500 < 0.93
    assert nested < nested_crossed - 20


@pytest.mark.parametrize("seed_sd", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("problem_sd", [0.0, 0.3])
def test_coverage_with_normal_components_also_at_zero(seed_sd, problem_sd):
    """1500 studies each at 4 seeds x 60 problems: never below 0.935, and above 0.97 only where a component is 0."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(1500):
        y = rng.normal(0, seed_sd, (4, 1)) + rng.normal(0, problem_sd, (1, 60)) + rng.normal(0, 0.4, (4, 60))
        found = ours.crossed_interval(y)
        hits += found.low <= 0 <= found.high
    assert 0.935 <= hits / 1500 <= (0.995 if problem_sd == 0 else 0.975)


# Shares of one run


def test_wilson_published():
    """30 of 30: [.89, 1] where Wald has [1, 1]. 81 of 263: Newcombe 1998, table I, method 3: .2553 to .3662."""
    low, high = ours.wilson(30, 30)
    assert low == pytest.approx(30 / (30 + 1.959964**2), abs=1e-6)
    assert high == pytest.approx(1.0)
    assert ours.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert ours.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    for k, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="wilson needs"):
            ours.wilson(k, n)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 3), (6, 1, 2), (6, 5, 2), (7, 0, 3), (4, 4, 4), (6, 3, 1)])
def test_pass_at_k_counts_subsets(n, c, k):
    """The share of all k-subsets of the n samples that hold a right one."""
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert ours.pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_of_many_samples_and_bad_ones():
    product = 1 - math.prod(1 - 100 / i for i in range(1000 - 7 + 1, 1000 + 1))
    assert ours.pass_at_k(1000, 7, 100) == pytest.approx(product, rel=1e-9)
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 2)):
        with pytest.raises(ValueError, match="pass@k needs"):
            ours.pass_at_k(n, c, k)


def test_avg_at_k():
    assert ours.avg_at_k([[1, 0, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]]) == pytest.approx((0.5 + 0.75) / 3)
    for outcomes in ([], [[]], [[1, 0], [1]]):
        with pytest.raises(ValueError, match="avg@k needs"):
            ours.avg_at_k(outcomes)
