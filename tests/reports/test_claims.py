"""Verdicts: each rule worked by hand or against another library, and the error rates that they promise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.weightstats import ttost_paired

from reports.claims import ClaimResult, decide
from reports.stats import sd_upper, seeds_needed
from suite.study import SEED_MODEL, Claim

SEEDS = (1, 2, 3, 4, 5)
FINAL = {
    "offline": (0.44, 0.50, 0.49, 0.47, 0.46),
    "semi": (0.51, 0.62, 0.55, 0.57, 0.50),
    "online": (0.52, 0.61, 0.55, 0.58, 0.49),
}
START = {"offline": (0.40, 0.42, 0.41, 0.39, 0.40), "online": (0.38, 0.44, 0.40, 0.41, 0.43)}


def values(metric: str, arm: str) -> Mapping[int, float]:
    assert metric == "eval/test/accuracy"
    return dict(zip(SEEDS, FINAL[arm], strict=True))


def seed_values(metric: str, arm: str) -> Mapping[int, float]:
    assert metric == "eval/test/accuracy"
    return dict(zip(SEEDS, START[arm], strict=True)) if arm in START else {}


def table(**arms: Mapping[int, float] | list[float]):
    """Values as `decide` asks for them, from one mapping (or list over seeds 0, 1, ...) per arm."""

    def read(metric: str, arm: str) -> Mapping[int, float]:
        found = arms.get(arm, {})
        return found if isinstance(found, dict) else dict(enumerate(found))

    return read


def one(kind: str, a: object, b: object, effect: float = 0.03, **options: object) -> ClaimResult:
    return decide([Claim("c", kind, "a", "b", effect)], table(a=a, b=b), table(), **options)[0]


# The three kinds


def test_better_supported_and_its_mirror_contradicted():
    up, down = decide(
        [Claim("up", "better", "online", "offline", 0.03), Claim("down", "better", "offline", "online", 0.03)],
        values,
        seed_values,
    )
    p = stats.ttest_rel(FINAL["online"], FINAL["offline"], alternative="greater").pvalue
    assert (up.verdict, down.verdict) == ("supported", "contradicted")
    assert (up.p, up.p_opposite) == pytest.approx((p, 1 - p))
    assert (down.p, down.p_opposite) == pytest.approx((1 - p, p))
    # each family has two members; the smaller is doubled, the larger is capped at 1
    assert (up.p_holm, up.p_opposite_holm) == pytest.approx((2 * p, 1 - p))
    assert (down.p_holm, down.p_opposite_holm) == pytest.approx((1 - p, 2 * p))
    assert (up.arm_mean, up.than_mean, up.difference) == pytest.approx((0.55, 0.472, 0.078))
    assert down.difference == pytest.approx(-0.078)
    assert up.sd == pytest.approx(math.sqrt(0.00117))
    assert (up.n, up.seeds, up.level, up.missing, up.note) == (5, SEEDS, 0.95, (), "")
    reference = stats.ttest_rel(FINAL["online"], FINAL["offline"]).confidence_interval(0.95)
    assert (up.low, up.high) == pytest.approx((reference.low, reference.high))


def test_better_is_one_sided():
    """Differences 1, 3, 1, 6, 1 (points): t = 2.45 with 4 df, .035 one-sided, .070 two-sided."""
    a, b = [0.50, 0.53, 0.51, 0.56, 0.51], [0.49, 0.50, 0.50, 0.50, 0.50]
    p = stats.ttest_rel(a, b).pvalue
    assert 0.05 < p < 0.10
    assert one("better", a, b).verdict == "supported"
    different = one("different", a, b)
    assert different.verdict == "undecided"
    assert different.p == pytest.approx(p)


def test_different_either_way_and_never_contradicted():
    a, b = FINAL["online"], FINAL["offline"]
    for first, second in ((a, b), (b, a)):
        found = one("different", list(first), list(second))
        assert found.verdict == "supported"
        assert found.p == pytest.approx(stats.ttest_rel(a, b).pvalue)
        assert (found.p_opposite, found.p_opposite_holm) == (None, None)
    close = one("different", list(FINAL["semi"]), list(a), effect=0.03)
    assert close.verdict == "undecided"
    assert "0.03 or more either way is excluded" in close.note
    assert "excluded" not in one("different", list(FINAL["semi"]), list(a), effect=0.005).note


@pytest.mark.parametrize(("margin", "verdict"), [(0.03, "supported"), (0.005, "undecided")])
def test_equivalent_is_tost_with_the_90_percent_interval(margin, verdict):
    claim = Claim("same", "equivalent", "semi", "online", margin)
    found = decide([claim], values, seed_values)[0]
    a, b = np.array(FINAL["semi"]), np.array(FINAL["online"])
    assert found.verdict == verdict
    assert found.p == pytest.approx(ttost_paired(a, b, -margin, margin)[0], rel=1e-9)
    reference = stats.ttest_rel(a, b).confidence_interval(0.90)
    assert (found.low, found.high, found.level) == pytest.approx((reference.low, reference.high, 0.90))
    assert (-margin < found.low and found.high < margin) == (verdict == "supported")


def test_equivalent_contradicted_only_beyond_the_margin():
    """Differences .078 on average: clearly above .02; different from 0 but not clearly beyond .06; within .2."""
    a, b = list(FINAL["online"]), list(FINAL["offline"])
    for first, second in ((a, b), (b, a)):
        verdicts = [one("equivalent", first, second, margin).verdict for margin in (0.02, 0.06, 0.2)]
        assert verdicts == ["contradicted", "undecided", "supported"]
    found = one("equivalent", a, b, 0.02)
    t = (0.078 - 0.02) / math.sqrt(0.00117 / 5), (0.078 + 0.02) / math.sqrt(0.00117 / 5)
    assert found.p_opposite == pytest.approx(stats.t.sf(t, 4).sum())


def test_the_seed_model_is_the_same_runs_before_training():
    claims = [
        Claim("learns", "better", "offline", SEED_MODEL, 0.02),
        Claim("learns too", "better", "online", SEED_MODEL, 0.02),
        Claim("unlearns", "better", SEED_MODEL, "online", 0.02),
    ]
    found = decide(claims, values, seed_values)
    assert [f.verdict for f in found] == ["supported", "supported", "contradicted"]
    assert [f.than_mean for f in found] == pytest.approx([0.404, 0.412, 0.55])
    assert [f.difference for f in found] == pytest.approx([0.068, 0.138, -0.138])
    p = stats.ttest_rel(FINAL["offline"], START["offline"], alternative="greater").pvalue
    assert found[0].p == pytest.approx(p)


def test_the_metric_is_the_claims():
    asked = []

    def recording(metric: str, arm: str) -> Mapping[int, float]:
        asked.append((metric, arm))
        return {1: 0.5, 2: 0.6}

    decide([Claim("c", "better", "a", SEED_MODEL, 0.1, metric="policy/entropy")], recording, recording)
    assert asked == [("policy/entropy", "a"), ("policy/entropy", "a")]


# The family


def test_holm_over_the_declared_claims_worked_by_hand():
    """One-sided p of about .02 each: alone supported; of three the smallest is tripled, and none is."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.01, 6)
    noise -= noise.mean()
    arms = {"base": [0.5] * 6}
    for name, p in (("x", 0.012), ("y", 0.02), ("z", 0.03)):
        shift = stats.t.isf(p, 5) * noise.std(ddof=1) / math.sqrt(6)
        arms[name] = list(0.5 + shift + noise)
    claims = [Claim(name, "better", name, "base", 0.01) for name in ("z", "x", "y")]
    family = decide(claims, table(**arms), table())
    assert [f.p for f in family] == pytest.approx([0.03, 0.012, 0.02], rel=1e-6)
    assert [f.p_holm for f in family] == pytest.approx([0.04, 0.036, 0.04], rel=1e-6)
    assert [f.verdict for f in family] == ["supported"] * 3
    weaker = [*claims, Claim("w", "different", "z", "base", 0.01)]  # two-sided .06
    assert [f.p_holm for f in decide(weaker, table(**arms), table())] == pytest.approx([0.06, 0.048, 0.06, 0.06])
    assert [f.verdict for f in decide(weaker, table(**arms), table())] == [
        "undecided",
        "supported",
        "undecided",
        "undecided",
    ]


