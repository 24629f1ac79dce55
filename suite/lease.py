"""Who works on which cell: leases with a fencing number, kept in the attributes of Optuna's trials.

A trial goes WAITING -> RUNNING when it is claimed, and back to WAITING when its worker gives it up or is lost. Each
claim raises the lease's number, and every later write checks number and owner under the storage's lock, so a worker
that lost its cell can write nothing to it any more. A trial ends as COMPLETE or FAIL, which is final in Optuna.

No clock is compared between machines: whether an owner still lives is judged by how long, on the observer's own
monotonic clock, its heartbeat counter has not changed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from suite.failures import Failure, Retries
from suite.storage import Store

HEARTBEAT_S = 2.0
"""Seconds between a worker's heartbeats."""
TTL_S = 60.0
"""Seconds without a heartbeat after which a cell is taken from its owner."""


HANG_S = 1800.0
"""Seconds without progress after which a cell counts as hung."""


class LeaseLost(RuntimeError):
    """The cell belongs to somebody else now; nothing may be written to it."""


@dataclass(frozen=True)
class Lease:
    """The right to work on one cell."""

    trial: int
    """Optuna's id of the trial in the storage."""
    number: int
    """The fencing number: 1 for the first claim of a cell, one more for each later claim. Also the attempt's number."""
    owner: str
    cell: str
    """The cell's name."""
    arm: str
    seed: int
    fingerprint: str
    reached: int
    """Last optimizer step that an earlier attempt reported, 0 if none."""


def lease_of(trial: FrozenTrial) -> tuple[int, str]:
    """(number, owner) of a trial's lease; the owner is empty when nobody holds it.

    Raises ValueError if the record is not what a claim writes, as after an edit by hand.
    """
    record = trial.user_attrs.get("lease")
    match record:
        case {"number": int(number), "owner": str(owner)} if number >= 0:
            return number, owner
    cell = trial.user_attrs.get("cell", f"trial {trial.number}")
    raise ValueError(f"the lease of cell {cell} reads {json.dumps(record)} and not a number with an owner")


def _machine() -> str:
    """Names the set of processes whose ids can be compared with ours; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:8]}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _birth(process: int) -> str | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def new_owner(name: str = "") -> str:
    """An owner's name for this process, never given twice: host, process, machine, and a random part."""
    process = os.getpid()
    return "|".join(
        (socket.gethostname(), str(process), _birth(process) or "", _machine(), name or uuid.uuid4().hex[:12])
    )


def is_gone(owner: str) -> bool:
    """Whether the owner is known to be dead: a process of this machine that no longer runs."""
    parts = owner.split("|")
    if len(parts) != 5 or not parts[3] or parts[3] != _machine() or not parts[1].isdecimal():
        return False
    return _birth(int(parts[1])) != parts[2]


