"""The sampler whose completions come from a vLLM engine; every load of weights into it is verified."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from transformers import PreTrainedModel

from suite import distributed
from suite.protocols import Completion, Request, Sampling
from suite.randomness import generator
from suite.rollout.remote import Answered, Remote
from suite.rollout.sync import FOLLOWING, SyncError, Verifier, score
from suite.rollout.transfer import Transfer


def request_seed(request: Request) -> int:
    """The seed of a request's own noise in vLLM, from its key alone."""
    return int(generator(*request.key, "vllm").integers(2**62))


class VllmSampler:
    """Draws completions from an engine; its weights change only in `load`, which proves that they are the given ones.

    `model` serves for scoring probes under the weights that are handed over; it stays as it is.

    With several ranks, the first of every `span` leads an engine, and `engine` is None on the others. All must make the
    same calls: each engine computes every n-th completion, and all ranks get all of them.
    """

    def __init__(
        self, engine: Remote | None, transfer: Transfer, model: PreTrainedModel, *, dtype: str, max_model_len: int,
        stop_ids: Iterable[int], probes: Sequence[tuple[int, ...]], span: int = 1, sleeps: bool = False,
    ) -> None:  # fmt: skip
        self.version = -1
        self._engine, self._transfer, self._model, self._probes = engine, transfer, model, tuple(probes)
        self._stop_ids, self._limit, self._span = sorted(stop_ids), max_model_len, span
        self._sleeps, self._asleep = sleeps, sleeps  # one that is taken over may be asleep
        self._verifier = Verifier(dtype)
        self._measured: dict[str, float] = {}
        distributed.together(self._calibrate)

    def _calibrate(self) -> None:
        if self._engine is None or self._engine.comparable:
            return
        held, fused = self._engine.ask("fingerprint")
        try:
            self._engine.comparable = self._verifier.calibrate(held, fused, self._model.state_dict())
        except SyncError:
            self._engine.close()
            raise

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Hand weights over and prove that they arrived. Raises SyncError, and ends the engine, if they did not."""
        began = time.perf_counter()
        self._waking()
        plain = {name: weights[name] for name in dict.fromkeys(self._aliases(weights).values())}
        try:
            distributed.together(self._unchanged)
            size = self._transfer.send(plain)
            gap = max(distributed.everywhere(lambda: self._verified(weights, version)))
        except Exception:
            if self._engine:
                self._engine.close()
            raise
        self.version = version
        seconds = time.perf_counter() - began
        self._measured = {"sync/logprob_gap": gap, "sync/seconds": seconds, "sync/bytes": float(size)}

    def _unchanged(self) -> None:
        if self._engine and self.version >= 0:
            self._verifier.unchanged(self._engine.ask("fingerprint")[0])

    def _verified(self, weights: Mapping[str, torch.Tensor], version: int) -> float:
        """The distance of the log-probs on this rank's engine, nats; 0 where it leads none."""
        engine = self._engine
        if engine is None:
            return 0.0
        engine.ask("derive")
        engine.ask("forget")
        held, fused = engine.ask("fingerprint")
        seen = engine.ask("probe", self._probes, FOLLOWING)
        scores = score(self._model, weights, self._probes)
        return self._verifier.check(version, weights, scores, seen, held, fused, engine.comparable)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that it samples from; proven to be in the engine still, unless it sleeps or is at a window.

        Nothing on a rank that does not keep them.
        """
        if self._engine and not self._engine.generating and not self._asleep:
            self._unchanged()
        found = self._transfer.given()
        names = self._aliases(self._model.state_dict()) if found else {}
        return {name: found[first] for name, first in names.items()}

    def measured(self) -> dict[str, float]:
        """What the last load took and showed, once."""
        out, self._measured = self._measured, {}
        return out

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; a request's seed comes from its key."""
        # to its end: a stream left open would be given up by the next request
        return [completion for batch in self.window([requests], sampling) for completion in batch]

    def window(self, batches: Sequence[Sequence[Request]], sampling: Sampling) -> Iterator[list[Completion]]:
        """The completions of several batches from one engine call, each as soon as it is complete.

        An engine that sleeps while the learner learns completes them all first.
        """
        longest = max((len(request.prompt_ids) for batch in batches for request in batch), default=0)
        if longest + sampling.max_tokens > self._limit:
            raise ValueError(
                f"a prompt of {longest} tokens and a completion budget of {sampling.max_tokens} exceed the engine's "
                f"{self._limit} tokens; raise its limit (rollout.max_model_len, for a server --max-model-len) or lower "
                "the budget"
            )
        options: dict[str, Any] = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens, "stop_token_ids": self._stop_ids,
        }  # fmt: skip
        self._waking()
        found = self._answers(batches, options)
        if self._sleeps:
            found = iter(list(found))
            self._rest()
        for answered in found:
            yield [self._completion(one) for one in answered]

    def _answers(self, batches: Sequence[Sequence[Request]], options: dict[str, Any]) -> Iterator[list[Answered]]:
        """The batches' answers from all engines, each of which has its share of every batch."""
        engines, number = distributed.size() // self._span, distributed.rank() // self._span
        answers: Iterator[list[Answered]] = repeat([])
        if self._engine:
            shares = [batch[number::engines] for batch in batches]
            asked = [[(request.prompt_ids, request_seed(request)) for request in share] for share in shares]
            answers = self._engine.stream(asked, options)
        for batch in batches:
            parts = distributed.everywhere(lambda: next(answers))
            yield [parts[place % engines * self._span][place // engines] for place in range(len(batch))]

    def _completion(self, answered: Answered) -> Completion:
        ids, logprobs = answered
        return Completion(ids, logprobs, "stop" if ids[-1] in self._stop_ids else "length", self.version)

    def _rest(self) -> None:
        if self._sleeps and self._engine:
            self._engine.ask("rest")
        self._asleep = self._sleeps

    def _waking(self) -> None:
        """Before the engine takes its memory again, which it does when it is asked: leave it what no rank uses."""
        if self._asleep:
            distributed.together(torch.cuda.empty_cache)
        self._asleep = False

    def _aliases(self, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Every name and the first name of the same tensor: tied weights are one."""
        if not self._model.config.get_text_config().tie_word_embeddings:
            return {name: name for name in weights}
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        places = {id(module): name for name, module in self._model.named_modules()}
        tied = {f"{places[id(head)]}.weight": f"{places[id(embedding)]}.weight"}
        return {name: tied.get(name, name) for name in weights}
