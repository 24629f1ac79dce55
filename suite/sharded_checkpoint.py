"""Checkpoints of several ranks: each writes its parts (torch.distributed.checkpoint), any number of ranks reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from suite import checkpoint, distributed

_BETWEEN = "/"
"""Between the names of a group and of a tensor."""


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, torch.Tensor]],
    state: dict[str, Any],
    *,
    keep: int,
    first: Callable[[], None] = lambda: None,
) -> None:
    """Write folder/step-NNNNNN as `suite.checkpoint.save` does, whole or not at all; all ranks must call it.

    Each rank writes the parts that it holds, and of what all hold one part; rank 0 the rest, after `first`. It returns
    when the checkpoint is in its place. The folder must be one that all ranks see.
    """

    def begin() -> Path:
        first()
        return checkpoint.begin(folder, step)

    partial = distributed.on_main(begin)
    flat = {f"{group}{_BETWEEN}{name}": value for group, part in tensors.items() for name, value in part.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(flat, checkpoint_id=partial)
    distributed.on_main(lambda: str(checkpoint.seal(partial, step, state, keep=keep)))


class Shards(Mapping[str, Mapping[str, torch.Tensor]]):
    """The groups of tensors of such a checkpoint, whole, on the CPU; each is read when it is asked for, and not kept.

    Every rank reads for itself, so that it need not be as many as wrote, nor ask for the same.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        described = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
        self._groups: dict[str, dict[str, TensorStorageMetadata]] = {}
        for key, tensor in described.items():
            group, _, name = key.partition(_BETWEEN)
            assert isinstance(tensor, TensorStorageMetadata)
            self._groups.setdefault(group, {})[name] = tensor

    @staticmethod
    def lie_in(place: Path) -> bool:
        """Whether the checkpoint in a folder is one of several ranks."""
        return (place / ".metadata").is_file()

    def __getitem__(self, group: str) -> dict[str, torch.Tensor]:
        found = {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in self._groups[group].items()}
        flat = {f"{group}{_BETWEEN}{name}": tensor for name, tensor in found.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(flat, checkpoint_id=self._place, no_dist=True)
        return found

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)
