"""A small study for tests of the sweep."""

from __future__ import annotations

from typing import Any

import optuna

from suite.config import RunConfig
from suite.lease import new_owner
from suite.storage import Store
from suite.study import Arm, Claim, Study
from suite.sweep import Sweep

PERIODS = {"online": 1, "k": 10, "offline": "inf"}


def study(arms: tuple[str, ...] = ("online", "k", "offline"), seeds: tuple[int, ...] = (3, 5), **more: Any) -> Study:
    made = tuple(Arm(name, {} if name == "online" else {"rollout.sync_period": PERIODS[name]}) for name in arms)
    claim = Claim("better", "better", "online", arms[-1], 0.03)
    return Study("mini", "Does it matter?", RunConfig(), made, seeds, (claim,), **more)


def finish(one: Sweep, count: int = 100, owner: str = "") -> list[str]:
    """Claims and finishes cells, with a value that tells them apart; the names in order."""
    done = []
    while len(done) < count and (held := one.claim(owner or new_owner())):
        one.finish(held, {"eval/test/accuracy": held.seed / 10})
        done.append(held.cell)
    return done


def trials(one: Sweep) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="mini", storage=Store(one.store.url).optuna).trials
