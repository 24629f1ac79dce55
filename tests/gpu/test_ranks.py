"""Two ranks with a GPU each: the run of one rank, with an engine each, one engine for both, or one elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gpus
import low_tokens
import pandas as pd
import pytest
from fakes import rollouts
from rank_runs import COMMON
from safetensors.torch import load_file
from torch.testing import assert_close
from vllm_rig import Rig, config, exact, share
from vllm_serving import serving

from suite.launch import ranks
from suite.rollout.sync import TOLERANCE
from suite.run import RunInfo

pytestmark = gpus.needs(2)

GAP = TOLERANCE["float32"]
vllm = pytest.mark.skipif(gpus.count() > 1 and not gpus.HAS_VLLM, reason=gpus.NO_VLLM)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpus.model(tmp_path_factory.mktemp("models") / "llama")


def run(model: Path, folder: Path, nproc: int, **options: Any) -> dict[str, float]:
    """The metrics of a run on so many ranks, whose model is exported."""
    # an epsilon above the gradients' rounding: Adam divides the smallest of them by themselves
    common = COMMON | {"optim__eps": 1e-4, "train__export_model": True}
    info = RunInfo("s", "a", "a", {})
    plugins = [Path(low_tokens.__file__)]
    return ranks.run(config(model, **common | options), folder, info, nproc=nproc, plugins=plugins)


def test_two_ranks_over_nccl_train_as_one(model: Path, tmp_path: Path) -> None:
    plain = {"rollout__engine": "in_process", "rollout__memory_share": 0.0, "rollout__sync_period": "inf"}
    one, two = (run(model, tmp_path / str(nproc), nproc, **plain) for nproc in (1, 2))
    losses = [name for name in one if name.startswith("loss/")]
    assert one["loss/grad_norm"] > 0.05  # above the limit: it was clipped
    for name in losses:
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-5), name
    start, mine, theirs = (
        load_file(place / "model.safetensors") for place in (model, tmp_path / "1" / "model", tmp_path / "2" / "model")
    )
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert_close(theirs[name], tensor, rtol=0, atol=1e-5)
    assert max(float((tensor - start[name]).abs().max()) for name, tensor in mine.items()) > 1e-4


@vllm
def test_an_engine_per_rank_and_one_on_both_gpus_sample_as_one_does(model: Path, tmp_path: Path) -> None:
    common = {"rollout__transfer": "ipc", "rollout__sync_period": 1}
    alone = run(model, tmp_path / "alone", 1, **common)
    each = run(model, tmp_path / "each", 2, rollout__sleep=True, **common)
    spread = run(model, tmp_path / "spread", 2, rollout__tensor_parallel_size=2, **common)
    first = rollouts(tmp_path / "alone")
    assert first["version"].unique().tolist() == [0, 1, 2]
    for name, metrics in (("alone", alone), ("each", each), ("spread", spread)):
        assert metrics["sync/loads"] == 3
        assert 0 <= metrics["sync/logprob_gap"] < GAP
        found = rollouts(tmp_path / name)
        assert found["version"].tolist() == first["version"].tolist()
        pd.testing.assert_frame_equal(found[found["version"] == 0], first[first["version"] == 0])


@vllm
def test_a_server_on_the_second_gpu_is_given_weights_over_nccl(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]
    options = ("--memory-share", str(share()), "--max-model-len", "128")
    with serving(model, tmp_path / "log.txt", *options, CUDA_VISIBLE_DEVICES=second) as (_, url):
        for _ in range(2):  # a second run finds the connection of the first, and its weights
            rig = Rig(model, monkeypatch, rollout__engine="vllm_server", rollout__server_url=url)
            assert type(rig.transfer).__name__ == "DirectTransfer"
            exact(rig, GAP)
