"""Checkpoints are whole or absent, and runs in a folder are finished once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small

from reports.wandb_file import read_run
from suite import checkpoint, optim
from suite.checkpoint import Writer
from suite.config import OptimConfig
from suite.run import Interrupted, Progress, RunInfo, run

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


def test_a_late_writer_takes_nothing_from_a_faster_one(tmp_path: Path) -> None:
    for step in (4, 6, 8):
        write(tmp_path, step, step / 2)
    write(tmp_path, 2, 1.0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000006", "step-000008"]


def test_the_owner_removes_what_is_half_written_or_damaged_and_keeps_the_rest(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint.save(tmp_path, step, {"policy": {"w": torch.ones(3)}}, {"fingerprint": "f"}, keep=2)
    (tmp_path / "step-000004" / "policy.safetensors").write_bytes(b"torn")
    (tmp_path / ".step-000006.0a1b2c3d.partial").mkdir()
    found = checkpoint.restore(tmp_path, "f")
    assert found is not None
    assert found.step == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]
    # with one checkpoint kept, a damaged newer one does not push out the one that is good
    checkpoint.save(tmp_path, 3, {"policy": {"w": torch.ones(3)}}, {"fingerprint": "f"}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


class Gate:
    """Stands before the files of a checkpoint, and lets its writer pass when it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open, real = threading.Semaphore(0), threading.Semaphore(0), checkpoint.save_file

        def waiting(*arguments: Any) -> None:
            self.arrived.release()
            assert self.open.acquire(timeout=60)
            real(*arguments)

        monkeypatch.setattr(checkpoint, "save_file", waiting)


def test_training_goes_on_while_a_checkpoint_is_written_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, synced = Gate(monkeypatch), list[int]()
    weights, state = torch.tensor([1.0, 2.0]), {"latest": {"loss/total": 0.5}}
    with Writer(tmp_path, keep=2, first=lambda: synced.append(1)) as writer:
        writer.save(2, {"policy": {"w": weights}}, state)
        assert gate.arrived.acquire(timeout=60)
        weights += 10.0
        state["latest"]["loss/total"] = 7.0
        writer.check()
        assert checkpoint.latest(tmp_path) is None
        # one at a time: the next waits
        second = threading.Thread(target=writer.save, args=(4, {"policy": {"w": weights}}, state))
        second.start()
        assert not gate.arrived.acquire(timeout=0.2)
        gate.open.release()
        second.join(60)
        first = checkpoint.latest(tmp_path)
        gate.open.release()
    assert first is not None
    assert (first.step, first.tensors["policy"]["w"].tolist()) == (2, [1.0, 2.0])
    assert first.state["latest"] == {"loss/total": 0.5}
    last = checkpoint.latest(tmp_path)
    assert last is not None
    assert (last.step, last.tensors["policy"]["w"].tolist()) == (4, [11.0, 12.0])
    assert synced == [1, 1]


def test_an_error_of_a_write_surfaces_at_the_next_step_or_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"), Writer(tmp_path, keep=2) as writer:  # noqa: PT012
        writer.save(2, {"policy": {"w": torch.ones(3)}}, {})
        while True:  # the steps of a training
            writer.check()
    with pytest.raises(OSError, match="No space left"), Writer(tmp_path, keep=2) as writer:
        writer.save(2, {"policy": {"w": torch.ones(3)}}, {})
    with pytest.raises(Interrupted) as caught, Writer(tmp_path, keep=2) as writer:  # noqa: PT012
        writer.save(2, {"policy": {"w": torch.ones(3)}}, {})
        raise Interrupted("stopped")
    assert "No space left" in caught.value.__notes__[0]


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


def test_a_run_that_dies_before_its_first_checkpoint_is_still_one_run(tmp_path: Path) -> None:
    config = small(train__steps=2)

    def dying(progress: Progress) -> None:
        if progress.step == 1:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(config, tmp_path / "run", INFO, on_progress=dying)
    run(config, tmp_path / "run", INFO)
    files = sorted((tmp_path / "run").rglob("run-*.wandb"))
    assert len({read_run(path).run_id for path in files}) == 1
    steps = [row["step"] for row in read_run(files[-1]).history if "reward/mean" in row or "policy/entropy" in row]
    assert steps == [0, 1, 2, 2]


def test_a_stop_before_an_evaluation_leaves_it_to_the_next_attempt(tmp_path: Path) -> None:
    config, seen = small(train__steps=4, eval__every=2), list[int]()
    polls = iter([False, True])
    with pytest.raises(Interrupted, match="after step 2"):
        run(config, tmp_path / "run", INFO, on_progress=lambda p: seen.append(p.step), stop=lambda: next(polls))
    assert seen == [0, 1, 2]
    run(config, tmp_path / "run", INFO, on_progress=lambda p: seen.append(p.step))
    assert seen == [0, 1, 2, 2, 3, 4, 4]
    last = max((tmp_path / "run").rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert [row["step"] for row in read_run(last).history if "policy/entropy" in row] == [0, 2, 4]


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