def test_a_claim_that_cannot_be_tested_yet_keeps_its_place():
    """p = .03 beside two claims without seeds is worth .09, as it will be when those come out badly."""
    noise = np.array([-0.01, 0.0, 0.01, 0.005, -0.005])
    shift = stats.t.isf(0.03, 4) * noise.std(ddof=1) / math.sqrt(5)
    arms = {"a": list(0.5 + shift + noise), "b": [0.5] * 5, "late": {}, "later": {0: 0.5}}
    claims = [Claim(x, "better", x, "b", 0.03) for x in ("a", "late", "later")]
    found = decide(claims, table(**arms), table())
    assert found[0].p_holm == pytest.approx(0.09)
    assert found[0].verdict == "undecided"
    assert [f.p_holm for f in found[1:]] == [None, None]
    assert decide(claims[:1], table(**arms), table())[0].verdict == "supported"


def test_contradictions_have_their_own_family_without_different():
    arms = {"a": list(FINAL["offline"]), "b": list(FINAL["online"])}
    better, equivalent = Claim("b", "better", "a", "b", 0.03), Claim("e", "equivalent", "a", "b", 0.02)
    found = decide([better, Claim("d", "different", "a", "b", 0.03), equivalent], table(**arms), table())
    p = stats.ttest_rel(FINAL["online"], FINAL["offline"], alternative="greater").pvalue
    outside = found[2].p_opposite
    assert outside > p
    assert (found[0].p_opposite_holm, found[2].p_opposite_holm) == pytest.approx((2 * p, max(outside, 2 * p)))
    assert [f.verdict for f in found] == ["contradicted", "supported", "contradicted"]
    # of the three supporting tests only `different` is small: its two-sided p is tripled
    assert found[1].p_holm == pytest.approx(6 * p)


