"""A vLLM engine on the learner's GPU: what it samples and is given, what is caught, what it frees. The models come one
after the other, each with one engine for all its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpus
import pandas as pd
import pytest
import torch
from fakes import rollouts, trained
from vllm_rig import (
    FREE,
    GREEDY,
    Rig,
    Sabotage,
    compare_loads,
    config,
    die_in_mid_generation,
    exact,
    half,
    requests,
    sending,
    share,
    skipping,
    worker_with_an_engine,
)

from suite import distributed
from suite.protocols import Completion
from suite.rollout import vllm_engine
from suite.rollout.sync import TOLERANCE, SyncError
from suite.rollout.transfer import FileTransfer, private_folder
from suite.rollout.vllm_engine import Engine, Settings, architecture, release_all

pytestmark = gpus.needs(1, vllm=True)

GAP = TOLERANCE["float32"]
UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")
HALF = {"rollout__engine_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("models")
    return {
        "untied": gpus.model(at / "untied"),
        "tied": gpus.model(at / "tied", tied=True),
        "flat": gpus.model(at / "flat", scale=2.0),
    }


@pytest.fixture(scope="module", autouse=True)
def no_engine_is_left() -> Iterator[None]:
    yield
    release_all()


def by_file(rig: Rig) -> Rig:
    """The same rig, whose engine is handed files."""
    assert not isinstance(rig.transfer, FileTransfer)
    assert isinstance(rig.engine, Engine)
    rig.transfer = rig.sampler._transfer = FileTransfer(rig.engine, rig.engine.dtype, private_folder())
    return rig


def both(rig: Rig) -> tuple[list[Completion], list[Completion]]:
    """Greedy completions of the engine and of the learner's own sampler."""
    asked = requests(["12+34=", "5+6=", "99+87=", "40+2="])
    return rig.sampler.generate(asked, GREEDY), rig.in_process.generate(asked, GREEDY)


# an untied model in float32


