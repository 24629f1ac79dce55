"""Checkpoints: safetensors and one JSON, written whole or not at all, verified when read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """Named groups of tensors (policy, generator, reference, optimizer) and the run's state."""

    step: int
    tensors: dict[str, dict[str, torch.Tensor]]
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

    Files are written beside their place with a manifest of their hashes and moved in by one rename, so a
    kill at any moment leaves whole checkpoints only.
    """
    place = folder / f"step-{step:06d}"
    partial = folder / f".{place.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, group in tensors.items():
        save_file({key: value.detach().contiguous() for key, value in group.items()}, partial / f"{name}.safetensors")
    write_json(partial / "state.json", {"step": step, **state})
    write_json(partial / MANIFEST, {file.name: file_hash(file) for file in sorted(partial.iterdir())})
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    for old in _places(folder)[keep:]:
        shutil.rmtree(old)
    return place


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
    except json.JSONDecodeError:
        return False
    return all((place / name).is_file() and file_hash(place / name) == value for name, value in hashes.items())


def latest(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None; a damaged one is passed over for the one before it."""
    for place in _places(folder):
        if is_whole(place):
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            tensors = {file.stem: load_file(file) for file in sorted(place.glob("*.safetensors"))}
            return Checkpoint(state["step"], tensors, state)
    return None


def restore(folder: Path, identity: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run, or None. Raises ValueError if it is of another configuration."""
    found = latest(folder)
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
