"""Weights from GPU to GPU through vLLM's own weight transfer. Not run on a GPU yet: `make test-gpu` does."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

from suite import distributed
from suite.rollout.remote import Remote


class Weights(base.WeightSource):
    """The tensors of the hand-over under way, as vLLM's sender reads them: cast one by one, on this rank's device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.now = dtype, dict[str, torch.Tensor]()

    def metadata(self) -> list[base.ParamMeta]:
        """Names, precision and shapes."""
        return [base.ParamMeta(name, self.dtype, tuple(tensor.shape)) for name, tensor in self.now.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.now.items():
            yield name, tensor.detach().to(distributed.device(), self.dtype)


class _Client:
    """What vLLM's sender asks of the engine's side."""

    def __init__(self, engine: Remote | None) -> None:
        self._engine = engine

    def _ask(self, name: str, *arguments: Any) -> None:
        assert self._engine is not None, "only a rank that leads an engine asks"
        self._engine.ask(name, *arguments)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("shutdown_weight_transfer_engine")  # the connection of an earlier run
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update")


def ipc(largest: int, leads: bool) -> base.TrainerInitInfo:
    """For an engine on the GPUs of these ranks, all of which must call it; `largest`: bytes of the largest tensor."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    # a buffer that tensors pass through, one after the other, and so no smaller than any of them
    size = max(DEFAULT_PACKED_BUFFER_SIZE_BYTES, largest)
    return IPCTrainerInitInfo(rank=0 if leads else 1, packed=True, packed_buffer_size_bytes=size)


def nccl(engine: Remote | None, host: str) -> base.TrainerInitInfo:
    """For a server on other GPUs, which rank 0 leads and to which it alone sends; `host` is where it listens."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    if engine is None:
        return NCCLTrainerInitInfo("", 0, 0, rank=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it asks for this machine's address on the way there
        address = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    return NCCLTrainerInitInfo(address, port, 1 + engine.ask("world_size"), rank=0)


class DirectTransfer:
    """vLLM's weight transfer, by the backend that `info` names; see `suite.rollout.transfer.Transfer`.

    Rank 0 keeps a copy of what it sent in host memory, for checkpoints.
    """

    def __init__(self, engine: Remote | None, dtype: str, info: base.TrainerInitInfo) -> None:
        self._source = Weights(getattr(torch, dtype))
        self._given: dict[str, torch.Tensor] = {}
        self._sender = WeightTransferTrainerFactory.trainer_init(info, client=_Client(engine), source=self._source)

    def send(self, weights: Mapping[str, torch.Tensor]) -> int:
        """See the protocol."""
        self._source.now = dict(weights)
        try:
            self._sender.send_weights()
        finally:
            self._source.now = {}
        size = sum(tensor.numel() for tensor in weights.values()) * self._source.dtype.itemsize
        if distributed.is_main():
            self._given = {name: tensor.detach().to("cpu", self._source.dtype) for name, tensor in weights.items()}
        return size

    def given(self) -> dict[str, torch.Tensor]:
        """See the protocol."""
        return self._given
