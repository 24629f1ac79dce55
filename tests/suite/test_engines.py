"""How engines are placed, woken, put to rest and handed weights, without a GPU or an engine."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpus
import pytest
import torch
from fakes import small
from safetensors.torch import load_file

from suite import distributed
from suite.commands import serve
from suite.config import ModelConfig, RunConfig, apply
from suite.parts import assemble
from suite.policy import Policy
from suite.protocols import Request, Sampling
from suite.rollout import engines, transfer, vllm_engine, vllm_sampler
from suite.rollout.fingerprints import WHOLE, bits, learner_fingerprint
from suite.rollout.transfer import FileTransfer
from suite.rollout.vllm_host import CACHE, WEIGHTS, Host
from suite.rollout.vllm_sampler import VllmSampler
from suite.validate import validate

SERVER = {"rollout.engine": "vllm_server", "rollout.server_url": "http://node:8000"}

vllm = pytest.mark.skipif(not gpus.HAS_VLLM, reason=gpus.NO_VLLM)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says it has GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(distributed, "rank", lambda: rank)
    monkeypatch.setattr(distributed, "size", lambda: size)
    monkeypatch.setenv("LOCAL_RANK", str(rank))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout.engine": "vllm_server"}, "needs the address of a `suite serve`"),
        (SERVER | {"rollout.transfer": "ipc"}, "for rollout.engine = 'vllm'; with 'vllm_server' it must be 'auto'"),
        ({"rollout.engine": "vllm", "rollout.transfer": "nccl"}, "must be 'auto', 'file' or 'ipc'"),
        (
            {"rollout.engine": "vllm", "rollout.engine_dtype": "float32", "learner.compute_dtype": "bfloat16"},
            "rollout.engine_dtype is 'float32', and the learner computes in bfloat16",
        ),
        (SERVER | {"rollout.sleep": True}, "nothing reads it here; it is read with rollout.engine = vllm"),
    ],
)
def test_engines_and_what_does_not_go_with_them_are_refused(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        validate(apply(RunConfig(), overrides))


# which GPUs


@pytest.mark.parametrize(
    ("visible", "rank", "size", "span", "found"),
    [
        (None, 3, 4, 1, "3"),
        (None, 2, 4, 2, "2,3"),
        ("4,5,6,7", 2, 4, 2, "6,7"),
        ("GPU-a,GPU-b", 1, 2, 1, "GPU-b"),
        ("4,5", 0, 1, 2, "4,5"),
        (None, 0, 1, 2, None),
    ],
)
def test_an_engine_has_the_gpus_of_its_ranks_and_nothing_of_their_places(
    visible: str | None, rank: int, size: int, span: int, found: str | None, cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    be_rank(monkeypatch, rank, size)
    environment = vllm_engine._environment(span)
    assert environment.get("CUDA_VISIBLE_DEVICES") == found
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()


@pytest.mark.parametrize("gpu", [False, True])
def test_only_on_a_cpu_is_vllm_kept_from_compiling_and_only_a_gpu_needs_whole_floats(
    gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    served = dict[str, str]()
    monkeypatch.setattr(serve, "require_vllm", lambda what: None)
    monkeypatch.setattr(engines, "check_heads", lambda *_: None)
    monkeypatch.setattr(os, "execve", lambda path, arguments, environment: served.update(environment))
    serve.serve("seed:addition", "127.0.0.1", 8000, "float32", 0, 1, 0.0, "auto", False)
    for environment in (vllm_engine._environment(1), served):
        assert ("TORCHDYNAMO_DISABLE" in environment) == (not gpu)
        assert (environment.get("TRITON_F32_DEFAULT") == "ieee") == gpu


# which way


@pytest.mark.parametrize(
    ("gpu", "ranks", "options", "found"),
    [
        (False, 1, {}, "file"),
        (True, 1, {}, "ipc"),
        (True, 4, {"rollout__tensor_parallel_size": 2}, "ipc"),
        (True, 1, {"rollout__tensor_parallel_size": 2}, "file"),
        (True, 1, {"rollout__transfer": "file"}, "file"),
        (True, 1, {"rollout__engine": "vllm_server"}, "nccl"),
        (False, 1, {"rollout__engine": "vllm_server"}, "file"),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_they_can(
    gpu: bool, ranks: int, options: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(distributed, "size", lambda: ranks)
    assert engines.way(small(**{"rollout__engine": "vllm"} | options)) == found


def test_a_way_that_cannot_be_is_refused(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = small(rollout__engine="vllm", rollout__transfer="ipc", rollout__tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"reaches the GPUs of the ranks, 1, and rollout\.tensor_parallel_size is 2"):
        engines.way(beyond)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="goes from GPU to GPU; here it must be 'file'"):
        engines.way(small(rollout__engine="vllm", rollout__transfer="ipc"))


def test_an_engine_computes_in_the_precision_of_the_learner() -> None:
    assert small().learner_dtype == "float32"
    assert small(model__dtype="bfloat16").learner_dtype == "bfloat16"
    assert small(learner__compute_dtype="bfloat16").learner_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({"learner__compute_dtype": "bfloat16"}, "bfloat16"),
        ({"rollout__engine_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_engine_is_asked_for_in_that_precision(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[str]()

    def refuse(config: RunConfig, policy: object, task: object, dtype: str) -> Any:
        found.append(dtype)
        raise InterruptedError

    monkeypatch.setitem(engines._CONNECTIONS, "vllm", refuse)
    with pytest.raises(InterruptedError):
        assemble(small(rollout__engine="vllm", **options))
    assert found == [dtype]


# asleep and awake


class Sleepy:
    """vLLM as a host sees it, which notes what it is asked for."""

    def __init__(self) -> None:
        self.said = list[object]()

    def wake_up(self, tags: list[str]) -> None:
        self.said.append(("wake", *tags))

    def sleep(self, level: int) -> None:
        self.said.append(("sleep", level))

    def reset_prefix_cache(self) -> bool:
        self.said.append("reset")
        return True

    def start_weight_update(self) -> None:
        self.said.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.said.append(request)


def host() -> tuple[Host, Sleepy]:
    found, inner = object.__new__(Host), Sleepy()
    found._llm, found._asleep, found._cpu = inner, (), False
    return found, inner


def test_a_request_wakes_what_it_needs_and_no_more() -> None:
    here, inner = host()
    here.answer("forget", ())
    assert inner.said == ["reset"]
    here.answer("rest", ())
    here.answer("start_weight_update", ())
    here.answer("update_weights", ({"names": []},))
    assert inner.said[1:] == [
        ("sleep", 1), ("wake", *WEIGHTS), "start", {"update_info": {"names": []}},
    ]  # fmt: skip
    here.answer("forget", ())
    assert inner.said[5:] == [("wake", *CACHE), "reset"]
    here.answer("rest", ())
    here.answer("forget", ())
    assert inner.said[7:] == [("sleep", 1), ("wake", *WEIGHTS, *CACHE), "reset"]


class Spoken:
    """An engine that answers every request by its seed, and notes in a common log what it is asked."""

    dtype, max_model_len, generating = "float32", 128, False

    def __init__(self, log: list[str]) -> None:
        self.comparable = {"known": 1}  # it is taken over: it needs no calibration
        self._log = log

    def ask(self, name: str, *_: Any) -> Any:
        self._log.append(name)
        return ({}, {}) if name == "fingerprint" else []

    def stream(self, batches: Sequence[Sequence[Any]], sampling: dict[str, Any]) -> Iterator[list[Any]]:
        for number, batch in enumerate(batches):
            self._log.append(f"batch {number}")
            yield [((3,), (-0.5,)) for _ in batch]

    def close(self) -> None:
        self._log.append("close")


class Sent:
    """A transfer that notes that it sends."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def send(self, weights: dict[str, torch.Tensor]) -> int:
        self._log.append("send")
        return 0

    def given(self) -> dict[str, torch.Tensor]:
        return {}


