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
from suite.study import Study


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
