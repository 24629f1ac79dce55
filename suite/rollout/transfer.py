"""How weights get from the learner into an engine: through a file that both see."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file

from suite import distributed
from suite.rollout.remote import Remote

FILE = "model.safetensors"

SHARED_MEMORY = Path("/dev/shm")


def private_folder(parent: str = "") -> Path:
    """A new folder in shared memory, or in `parent`, for its maker to remove. Raises ValueError if `parent` is none.

    What killed processes have left in shared memory is removed first.
    """
    if parent and not Path(parent).is_dir():
        raise ValueError(f"rollout.transfer_folder: there is no folder {parent}")
    for left in SHARED_MEMORY.glob("suite-vllm-*"):
        if not Path(f"/proc/{left.name.split('-')[2]}").exists() and os.access(left, os.W_OK):
            shutil.rmtree(left, ignore_errors=True)
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else None
    place = Path(tempfile.mkdtemp(prefix=f"suite-vllm-{os.getpid()}-", dir=parent or shared))
    if parent:
        place.chmod(0o755)  # another user's server reads there
    return place


class Transfer(Protocol):
    """The way to one engine."""

    def send(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Give whole tensors to the engine, in its precision; their size in bytes. All ranks must call it."""
        ...

    def given(self) -> dict[str, torch.Tensor]:
        """What was sent last, in host memory; nothing on a rank that does not keep it."""
        ...


class FileTransfer:
    """A safetensors file, written by rank 0, that engines take through `reload_weights`. It stays until the next one.

    `engine` is None on a rank that leads none. The file is replaced, never written over: who reads the old one goes on.
    The folder goes with this object, or with the process.
    """

    def __init__(self, engine: Remote | None, dtype: str, folder: Path) -> None:
        self._engine, self._dtype, self._folder = engine, getattr(torch, dtype), folder
        if distributed.is_main():
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def send(self, weights: Mapping[str, torch.Tensor]) -> int:
        """See the protocol."""
        size = distributed.on_main(lambda: self.write(weights))
        if self._engine:
            self._engine.ask("reload", str(self._folder))
        return size

    def write(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Write the file; its size in bytes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f".{FILE}"
        plain = {name: tensor.detach().to("cpu", self._dtype).contiguous() for name, tensor in weights.items()}
        save_file(plain, new)
        new.replace(self._folder / FILE)
        return (self._folder / FILE).stat().st_size

    def given(self) -> dict[str, torch.Tensor]:
        """See the protocol; every rank reads the file."""
        return load_file(self._folder / FILE)
