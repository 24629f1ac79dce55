"""AdamW, its learning rate as a function of the step, and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from suite import sharding
from suite.config import OptimConfig


def build(parameters: Iterable[torch.nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on all parameters."""
    return torch.optim.AdamW(
        list(parameters),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (0-based) of `steps`: linear warm-up to the peak, then the schedule down to 0.

    With a warm-up of w steps, step w - 1 is the first at the peak; `linear` and `cosine` would reach 0 at step `steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    return config.lr * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter number and name ("3.exp_avg")."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{index}.{name}": torch.as_tensor(value).contiguous()
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put back what `state_tensors` gave."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.state.clear()
    for key, tensor in tensors.items():
        index, name = key.split(".")
        parameter = parameters[int(index)]
        # a moment lies as its parameter does; the count of steps is a number on the CPU
        mine = sharding.like(tensor, parameter) if tensor.shape == parameter.shape else tensor
        optimizer.state[parameter][name] = mine.clone()
