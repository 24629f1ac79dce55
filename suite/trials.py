"""Cells as Optuna trials: how they are created, named and found. Callers that write hold the storage's lock."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from suite.config import flatten
from suite.lease import owner_of
from suite.status import CellStatus, State
from suite.storage import Store
from suite.study import Cell, Study

WITHDRAWN = "withdrawn"
"""First word of the reason of a trial that was never run because its cell is no longer declared."""

ARM = "arm"
"""The parameter that names a cell's arm."""

_WHOLE, _REAL = 2**53, 1e30
"""Numbers from here on are shown as choices: Optuna's spaces hold floats."""


def create_study(store: Store, study: Study) -> optuna.Study:
    """The Optuna study named after the study, created if it is not there."""
    inner = optuna.create_study(study_name=study.name, storage=store.optuna, direction="maximize", load_if_exists=True)
    for name, value in (("question", study.question), ("metric", study.metric)):
        if inner.user_attrs.get(name) != value:
            inner.set_user_attr(name, value)
    if inner.metric_names != [study.metric]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            inner.set_metric_names([study.metric])
    return inner


def add(inner: optuna.Study, study: Study, cells: Iterable[Cell], base: dict[str, int] | None = None) -> None:
    """Adds a waiting trial for each cell; its parameters are its arm and the options in which arms differ.

    The seed is none: it repeats an experiment, and an importance of it would say nothing.
    """
    options = list(dict.fromkeys(name for arm in study.arms for name in study.differs(arm.name)))
    values = {arm.name: {**flatten(study.config(arm.name)), ARM: arm.name} for arm in study.arms}
    known = _spaces(inner)
    for cell in cells:
        params: dict[str, Any] = {}
        spaces: dict[str, BaseDistribution] = {}
        for option in [ARM, *options]:
            every = [_plain(tree[option]) for tree in values.values()]
            value = _plain(values[cell.arm][option])
            name, space = _place(known, option, value, every)
            params[name], spaces[name] = value, space
        attrs = {"cell": cell.name, "arm": cell.arm, "seed": cell.seed, "fingerprint": cell.fingerprint}
        attrs |= {"starts_from": cell.starts_from} if cell.starts_from else {}
        attrs |= {"weights": [cell.config.model.name, cell.config.model.weights]} if cell.config.model.weights else {}
        lease = {"number": (base or {}).get(cell.fingerprint, 0), "owner": ""}
        inner.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=params,
                distributions=spaces,
                user_attrs={**attrs, "lease": lease},
            )
        )


def repeat(inner: optuna.Study, trial: FrozenTrial) -> None:
    """Adds a waiting trial for the cell of a finished one, whose record stays. Fencing numbers go on counting."""
    names = ("cell", "arm", "seed", "fingerprint", "lease", "starts_from", "weights")
    kept = {name: trial.user_attrs[name] for name in names if name in trial.user_attrs}
    kept["lease"] = {"number": kept["lease"]["number"], "owner": ""}
    kept["after"] = trial.number
    inner.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params=trial.params,
            distributions=trial.distributions,
            user_attrs=kept,
        )
    )


def latest(found: Iterable[FrozenTrial]) -> dict[str, FrozenTrial]:
    """The trial that counts for each fingerprint: the newest one that was not withdrawn."""
    return {
        trial.user_attrs["fingerprint"]: trial
        for trial in found
        if not str(trial.user_attrs.get("reason", "")).startswith(WITHDRAWN)
    }


def finished(found: Iterable[FrozenTrial]) -> dict[tuple[str, int], FrozenTrial]:
    """The newest complete trial of each arm and seed, under whatever definition of the arm."""
    complete = (trial for trial in found if trial.state == TrialState.COMPLETE)
    return {(trial.user_attrs["arm"], trial.user_attrs["seed"]): trial for trial in complete}


