"""Checkpoints: safetensors and one JSON, written whole or not at all, beside the training, verified when read.

Several ranks write theirs with torch.distributed.checkpoint (`suite.sharded_checkpoint`), in the same folders under the
same rules; either kind is read by any number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """Named groups of tensors (policy, generator, reference, optimizer) and the run's state."""

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: dict[str, Any]


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensors_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, hex: equal weights, bit for bit, give equal hashes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: dict[str, Any], *, keep: int
) -> Path:
    """Write folder/step-NNNNNN and drop all but the newest `keep`.

    Files are written beside their place with a manifest of their hashes, brought to the disk, and moved in by one
    rename, so a kill or a power cut at any moment leaves whole checkpoints only.
    """
    partial = begin(folder, step)
    for name, group in tensors.items():
        save_file({key: value.detach().contiguous() for key, value in group.items()}, partial / f"{name}.safetensors")
    return seal(partial, step, state, keep=keep)


def begin(folder: Path, step: int) -> Path:
    """A fresh folder in which the checkpoint of a step is written, to be put in its place by `seal`."""
    # a name of its own: a worker that lost the run, and does not know it yet, may be writing the same step
    partial = folder / f".{name_of(step)}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir(parents=True)
    return partial


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:06d}"


def seal(partial: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Complete a checkpoint that `begin` began and whose tensors are written, and move it in; as `save` says."""
    folder = partial.parent
    place = folder / name_of(step)
    for file in partial.iterdir():
        _to_disk(file)
    write_json(partial / "state.json", {"step": step, **state})
    write_json(partial / MANIFEST, {file.name: file_hash(file) for file in sorted(partial.iterdir())})
    _to_disk(partial)
    if place.exists():
        place.rename(folder / f"{partial.name}.old")
    partial.rename(place)
    _to_disk(folder)
    for old in (*[old for old in _places(folder) if old <= place][keep:], *folder.glob(f".{place.name}.*.old")):
        _remove(old)
    return place


def _to_disk(path: Path) -> None:
    """Have the system write a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(place: Path) -> None:
    # another process may be removing the same; what is left is found by the next
    shutil.rmtree(place, ignore_errors=True)


class Writer:
    """Writes checkpoints in a thread of its own, from copies of the tensors, so that training goes on meanwhile.

    One at a time: the next one waits for the one before. An error of a write is raised by the next call, or at the
    end of the context, which waits for the write under way. `first` runs in the thread before each write.
    """

    def __init__(self, folder: Path, *, keep: int, first: Callable[[], None] = lambda: None) -> None:
        self._folder, self._keep, self._first = folder, keep, first
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: dict[str, Any]) -> None:
        """Start writing what the tensors and the state are now; returns when both are copied."""
        self.wait()
        copies = {
            name: {key: value.detach().to("cpu", copy=True) for key, value in group.items()}
            for name, group in tensors.items()
        }
        self._pending = self._thread.submit(self._write, step, copies, copy.deepcopy(state))

    def save_shards(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: dict[str, Any]) -> None:
        """The same from several ranks, all of which must call it; returns when the checkpoint is written."""
        from suite import sharded_checkpoint

        sharded_checkpoint.save(self._folder, step, tensors, state, keep=self._keep, first=self._first)

    def check(self) -> None:
        """Raise the error of a write that has failed; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written; raises the error of a write that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: dict[str, Any]) -> None:
        self._first()
        save(self._folder, step, tensors, state, keep=self._keep)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.wait()
        elif self._pending is not None and (failed := self._pending.exception()) is not None:
            error.add_note(f"and the checkpoint could not be written: {type(failed).__name__}: {failed}")


def _places(folder: Path) -> list[Path]:
    """Checkpoints, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def is_whole(place: Path) -> bool:
    """Whether every file that the manifest names is there, bit for bit."""
    manifest = place / MANIFEST
    if not manifest.is_file():
        return False
    try:
        hashes = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return all((place / name).is_file() and file_hash(place / name) == value for name, value in hashes.items())


def latest(folder: Path, usable: Callable[[dict[str, Any]], bool] = lambda state: True) -> Checkpoint | None:
    """The newest whole checkpoint whose state is usable, or None; a damaged one is passed over for the one before."""
    for place in _places(folder):
        if is_whole(place):
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            if usable(state):
                return Checkpoint(state["step"], _tensors(place), state)
    return None


def _tensors(place: Path) -> Mapping[str, Mapping[str, torch.Tensor]]:
    from suite.sharded_checkpoint import Shards

    if Shards.lie_in(place):
        return Shards(place)
    return {file.stem: load_file(file) for file in sorted(place.glob("*.safetensors"))}


def restore(
    folder: Path, identity: str, usable: Callable[[dict[str, Any]], bool] = lambda state: True
) -> Checkpoint | None:
    """The newest whole and usable checkpoint of a run, or None; newer ones and half-written ones are removed.

    Only the run's owner may call it. Raises ValueError if the checkpoint is of another configuration.
    """
    found = latest(folder, usable)
    newer = [place for place in _places(folder) if found is None or place.name > f"step-{found.step:06d}"]
    for left in (*newer, *folder.glob(".step-*")):
        _remove(left)
    if found and found.state["fingerprint"] != identity:
        raise ValueError(
            f"the checkpoint in {folder} is of configuration {found.state['fingerprint']}, this run is {identity}; "
            "move it away or run in another folder"
        )
    return found


def save_failure(folder: Path, step: int, batch: Mapping[str, Any], error: str) -> None:
    """Keep the tensors that a failed step was fed, and the error."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, folder / "batch.safetensors")
    write_json(folder / "failure.json", {"step": step, "error": error})
