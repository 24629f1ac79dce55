"""Every preset learns in the miniature: more held-out additions are right after a short run than before it."""

from __future__ import annotations

import pyarrow.parquet
import pytest
from scipy.stats import binomtest

from ablations.load import load_preset, presets
from ablations.preset import preset
from suite.config import RunConfig, apply
from suite.run import RunInfo, run

SMALL = {
    "model.path": "seed:addition/2",  # all learn from it, under three instruction sets
    "rollout.num_prompts": 16, "rollout.num_generations": 8, "optim.lr": 5e-5, "train.steps": 60,
    "train.checkpoint_every": 0, "eval.every": 60, "eval.validation_problems": 1, "eval.test_problems": 1000,
    "eval.num_samples": 0, "eval.probe_prompts": 1, "eval.probe_samples": 1,
}  # fmt: skip
"""A few seconds of one core. The rate is above the miniature's own, so that few steps show what is learnt."""

BETA = 1.0
"""At the published 0.1, offline DPO ends below the seed model (LOG.md)."""


def small(name: str) -> RunConfig:
    """The preset's slots under the small settings."""
    changes = preset(name)
    objective = {"objective.beta": BETA} if "objective.pair_rule" in changes else {}
    critic = {"critic.lr": 3e-4} if "critic.init" in changes else {}
    return apply(RunConfig(), {**SMALL, **changes, **objective, **critic})


def right(folder, step: int) -> list[bool]:
    """Which test problems were solved at a step, in the order of the problems."""
    rows = pyarrow.parquet.read_table(folder / "evaluations" / f"eval-test-problems-{step:06d}.parquet").to_pylist()
    return [row["outcome"] == "right" for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in presets() if not load_preset(name).evaluates])
def test_it_learns(name, tmp_path, monkeypatch):
    """Exact sign test on the problems that the run turned from wrong to right or back, one-sided, p below .001."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    config = small(name)
    run(config, tmp_path / "run", RunInfo("learning", name, name, {}))
    before, after = (right(tmp_path / "run", step) for step in (0, config.train.steps))
    assert len(before) == len(after) >= 1000
    won = sum(now and not then for then, now in zip(before, after, strict=True))
    lost = sum(then and not now for then, now in zip(before, after, strict=True))
    assert binomtest(won, won + lost, 0.5, alternative="greater").pvalue < 0.001, (
        f"{sum(before)} of {len(before)} right before, {sum(after)} after: {won} won, {lost} lost"
    )
