"""What the tests of several ranks run on each: `python rank_runs.py FOLDER CASE ...`, with torchrun's variables set."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from fakes import MemoryTracker, small

from suite import distributed, sharding
from suite import train as core
from suite.checkpoint import latest, restore, write_json
from suite.config import RunConfig, apply, fingerprint, to_json
from suite.parts import Parts, assemble
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
    "recomputed": {"learner__activation_checkpointing": True, "rollout__sync_period": "inf", "critic__init": "policy",
                   **GRPO, "objective__advantage": "gae", "objective__scale_rewards": "none"},
}  # fmt: skip


def configured(case: str) -> RunConfig:
    """The run of a case; its other parts are separated by `-`."""
    return small(**{**COMMON, **CASES[case.split("-")[0]]})


def train(case: str, folder: Path, parts: list[Parts] | None = None) -> tuple[core.Outcome | None, MemoryTracker]:
    """One case in its folder, from the newest checkpoint there; `-cut` stops it after two steps."""
    config, tracker, held = configured(case), MemoryTracker(), parts if parts is not None else []
    place = folder / case.removesuffix("-cut")
    polls = iter([False, True])
    stop = (lambda: next(polls)) if case.endswith("-cut") else None
    distributed.on_main(lambda: restore(place / "checkpoints", fingerprint(config)) and None)

    def keep(*arguments: object) -> Parts:
        held.append(assemble(*arguments))  # type: ignore[arg-type]
        return held[-1]

    before, core.assemble = core.assemble, keep
    try:
        return core.train(config, place, tracker, latest(place / "checkpoints"), stop=stop), tracker  # type: ignore[arg-type]
    except Interrupted:
        return None, tracker
    finally:
        core.assemble = before


def main(folder: Path, cases: list[str]) -> None:
    """Run the cases on all ranks; rank 0 writes what they logged and the weights they ended with."""
    torch.set_num_threads(1)
    with distributed.session(apply(RunConfig(), {})):
        for case in cases:
            parts: list[Parts] = []
            outcome, tracker = train(case, folder, parts)
            weights = sharding.whole(parts[0].policy.model.state_dict())
            logged = json.dumps([[step, sorted(row.items())] for step, row in tracker.rows.items()])
            same = distributed.gathered(json.loads(logged))
            places = [type(p).__name__ for p in parts[0].policy.model.parameters()]
            if distributed.is_main():
                place = folder / case.removesuffix("-cut")
                torch.save(weights, place / "weights.pt")
                write_json(place / "config.json", {"run": to_json(configured(case))})
                found = {
                    "rows": {str(step): row for step, row in tracker.rows.items()}, "size": distributed.size(),
                    "weights": outcome and outcome.weights, "parameters": sorted(set(places)),
                    "equal": all(_untimed(rows) == _untimed(same[0]) for rows in same),
                }  # fmt: skip
                write_json(place / f"found{'-cut' * case.endswith('-cut')}.json", found)


def _untimed(rows: list) -> list:
    return [[step, [item for item in row if not item[0].startswith("time/")]] for step, row in rows]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
