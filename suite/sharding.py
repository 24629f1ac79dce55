"""A model spread over ranks (FSDP2), and how its passes are computed: precision, recomputation, compiling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint as recomputed

from suite import distributed
from suite.config import LearnerConfig, RunConfig


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a model's authors name as indivisible: its decoder layers."""
    names = {name for part in model.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    return [part for part in model.modules() if type(part).__name__ in names]


def prepare(model: torch.nn.Module, config: RunConfig, *, trains: bool, whole: Iterable[torch.nn.Module] = ()) -> None:
    """Make a model ready, in place, for this rank: layers recomputed or compiled as configured, then sharded.

    A decoder layer is a shard group of its own, what is left another. Gradients are summed over ranks, in fp32;
    `whole` names modules that compute in the precision of their weights whatever the configuration. Parameters are
    replaced: an optimizer must be built afterwards, and copies be made before.

    Raises ValueError if layers are to be recomputed or compiled and the model names none.
    """
    layers = decoder_layers(model)
    for option in ("activation_checkpointing", "compile"):
        if getattr(config.learner, option) and not layers:
            raise ValueError(f"learner.{option} is on, but {type(model).__name__} names no decoder layers; turn it off")
    if trains and config.learner.activation_checkpointing:
        for part in model.modules():
            if hasattr(part, "config") and hasattr(part.config, "use_cache"):
                part.config.use_cache = False  # a cache would be filled again by the second pass
        for layer in layers:
            layer.forward = partial(_layer, layer.forward)
    if trains and config.learner.compile:
        for layer in layers:
            layer.compile(dynamic=True)
    if distributed.shards(config):
        _shard(model, layers, whole, config.learner)


def _layer(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """A layer that keeps its inputs alone for the backward pass, and runs again there."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return recomputed(forward, *arguments, use_reentrant=False, **named)


def _shard(
    model: torch.nn.Module, layers: list[torch.nn.Module], whole: Iterable[torch.nn.Module], config: LearnerConfig
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(distributed.device().type, (distributed.size(),))
    compute = None if config.compute_dtype == "model" else getattr(torch, config.compute_dtype)
    plain = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for part in whole:
        fully_shard(part, mesh=mesh, mp_policy=plain)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # losses are divided by counts over all ranks already: their gradients add up
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all ranks' parts. All ranks must call it for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A module's state, or an optimizer's, with all ranks' parts of every tensor. All ranks must call it."""
    return {name: full(tensor) for name, tensor in tensors.items()}


def like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A whole tensor's values, laid out as the target: on its device, and this rank's part alone if it is sharded."""
    if not isinstance(target, DTensor):
        return tensor.to(target.device)
    here = tensor.to(target.device)
    return distribute_tensor(here, target.device_mesh, target.placements, src_data_rank=None)


@torch.no_grad()
def load(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put whole tensors into a model, sharded or not. Raises RuntimeError if a name or shape does not fit."""
    live = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in live.values()):
        model.load_state_dict(tensors)
        return
    if odd := live.keys() ^ tensors.keys():
        raise RuntimeError(f"the model's tensors and the given ones differ: {', '.join(sorted(odd))}")
    for name, tensor in live.items():
        if tensor.shape != tensors[name].shape:
            raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}, the given one {tuple(tensors[name].shape)}")
        tensor.copy_(like(tensors[name], tensor))


def clip(parameters: Iterable[torch.nn.Parameter], limit: float) -> float:
    """Scale gradients down to a global norm of `limit` (0: never); the norm before, over all ranks."""
    return float(full(torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)))


def cast(model: torch.nn.Module, config: RunConfig) -> torch.nn.Module:
    """The model with its parameters, not its buffers, in the precision that the learner computes in; in place."""
    if config.learner.compute_dtype != "model":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.learner.compute_dtype))
    return model
