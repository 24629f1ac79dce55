"""A vLLM engine that `suite serve` runs elsewhere, as the learner sees it: asked over HTTP, in JSON alone.

JSON keeps what matters: token ids, 64-bit checksums, and floats, which are written so that they are read back as they
were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from suite.failures import EngineDied
from suite.rollout.http_requests import GONE, Flight, Line, Refused
from suite.rollout.remote import Answered, Asked

GENERATE = "/inference/v1/generate"
CONNECT_PATIENCE_S = 60.0
FORGET_S = 10.0
"""How long the prefix cache may be held by requests that have just been ended."""

NO_NUMBER = -9999.0
"""What vLLM's server writes for a log-prob that is minus infinity or none at all."""


class Control:
    """What may be asked of a server; every public method is a request by its name, as in `vllm_host.Host`.

    Each is made on a connection of its own, so that one may wait for another: both ends of a transfer start together.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def describe(self) -> dict[str, Any]:
        """Dtype, length, device and transfer of the engine."""
        return self._call("suite_describe", patience=CONNECT_PATIENCE_S)[0]

    def world_size(self) -> int:
        """Workers that the engine is spread over."""
        return int(self._get("/get_world_size")["world_size"])

    def fingerprint(self) -> tuple[dict[str, list[tuple[int, int]]], dict[str, list[str]]]:
        """Checksums of the tensors that the engine computes with, worker by worker, and what is fused of what."""
        found: dict[str, list[tuple[int, int]]] = {}
        for worker in (parts := self._call("suite_fingerprint")):
            for name, (kind, value) in worker["sums"].items():
                found.setdefault(name, []).append((kind, value))
        return found, parts[0]["fused"]

    def reload(self, folder: str) -> None:
        """Take the weights of the safetensors in a folder, which the server must see under the same name."""
        self._call("suite_reload", folder)

    def reload_original(self) -> None:
        """Take the weights of the checkpoint that the server was started with."""
        self._call("suite_reload")

    def derive(self) -> None:
        """Build anew what a CPU derives from the weights."""
        self._call("suite_derive")

    def forget(self) -> None:
        """Drop the keys and values of prompts that were computed with other weights."""
        until = time.monotonic() + FORGET_S
        while not self._post("/reset_prefix_cache", {})["success"]:
            if time.monotonic() > until:
                raise Refused("vLLM did not reset its prefix cache; does another run use this server?")
            time.sleep(0.05)

    def probe(self, sequences: Sequence[tuple[int, ...]], count: int) -> list[tuple[list[float], dict[int, float]]]:
        """Per sequence: the log-probs of its tokens but the first, and of `count` tokens that may follow it.

        The second are a request of their own: one that asks for prompt log-probs does not read the prefix cache.
        """
        plain = {"temperature": 1.0, "max_tokens": 1}
        tokens = self._all(sequences, plain | {"prompt_logprobs": 0})
        # the answer is cut to as many as are asked for, and the token that was drawn may be beside the likeliest
        following = self._all(sequences, plain | {"logprobs": count + 1})
        out = []
        for ids, given, after in zip(sequences, tokens, following, strict=True):
            rows = zip(ids[1:], given["prompt_logprobs"][1:], strict=True)
            (drawn,) = after["choices"][0]["logprobs"]["content"]
            near = [row for row in drawn["top_logprobs"] if row["rank"] and row["rank"] <= count]
            found = {row["token_id"]: _number(row["logprob"]) for row in [drawn, *near]}
            out.append(([_number(row[str(token)]["logprob"]) for token, row in rows], found))
        return out

    def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        """Open the channel for weights; the learner must open its end at the same time."""
        self._post("/init_weight_transfer_engine", {"init_info": dict(info)})

    def shutdown_weight_transfer_engine(self) -> None:
        """Close the channel for weights."""
        self._post("/shutdown_weight_transfer_engine", {})

    def start_weight_update(self) -> None:
        """Be ready for weights."""
        self._post("/start_weight_update", {})

    def update_weights(self, info: Any) -> None:
        """Receive the weights that the information announces; the learner must send them at the same time."""
        self._post("/update_weights", {"update_info": info})

    def finish_weight_update(self) -> None:
        """Put what was received in its place."""
        self._post("/finish_weight_update", {})

    def abort(self) -> None:
        """End all requests of the server."""
        self._post("/abort_requests", {})

    def _all(self, sequences: Sequence[tuple[int, ...]], sampling: dict[str, Any]) -> list[Any]:
        flight = Flight(
            self.url,
            GENERATE,
            len(sequences),
            lambda place: _body((sequences[place], 0), sampling),
            lambda answer: answer,
        )
        try:
            return [flight.take(place) for place in range(len(sequences))]
        finally:
            flight.hang_up()

    def _call(self, method: str, *arguments: str, patience: float | None = None) -> list[Any]:
        """What the method gives on each worker."""
        body = {"method": method, "args": arguments}
        return list(self._post("/collective_rpc", body, patience)["results"])

    def _post(self, path: str, body: object, patience: float | None = None) -> Any:
        with closing(Line(self.url, patience)) as line:
            return line.post(path, body)

    def _get(self, path: str) -> Any:
        with closing(Line(self.url, CONNECT_PATIENCE_S)) as line:
            return line.get(path)


class Server:
    """A running server, in which nobody else must change the weights meanwhile. It lives on when this is closed."""

    def __init__(self, url: str, control: Control, described: Mapping[str, Any], world_size: int) -> None:
        self.url, self.dtype, self.max_model_len = url, str(described["dtype"]), int(described["max_model_len"])
        self.cpu, self.transfer, self.world_size = bool(described["cpu"]), str(described["transfer"]), world_size
        self.comparable: dict[str, int] = {}
        self._control = control
        self._flight: Flight | None = None

    @classmethod
    def connect(cls, url: str) -> Server:
        """The server at an address. Raises ValueError if there is none that `suite serve` has started."""
        if not url:
            raise ValueError(
                "rollout.engine is 'vllm_server', and rollout.server_url is empty; "
                "give the address at which `suite serve` listens, such as http://node7:8000"
            )
        _check(url)
        control = Control(url.rstrip("/"))
        try:
            return cls(url.rstrip("/"), control, control.describe(), control.world_size())
        except GONE as error:
            raise ValueError(
                f"rollout.server_url: nobody answers at {url} ({error}); start `suite serve MODEL` there, "
                "or wait until it has loaded its model"
            ) from error
        except (Refused, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"rollout.server_url: what answers at {url} is not a server that `suite serve` has started ({error})"
            ) from error

    @property
    def generating(self) -> bool:
        """Whether a generation is under way, which anything that is asked now would end."""
        return self._flight is not None

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the request of that name gives: see `Control`. Whatever was being generated is given up.

        Raises EngineDied, with the server's words, if it fails.
        """
        try:
            self._give_up()
            return getattr(self._control, name)(*arguments)
        except (Refused, *GONE) as error:
            raise self._died(error) from error

    def stream(self, batches: Sequence[Sequence[Asked]], sampling: dict[str, Any]) -> Iterator[list[Answered]]:
        """The batches' completions, batch by batch, while the later ones are being generated."""
        flat, options = [one for batch in batches for one in batch], {**sampling, "logprobs": 0}
        try:
            self._give_up()
        except (Refused, *GONE) as error:
            raise self._died(error) from error
        mine = self._flight = Flight(self.url, GENERATE, len(flat), lambda place: _body(flat[place], options), _answer)
        place = 0
        for number, batch in enumerate(batches):
            if self._flight is not mine:
                raise RuntimeError(f"the engine was asked something else after {number} of {len(batches)} batches")
            try:
                part = [mine.take(place + offset) for offset in range(len(batch))]
            except (Refused, *GONE) as error:
                self.close()
                raise self._died(error) from error
            place += len(batch)
            if number == len(batches) - 1:
                self._flight = None
            yield part

    def close(self) -> None:
        """Drop the connections; the server ends what they asked for, and lives on."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.hang_up()

    def _give_up(self) -> None:
        """Have nothing more generated. When this returns, no request of ours is in the engine.

        A request may reach the engine after others were ended there: they are ended until every one has its answer.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.stop()
            while not flight.ended(0.05):
                self._control.abort()

    def _died(self, error: Exception) -> EngineDied:
        if isinstance(error, Refused):
            return EngineDied(f"the vLLM server at {self.url} failed: {error}")
        return EngineDied(f"the vLLM server at {self.url} is gone: {error or type(error).__name__}")


def _check(url: str) -> None:
    """Raises ValueError if it is not the address of a server."""
    try:
        parts = urlsplit(url)
        right = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"rollout.server_url is {url!r}; give an address such as http://node7:8000")


def _body(asked: Asked, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """A request for one completion."""
    prompt, seed = asked
    fixed = {"seed": seed, "ignore_eos": True, "detokenize": False}
    return {"token_ids": prompt, "sampling_params": {**sampling, **fixed}}


def _answer(found: Any) -> Answered:
    """The completion in an answer."""
    (best,) = found["choices"]
    if best["finish_reason"] not in ("stop", "length"):
        raise Refused(f"vLLM ended a request with {best['finish_reason']!r}; does another run use this server?")
    ids, rows = tuple(best["token_ids"]), best["logprobs"]["content"]
    return ids, tuple(_number(row["logprob"]) for _, row in zip(ids, rows, strict=True))


def _number(logprob: float) -> float:
    return logprob if logprob > NO_NUMBER else math.nan