# What is missing


def test_missing_seeds_are_dropped_on_both_sides_and_named():
    a = {1: 0.60, 2: 0.55, 3: 0.58, 5: math.nan, 6: 0.70}
    b = {1: 0.50, 2: 0.49, 3: 0.47, 4: 0.99, 5: 0.45}
    found = one("better", a, b, seeds=(1, 2, 3, 4, 5, 6, 7))
    assert (found.n, found.seeds, found.missing) == (3, (1, 2, 3), (4, 5, 6, 7))
    assert found.difference == pytest.approx(0.09)
    assert found.arm_mean == pytest.approx((0.60 + 0.55 + 0.58) / 3)
    assert "'a' has no finite eval/test/accuracy at seed 5" in found.note
    assert "'a' has no value at seeds 4, 7" in found.note
    assert "'b' has no value at seeds 6, 7" in found.note
    assert "only 3 seeds" in found.note


@pytest.mark.parametrize("kind", ["better", "different", "equivalent"])
def test_fewer_than_three_common_seeds_decide_nothing(kind):
    for a, n, reason in (
        ({1: 0.9, 3: 0.9}, 1, "1 common seed;"),
        ({7: 0.9}, 0, "0 common seeds;"),
        ({}, 0, "0 common"),
        ({1: 0.9, 2: 0.8}, 2, "2 common seeds; a verdict needs at least 3"),
    ):
        found = one(kind, a, {1: 0.1, 2: 0.15})
        assert (found.verdict, found.n, found.p, found.p_holm, found.p_opposite) == ("undecided", n, None, None, None)
        if n < 2:
            assert (found.sd, found.low, found.high, found.seeds_needed) == (None, None, None, None)
        assert reason in found.note
        assert "seed" in found.note
    assert one(kind, {1: 0.9}, {1: 0.1}).difference == pytest.approx(0.8)


# Differences without spread