Made = Callable[..., tuple[VllmSampler, list[str]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    policy = Policy.load(ModelConfig())

    def make(*, sleeps: bool) -> tuple[VllmSampler, list[str]]:
        log = list[str]()
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("emptied"))
        monkeypatch.setattr(vllm_sampler, "score", lambda *_: None)
        sampler = VllmSampler(
            Spoken(log), Sent(log), policy.model, dtype="float32", max_model_len=128, stop_ids=[1], probes=[(3, 4)],
            sleeps=sleeps,
        )  # fmt: skip
        monkeypatch.setattr(sampler._verifier, "check", lambda *_: 0.0)
        return sampler, log

    return make


BATCHES = [[Request((3, 4), (0, number))] for number in range(3)]
ONE = Sampling(1.0, 1.0, 0, 1)


def test_an_engine_rests_after_its_whole_window_and_wakes_into_memory_that_was_given_back(made: Made) -> None:
    sampler, log = made(sleeps=True)
    weights = sampler._model.state_dict()
    sampler.load(weights, 0)  # the engine may be asleep: it is taken over from another cell
    assert log == ["emptied", "send", "derive", "forget", "fingerprint", "probe"]
    log.clear()
    stream = sampler.window(BATCHES, ONE)
    assert len(next(stream)) == 1
    assert log == ["batch 0", "batch 1", "batch 2", "rest"]
    assert len(list(stream)) == 2
    log.clear()
    sampler.weights()  # a checkpoint lets it sleep
    assert log == []
    sampler.load(weights, 1)
    assert log[:3] == ["emptied", "fingerprint", "send"]
    log.clear()
    list(sampler.window(BATCHES, ONE))
    list(sampler.window(BATCHES[:1], ONE))
    assert log == ["batch 0", "batch 1", "batch 2", "rest", "emptied", "batch 0", "rest"]


def test_an_engine_that_does_not_sleep_goes_on_while_the_learner_learns(made: Made) -> None:
    sampler, log = made(sleeps=False)
    sampler.load(sampler._model.state_dict(), 0)
    log.clear()
    stream = sampler.window(BATCHES, ONE)
    next(stream)
    assert log == ["batch 0"]
    list(stream)
    assert log == ["batch 0", "batch 1", "batch 2"]
    sampler.weights()
    assert log[3:] == ["fingerprint"]


# ends


def test_all_processes_of_an_engine_end_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    assert vllm_engine._runs(leader.pid)
    vllm_engine._end_group(leader)
    assert leader.returncode == -9
    assert not vllm_engine._runs(leader.pid)
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


# weights


def test_a_file_of_weights_is_replaced_and_never_written_over(tmp_path: Path) -> None:
    to = FileTransfer(None, "float32", tmp_path / "weights")
    to.write({"a": torch.ones(2)})
    file = tmp_path / "weights" / transfer.FILE
    with file.open("rb") as old:
        first = old.read()
        to.write({"a": torch.zeros(2)})
        old.seek(0)
        assert old.read() == first
    assert load_file(file)["a"].tolist() == [0.0, 0.0]
    assert [path.name for path in file.parent.iterdir()] == [transfer.FILE]
    del to  # the next cell's weights have a folder of their own
    gc.collect()
    assert not file.parent.exists()


def test_checksums_are_made_where_the_weights_are_and_eight_bits_are_summed_as_they_are() -> None:
    small_floats = torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn)
    assert bits(small_floats) == sum(small_floats.view(torch.uint8).tolist())
    asked = list[object]()

    class Watched(torch.Tensor):
        def to(self, *arguments: Any, **named: Any) -> torch.Tensor:
            asked.append((arguments, named))
            return torch.zeros(3)

    learner_fingerprint({"a": torch.zeros(3).as_subclass(Watched)}, torch.float32, [WHOLE])
    assert asked == [((torch.float32,), {})]


@vllm
def test_what_goes_from_gpu_to_gpu_is_cast_on_the_ranks_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from suite.rollout import direct

    monkeypatch.setattr(distributed, "device", lambda: torch.device("meta"))
    source = direct.Weights(torch.bfloat16)
    source.now = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    sent = list(source)
    assert [(name, tensor.device.type, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent] == [
        (meta.name, "meta", meta.dtype, meta.shape) for meta in source.metadata()
    ]
    assert [name for name, _ in source] == ["a", "b"]  # every hand-over reads it anew


@vllm
def test_the_buffer_holds_the_largest_tensor_and_one_rank_per_engine_sends() -> None:
    from suite.rollout import direct

    least = direct.DEFAULT_PACKED_BUFFER_SIZE_BYTES
    leader, other = direct.ipc(7, leads=True), direct.ipc(2 * least, leads=False)
    assert (leader.is_sender, leader.packed, leader.packed_buffer_size_bytes) == (True, True, least)
    assert (other.is_sender, other.packed_buffer_size_bytes) == (False, 2 * least)
