"""Cells that start from the final model of another cell: when they may, and where that model lies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from suite import trials
from suite.config import FROM_ARM, RunConfig, apply
from suite.declaration import Choice
from suite.run import MODEL
from suite.status import StudyStatus
from suite.study import Cell, Study


def placed(config: RunConfig, folder: Path, arm: str, found: Iterable[FrozenTrial]) -> RunConfig:
    """The configuration of a cell with the folder of the model that it starts from.

    ValueError if the cell that it starts from is not complete: it failed, or was never run in its present definition.
    """
    parent = config.model.path.removeprefix(FROM_ARM)
    trial = trials.latest(found).get(config.model.parent)
    if trial is None or trial.state != TrialState.COMPLETE:
        why = "was not run in its present definition" if trial is None else f"failed in {trial.user_attrs['cell']}"
        raise ValueError(f"arm {arm!r} starts from arm {parent!r}, which {why}; see to that one first")
    return apply(config, {"model.folder": str((folder / "cells" / trial.user_attrs["cell"] / MODEL).resolve())})


def check_shared(cells: Iterable[Cell], found: Iterable[FrozenTrial], rerun: Choice) -> None:
    """Raises ValueError if declared cells would start from other weights of a model than cells that stay beside them.

    Compared under equal names of models, so that no two arms, and no two replicates of one, differ unseen in what they
    start from.
    """
    kept = {
        tuple(trial.user_attrs.get("weights", ())): trial.user_attrs["cell"]
        for trial in found
        if trial.state != TrialState.FAIL and not rerun.takes(trial.user_attrs["arm"], trial.user_attrs["seed"])
    }
    theirs = {pair[0]: (pair[1], cell) for pair, cell in kept.items() if pair}
    for cell in cells:
        path, weights = cell.config.model.name, cell.config.model.weights
        known, name = theirs.setdefault(path, (weights, cell.name))
        if weights and known != weights:
            raise ValueError(
                f"cell {cell.name} would start from weights {weights} of {path!r}, and cell {name} starts from "
                f"{known}; put those back, or run every cell anew with --rerun-stale"
            )


def check_chosen(study: Study, status: StudyStatus, choice: Choice, seeds: Collection[int]) -> None:
    """Raises ValueError if a chosen cell would wait for one that is neither finished nor running nor chosen."""
    waiting = {(cell.arm, cell.seed) for cell in status.cells if cell.status == "waiting"}
    for arm in study.arms:
        for parent in study.lineage(arm.name):
            for seed in seeds:
                starts = choice.takes(arm.name, seed) and (arm.name, seed) in waiting
                if starts and (parent, seed) in waiting and not choice.takes(parent, seed):
                    raise ValueError(
                        f"arm {arm.name!r} starts from arm {parent!r}, whose cell of seed {seed} is not finished; "
                        "run that arm too"
                    )