def withdraw(store: Store, inner: optuna.Study, declared: set[str]) -> None:
    """Ends waiting trials of cells that are no longer declared, so that nobody waits for them."""
    for trial in inner.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        if trial.user_attrs["fingerprint"] not in declared:
            store.optuna.set_trial_user_attr(trial._trial_id, "reason", f"{WITHDRAWN}: its arm or seed changed or left")
            store.optuna.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _spaces(inner: optuna.Study) -> dict[str, BaseDistribution]:
    out: dict[str, BaseDistribution] = {}
    for trial in inner.get_trials(deepcopy=False):
        for name, space in trial.distributions.items():
            out.setdefault(name, space)
    return out


def _place(
    known: dict[str, BaseDistribution], option: str, value: Any, every: list[Any]
) -> tuple[str, BaseDistribution]:
    """The parameter that can hold a value of an option.

    Numbers get a space from the smallest to the largest that was ever declared. Optuna fixes the choices of a
    parameter when it first appears: one that came later goes to a parameter of its own, `option (2)`.
    """
    for count in range(1, len(known) + 2):
        name = option if count == 1 else f"{option} ({count})"
        known[name] = _space(every, known.get(name))
        if _holds(known[name], value):
            return name, known[name]
    raise AssertionError(f"a new space always holds its own values, {option} = {value!r}")


def _space(values: list[Any], known: BaseDistribution | None = None) -> BaseDistribution:
    """The space of an option's values; one that is known stays as it is, or grows to hold further numbers."""
    if isinstance(known, CategoricalDistribution):
        return known
    if known is None:
        whole = all(type(value) is int and abs(value) < _WHOLE for value in values)
        real = all(type(value) in (int, float) and abs(value) < _REAL for value in values)
        if not real:
            return CategoricalDistribution(list(dict.fromkeys(values)))
        return (IntDistribution if whole else FloatDistribution)(min(values), max(values))
    assert isinstance(known, IntDistribution | FloatDistribution)
    kinds = (int,) if isinstance(known, IntDistribution) else (int, float)
    ends = [known.low, known.high, *(value for value in values if type(value) in kinds)]
    return type(known)(min(ends), max(ends))


def _holds(space: BaseDistribution, value: Any) -> bool:
    if isinstance(space, CategoricalDistribution):
        # Python counts True as 1 and 1.0 as 1; a dashboard must not.
        return any(type(value) is type(choice) and value == choice for choice in space.choices)
    assert isinstance(space, IntDistribution | FloatDistribution)
    kinds = (int,) if isinstance(space, IntDistribution) else (int, float)
    return type(value) in kinds and space.low <= value <= space.high


_STATES: dict[TrialState, State] = {
    TrialState.WAITING: "waiting",
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.FAIL: "failed",
    TrialState.PRUNED: "failed",
}


def status_of(trial: FrozenTrial, stale: str | None) -> CellStatus:
    """How the cell of a trial stands; `stale` says why a finished one does not count as complete."""
    attrs, complete = trial.user_attrs, trial.state == TrialState.COMPLETE
    progress = attrs.get("progress", {})
    attempts = attrs.get("attempts", [])
    last = attempts[-1]["reason"] if attempts and not complete else None
    return CellStatus(
        arm=attrs["arm"],
        seed=attrs["seed"],
        name=attrs["cell"],
        fingerprint=attrs["fingerprint"],
        status="stale" if stale else _STATES[trial.state],
        folder=f"cells/{attrs['cell']}",
        error=stale or last,
        attempts=len(attempts) + (trial.state in (TrialState.RUNNING, TrialState.COMPLETE)),
        step=progress.get("step", 0),
        steps=progress.get("steps", 0),
        metrics={**progress.get("metrics", {}), **attrs.get("metrics", {})},
        seconds=progress.get("seconds", 0.0),
        started_at=progress.get("started_at", 0),
        worker=owner_of(trial).rpartition("|")[2],
        tokens_per_second=progress.get("tokens_per_second", 0.0),
    )
