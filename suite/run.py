"""One run in its folder: validated, recorded, tracked, resumed, finished once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.config import RunConfig, fingerprint, to_json

if TYPE_CHECKING:
    from suite.checkpoint import Checkpoint
    from suite.tracking import Tracker
    from suite.train import Outcome

MODEL = "model"
"""The folder, in a run's folder, of its final model."""


class Interrupted(Exception):
    """A stop was asked for; a checkpoint is written."""


class NonFiniteLoss(RuntimeError):
    """The loss or its gradient is no number; the batch is saved in the run's folder."""


@dataclass(frozen=True)
class RunInfo:
    """Where a run belongs."""

    study: str
    arm: str
    label: str
    differs: dict[str, list[Any]]
    """Option -> [the control's value, this arm's value]."""


@dataclass(frozen=True)
class Progress:
    """How far a run is, with the latest value of each metric."""

    step: int
    steps: int
    metrics: dict[str, float]


def run(
    config: RunConfig,
    folder: Path,
    info: RunInfo,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Train to the end, from the folder's newest whole checkpoint if there is one; returns the final metrics.

    A finished run is not run again: its metrics are read from `result.json`. `stop` is polled between
    rollout batches; when it says so, a checkpoint is written and Interrupted raised. Raises ValueError for a
    configuration that cannot run and for a folder that holds another one; NonFiniteLoss as it says.

    Under torchrun all ranks call it (`suite.launch.ranks`); rank 0 writes, and `on_progress` and `stop` are its own.
    """
    from suite import checkpoint, distributed
    from suite.export import export
    from suite.provenance import machine, provenance
    from suite.tracking import Silent, Tracker
    from suite.train import train
    from suite.validate import validate

    validate(config)
    code = provenance() | {"machine": machine()}
    with distributed.session(config):
        main = distributed.is_main()
        mine: list[Checkpoint | None] = []
        record, metrics = distributed.on_main(lambda: _open(config, folder, info, code, mine))
        if metrics is not None:
            return metrics
        start = mine[0] if main else checkpoint.latest(folder / "checkpoints")
        if config.model.folder:
            distributed.on_main(lambda: export(Path(config.model.folder)))
        tracked = {
            key: record[key] for key in ("study", "arm", "label", "seed", "fingerprint", "differs", "run", *code)
        }
        tracker = Tracker(
            folder, project=info.study, group=info.arm, name=folder.name, config=tracked, run_id=record["run_id"],
            resume_step=start.step if start else 0, resume_rows=start.state["logged"] if start else 0,
        ) if main else Silent()  # fmt: skip
        with tracker:
            outcome = train(config, folder, tracker, start, on_progress=on_progress if main else None, stop=stop)
        distributed.on_main(lambda: _close(config, folder, outcome, tracker, code, stop))
    return outcome.metrics


def _open(
    config: RunConfig, folder: Path, info: RunInfo, code: dict[str, Any], start: list[Checkpoint | None]
) -> tuple[dict[str, Any], dict[str, float] | None]:
    """Describe the run in its folder; the description, and the metrics if it is finished. If not, where it goes on
    from is appended to `start`."""
    from suite.checkpoint import restore, write_json
    from suite.tracking import holds, journal_of, read_journal

    identity = fingerprint(config)
    record = {"fingerprint": identity, "seed": config.seed, **asdict(info), **code, "run": to_json(config)}
    described, result = folder / "config.json", folder / "result.json"
    found = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {"fingerprint": identity}
    if found["fingerprint"] != identity:
        raise ValueError(
            f"{folder} holds run {found['fingerprint']}, and this configuration is {identity}; take another folder"
        )
    if result.is_file():
        return record, dict(json.loads(result.read_text(encoding="utf-8"))["metrics"])
    folder.mkdir(parents=True, exist_ok=True)

    def rows_are_whole(state: dict[str, Any]) -> bool:
        """Rows that are lost are logged again by training from before them."""
        rows = read_journal(journal_of(folder, state["run_id"]))
        if whole := holds(rows, state["logged"], state.get("rows")):
            return whole
        print(
            f"the journal of rows in {folder / 'wandb'} is not what the checkpoint of step {state['step']} counted, "
            f"{state['logged']} rows; going on from an earlier step",
            flush=True,
        )
        return False

    start.append(restore(folder / "checkpoints", identity, rows_are_whole))
    # kept here too: killed before its first checkpoint, a run is still one run in W&B
    record["run_id"] = start[0].state["run_id"] if start[0] else found.get("run_id") or uuid.uuid4().hex[:12]
    write_json(described, record)
    return record, None


def _close(
    config: RunConfig,
    folder: Path,
    outcome: Outcome,
    tracker: Tracker,
    code: dict[str, Any],
    stop: Callable[[], bool] | None,
) -> None:
    """Write what a finished run leaves."""
    from suite.checkpoint import write_json
    from suite.export import export

    if stop is not None:
        stop()  # whoever has lost the run must not finish it: stop() raises then
    if config.train.export_model:
        export(folder / MODEL)
    rows = {"run_id": tracker.run_id, "logged": tracker.logged, "rows": tracker.rows_hash}
    result = {"step": outcome.step, "weights": outcome.weights, "metrics": outcome.metrics, **rows, **code}
    write_json(folder / "result.json", result)
