"""What `suite serve` adds to vLLM's workers: methods called by their names, whose answers JSON can say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Extension:
    """Mixed into vLLM's worker class, which refuses names that it has itself: hence the prefix."""

    vllm_config: Any
    _suite_first: tuple[str, Any, Any] | None = None
    """The server's own checkpoint: model, where its weights lie, revision."""

    if TYPE_CHECKING:

        def get_model(self) -> torch.nn.Module: ...

        def reload_weights(self, *, weights_path: str | None = None) -> None: ...

    def suite_describe(self) -> dict[str, Any]:
        """What a learner must know before it hands anything over."""
        from vllm.platforms import current_platform

        model, transfer = self.vllm_config.model_config, self.vllm_config.weight_transfer_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "cpu": bool(current_platform.is_cpu()),
            "transfer": transfer.backend if transfer else "file",
        }

    def suite_fingerprint(self) -> dict[str, Any]:
        """See `suite.rollout.fingerprints.engine_fingerprint`."""
        from suite.rollout.fingerprints import engine_fingerprint

        sums, fused = engine_fingerprint(self.get_model())
        return {"sums": {name: list(value) for name, value in sums.items()}, "fused": fused}

    def suite_reload(self, folder: str = "") -> None:
        """Take the weights of the safetensors in a folder; without one, those of the server's own checkpoint.

        vLLM takes the folder for the model's own from then on, so what was there first is kept here.
        """
        model = self.vllm_config.model_config
        if self._suite_first is None:
            self._suite_first = model.model, model.model_weights, model.revision
        if folder:
            self.reload_weights(weights_path=folder)
        else:
            model.model, model.model_weights, model.revision = self._suite_first
            self.reload_weights()

    def suite_derive(self) -> None:
        """Build anew what a CPU derives from the weights."""
        from vllm.platforms import current_platform

        from suite.rollout.vllm_host import repack

        if current_platform.is_cpu():
            repack(self.get_model())
