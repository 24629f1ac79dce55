"""The sampler in the learner's process: a transformers model, a key-value cache and keyed noise."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from suite import distributed
from suite.batch import pad
from suite.failures import SyncError
from suite.protocols import Completion, Request, Sampling
from suite.randomness import generator


def processed_logprobs(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities after temperature, top-k and top-p, renormalised over what is kept; fp32.

    Temperature 0 leaves the distribution of temperature 1: the draw is then the arg max.
    Top-p keeps the smallest set of most probable tokens whose mass reaches p, always at least one.
    """
    logits = logits_BV.float() / (sampling.temperature or 1.0)
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, index, before >= sampling.top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits.log_softmax(-1)


def draw(logprobs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the uniform; none of probability 0."""
    cumulative = logprobs_BV.double().exp().cumsum(-1)
    target = (uniform_B.double() * cumulative[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logprobs_BV.shape[-1] - 1)


def verify_copy(generator: object, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Raises SyncError unless a sampler of this process holds these weights, bit for bit, under this version.

    Engines verify their own loads, in ways that do not need a second copy of the weights.
    """
    if not isinstance(generator, InProcessSampler):
        return
    held = generator.weights()
    wrong = [
        name
        for name, value in weights.items()
        if name not in held or not torch.equal(held[name], value.to(held[name].device, held[name].dtype))
    ]
    if wrong or generator.version != version:
        what = f"{len(wrong)} of {len(weights)} tensors, {wrong[0]} first" if wrong else f"version {generator.version}"
        raise SyncError(f"the sampler does not hold the weights of step {version} that it was given: {what}")


class InProcessSampler:
    """Draws completions from a model in this process, whose weights change only in `load`.

    With `spread`, all ranks hold the weights and must make the same calls: each computes every n-th chunk, and all get
    all completions. Chunks are the same whatever the number of ranks, and so is what they give.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_id: int,
        stop_ids: Iterable[int],
        chunk_size: int = 256,
        version: int = 0,
        spread: bool = False,
    ) -> None:
        self.model, self.version, self._spread = model, version, spread
        self._pad_id, self._stop_ids, self._chunk_size = pad_id, torch.tensor(sorted(stop_ids)), chunk_size

    def separate(self) -> InProcessSampler:
        """The same sampler on a copy of the weights."""
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model).requires_grad_(False)
        return twin

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Copy weights in. Raises RuntimeError if a name or shape does not fit."""
        self.model.load_state_dict(weights)
        self.version = version

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that it samples from."""
        return self.model.state_dict()

    def measured(self) -> dict[str, float]:
        """Nothing: a load in this process is a copy, bit for bit."""
        return {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order. Noise is keyed per request and position."""
        starts = range(0, len(requests), self._chunk_size)
        chunks = [requests[start : start + self._chunk_size] for start in starts]
        if self._spread:
            found = distributed.in_turns(chunks, lambda chunk: self._chunk(chunk, sampling))
        else:
            found = [self._chunk(chunk, sampling) for chunk in chunks]
        return [completion for chunk in found for completion in chunk]

    def window(self, batches: Sequence[Sequence[Request]], sampling: Sampling) -> Iterator[list[Completion]]:
        """The completions of several batches, one after the other: the forward passes are those of single batches."""
        for requests in batches:
            yield self.generate(requests, sampling)

    @torch.inference_mode()
    def _chunk(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        # a prompt is read once, whatever the number of its samples
        place = {prompt: index for index, prompt in enumerate(dict.fromkeys(r.prompt_ids for r in requests))}
        device, rows = self.model.device, len(requests)
        index_B = torch.tensor([place[r.prompt_ids] for r in requests], device=device)
        ids, attention, _ = (part.to(device) for part in pad(list(place), [()] * len(place), self._pad_id))
        stop_ids = self._stop_ids.to(device)
        greedy = sampling.temperature == 0
        if not greedy:
            noise = np.stack([generator(*r.key).random(sampling.max_tokens) for r in requests])
            uniform_BT = torch.from_numpy(noise).to(device)
        tokens_BT = torch.full((rows, sampling.max_tokens), self._pad_id, device=device)
        logprobs_BT = torch.zeros((rows, sampling.max_tokens), device=device)
        length_B = torch.zeros(rows, dtype=torch.long, device=device)
        running_B = torch.ones(rows, dtype=torch.bool, device=device)
        cache = DynamicCache(config=self.model.config)
        position = (attention.cumsum(-1) - 1).clamp(min=0)
        for t in range(sampling.max_tokens):
            logits = self.model(
                input_ids=ids, attention_mask=attention, position_ids=position, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]  # fmt: skip
            if t == 0:
                logits, attention, position = logits[index_B], attention[index_B], position[index_B]
                cache.batch_select_indices(index_B)
            logprobs_BV = processed_logprobs(logits, sampling)
            token_B = logprobs_BV.argmax(-1) if greedy else draw(logprobs_BV, uniform_BT[:, t])
            tokens_BT[:, t] = torch.where(running_B, token_B, self._pad_id)
            logprobs_BT[:, t] = logprobs_BV.gather(-1, token_B.unsqueeze(-1)).squeeze(-1)
            length_B += running_B
            running_B = running_B & ~torch.isin(token_B, stop_ids)
            if not running_B.any():
                break
            ids, position = tokens_BT[:, t : t + 1], position[:, -1:] + 1
            attention = torch.cat([attention, torch.ones_like(ids)], -1)
        return [
            Completion(
                tuple(tokens_BT[row, :length].tolist()),
                tuple(logprobs_BT[row, :length].tolist()),
                "length" if running_B[row] else "stop",
                self.version,
            )
            for row, length in enumerate(length_B.tolist())
        ]