@pytest.mark.parametrize("kind", ["better", "different", "equivalent"])
@pytest.mark.parametrize("shift", [0.0, 0.1, -0.1, 0.02])
def test_equal_differences_are_no_certainty(kind, shift):
    b = [0.5, 0.4, 0.2, 0.8, 0.7]
    found = one(kind, [x + shift for x in b], b)
    assert (found.verdict, found.p, found.p_holm, found.p_opposite) == ("undecided", None, None, None)
    assert (found.low, found.high, found.seeds_needed) == (None, None, None)
    assert found.difference == pytest.approx(shift)
    assert ("check that the arm differs at all" if shift == 0 else "same at every seed") in found.note
    scored = decide([Claim("c", kind, "a", "b", 0.03)], table(a=[0.9, 0.9], b=[0.4, 0.4]), table())[0]
    assert (scored.verdict, scored.p) == ("undecided", None)


def test_a_collapsed_replicate_is_pointed_out():
    start = table(a=[0.4] * 5, b=[0.4] * 5)
    found = decide([Claim("c", "better", "a", "b", 0.03)], table(a=[0.6, 0.1, 0.6, 0.5, 0.7], b=[0.4] * 5), start)[0]
    assert "'a' collapsed to less than half of its start at seed 1" in found.note


def test_failed_cells_count_as_untrained_in_a_second_verdict():
    """By hand: without seed 4 the differences are .20, .21, .19, .20; with it .00 joins them."""
    a, b = {0: 0.60, 1: 0.61, 2: 0.59, 3: 0.60}, {0: 0.40, 1: 0.40, 2: 0.40, 3: 0.40, 4: 0.42}
    start = table(a={}, b=dict.fromkeys(range(5), 0.38))
    claims = [Claim("c", "better", "a", "b", 0.03)]
    found = decide(claims, table(a=a, b=b), start, failed={"a": {4}, "b": ()})[0]
    assert (found.verdict, found.n) == ("supported", 4)
    again = found.with_failed
    assert again.n == 5
    reference = stats.ttest_rel([*a.values(), 0.38], list(b.values()), alternative="greater")
    assert again.difference == pytest.approx((0.20 + 0.21 + 0.19 + 0.20 - 0.04) / 5)
    assert again.p == pytest.approx(reference.pvalue)
    assert decide(claims, table(a=a, b=b), start, failed={"a": (), "b": ()})[0].with_failed is None


# Planning and remarks


def test_seeds_needed_come_from_the_declared_effect_and_an_upper_bound():
    """Never from the observed difference: shifting one arm leaves them alone. Holm's strictest step is planned for."""
    a, b = list(FINAL["online"]), list(FINAL["offline"])
    expected = seeds_needed("better", 0.03, sd_upper(math.sqrt(0.00117), 5))
    assert one("better", a, b).seeds_needed == expected
    assert one("better", [x - 0.078 for x in a], b).seeds_needed == expected
    assert one("better", a, b, effect=0.06).seeds_needed < expected
    claims = [Claim(str(i), "better", "online", "offline", 0.03) for i in range(3)]
    of_three = seeds_needed("better", 0.03, sd_upper(math.sqrt(0.00117), 5), alpha=0.05 / 3)
    assert [f.seeds_needed for f in decide(claims, values, seed_values)] == [of_three] * 3
    assert of_three > expected


def test_real_but_smaller_than_interesting_is_said():
    found = one("better", [0.51, 0.521, 0.532, 0.541, 0.55], [0.50, 0.51, 0.52, 0.53, 0.54], effect=0.03)
    assert found.verdict == "supported"
    assert "below the smallest effect of interest (0.03)" in found.note
    assert "smallest effect" not in one("better", list(FINAL["online"]), list(FINAL["offline"]), 0.03).note


def test_exploratory_is_marked_and_changes_no_number():
    claims = [Claim("a", "better", "online", "offline", 0.03), Claim("b", "better", "semi", "offline", 0.03)]
    plain, marked = (decide(claims, values, seed_values, exploratory=names) for names in ({}, {"b": "added late"}))
    assert [f.exploratory for f in marked] == [False, True]
    assert "exploratory: added late; the p values are no error rates" in marked[1].note
    assert "exploratory" not in marked[0].note
    assert [(f.verdict, f.p_holm) for f in marked] == [(f.verdict, f.p_holm) for f in plain]


