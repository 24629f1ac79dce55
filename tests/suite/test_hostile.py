"""Files from elsewhere run nothing, damaged weights are refused, and a load in this process is verified."""

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fakes import small, trained
from safetensors.torch import load_file, save_file
from tiny_llama import make

from suite import cli
from suite.config import RunConfig, apply
from suite.failures import SyncError
from suite.policy import Policy
from suite.rollout.in_process import InProcessSampler
from suite.sharded_checkpoint import Shards
from suite.validate import validate


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {"policy/w": torch.arange(12.0).reshape(4, 3), "optimizer/step": torch.tensor(3, dtype=torch.int64)}
    dcp.save(tensors, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_a_sharded_checkpoint_is_read_as_data(checkpoint: Path) -> None:
    shards = Shards(checkpoint)
    assert torch.equal(shards["policy"]["w"], torch.arange(12.0).reshape(4, 3))
    assert int(shards["optimizer"]["step"]) == 3


class _Runs:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_a_hostile_checkpoint_runs_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with (checkpoint / ".metadata").open("wb") as file:
        pickle.dump(_Runs(tmp_path / "ran"), file)
    with pytest.raises(ValueError, match=r"it names \w+\.mkdir, which no checkpoint needs"):
        Shards(checkpoint)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_reads_no_file_outside_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    with (checkpoint / ".metadata").open("rb") as file:
        found = pickle.load(file)  # noqa: S301  our own
    for part in found.storage_data.values():
        part.relative_path = "../secret.distcp"
    with (checkpoint / ".metadata").open("wb") as file:
        pickle.dump(found, file)
    with pytest.raises(ValueError, match="it names a file outside its folder"):
        Shards(checkpoint)


@pytest.mark.parametrize("data", [b"", b"no pickle", b"\x80\x04N."], ids=["empty", "text", "none"])
def test_a_checkpoint_whose_metadata_is_damaged_is_refused(checkpoint: Path, data: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match="is no checkpoint's metadata"):
        Shards(checkpoint)


def test_weights_that_are_cut_or_no_numbers_are_refused(tmp_path: Path) -> None:
    file = make(tmp_path / "m", tied=False) / "model.safetensors"
    config = apply(RunConfig(), {"model.path": str(tmp_path / "m")}).model
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.path: cannot load"):
        Policy.load(config)
    file.write_bytes(whole)
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[1] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"are no numbers: {name}"):
        Policy.load(config)


Load = Callable[[InProcessSampler, Mapping[str, torch.Tensor], int], None]
_LOAD = InProcessSampler.load
_LATE: list[Mapping[str, torch.Tensor]] = []


def _nothing(sampler: InProcessSampler, weights: Mapping[str, torch.Tensor], version: int) -> None:
    sampler.version = version


def _late(sampler: InProcessSampler, weights: Mapping[str, torch.Tensor], version: int) -> None:
    _LATE.append({name: value.clone() for name, value in weights.items()})
    _LOAD(sampler, _LATE[-2] if len(_LATE) > 1 else sampler.model.state_dict(), version)


def _some(change: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Load:
    def load(sampler: InProcessSampler, weights: Mapping[str, torch.Tensor], version: int) -> None:
        old = sampler.model.state_dict()
        _LOAD(sampler, {name: change(name, value, old[name].clone()) for name, value in weights.items()}, version)

    return load


SABOTAGE: dict[str, Load] = {
    "not transferred": _nothing,
    "late by one": _late,
    "half": _some(lambda name, new, old: old if "layers" in name else new),
    "one tensor old": _some(lambda name, new, old: old if name == "lm_head.weight" else new),
    "rows shuffled": _some(lambda name, new, old: new.flip(0) if name == "lm_head.weight" else new),
    "scaled": _some(lambda name, new, old: new * 1.0001),
    "version wrong": lambda sampler, weights, version: _LOAD(sampler, weights, version + 1),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_load_in_this_process_that_went_wrong_ends_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessSampler, "load", SABOTAGE[name])
    _LATE.clear()
    with pytest.raises(SyncError, match=r"does not hold the weights of step 1 that it was given"):
        trained(small(train__steps=3, optim__lr=1e-3), tmp_path)


def test_nested_json_and_a_study_that_raises_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.json").write_text("[" * 100_000)
    for command in ("status", "report"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert "study.json is not" in capsys.readouterr().err
    (tmp_path / "raises.py").write_text("\nx = 1 / 0\n")
    assert cli.main(["run", str(tmp_path / "raises.py")]) == 2
    assert "raises.py, line 2 raises ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_a_judges_address_is_shown_without_its_secrets() -> None:
    options = {"objective.pair_rule": "judge", "judge.name": "openai", "judge.model": "m"}
    config = apply(RunConfig(), {**options, "judge.url": "ftp://me:hidden@host/v1?token=alsohidden"})
    with pytest.raises(ValueError, match=r"judge\.url is ") as error:
        validate(config)
    assert "hidden" not in str(error.value)
