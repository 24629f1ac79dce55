"""Checkpoints are whole or absent, and runs in a folder are finished once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fakes import small

from suite import checkpoint, optim
from suite.config import OptimConfig
from suite.run import Interrupted, RunInfo, run

INFO = RunInfo(study="test", arm="a", label="A", differs={})


def write(folder: Path, step: int, value: float, keep: int = 2) -> Path:
    return checkpoint.save(folder, step, {"policy": {"w": torch.full((3,), value)}}, {"batches": step}, keep=keep)


def test_the_newest_is_read_and_the_oldest_dropped(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        write(tmp_path, step, step / 2)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.state["batches"]) == (10, 10)
    assert found.tensors["policy"]["w"].tolist() == [5.0] * 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000010"]
    assert checkpoint.latest(tmp_path / "nothing") is None


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest cut", "no manifest", "partial"])
def test_a_damaged_checkpoint_is_recognised_and_the_one_before_it_used(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 2, 1.0)
    place = write(tmp_path, 4, 2.0)
    weights = place / "policy.safetensors"
    content = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(content[:-3])
    elif damage == "flip":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "missing":
        weights.unlink()
    elif damage == "manifest cut":
        (place / checkpoint.MANIFEST).write_text('{"policy.safe')
    elif damage == "no manifest":
        (place / checkpoint.MANIFEST).unlink()
    else:
        place.rename(tmp_path / f".{place.name}.partial")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert write(tmp_path, 4, 3.0).is_dir()  # and writing it again works
    again = checkpoint.latest(tmp_path)
    assert again is not None
    assert again.tensors["policy"]["w"].tolist() == [3.0] * 3


def test_equal_bits_and_only_they_have_equal_hashes() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0)}
    assert checkpoint.tensors_hash(one) == checkpoint.tensors_hash({k: v.clone() for k, v in reversed(one.items())})
    for other in (
        {**one, "a": torch.tensor([1.0, torch.nextafter(torch.tensor(2.0), torch.tensor(3.0)).item()])},
        {**one, "a": torch.tensor([[1.0, 2.0]])},
        {**one, "a": torch.tensor([1.0, 2.0], dtype=torch.float64)},
    ):
        assert checkpoint.tensors_hash(one) != checkpoint.tensors_hash(other)


def test_the_optimizer_goes_on_bit_for_bit() -> None:
    def steps(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, count: int) -> None:
        for i in range(count):
            parameter.grad = torch.tensor([0.1 * i, -0.3, 1.0])
            optimizer.step()

    config = OptimConfig(lr=0.1, weight_decay=0.1)
    whole, cut, fresh = (torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0])) for _ in range(3))
    first = optim.build([whole], config)
    steps(first, whole, 3)
    second = optim.build([cut], config)
    steps(second, cut, 3)
    third = optim.build([fresh], config)
    fresh.data.copy_(cut.data)
    optim.load_state_tensors(third, optim.state_tensors(second))
    steps(first, whole, 2)
    steps(third, fresh, 2)
    assert torch.equal(whole, fresh)


def test_learning_rates_by_hand() -> None:
    linear = OptimConfig(lr=1.0, warmup_steps=4, schedule="linear")
    assert [optim.learning_rate(linear, step, 14) for step in (0, 1, 3, 4, 9, 13)] == pytest.approx(
        [0.25, 0.5, 1.0, 1.0, 0.5, 0.1]
    )
    cosine = OptimConfig(lr=2.0, warmup_steps=0, schedule="cosine")
    assert [optim.learning_rate(cosine, step, 4) for step in (0, 2)] == pytest.approx([2.0, 1.0])
    assert optim.learning_rate(OptimConfig(lr=3.0), 7, 8) == 3.0


def test_a_run_in_its_folder(tmp_path: Path) -> None:
    config = small(train__steps=4, eval__every=2)
    seen: list[int] = []
    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", INFO, on_progress=lambda p: seen.append(p.step), stop=lambda: True)
    assert not (tmp_path / "run" / "result.json").exists()
    metrics = run(config, tmp_path / "run", INFO, on_progress=lambda p: seen.append(p.step))
    assert seen == [0, 1, 2, 2, 3, 4, 4]
    assert metrics["eval/test/accuracy"] > 0
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert set(record) >= {
        "study",
        "arm",
        "label",
        "differs",
        "seed",
        "fingerprint",
        "commit",
        "dirty",
        "versions",
        "run",
    }
    assert record["run"]["train"]["steps"] == 4
    whole = run(config, tmp_path / "whole", INFO)
    timeless = {k: v for k, v in whole.items() if not k.startswith("time/")}
    assert timeless == {k: v for k, v in metrics.items() if not k.startswith("time/")}
    results = [json.loads((tmp_path / name / "result.json").read_text())["weights"] for name in ("run", "whole")]
    assert results[0] == results[1]
    # finished: not run again
    assert run(config, tmp_path / "run", INFO, on_progress=lambda p: pytest.fail("ran again")) == metrics
    with pytest.raises(ValueError, match="take another folder"):
        run(small(train__steps=5), tmp_path / "run", INFO)