def test_bad_claims_are_refused():
    claim = Claim("c", "better", "online", "offline", 0.03)
    with pytest.raises(ValueError, match="repeated: 'c'"):
        decide([claim, claim], values, seed_values)
    with pytest.raises(ValueError, match="exploratory names claims out of"):
        decide([claim], values, seed_values, exploratory={"d": ""})
    with pytest.raises(ValueError, match="with itself"):
        decide([Claim("c", "better", "online", "online", 0.03)], values, seed_values)
    assert decide([], values, seed_values) == []


# What the verdicts promise


@pytest.fixture
def quick(monkeypatch):
    """statsmodels' multipletests collects garbage on every call, a tenth of a second each in a large process."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def _verdicts(kind: str, shift: float, effect: float, n: int = 5, studies: int = 2000) -> dict[str, float]:
    rng = np.random.default_rng(6)
    count = dict.fromkeys(("supported", "contradicted", "undecided"), 0)
    for _ in range(studies):
        common = rng.normal(0.5, 0.05, n)
        a, b = common + rng.normal(shift, 0.02, n), common + rng.normal(0, 0.02, n)
        count[one(kind, list(a), list(b), effect).verdict] += 1
    return {verdict: k / studies for verdict, k in count.items()}


@pytest.mark.slow
def test_better_errs_at_five_percent_when_nothing_differs(quick):
    """2000 studies (standard error 0.005): 5 % supported, 5 % contradicted, as a one-sided test at .05 has it."""
    shares = _verdicts("better", 0.0, 0.03)
    assert shares["supported"] == pytest.approx(0.05, abs=0.015)
    assert shares["contradicted"] == pytest.approx(0.05, abs=0.015)


@pytest.mark.slow
def test_equivalent_errs_at_five_percent_at_the_margin(quick):
    """True difference exactly the margin, margin 4.7 standard errors: at most 5 % supported, 5 % contradicted."""
    shares = _verdicts("equivalent", 0.06, 0.06)
    assert shares["supported"] == pytest.approx(0.05, abs=0.015)
    assert shares["contradicted"] == pytest.approx(0.05, abs=0.015)


@pytest.mark.slow
def test_contradicting_equivalence_errs_at_five_percent_for_a_small_margin_too(quick):
    """Margin 0.08 standard errors, true difference at it: one-sided tests either way would err in 10 %."""
    shares = _verdicts("equivalent", 0.001, 0.001)
    assert shares["contradicted"] == pytest.approx(0.05, abs=0.015)
    assert shares["supported"] == 0.0


@pytest.mark.slow
def test_holm_keeps_false_support_of_three_claims_at_five_percent(quick):
    """Nothing differs, three arms against one control: 1000 studies, at least one false "supported" in about 5 %."""
    rng = np.random.default_rng(9)
    claims = [Claim(name, "better", name, "control", 0.03) for name in "xyz"]
    corrected = bare = 0
    for _ in range(1000):
        arms = {name: list(rng.normal(0.5, 0.02, 5)) for name in ("x", "y", "z", "control")}
        found = decide(claims, table(**arms), table())
        corrected += any(f.verdict == "supported" for f in found)
        bare += any(f.p <= 0.05 for f in found)
    assert corrected / 1000 <= 0.07
    assert bare / 1000 > 0.09


def test_testing_again_after_more_seeds_is_why_peeking_is_marked():
    """Two-sided tests at n = 5, 7, ..., 15 of nothing: about 14 % of 20,000 studies find something."""
    x = np.random.default_rng(1).normal(size=(20_000, 15))
    found = np.zeros(20_000, dtype=bool)
    for n in range(5, 16, 2):
        found |= np.abs(stats.ttest_1samp(x[:, :n], 0, axis=1).statistic) > stats.t.isf(0.025, n - 1)
    assert found.mean() == pytest.approx(0.14, abs=0.01)
