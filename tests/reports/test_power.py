"""Planning: power and numbers of seeds against published numbers, other libraries and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats
from statsmodels.stats.power import TTestPower

from reports import stats as ours


def test_seeds_needed_published():
    """G*Power, paired, d = .5, alpha .05, power .8: 34 two-sided, 27 one-sided; d = .8: 15 and 12."""
    assert ours.seeds_needed("different", 0.5, 1.0) == 34
    assert ours.seeds_needed("better", 0.5, 1.0) == 27
    assert ours.seeds_needed("different", 0.8, 1.0) == 15
    assert ours.seeds_needed("better", 0.8, 1.0) == 12


@pytest.mark.parametrize(("n", "units"), [(3, 3.3), (5, 1.7), (10, 1.0)])
def test_detectable_effect_of_paired_seeds(n, units):
    """Known table: at 80 % two-sided power 3, 5, 10 paired seeds see 3.3, 1.7, 1.0 SD."""
    assert ours.power("different", units, 1.0, n) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("d", [0.3, 0.9, 1.6])
def test_power_is_statsmodels(d):
    for n in (4, 9, 15):
        one = TTestPower().power(d, n, 0.05, alternative="larger")
        two = TTestPower().power(d, n, 0.05, alternative="two-sided")
        assert ours.power("better", 3 * d, 3.0, n) == pytest.approx(one, rel=1e-9)
        # ours leaves out findings in the wrong direction, at most 1 in 100 here
        wrong = stats.nct.cdf(-stats.t.isf(0.025, n - 1), n - 1, d * math.sqrt(n))
        assert ours.power("different", 3 * d, 3.0, n) == pytest.approx(two - wrong, rel=1e-6)


@pytest.mark.parametrize("d", [0.001, 0.4, 7.0, 400.0])
def test_power_is_a_number_everywhere(d):
    for kind in ("better", "different", "equivalent"):
        last = 0.0
        for n in (2, 3, 5, 30, 3000):
            found = ours.power(kind, d, 1.0, n, alpha=0.05 / 6)
            assert 0 <= found <= 1 + 1e-9
            assert kind == "equivalent" or found >= last
            last = found


def test_equivalence_power_published():
    """PowerTOST's first example (2x2 cross-over, CV .3, ratio .95, limits .8 to 1.25): 40 subjects, power 0.815845."""
    se = math.sqrt(math.log(0.3**2 + 1) * 2 / 40)
    assert ours.tost_power(math.log(1.25) / se, 38, 0.05, math.log(0.95) / se) == pytest.approx(0.815845, abs=2e-6)


def test_equivalence_power_integrates_exactly():
    """The same integral by an adaptive rule, also where it is sharp."""
    for df, margin, shift in ((1, 30.0, 0.0), (2, 1.2, 0.1), (4, 4.0, 0.5), (40, 3.1, 0.0), (5000, 3.0, 0.2)):
        critical = stats.t.isf(0.05, df)

        def given(s, df=df, margin=margin, shift=shift, critical=critical):
            reach = margin - critical * s
            inside = stats.norm.cdf(reach - shift) - stats.norm.cdf(-reach - shift)
            return inside * 2 * df * s * stats.chi2.pdf(df * s * s, df)

        peak = [x for x in (0.9, 1.0, 1.1) if x < margin / critical]
        exact, _ = integrate.quad(given, 0, min(margin / critical, 20), points=peak, limit=500, epsabs=1e-12)
        assert ours.tost_power(margin, df, shift=shift) == pytest.approx(exact, abs=1e-9)


def test_equivalence_power_against_simulated_studies():
    """Two one-sided tests on 40,000 studies each; standard error at most 0.0025."""
    rng = np.random.default_rng(2)
    for n, margin in ((3, 3.5), (5, 1.6), (12, 0.8)):
        x = rng.normal(size=(40_000, n))
        reach = stats.t.isf(0.05, n - 1) * x.std(axis=1, ddof=1) / math.sqrt(n)
        share = np.mean(np.abs(x.mean(axis=1)) + reach < margin)
        assert ours.power("equivalent", margin, 1.0, n) == pytest.approx(share, abs=0.009)


@pytest.mark.parametrize("alpha", [0.05, 0.05 / 3])
@pytest.mark.parametrize("kind", ["better", "different", "equivalent"])
def test_seeds_needed_is_the_smallest_that_reaches_the_power(kind, alpha):
    for effect, sd in ((0.03, 0.02), (0.03, 0.04), (0.01, 0.05), (0.5, 0.01)):
        n = ours.seeds_needed(kind, effect, sd, alpha=alpha)
        assert ours.power(kind, effect, sd, n, alpha) >= 0.8
        assert n == 2 or ours.power(kind, effect, sd, n - 1, alpha) < 0.8


@pytest.mark.parametrize("kind", ["better", "different", "equivalent"])
def test_seeds_needed_deliver_their_power_in_simulation(kind):
    """20,000 studies with the seeds asked for: the power is at least .8, and with one seed less it is not."""
    rng = np.random.default_rng(8)
    n = ours.seeds_needed(kind, 0.03, 0.025)
    for seeds, enough in ((n, True), (n - 1, False)):
        x = rng.normal(0 if kind == "equivalent" else 0.03, 0.025, (20_000, seeds))
        mean, se = x.mean(axis=1), x.std(axis=1, ddof=1) / math.sqrt(seeds)
        one, two = stats.t.isf(0.05, seeds - 1), stats.t.isf(0.025, seeds - 1)
        found = {
            "better": mean > one * se,
            "different": np.abs(mean) > two * se,
            "equivalent": np.abs(mean) + one * se < 0.03,
        }
        assert (np.mean(found[kind]) > 0.8 - 0.008) == enough


def test_seeds_needed_at_the_ends():
    assert ours.seeds_needed("better", 0.03, 0.0) == 2
    assert ours.seeds_needed("better", 1e-4, 1.0) == pytest.approx(6.18256e8, rel=1e-5)
    near = ours.seeds_needed("different", 0.0089, 1.0)  # just below the change to the normal approximation
    assert near == pytest.approx(((1.9599640 + 0.8416212) / 0.0089) ** 2, rel=1e-4)
    for bad in (("better", 0.0, 1.0), ("better", -1.0, 1.0), ("better", 0.1, -1.0), ("best", 0.1, 1.0)):
        with pytest.raises(ValueError, match=r"planning needs|kind is"):
            ours.seeds_needed(*bad)
    with pytest.raises(ValueError, match="two seeds"):
        ours.power("better", 0.1, 0.1, 1)


def test_sd_upper_bounds_the_sd():
    """chi-square(.20; 4) = 1.6488: at five seeds the bound is 1.5576 times the estimate, and it holds 80 % of times."""
    assert ours.sd_upper(0.02, 5) == pytest.approx(0.02 * math.sqrt(4 / 1.648777), rel=1e-5)
    rng = np.random.default_rng(4)
    held = [ours.sd_upper(float(s), 5) >= 1 for s in rng.normal(size=(4000, 5)).std(axis=1, ddof=1)]
    assert np.mean(held) == pytest.approx(0.8, abs=0.02)
    for sd, n in ((0.1, 1), (-0.1, 5), (math.nan, 5)):
        with pytest.raises(ValueError, match="upper bound"):
            ours.sd_upper(sd, n)
