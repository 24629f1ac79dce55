"""The sampler whose completions come from a vLLM engine; every load of weights into it is verified."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from suite.protocols import Completion, Request, Sampling
from suite.randomness import generator
from suite.rollout.sync import FOLLOWING, SyncError, Verifier, score
from suite.rollout.vllm_engine import Answered, Engine

FILE = "model.safetensors"


def request_seed(request: Request) -> int:
    """The seed of a request's own noise in vLLM, from its key alone."""
    return int(generator(*request.key, "vllm").integers(2**62))


class VllmSampler:
    """Draws completions from an engine; its weights change only in `load`, which proves that they are the given ones.

    `model` serves for scoring probes under the weights that are handed over; it stays as it is.
    """

    def __init__(
        self, engine: Engine, model: PreTrainedModel, *, stop_ids: Iterable[int], probes: Sequence[tuple[int, ...]]
    ) -> None:
        self.version = -1
        self._engine, self._model, self._probes = engine, model, tuple(probes)
        self._stop_ids = sorted(stop_ids)
        self._verifier = Verifier(engine.settings.dtype)
        self._measured: dict[str, float] = {}
        if not engine.comparable:
            held, fused = engine.ask("fingerprint")
            try:
                engine.comparable = self._verifier.calibrate(held, fused, model.state_dict())
            except SyncError:
                engine.close()
                raise

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Hand weights over and prove that they arrived. Raises SyncError, and ends the engine, if they did not."""
        began = time.perf_counter()
        try:
            if self.version >= 0:
                self._verifier.unchanged(self._engine.ask("fingerprint")[0])
            size = self._write(weights)
            self._engine.ask("reload", str(self._engine.place / "weights"))
            self._engine.ask("derive")
            self._engine.ask("forget")
            held, fused = self._engine.ask("fingerprint")
            seen = self._engine.ask("probe", self._probes, FOLLOWING)
            scores = score(self._model, weights, self._probes)
            gap = self._verifier.check(version, weights, scores, seen, held, fused, self._engine.comparable)
        except Exception:
            self._engine.close()
            raise
        self.version = version
        seconds = time.perf_counter() - began
        self._measured = {"sync/logprob_gap": gap, "sync/seconds": seconds, "sync/bytes": float(size)}

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that it samples from; unless a window is under way, proven to be in the engine still."""
        if not self._engine.generating:
            self._verifier.unchanged(self._engine.ask("fingerprint")[0])
        found = load_file(self._engine.place / "weights" / FILE)
        return {name: found[first] for name, first in self._aliases(self._model.state_dict()).items()}

    def measured(self) -> dict[str, float]:
        """What the last load took and showed, once."""
        out, self._measured = self._measured, {}
        return out

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; a request's seed comes from its key."""
        # to its end: a stream left open would be given up by the next request
        return [completion for batch in self.window([requests], sampling) for completion in batch]

    def window(self, batches: Sequence[Sequence[Request]], sampling: Sampling) -> Iterator[list[Completion]]:
        """The completions of several batches from one engine call, each as soon as it is complete."""
        limit = self._engine.settings.max_model_len
        longest = max((len(request.prompt_ids) for batch in batches for request in batch), default=0)
        if longest + sampling.max_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and a completion budget of {sampling.max_tokens} exceed the engine's "
                f"{limit} tokens; raise rollout.max_model_len or lower the budget"
            )
        asked = [[(request.prompt_ids, request_seed(request)) for request in batch] for batch in batches]
        options: dict[str, Any] = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens, "stop_token_ids": self._stop_ids,
        }  # fmt: skip
        for answered in self._engine.stream(asked, options):
            yield [self._completion(one) for one in answered]

    def _completion(self, answered: Answered) -> Completion:
        ids, logprobs = answered
        return Completion(ids, logprobs, "stop" if ids[-1] in self._stop_ids else "length", self.version)

    def _write(self, weights: Mapping[str, torch.Tensor]) -> int:
        """One safetensors file in the engine's dtype, in shared memory; its size in bytes. A tied tensor goes once."""
        dtype = getattr(torch, self._engine.settings.dtype)
        names = dict.fromkeys(self._aliases(weights).values())
        folder = self._engine.place / "weights"
        folder.mkdir(exist_ok=True)
        plain = {name: weights[name].detach().to("cpu", dtype).contiguous() for name in names}
        save_file(plain, folder / FILE)
        return (folder / FILE).stat().st_size

    def _aliases(self, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Every name and the first name of the same tensor: tied weights are one."""
        if not self._model.config.get_text_config().tie_word_embeddings:
            return {name: name for name in weights}
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        places = {id(module): name for name, module in self._model.named_modules()}
        tied = {f"{places[id(head)]}.weight": f"{places[id(embedding)]}.weight"}
        return {name: tied.get(name, name) for name in weights}
