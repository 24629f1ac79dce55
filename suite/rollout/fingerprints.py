"""Checksums by which the tensors of an engine and of a learner can be compared bit for bit, across layouts.

A checksum is the sum of the elements' bit patterns, so it is the same for a transposed tensor, adds up over the parts
of a fused one and over the shards of a split one, and padding with zeros leaves it alone. A packed layer, whose weight
is kept in a kernel's own format, is read through the kernel: fed with unit vectors, it answers with columns of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from suite.randomness import permutation

WHOLE = 0
"""What a checksum covers: the whole tensor, or, of parts of so many columns each, those that `columns` names."""

MOST_COLUMNS = 64
"""Columns of a packed weight that are read; every row is covered by each."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.lru_cache(maxsize=256)
def columns(width: int) -> tuple[int, ...]:
    """Which columns of a packed weight stand for it: all of a narrow one, a keyed choice of a wide one."""
    return tuple(sorted(permutation(width, "columns of a packed weight")[:MOST_COLUMNS]))


def bits(tensor: torch.Tensor) -> int:
    """The sum of the elements' bit patterns, modulo 2^64; -0 counts as 0."""
    # eight bits are not for arithmetic: they are a quantised layer's, and never a -0 of the learner's
    signed = tensor.is_floating_point() and tensor.element_size() > 1
    plain = (tensor.detach() + 0.0 if signed else tensor.detach()).contiguous()
    return int(plain.view(_WORDS[plain.element_size()]).sum(dtype=torch.int64))


def engine_fingerprint(model: torch.nn.Module) -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
    """The checksums of all that a vLLM model computes with, by name, and its fused modules. Runs in the engine."""
    found: dict[str, tuple[int, int]] = {}
    packed = {name: module for name, module in model.named_modules() if hasattr(module, "cpu_linear")}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            found[name] = WHOLE, bits(parameter.data)
    for name, module in packed.items():
        width, dtype = _width(module), model_dtype(model)
        if width and hasattr(module, "weight"):
            unit = torch.zeros((len(columns(width)), width), dtype=dtype)
            unit[range(len(columns(width))), columns(width)] = 1.0
            with torch.no_grad():
                found[f"{name}.weight (packed)"] = width, bits(module.cpu_linear(unit, module.weight, None))
    return found, {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}


def _width(module: torch.nn.Module) -> int:
    """Inputs of a packed layer (on this rank), 0 if it does not say."""
    for attribute in ("input_size_per_partition", "embedding_dim"):
        if isinstance(width := getattr(module, attribute, None), int):
            return width
    return 0


def model_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of a model's floating-point parameters."""
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def learner_fingerprint(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype, kinds: Iterable[int]
) -> dict[str, dict[int, int]]:
    """Checksums of the learner's weights as the engine would hold them in its dtype: name -> what is covered -> sum."""
    out: dict[str, dict[int, int]] = {}
    known: dict[tuple[int, torch.Size], dict[int, int]] = {}
    wanted = set(kinds)
    for name, tensor in weights.items():
        place = tensor.data_ptr(), tensor.shape
        if place not in known:  # tied weights are read once
            cast = tensor.detach().to(dtype)
            known[place] = {kind: value for kind in wanted if (value := _sum(cast, kind)) is not None}
        out[name] = known[place]
    return out


def _sum(tensor: torch.Tensor, kind: int) -> int | None:
    """The checksum of what a kind covers, None where the tensor does not fall into parts of so many columns."""
    if kind == WHOLE:
        return bits(tensor)
    if tensor.ndim != 2 or tensor.shape[1] % kind:
        return None
    parts = range(0, tensor.shape[1], kind)
    return bits(tensor[:, [first + column for first in parts for column in columns(kind)]])


def expected(
    name: str, kind: int, learner: Mapping[str, Mapping[int, int]], fused: Mapping[str, Sequence[str]]
) -> int | None:
    """The checksum that the engine's tensor must have, or None where the learner has no tensor of that name."""
    sources = [name.removesuffix(" (packed)")]
    for whole, parts in fused.items():
        if f".{whole}." in name:
            sources = [sources[0].replace(f".{whole}.", f".{part}.") for part in parts]
    if any(kind not in learner.get(source, {}) for source in sources):
        return None
    return wrapped(sum(learner[source][kind] for source in sources))


def wrapped(value: int) -> int:
    """An integer modulo 2^64, signed, as 64-bit sums come out."""
    return (value + 2**63) % 2**64 - 2**63
