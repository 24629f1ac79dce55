"""Checkpoints of several ranks: each writes its parts (torch.distributed.checkpoint), any number of ranks reads."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

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


_NAMES = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    ),
}
"""What torch.distributed.checkpoint's metadata is made of; it pickles them, and a pickle may name anything else."""


class _Names(pickle.Unpickler):
    """Reads a pickle of the known names alone, so that it is data and runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """Reads the metadata of a checkpoint as data, and parts in the checkpoint's own folder alone."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as opened:
                found = _Names(opened).load()
            parts = list(found.storage_data.values())
            if any(Path(part.relative_path).name != str(part.relative_path) for part in parts):
                raise ValueError("it names a file outside its folder")
            if any(part.transform_descriptors for part in parts):
                raise ValueError("it names transformations, which no checkpoint of this project has")
        except (ValueError, AttributeError, EOFError, TypeError, KeyError, IndexError, pickle.UnpicklingError) as error:
            raise ValueError(f"{file} is no checkpoint's metadata: {error}; take another checkpoint") from error
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return cast(Metadata, found)


class Shards(Mapping[str, Mapping[str, torch.Tensor]]):
    """The groups of tensors of such a checkpoint, whole, on the CPU; each is read when it is asked for, and not kept.

    Every rank reads for itself, so that it need not be as many as wrote, nor ask for the same.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        described = _Reader(place).read_metadata().state_dict_metadata
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
            dcp.load(flat, storage_reader=_Reader(self._place), no_dist=True)
        return found

    def __contains__(self, group: object) -> bool:
        return group in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)
