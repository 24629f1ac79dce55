"""`suite plan`: the spread it reckons with, what seeds can decide, and what it prints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from fakes import SMALL, small

from suite import cli
from suite.commands import power
from suite.commands.cost import ends
from suite.commands.plan import Seconds
from suite.commands.power import Spread, decide, pilot_spreads, spread
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

ACCURACY = "eval/test/accuracy"
STUDY = f"""
from suite.config import RunConfig, apply
from suite.study import SEED_MODEL, Arm, Claim, Study

STUDY = Study(
    "little", "Does it run?", apply(RunConfig(), {SMALL!r}),
    (Arm("plain"), Arm("stale", {{"rollout.sync_period": 3}}, "s=3")), (4, 7),
    (Claim("fresh is better", "better", "plain", "stale", 0.1), Claim("it learns", "better", "plain", SEED_MODEL, 0.2)),
)
"""


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A study of two arms and two claims, whose cells take 90 s and 180 s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    found = Seconds({"plain": 90.0, "stale": 180.0}, "measured", 1)
    monkeypatch.setattr(power, "measured", lambda *_, **__: found)
    (tmp_path / "little.py").write_text(STUDY)
    return str(tmp_path / "little.py")


def test_the_spread_is_the_upper_bound_of_the_paired_sd() -> None:
    ends_of = {"plain": {1: 0.5, 2: 0.7, 3: 0.6}, "stale": {1: 0.4, 2: 0.4, 3: 0.5, 4: 0.9}}
    before = {"plain": {1: 0.25, 2: 0.25, 3: 0.25}, "stale": {1: 0.1, 2: 0.3, 3: 0.9}}

    def final(metric: str, arm: str) -> dict[int, float]:
        assert metric == ACCURACY
        return ends_of[arm]

    def initial(metric: str, arm: str) -> dict[int, float]:
        assert metric == ACCURACY
        return before[arm]

    # chi-square with two degrees of freedom: P(x > c) = exp(-c / 2), so the 20 % point is -2 ln .8
    factor = math.sqrt(2 / (-2 * math.log(0.8)))
    found = spread(Claim("c", "better", "plain", "stale", 0.1), final, initial, "here")
    assert found is not None
    assert found.sd == pytest.approx(factor * math.sqrt(0.04 / 3))  # differences .1, .3, .1
    assert found.source == "here: 0.115 over 3 seeds, bound above"
    # against the seed model: the same runs before their first step
    found = spread(Claim("c", "better", "plain", SEED_MODEL, 0.1), final, initial, "here")
    assert found is not None
    assert found.sd == pytest.approx(factor * 0.1)  # .25, .45, .35
    assert spread(Claim("c", "better", "plain", "stale", 0.1), lambda *_: {1: 0.5}, initial, "here") is None


@pytest.mark.parametrize(("kind", "seeds"), [("better", 8), ("different", 10), ("equivalent", 11)])
def test_seeds_for_80_percent_are_those_of_the_documentation(kind: Any, seeds: int) -> None:
    """docs/statistics.md: margin = 1 SD, one claim."""
    claim, spreads = Claim("c", kind, "a", "b", 0.05), {"c": Spread(0.05, "--sd")}
    (one,), (fewer,) = decide([claim], spreads, seeds), decide([claim], spreads, seeds - 1)
    assert one.needed == fewer.needed == seeds
    assert fewer.power < 0.8 <= one.power
    # a second claim makes every test stricter, and one of unknown spread is left out
    assert [d.needed > seeds for d in decide([claim, Claim("d", kind, "a", "b", 0.05)], spreads, seeds)] == [True]
    assert decide([claim], spreads, 1)[0].power == 0.0


def test_a_pilot_runs_the_claimed_arms_on_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = (Arm("a"), Arm("b", {"rollout.sync_period": 2}), Arm("unclaimed", {"rollout.sync_period": 3}))
    claims = (Claim("c", "better", "a", "b", 0.1), Claim("s", "better", "a", SEED_MODEL, 0.1))
    study = Study("s", "?", apply(RunConfig(), SMALL), arms, (3, 8), claims)
    ran: list[tuple[int, Any, int]] = []

    def fake(config: RunConfig, steps: int) -> tuple[dict[str, float], dict[str, float]]:
        ran.append((config.seed, config.rollout.sync_period, steps))
        return {ACCURACY: 0.2}, {ACCURACY: 0.5 + 0.1 * config.seed * (config.rollout.sync_period == 1)}

    monkeypatch.setattr(power, "ends", fake)
    found = pilot_spreads(study, 3, 2, power.console())
    assert ran == [(seed, period, 2) for seed in (9, 10, 11) for period in (1, 2)]
    assert found["c"].sd == found["s"].sd == pytest.approx(0.1 * math.sqrt(1 / -math.log(0.8)))
    assert found["c"].source == ("a pilot of 2 of 6 steps, which understates the spread: 0.1 over 3 seeds, bound above")


def test_both_ends_of_a_run_that_is_cut_short() -> None:
    first, last = ends(small(), 2)
    assert first[ACCURACY] == pytest.approx(round(first[ACCURACY] * 20) / 20)
    assert "loss/total" not in first
    assert {ACCURACY, "loss/total"} <= set(last)
    assert last["cost/prompts"] == 16


def test_the_plan_names_cost_power_and_what_it_would_take(capsys: Any, little: str, tmp_path: Path) -> None:
    assert cli.main(["plan", little, "--sd", "0.1", "--workers", "2"]) == 0
    text = capsys.readouterr().out
    # two cells of 90 s and two of 180 s: 0.15 core-hours, half of 540 s on two workers
    assert "0.15" in text
    assert "time   about 4 min 30 s on 2 workers (1 thread a worker; measured)" in text
    # two claims: `better` at .025 is `different` at .05, in docs/statistics.md 10 seeds at a margin of 1 SD, 5 at 2
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.count("│") > 5}
    assert rows["fresh is better"].split("│")[-2].strip() == "10"
    assert rows["it learns"].split("│")[-2].strip() == "5"
    assert "2 seeds cannot decide at 80 %: fresh is better, it learns" in text
    assert "80 % for every claim: 10 seeds, 0.75 core-hours" in text
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"little.py"}


def test_without_a_spread_the_plan_asks_for_one(capsys: Any, little: str) -> None:
    assert cli.main(["plan", little]) == 0
    text = capsys.readouterr().out
    assert "unknown" in text
    assert "--sd" in text
    assert "--pilot-seeds" in text
    for words, sentence in (
        (("--sd", "0"), "--sd is 0.0"),
        (("--pilot-seeds", "1"), "at least 2 seeds"),
        (("--pilot-steps", "-3"), "--pilot-steps is -3"),
    ):
        assert cli.main(["plan", little, *words]) == 2
        assert sentence in capsys.readouterr().err