@pytest.fixture
def rig(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(models["untied"], monkeypatch)


def test_after_a_sync_through_ipc_the_engine_samples_from_the_learners_weights(rig: Rig) -> None:
    assert type(rig.transfer).__name__ == "DirectTransfer"
    exact(rig, GAP)
    given = rig.sampler.weights()
    assert all(torch.equal(given[name], tensor.cpu()) for name, tensor in rig.policy.model.state_dict().items())


def test_through_a_file_too(rig: Rig) -> None:
    exact(by_file(rig), GAP)


def test_weights_of_a_checkpoint_which_are_in_host_memory_are_handed_over_too(rig: Rig) -> None:
    rig.move(0.05)
    rig.sampler.load({name: tensor.cpu() for name, tensor in rig.policy.model.state_dict().items()}, 5)
    theirs, mine = both(rig)
    assert [c.token_ids for c in theirs] == [c.token_ids for c in mine]


@pytest.mark.parametrize("size", [0.05, 1e-6])
@pytest.mark.parametrize("sabotage", [skipping(*UPDATE), sending(half)], ids=["nothing", "half"])
def test_a_sabotaged_sync_is_caught_and_an_honest_one_mends_it(
    sabotage: Sabotage, size: float, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.move(size)
    with monkeypatch.context() as patch:
        sabotage(rig, patch)
        with pytest.raises(SyncError, match="after handing over the weights of step 3"):
            rig.load(3)
    assert rig.sampler.version == 0
    rig.sampler._verifier._held = None  # the test goes on with the engine that a run would have ended
    assert rig.load(3) < GAP


@pytest.mark.parametrize(("period", "loads"), [(1, 6), (3, 2), ("inf", 1)])
def test_loads_are_ceil_n_over_s_and_every_one_is_verified(
    period: int | str, loads: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (*UPDATE, "derive", "forget", "probe")
    compare_loads(models["untied"], tmp_path, monkeypatch, period, loads, asked)


def windowed(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[pd.DataFrame]:
    """The rollouts of a run that generates whole windows, and of one that goes step by step."""
    calls, plain = list[int](), Engine.stream

    def stream(this: Engine, batches: Any, sampling: Any) -> Any:
        calls.append(len(batches))
        return plain(this, batches, sampling)

    monkeypatch.setattr(Engine, "stream", stream)
    trained(config(model, **options), folder / "whole")
    whole = len(calls)
    trained(config(model, rollout__window_rollouts=1, **options), folder / "steps")
    assert max(calls[:whole]) > 1
    assert calls[whole:] == [1] * 6
    return [rollouts(folder / name) for name in ("whole", "steps")]


def test_a_window_equals_step_by_step(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, steps = windowed(models["untied"], tmp_path, monkeypatch, rollout__sync_period=3)
    assert len(set(map(tuple, whole["token_ids"]))) > 40
    pd.testing.assert_frame_equal(steps, whole)


def test_an_engine_that_dies_is_a_failure_of_the_cell_and_frees_its_memory(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rig: Rig
) -> None:
    monkeypatch.undo()  # the engine of the rig may end
    before = gpus.free()
    die_in_mid_generation(models["untied"], tmp_path, monkeypatch)
    assert gpus.free() > before + 2 * gpus.GIBIBYTE


# a tied model in float32, whose engine sleeps while the learner learns


@pytest.fixture
def sleeper(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(models["tied"], monkeypatch, rollout__sleep=True)


def test_tied_embeddings_in_an_engine_that_sleeps(sleeper: Rig) -> None:
    exact(sleeper, GAP)


def test_tied_embeddings_through_a_file(sleeper: Rig) -> None:
    exact(by_file(sleeper), GAP)


def test_sleep_frees_memory_and_the_engine_samples_the_same_afterwards(sleeper: Rig) -> None:
    asked = requests(["12+34=", "5+6="], 20)
    first = sleeper.sampler.generate(asked, FREE)
    asleep = gpus.free()
    sleeper.engine.ask("forget")  # it wakes
    awake = gpus.free()
    assert asleep - awake > 2 * gpus.GIBIBYTE
    sleeper.engine.ask("rest")
    assert gpus.free() == pytest.approx(asleep, abs=gpus.GIBIBYTE / 4)
    assert sleeper.sampler.generate(asked, FREE) == first


def test_a_load_finds_the_engine_asleep_and_leaves_it_with_the_learners_weights(sleeper: Rig) -> None:
    sleeper.sampler.generate(requests(["12+34="]), FREE)
    asleep = gpus.free()
    sleeper.move(0.05)
    assert sleeper.load(5) < GAP
    assert gpus.free() < asleep - 2 * gpus.GIBIBYTE
    theirs, mine = both(sleeper)
    assert [c.token_ids for c in theirs] == [c.token_ids for c in mine]
    for a, b in zip(theirs, mine, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


def test_a_sleeping_engine_is_taken_over_by_the_next_cell(
    sleeper: Rig, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper.sampler.generate(requests(["12+34="]), FREE)
    assert sleeper.sampler._asleep
    again = Rig(models["tied"], monkeypatch, rollout__sleep=True, seed=1)
    assert again.engine is sleeper.engine
    exact(again, GAP)


# an engine in bfloat16


def test_in_bfloat16_log_probs_agree_within_the_tolerance(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(models["flat"], monkeypatch, **HALF)
    held, _ = rig.engine.ask("fingerprint")
    assert set(held) == set(rig.engine.comparable)
    rig.move(0.05)
    assert 0 < rig.load(7) < TOLERANCE["bfloat16"]
    theirs, mine = both(rig)
    for a, b in zip(theirs, mine, strict=True):
        assert a.logprobs[0] == pytest.approx(b.logprobs[0], abs=TOLERANCE["bfloat16"])


def test_a_learner_that_computes_in_bfloat16_has_such_an_engine(models: dict[str, Path], tmp_path: Path) -> None:
    run = config(models["flat"], learner__compute_dtype="bfloat16", rollout__sync_period=3)
    with distributed.session(run):
        _, tracker = trained(run, tmp_path)
    assert max(tracker.column("sync/logprob_gap")) < TOLERANCE["bfloat16"]
    assert tracker.column("sync/loads")[-1] == 2
    (engine,) = vllm_engine._RUNNING
    assert engine.dtype == "bfloat16"


def test_in_bfloat16_most_of_a_window_equals_step_by_step(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    run = HALF | {"rollout__sync_period": "inf"}
    whole, steps = windowed(models["flat"], tmp_path, monkeypatch, **run)
    pairs = zip(whole["token_ids"], steps["token_ids"], strict=True)
    matching = sum(tuple(a) == tuple(b) for a, b in pairs) / len(whole)
    record_property("matching_share", matching)
    print(f"{matching:.1%} of {len(whole)} completions are the same, token for token")
    assert matching > 0.5


def test_a_worker_that_is_killed_leaves_no_engine_and_no_memory(models: dict[str, Path]) -> None:
    release_all()
    settings = Settings(architecture(str(models["flat"])), "bfloat16", 128, 1, share(), True, False, "ipc")
    before = gpus.free()
    with worker_with_an_engine(settings, models["flat"], started=True):
        assert gpus.free() < before - 2 * gpus.GIBIBYTE
    assert gpus.comes(lambda: gpus.free() > before - gpus.GIBIBYTE / 8)
