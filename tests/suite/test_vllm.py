"""A real vLLM engine on the CPU: what it samples, what it is given, and what is caught. One engine serves all tests
but those of the untied model, which come first and end with its death.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from fakes import rollouts, trained
from scipy.stats import chisquare
from tiny_llama import make
from vllm_rig import (
    FREE,
    REAL_ENGINE,
    Rig,
    Sabotage,
    compare_loads,
    config,
    die_in_mid_generation,
    exact,
    half,
    requests,
    sending,
    skipping,
    worker_with_an_engine,
)

from suite.config import ModelConfig
from suite.launch import ranks
from suite.parts import assemble
from suite.policy import Policy
from suite.protocols import Request, Sampling
from suite.rollout import vllm_engine
from suite.rollout.in_process import processed_logprobs
from suite.rollout.sync import SyncError
from suite.rollout.transfer import SHARED_MEMORY, FileTransfer, private_folder
from suite.rollout.vllm_engine import Engine, Settings, architecture, release_all
from suite.rollout.vllm_sampler import VllmSampler
from suite.run import Interrupted, RunInfo

pytestmark = REAL_ENGINE


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left() -> Iterator[None]:
    yield
    release_all()


def test_after_a_sync_the_engine_samples_from_the_learners_weights(
    untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact(Rig(untied, monkeypatch))


def test_an_engine_that_dies_in_mid_generation_is_a_failure_of_the_cell_and_is_not_used_again(
    untied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = die_in_mid_generation(untied, tmp_path, monkeypatch)
    monkeypatch.setattr(Engine, "start", classmethod(lambda cls, settings, model: "a fresh engine"))
    assert vllm_engine.acquire(engine.settings, str(untied)) == "a fresh engine"
    vllm_engine._RUNNING.clear()


@pytest.fixture
def rig(tied: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tied, monkeypatch)


def test_tied_embeddings_too(rig: Rig) -> None:
    exact(rig)


def test_logprobs_are_the_processed_ones_at_the_sampling_temperature_and_draws_follow_them(rig: Rig) -> None:
    (one,) = requests(["12+34="])
    asked = [Request(one.prompt_ids, (0, sample)) for sample in range(600)]
    with torch.no_grad():
        logits = rig.policy.model(input_ids=torch.tensor([one.prompt_ids])).logits[:, -1]
    for sampling in (Sampling(0.6, 1.0, 0, 1), Sampling(1.3, 0.8, 6, 1)):
        right = processed_logprobs(logits, sampling)[0].double()
        drawn = rig.sampler.generate(asked, sampling)
        assert all(c.logprobs[0] == pytest.approx(float(right[c.token_ids[0]]), abs=1e-4) for c in drawn)
        counts, kept = Counter(c.token_ids[0] for c in drawn), right.exp() * len(asked) > 5
        assert not any(count for token, count in counts.items() if right[token] == -torch.inf)
        seen = torch.tensor([counts[token] for token in range(len(right))], dtype=torch.double)[kept]
        want = right.exp()[kept]
        assert chisquare(seen, want / want.sum() * seen.sum()).pvalue > 0.001
    whole = rig.sampler.generate(requests(["12+34=", "5+6="], 8), FREE)
    assert all(len(c.logprobs) == len(c.token_ids) for c in whole)
    assert len({c.token_ids for c in whole}) > 8  # every request has noise of its own


def test_a_request_is_answered_by_its_key_whatever_is_beside_it(rig: Rig) -> None:
    asked = requests(["12+34=", "5+6=", "99+87="], 6)
    together = [c.token_ids for c in rig.sampler.generate(asked, FREE)]
    assert [c.token_ids for c in rig.sampler.generate(asked[::-1], FREE)][::-1] == together
    assert [rig.sampler.generate([request], FREE)[0].token_ids for request in asked[:4]] == together[:4]


def test_stop_tokens_and_the_budget_give_the_right_reason(rig: Rig) -> None:
    asked, (stop,) = requests(["12+34="], 60), rig.policy.stop_ids
    found = rig.sampler.generate(asked, FREE)
    for completion in found:
        ended = completion.token_ids[-1] == stop
        assert completion.finish_reason == ("stop" if ended else "length")
        assert stop not in completion.token_ids[:-1]
        assert ended or len(completion.token_ids) == 6
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    with pytest.raises(ValueError, match=r"rollout\.max_model_len, for a server --max-model-len\) or lower"):
        rig.sampler.generate(asked, Sampling(1.0, 1.0, 0, 500))


@pytest.mark.parametrize(
    ("sabotage", "size", "words"),
    [
        (sending(lambda w: {name: tensor * 1.1 for name, tensor in w.items()}), 0.05, "another one or incomplete"),
        (sending(half), 0.05, "another one or incomplete"),
        (skipping("forget"), 0.05, "the prefix cache was not reset"),
        (skipping("derive"), 0.05, "output head is a stale copy"),
        (skipping("reload", "derive"), 0.05, "still samples from the weights of step 0"),
        (skipping("reload", "derive"), 1e-6, "nothing was taken over"),
        (skipping("reload", "derive"), 1e-7, "not the learner's: the checksum"),
        (sending(half), 1e-7, "not the learner's: the checksum"),
        (skipping("derive"), 1e-7, "not the learner's: the checksum"),
    ],
    ids=["file", "half", "cache", "tied head", "nothing", "nothing, 1e-6", "nothing, 1e-7", "half, 1e-7", "head, 1e-7"],
)
def test_a_sabotaged_sync_is_caught_and_an_honest_one_mends_it(
    sabotage: Sabotage, size: float, words: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.move(size)
    with monkeypatch.context() as patch:
        sabotage(rig, patch)
        with pytest.raises(SyncError, match="after handing over the weights of step 3") as caught:
            rig.load(3)
    assert words in str(caught.value)
    assert rig.sampler.version == 0
    rig.sampler._verifier._held = None  # the test goes on with the engine that a run would have ended
    assert rig.load(3) < 2e-5


def test_weights_that_change_between_syncs_are_caught(rig: Rig, tied: Path) -> None:
    assert rig.sampler.weights().keys() == rig.policy.model.state_dict().keys()
    rig.move(1e-6)
    assert isinstance(rig.transfer, FileTransfer)
    rig.transfer.write(dict(rig.policy.model.named_parameters()))
    rig.engine.ask("reload", str(rig.transfer._folder))
    with pytest.raises(SyncError, match="are not what they were after the weights of step 0"):
        rig.sampler.weights()


@pytest.mark.parametrize(("period", "loads"), [(1, 6), (3, 2), ("inf", 1)])
def test_loads_are_ceil_n_over_s_and_every_one_is_verified(
    period: int | str, loads: int, tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare_loads(tied, tmp_path, monkeypatch, period, loads, ("reload", "derive", "forget", "probe"))


def test_a_window_is_one_call_and_equals_step_by_step_also_when_the_run_is_stopped_inside(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, plain = list[int](), Engine.stream

    def stream(this: Engine, batches: Any, sampling: Any) -> Any:
        calls.append(len(batches))
        return plain(this, batches, sampling)

    monkeypatch.setattr(Engine, "stream", stream)
    run = config(tied, rollout__sync_period=3)
    whole, _ = trained(run, tmp_path / "whole")
    assert calls == [3, 3]
    steps, _ = trained(config(tied, rollout__sync_period=3, rollout__window_rollouts=1), tmp_path / "steps")
    assert calls == [3, 3] + [1] * 6
    polls = iter([False, True])
    with pytest.raises(Interrupted):
        trained(run, tmp_path / "cut", stop=lambda: next(polls))
    trained(run, tmp_path / "cut")
    assert calls[8:] == [3, 1, 3]
    expected = rollouts(tmp_path / "whole")
    assert len(set(map(tuple, expected["token_ids"]))) > 40
    pd.testing.assert_frame_equal(rollouts(tmp_path / "steps"), expected)
    pd.testing.assert_frame_equal(rollouts(tmp_path / "cut"), expected)
    assert whole.step == steps.step == 6


def test_a_worker_keeps_its_engine_and_gives_it_the_next_cells_weights(tied: Path, tmp_path: Path) -> None:
    first = assemble(config(tied))
    first.policy.model.save_pretrained(tmp_path)
    Policy.load(ModelConfig(path=str(tied))).tokenizer.save_pretrained(tmp_path)
    assert architecture(str(tmp_path)) == architecture(str(tied))
    second = assemble(config(tmp_path, seed=1))
    assert isinstance(first.generator, VllmSampler)
    assert isinstance(second.generator, VllmSampler)
    assert second.generator._engine is first.generator._engine
    # a cell that left in mid-generation leaves the engine ready for the next one
    asked = requests(["12+34="], 200)
    stream = second.generator.window([asked[:100], asked[100:]], FREE)
    assert len(next(stream)) == 100
    assert first.generator.weights()  # the checkpoint of a run does not disturb its window
    assert second.generator._engine.generating
    again = assemble(config(tied, seed=2)).generator
    assert [c.token_ids for c in again.generate(asked[:9], FREE)] == [
        c.token_ids for c in first.generator.generate(asked[:9], FREE)
    ]


def test_no_engine_outlives_a_worker_that_is_killed(tied: Path) -> None:
    settings = Settings(architecture(str(tied)), "float32", 64, 1, 0.005, True, False)
    with worker_with_an_engine(settings, tied, started=False) as worker:
        pass
    private_folder()  # as the next worker's engine does when it starts
    assert not list(SHARED_MEMORY.glob(f"suite-vllm-{worker}-*"))


def test_every_rank_has_an_engine_and_all_get_the_rollouts_of_one(tied: Path, tmp_path: Path) -> None:
    """Two ranks: each engine samples its share of every batch, and what is learned is what one process learns."""
    options = {"reward__shaping": "soft_overlong", "reward__shaping_coef": 1.0, "rollout__sync_period": 3}
    run, info = config(tied, rollout__num_prompts=3, **options), RunInfo("study", "arm", "arm", {})
    one, _ = trained(run, tmp_path / "one")
    two = ranks.run(run, tmp_path / "two", info, nproc=2)
    pd.testing.assert_frame_equal(rollouts(tmp_path / "one"), rollouts(tmp_path / "two"))
    assert one.metrics["loss/grad_norm"] > 0
    for name in ("loss/total", "loss/grad_norm", "sync/loads", "sync/version", "cost/generated_tokens"):
        assert two[name] == pytest.approx(one.metrics[name], abs=1e-5), name
