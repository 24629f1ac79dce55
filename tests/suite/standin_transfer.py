"""A backend of vLLM's weight transfer that needs no GPU: files instead of NCCL or IPC, all else as vLLM does it.

vLLM finds it in every process of an engine through a plugin's entry point, which `installed` lays in a folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

NAME = "standin"


def installed(folder: Path) -> Path:
    """A folder to be put on the path of an engine that is to know this backend."""
    described = folder / "standin-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nstandin = standin_transfer:register\n")
    return folder


@dataclass
class InitInfo(base.WeightTransferInitInfo):
    folder: str


@dataclass
class UpdateInfo(base.WeightTransferUpdateInfo):
    names: list[str]
    file: str


class Receiver(base.WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.folder = Path(init_info.folder)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        found = load_file(self.folder / update_info.file)
        self.model.load_weights((name, found[name]) for name in update_info.names)

    def shutdown(self) -> None:
        pass


@dataclass
class TrainerInfo(base.TrainerInitInfo):
    backend: ClassVar[str] = NAME
    folder: str


class Sender(base.TrainerWeightTransferEngine[TrainerInfo]):
    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: Any = None) -> Sender:
        sender = cls(client=client, source=source, is_sender=init_info.is_sender)
        sender.folder = Path(init_info.folder)
        sender.folder.mkdir()
        client.init_weight_transfer_engine({"folder": init_info.folder})
        return sender

    def send_weights(self) -> None:
        """In two messages, as a large model needs several."""
        self.client.start_weight_update()
        pairs = list(self.source)
        assert [(meta.name, meta.shape) for meta in self.source.metadata()] == [(n, tuple(t.shape)) for n, t in pairs]
        for number, part in enumerate((pairs[::2], pairs[1::2])):
            save_file({name: tensor.contiguous() for name, tensor in part}, self.folder / f"{number}.safetensors")
            self.client.update_weights({"names": [name for name, _ in part], "file": f"{number}.safetensors"})
        self.client.finish_weight_update()


def register() -> None:
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiver)
        WeightTransferTrainerFactory.register_engine(NAME, Sender)
