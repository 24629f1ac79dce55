"""A run on one, two and four ranks is one run: same losses, weights and rollouts, and checkpoints that all can read."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import rank_runs
import torch
from fake_runner import one_code
from fakes import small, trained
from rich.console import Console
from transformers import AutoModelForCausalLM

from suite import distributed, policy, sharding
from suite.batch import Batch
from suite.checkpoint import is_whole, latest, restore
from suite.cli import main as command_line
from suite.config import ModelConfig, RunConfig, apply, fingerprint
from suite.export import export
from suite.launch import machine, ranks
from suite.launch.local import run_study
from suite.run import Interrupted, NonFiniteLoss, Progress, RunInfo
from suite.sharded_checkpoint import Shards
from suite.starts import resolve_path
from suite.study import Arm, Study

ROOT = Path(__file__).resolve().parents[2]
THREE = ("dpo", "grpo", "ppo")


def spawn(*work: tuple[int, Sequence[str]]) -> None:
    """Run jobs of `rank_runs` on so many ranks each, one after the other, in one process apart and its forks."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "suite")))
    code = "import sys, json, rank_runs; [rank_runs.start(count, jobs) for count, jobs in json.loads(sys.argv[1])]"
    command = [sys.executable, "-c", code, json.dumps(work)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks leave: `N` holds the runs on N ranks, `AtoB` one that A ranks began and B go on with."""
    at = tmp_path_factory.mktemp("ranks")
    rank_runs.main([*(f"{at / '1'}:{case}" for case in (*THREE, "mixed", "stopped")), f"{at / '1to2'}:stopped-cut"])
    two = [
        *(f"{at / '2'}:{case}" for case in (*THREE, "mixed")),
        f"{at / '1to2'}:stopped",
        f"{at / '2to1'}:stopped-cut",
    ]
    spawn((2, two), (4, [*(f"{at / '4'}:{case}" for case in THREE), f"{at / '2to1'}>{at / '2to4'}:stopped"]))
    return at


def found(place: Path) -> dict[str, Any]:
    return dict(json.loads((place / "found.json").read_text()))


def weights(place: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(place / "weights.pt"))


def assert_equal_runs(one: Path, other: Path, steps: Sequence[int] | None = None, tolerance: float = 1e-5) -> None:
    """Same names and, within the tolerance, same values in every logged row, and same weights at the end."""
    mine, theirs = found(one)["rows"], found(other)["rows"]
    for step in map(str, steps) if steps else mine:
        assert mine[step].keys() == theirs[step].keys()
        undecided = abs(mine[step].get("dpo/margin", 1.0)) < 1e-6  # a learner that is its reference, up to rounding
        for name, value in mine[step].items():
            if undecided and name == "dpo/accuracy":
                continue
            assert theirs[step][name] == pytest.approx(value, rel=tolerance, abs=tolerance), (step, name)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("case", THREE)
def test_three_updates_give_the_same_losses_metrics_and_weights(folder: Path, case: str, count: int) -> None:
    assert_equal_runs(folder / "1" / case, folder / str(count) / case)
    rows = found(folder / str(count) / case)["rows"]
    assert sorted(rows) == ["0", "1", "2", "3"]
    assert all(rows[step]["loss/grad_norm"] > 0.05 for step in "123")  # above the limit: it was clipped
    moved = weights(folder / "1" / case)["model.layers.0.mlp.up_proj.weight"]
    start = AutoModelForCausalLM.from_pretrained(resolve_path("seed:addition")).state_dict()
    assert (moved - start["model.layers.0.mlp.up_proj.weight"]).abs().max() > 3e-4


@pytest.mark.parametrize("count", [1, 2, 4])
def test_each_rank_holds_and_samples_its_share(folder: Path, count: int) -> None:
    alone, here = found(folder / "1" / "dpo"), found(folder / str(count) / "dpo")
    assert here["equal"]  # every rank sees the same metrics
    assert here["kinds"] == (["Parameter"] if count == 1 else ["DTensor"])
    assert here["held"] <= alone["held"] / count * 1.02
    assert sum(map(sum, here["chunks"])) == sum(alone["chunks"][0])
    # the 15 rollouts of a batch are sampled in chunks of 7, 7 and 1, of which each rank takes every count-th
    shared = {1: [], 2: [[7] * 3], 4: [[7] * 3, [1] * 3, []]}
    assert here["chunks"][1:] == shared[count]


def test_bfloat16_computes_with_float32_weights_on_any_number_of_ranks(folder: Path) -> None:
    full, one, two = (found(folder / place) for place in ("1/dpo", "1/mixed", "2/mixed"))
    assert one["dtypes"] == two["dtypes"] == ["torch.float32", "torch.bfloat16", "torch.bfloat16"]
    assert full["dtypes"] == ["torch.float32"] * 3
    assert one["kinds"] == two["kinds"] == ["DTensor"]
    losses = [[rows["rows"][step]["dpo/chosen_logprob"] for step in "123"] for rows in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][0] == pytest.approx(full["rows"]["1"]["dpo/chosen_logprob"], rel=5e-2)
    assert losses[0][0] != full["rows"]["1"]["dpo/chosen_logprob"]


def test_rollouts_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    columns = ["uid", "sample", "version", "token_ids", "reward"]
    for number, version in enumerate([0, 0, 2, 2, 4]):
        one, two = (
            pd.read_parquet(folder / place / "stopped" / "rollouts" / f"batch-{number:06d}.parquet")[columns]
            for place in ("1", "2to1" if number < 2 else "1to2")
        )
        pd.testing.assert_frame_equal(one, two)
        assert set(two["version"]) == {version}


@pytest.mark.parametrize("place", ["1to2", "2to4"])
def test_a_checkpoint_goes_on_on_another_number_of_ranks(folder: Path, place: str) -> None:
    assert_equal_runs(folder / "1" / "stopped", folder / place / "stopped", (3, 4, 5))
    assert sorted(found(folder / place / "stopped")["rows"]) == ["3", "4", "5"]


def test_a_checkpoint_of_two_ranks_goes_on_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "2to1", tmp_path / "2to1")
    rank_runs.main([f"{tmp_path / '2to1'}:stopped"])
    assert_equal_runs(folder / "1" / "stopped", tmp_path / "2to1" / "stopped", (3, 4, 5))


def test_sharded_checkpoints_are_whole_kept_to_a_number_and_exported(folder: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "stopped"
    shutil.copytree(folder / "1to2" / "stopped", run_folder)
    places = sorted((run_folder / "checkpoints").iterdir())
    assert [place.name for place in places] == ["step-000004", "step-000005"]
    assert all(is_whole(place) and Shards.lie_in(place) for place in places)
    assert len(list(places[0].glob("*.distcp"))) == 2
    export(run_folder / "model")
    model = AutoModelForCausalLM.from_pretrained(run_folder / "model")
    expected = weights(run_folder)
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_a_half_written_checkpoint_is_passed_over_for_the_one_before(folder: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(folder / "1to2" / "stopped" / "checkpoints", checkpoints)
    identity = fingerprint(rank_runs.configured("stopped"))
    before = latest(checkpoints)
    assert before is not None
    assert before.step == 5
    part = sorted((checkpoints / "step-000005").glob("*.distcp"))[1]
    os.truncate(part, part.stat().st_size - 1)
    shutil.copytree(checkpoints / "step-000005", checkpoints / ".step-000006.0123abcd.partial")
    start = restore(checkpoints, identity)
    assert start is not None
    assert start.step == 4
    assert start.tensors.keys() == before.tensors.keys() == {"policy", "generator", "reference", "optimizer"}
    assert [place.name for place in checkpoints.iterdir()] == ["step-000004"]


def test_recomputed_layers_change_results_by_rounding_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are equal on some CPUs and not on others, where a kernel depends on where its tensors lie in memory."""
    passes, forward = [0], torch.nn.Linear.forward

    def count(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        passes[0] += torch.is_grad_enabled()
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", count)
    options, seen = {**rank_runs.COMMON, **rank_runs.CASES["ppo"]}, []
    for recomputed in (False, True):
        config = small(**options, learner__activation_checkpointing=recomputed)
        _, tracker = trained(config, tmp_path / str(recomputed))
        seen.append([tracker.rows[1][name] for name in ("loss/total", "loss/grad_norm", "critic/loss")])
        passes.append(0)
        passes[0], passes[-1] = 0, passes[0]
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert passes[2] > 1.9 * passes[1]  # layers ran twice


def test_compiling_takes_every_layer_of_policy_and_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled; the compiler itself, minutes on a CPU, is left out."""
    compiled = list[str]()
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: compiled.append(type(self).__name__))
    trained(small(**{**rank_runs.COMMON, **rank_runs.CASES["ppo"]}, learner__compile=True), tmp_path)
    assert compiled == ["LlamaDecoderLayer"] * 6


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("installed", [False, True])
def test_flash_attention_is_taken_where_it_is_there(
    cuda: bool, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(policy, "is_flash_attn_2_available", lambda: installed)
    half, own = ModelConfig(path="m", dtype="bfloat16"), "flash_attention_2"
    assert policy.attention_kernel(half) == (own if cuda and installed else None)
    assert policy.attention_kernel(replace(half, dtype="float32")) is None
    assert policy.attention_kernel(replace(half, path="seed:addition")) == "eager"
    assert policy.attention_kernel(replace(half, attention="sdpa")) == "sdpa"


def test_layers_that_a_model_does_not_name_cannot_be_recomputed() -> None:
    config = small(learner__activation_checkpointing=True)
    with pytest.raises(
        ValueError, match=r"learner\.activation_checkpointing is on, but Linear names no decoder layers"
    ):
        sharding.prepare(torch.nn.Linear(2, 2), config, trains=True)


@pytest.mark.parametrize(("units", "count", "rows"), [(7, 3, 2), (2, 4, 0), (9, 2, 4)])
def test_shares_are_disjoint_cover_the_batch_and_take_equally_many_passes(
    units: int, count: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(2 * units)[:, None].expand(-1, 3)
    batch = Batch(
        ids, torch.ones_like(ids), torch.ones(2 * units, 2, dtype=torch.bool), torch.zeros(2 * units, 2),
        torch.zeros(2 * units), torch.zeros(2 * units), torch.zeros(2 * units),
        [[2 * unit, 2 * unit + 1] for unit in range(units)],
    )  # fmt: skip
    monkeypatch.setattr(distributed, "size", lambda: count)
    seen, passes = [], set()
    for rank in range(count):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        micros = distributed.micro_batches(batch, rows)
        passes.add(len(micros))
        for micro, real in micros:
            assert len(micro) <= (rows or len(batch))
            assert bool(micro.mask_BT.any()) == real
            seen += micro.input_ids_BL[:, 0].tolist() if real else []
    assert seen == list(range(2 * units))
    assert len(passes) == 1


def test_torchrun_starts_stops_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(**{**rank_runs.COMMON, "train__steps": 200})
    heard, pids, end = list[Progress](), list[int](), ranks._end

    def note(process: subprocess.Popen[bytes], place: Path) -> None:
        pids.extend(int(file.read_text()) for file in place.glob("pid-*"))
        end(process, place)

    monkeypatch.setattr(ranks, "_end", note)
    with pytest.raises(Interrupted, match=r"stopped after step \d+ of 200"):
        ranks.run(
            config, tmp_path / "cell", RunInfo("s", "a", "a", {}), nproc=2, on_progress=heard.append,
            stop=lambda: any(progress.step >= 2 for progress in heard),
        )  # fmt: skip
    assert heard[-1].metrics["loss/grad_norm"] > 0
    start = latest(tmp_path / "cell" / "checkpoints")
    assert start is not None
    assert isinstance(start.tensors, Shards)
    assert start.step >= 2
    assert start.state["run_id"] == json.loads((tmp_path / "cell" / "config.json").read_text())["run_id"]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("classes", "kind", "words"),
    [
        (["NonFiniteLoss", "RuntimeError"], NonFiniteLoss, "^it broke$"),
        (["ValueError", "Exception"], ValueError, "^it broke$"),
        (["OutOfMemoryError", "RuntimeError"], MemoryError, "^it broke$"),
        (["KeyError", "LookupError"], RuntimeError, "^KeyError: it broke$"),
    ],
)
def test_what_a_rank_dies_of_is_raised_by_the_launcher(
    classes: list[str], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    ranks.put(tmp_path / "outcome-0.json", {"classes": ["Abandoned"], "message": "rank 1 is gone", "lost": True})
    ranks.put(tmp_path / "outcome-1.json", {"classes": classes, "message": "it broke", "lost": False})
    with pytest.raises(kind, match=words):
        ranks._outcome(tmp_path, 1)
    with pytest.raises(RuntimeError, match="exit code -9"):
        ranks._outcome(tmp_path / "nothing", -9)


def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path) -> None:
    """The watcher of a rank, without the rank: it ends its process when another one is gone."""
    code = "import sys, time; from suite.launch.rank import _leave_with; _leave_with(int(sys.argv[1])); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    mine = subprocess.Popen([sys.executable, "-c", code, str(other.pid)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        time.sleep(2.0)
        assert mine.poll() is None
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert mine.wait(20) == 75
    finally:
        mine.kill()
        other.kill()


@pytest.mark.parametrize(
    ("found_gpus", "per_cell", "groups", "limit", "note"),
    [
        ([], 0, (), None, ""),
        (["a", "b"], 0, ("a", "b"), None, ""),
        (["a", "b", "c", "d"], 2, ("a,b", "c,d"), 2, ""),
        (["a", "b", "c"], 2, ("a,b",), 1, "3 GPUs do not divide by --gpus-per-cell 2: 1 of them idle"),
    ],
)
def test_gpus_are_divided_among_workers(
    found_gpus: list[str], per_cell: int, groups: tuple[str, ...], limit: int | None, note: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "gpus", lambda: found_gpus)
    assert machine.share_gpus(per_cell) == machine.GpuShare(groups, limit, note)


def test_bad_numbers_are_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["train", "--nproc", "0"]) == 2
    assert capsys.readouterr().err == "suite: --nproc is 0 and must be at least 1\n"
    three = ["--rollout.engine", "vllm", "--rollout.tensor-parallel-size", "3"]
    assert command_line(["train", "--nproc", "2", *three]) == 2
    assert "--nproc is 2 and must be a multiple of rollout.tensor_parallel_size, 3" in capsys.readouterr().err
    assert command_line(["run", "mini_sync", "--gpus-per-cell", "-1", "--dry-run"]) == 2
    assert "--gpus-per-cell is -1 and must be at least 0" in capsys.readouterr().err
    for have, words in (([], "no GPU"), (["a"], "1 GPU"), (["a", "b"], "2 GPUs")):
        monkeypatch.setattr(machine, "gpus", lambda have=have: have)
        assert command_line(["run", "mini_sync", "--gpus-per-cell", "3", "--dry-run"]) == 2
        assert capsys.readouterr().err == f"suite: --gpus-per-cell is 3, and this machine has {words}\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="--nproc is 3 and must be at most 2, the GPUs of this machine"):
        ranks.check(3)


def test_a_server_is_not_shared_by_workers(tmp_path: Path) -> None:
    config = apply(RunConfig(), {"rollout.engine": "vllm_server", "rollout.server_url": "http://127.0.0.1:1"})
    one = Study("mini", "?", config, (Arm("a"),), (1,))
    with pytest.raises(ValueError, match="arm 'a' samples from a server, which serves one run at a time; give --worke"):
        run_study(one, tmp_path / "study", 2)
    assert not (tmp_path / "study").exists()


def test_every_worker_gets_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["a", "b", "c", "d", "e"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "plan.json").write_text(json.dumps({"a": {"seconds": 0.15}}))
    one, text = Study("mini", "?", RunConfig(), (Arm("a"),), (1, 2, 3, 4)), io.StringIO()
    with one_code(monkeypatch):
        status = run_study(
            one, tmp_path, 4, runner="tests.suite.fake_runner:ranked", gpus_per_cell=2,
            console=Console(file=text, width=120),
        )  # fmt: skip
    assert status.count("complete") == 4
    assert "2 workers" in text.getvalue()
    assert "5 GPUs do not divide by --gpus-per-cell 2: 1 of them idle" in text.getvalue()
    said = [line.split() for file in tmp_path.glob("cells/*/ranks.txt") for line in file.read_text().splitlines()]
    assert {(nproc, gpus) for nproc, gpus, _ in said} == {("2", "a,b"), ("2", "c,d")}
    assert len({(worker, gpus) for _, gpus, worker in said}) == 2  # one worker, one group