class Watch:
    """Finds owners that show no sign of life. Keep one per process and look often: time passes only between looks.

    One look counts for at most twice the heartbeat's interval, so that an observer that slept, or a storage that did
    not answer, takes no cell from a worker that could not be heard.
    """

    def __init__(self, ttl_s: float = TTL_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.ttl_s, self._most_s = ttl_s, 2 * heartbeat_s
        self._seen: dict[int, tuple[object, float]] = {}
        self._looked: float | None = None

    def silent(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """The running trials whose lease and heartbeat have not changed for the time to live."""
        now = time.monotonic()
        gap = 0.0 if self._looked is None else min(now - self._looked, self._most_s)
        self._looked = now
        seen: dict[int, tuple[object, float]] = {}
        for trial in trials:
            sign = (json.dumps(trial.user_attrs.get("lease")), _beat(trial))
            before, quiet = self._seen.get(trial._trial_id, (None, 0.0))
            seen[trial._trial_id] = (sign, quiet + gap if before == sign else 0.0)
        self._seen = seen
        return [trial for trial in trials if seen[trial._trial_id][1] >= self.ttl_s]


def _beat(trial: FrozenTrial) -> int:
    return int(trial.user_attrs.get("progress", {}).get("beat", 0))


def last_step(trial: FrozenTrial) -> int:
    """The last optimizer step that any of the trial's workers reported, 0 if none."""
    attempts = trial.user_attrs.get("attempts", [])
    return max([int(trial.user_attrs.get("progress", {}).get("step", 0)), *(attempt["step"] for attempt in attempts)])


class Leases:
    """Claims, renews and ends the leases of one Optuna study, under the storage's lock. Every call may be repeated."""

    def __init__(self, store: Store, study: optuna.Study, retries: Retries | None = None) -> None:
        self.store, self.study, self.retries = store, study, retries or Retries()

    def claim(self, owner: str, wanted: Callable[[FrozenTrial], bool]) -> Lease | None:
        """The lease of the first waiting trial that is wanted, in order of creation; None if there is none."""

        def action() -> Lease | None:
            with self.store.lock():
                trials = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
                for trial in trials:
                    # The claim arrived although its confirmation did not.
                    if trial.state == TrialState.RUNNING and owner_of(trial) == owner:
                        return _lease(trial, lease_of(trial)[0], owner)
                for trial in trials:
                    if trial.state == TrialState.WAITING and wanted(trial):
                        number = number_of(trial) + 1
                        if self.store.optuna.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                            self._set(trial._trial_id, lease={"number": number, "owner": owner})
                            return _lease(trial, number, owner)
            return None

        return self.store.call(action)

    def renew(self, lease: Lease, progress: Mapping[str, Any]) -> None:
        """Shows a sign of life, with the progress made. Raises LeaseLost if the cell belongs to somebody else."""

        def action() -> None:
            with self.store.lock():
                trial = self._held(lease)
                self._set(lease.trial, progress={**progress, "beat": _beat(trial) + 1})

        self.store.call(action)

    def mark(self, lease: Lease, code: str) -> None:
        """Records the code that works on the cell, beside any other code that did. Raises LeaseLost."""

        def action() -> None:
            with self.store.lock():
                before = self._held(lease).user_attrs.get("code", [])
                if code not in before:
                    self._set(lease.trial, code=[*before, code])

        self.store.call(action)

    def note(self, lease: Lease, step: int, value: float) -> None:
        """Reports an intermediate value of the trial, for the Optuna dashboard."""

        def action() -> None:
            with self.store.lock():
                self._held(lease)
                self.store.optuna.set_trial_intermediate_value(lease.trial, step, value)

        self.store.call(action)

    def finish(self, lease: Lease, value: float, **attrs: Any) -> None:
        """Ends the trial as COMPLETE. Raises LeaseLost if the cell belongs to somebody else."""
        assert math.isfinite(value)

        def action() -> None:
            with self.store.lock():
                trial = self.store.optuna.get_trial(lease.trial)
                if trial.state == TrialState.COMPLETE and owner_of(trial) == lease.owner:
                    return
                self._held(lease)
                self._set(lease.trial, **attrs)
                self.store.optuna.set_trial_state_values(lease.trial, TrialState.COMPLETE, [value])

        self.store.call(action)

    def release(self, lease: Lease) -> None:
        """Gives the cell back to the queue. Raises LeaseLost if it belongs to somebody else."""

        def action() -> None:
            with self.store.lock():
                self._held(lease)
                self._requeue(lease.trial, lease.number)

        self.store.call(action)

    def fail(self, lease: Lease, failure: Failure) -> bool:
        """Records a failed attempt; True if the cell goes back to the queue, False if the trial ends as FAIL."""

        def action() -> bool:
            with self.store.lock():
                return self._failed(self._held(lease), lease.number, lease.owner, failure)

        return self.store.call(action)

    def expire(self, trial: FrozenTrial, failure: Failure) -> bool:
        """Takes a cell from an owner that is gone; False if it was no longer that owner's when looked at again.

        The former owner's later writes are refused.
        """

        def action() -> bool:
            with self.store.lock():
                now = self.store.optuna.get_trial(trial._trial_id)
                if now.state != TrialState.RUNNING or now.user_attrs.get("lease") != trial.user_attrs.get("lease"):
                    return False
                self._failed(now, number_of(now), owner_of(now), failure)
                return True

        return self.store.call(action)

    def _held(self, lease: Lease) -> FrozenTrial:
        trial = self.store.optuna.get_trial(lease.trial)
        if trial.state != TrialState.RUNNING or (number_of(trial), owner_of(trial)) != (lease.number, lease.owner):
            raise LeaseLost(f"cell {lease.cell} was taken from this worker (lease {lease.number})")
        return trial

    def _failed(self, trial: FrozenTrial, number: int, owner: str, failure: Failure) -> bool:
        record = {
            "number": number,
            "owner": owner,
            "kind": failure.kind,
            "step": failure.step,
            "reason": failure.reason,
        }
        attempts = [*trial.user_attrs.get("attempts", []), record]
        self._set(trial._trial_id, attempts=attempts, reason=failure.reason)
        if self.retries.exhausted(attempts):
            self.store.optuna.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            return False
        self._requeue(trial._trial_id, number)
        return True

    def _requeue(self, trial: int, number: int) -> None:
        # The lease is voided before the trial is free, so that no moment exists in which its old owner could write.
        self._set(trial, lease={"number": number, "owner": ""})
        self.store.optuna.set_trial_state_values(trial, TrialState.WAITING)

    def _set(self, trial: int, **attrs: Any) -> None:
        for name, value in attrs.items():
            self.store.optuna.set_trial_user_attr(trial, name, value)


def _lease(trial: FrozenTrial, number: int, owner: str) -> Lease:
    attrs = trial.user_attrs
    cell, arm, seed, key = attrs["cell"], attrs["arm"], attrs["seed"], attrs["fingerprint"]
    return Lease(trial._trial_id, number, owner, cell, arm, seed, key, last_step(trial))


def number_of(trial: FrozenTrial) -> int:
    """The lease's number; after an edit by hand, the number of attempts that are on record."""
    try:
        return lease_of(trial)[0]
    except ValueError:
        return len(trial.user_attrs.get("attempts", []))


def owner_of(trial: FrozenTrial) -> str:
    """The lease's owner. After an edit by hand it is nobody: whoever held it is refused, and the cell is taken back."""
    try:
        return lease_of(trial)[1]
    except ValueError:
        return ""
