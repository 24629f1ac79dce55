"""What the tests of several ranks run on each: `python rank_runs.py N FOLDER:CASE ...` starts N ranks on these jobs."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from fakes import MemoryTracker, small

from suite import distributed, sharding
from suite import train as core
from suite.checkpoint import Checkpoint, latest, restore, write_json
from suite.config import RunConfig, fingerprint, to_json
from suite.parts import Parts
from suite.protocols import Request, Sampling
from suite.rollout.in_process import InProcessSampler
from suite.run import Interrupted

COMMON = {
    # 5 x 3 rollouts in micro-batches of 2: ranks have unequal shares, and unequal numbers of passes
    "rollout__num_prompts": 5, "rollout__num_generations": 3, "rollout__chunk_size": 7, "optim__micro_batch_size": 2,
    "eval__validation_problems": 6, "eval__test_problems": 6, "eval__probe_prompts": 2, "eval__probe_samples": 2,
    "train__steps": 3, "train__checkpoint_every": 0, "optim__max_grad_norm": 0.05, "optim__lr": 3e-4,
}  # fmt: skip
GRPO = {"objective__name": "policy_gradient", "objective__kl": "loss", "objective__kl_coef": 0.05}
CASES: dict[str, dict[str, object]] = {
    "dpo": {"rollout__sync_period": "inf", "objective__entropy_coef": 0.01, "objective__nll_coef": 0.2},
    "grpo": {
        **GRPO, "rollout__sync_period": "inf", "objective__num_minibatches": 3,
        "objective__loss_agg_mode": "token-mean",
    },
    "ppo": {
        **GRPO, "rollout__sync_period": "inf", "objective__advantage": "gae", "objective__scale_rewards": "none",
        "objective__num_minibatches": 3, "critic__init": "policy", "critic__lr": 1e-3, "critic__max_grad_norm": 0.5,
    },
    # stopped after two steps and gone on with: the generator is behind, the reference is not the seed model
    "stopped": {
        "rollout__sync_period": 2, "rollout__reference_sync": "with_generator", "train__steps": 5,
        "train__checkpoint_every": 1, "train__keep_checkpoints": 2,
    },
    "mixed": {"learner__compute_dtype": "bfloat16", "rollout__sync_period": "inf"},
}  # fmt: skip


def configured(case: str) -> RunConfig:
    """The run of a case."""
    return small(**{**COMMON, **CASES[case.removesuffix("-cut")]})


@contextmanager
def spied() -> Iterator[tuple[list[Parts], list[int]]]:
    """The parts that a run assembles, and the number of requests in each chunk that this rank samples."""
    parts, chunks, assembled, chunk = list[Parts](), list[int](), core.assemble, InProcessSampler._chunk

    def keep(config: RunConfig, start: Checkpoint | None = None) -> Parts:
        parts.append(assembled(config, start))
        return parts[-1]

    def count(self: InProcessSampler, requests: Sequence[Request], sampling: Sampling) -> list:
        chunks.append(len(requests))
        return chunk(self, requests, sampling)

    core.assemble, InProcessSampler._chunk = keep, count  # type: ignore[method-assign]
    try:
        yield parts, chunks
    finally:
        core.assemble, InProcessSampler._chunk = assembled, chunk  # type: ignore[method-assign]


def work(folder: Path, case: str) -> None:
    """Run a case in folder/CASE, from the newest checkpoint there; a case that ends in `-cut` stops after two steps.

    Rank 0 leaves `weights.pt` and `found.json` there.
    """
    config, tracker = configured(case), MemoryTracker()
    place, polls = folder / case.removesuffix("-cut"), iter([False, True])
    distributed.on_main(lambda: restore(place / "checkpoints", fingerprint(config)) and None)
    start, stop = latest(place / "checkpoints"), (lambda: next(polls)) if case.endswith("-cut") else None
    digest = ""
    with spied() as (parts, chunks):
        try:
            digest = core.train(config, place, tracker, start, stop=stop).weights  # type: ignore[arg-type]
        except Interrupted:
            assert stop is not None
    model, samplers = parts[0].policy.model, (parts[0].generator, parts[0].evaluator)
    weights = sharding.whole(model.state_dict())
    rows = [(step, {k: v for k, v in row.items() if not k.startswith("time/")}) for step, row in tracker.rows.items()]
    said, counted = distributed.gathered(repr(rows)), distributed.gathered(chunks)
    found = {
        "rows": {str(step): row for step, row in rows}, "weights": digest, "equal": len(set(said)) == 1,
        "chunks": counted, "kinds": sorted({type(p).__name__ for p in model.parameters()}),
        "dtypes": [str(next(m.parameters()).dtype) for m in (model, *(sampler.model for sampler in samplers))],
        "held": sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters()),
    }  # fmt: skip
    if distributed.is_main():
        torch.save(weights, place / "weights.pt")
        write_json(place / "found.json", found)
        write_json(place / "config.json", {"run": to_json(config)})


def main(jobs: Sequence[str]) -> None:
    """Run the jobs, FOLDER:CASE or OLD>FOLDER:CASE (in a copy of OLD), on the ranks that the environment says."""
    torch.set_num_threads(1)
    with distributed.session(RunConfig()):
        for job in jobs:
            where, case = job.rsplit(":", 1)
            old, _, folder = where.rpartition(">")
            if old:
                distributed.on_main(lambda old=old, new=folder: shutil.copytree(old, new))
            with distributed.session(configured(case)):
                work(Path(folder), case)


def start(count: int, jobs: Sequence[str]) -> None:
    """Run the jobs on so many processes, under torchrun's variables. They are forks, which import nothing again.

    Raises RuntimeError if one of them fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank(number: int) -> None:
        os.environ.update(common, RANK=str(number), LOCAL_RANK=str(number))
        main(jobs)

    processes = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.1)
            if any(process.exitcode for process in processes):
                raise RuntimeError(f"of {count} ranks one failed: {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    start(int(sys.argv[1]), sys.argv[2:])
