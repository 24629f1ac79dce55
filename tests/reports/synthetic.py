"""A small synthetic study with numbers to recompute by hand: frames as `reports.load` gives them, and study.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from reports.load import StudyData

COMMIT = "c0ffee" + "0" * 34
STEPS = 20
PROBLEMS = 40
LABELS = {
    "offline": "Offline DPO, s = ∞",
    "semi": "Semi-online DPO, s = 10",
    "online": "Online DPO, s = 1",
    "grpo": "GRPO",
}
PERIODS: dict[str, Any] = {"offline": "inf", "semi": 10, "online": 1, "grpo": 1}
LEVELS = {"offline": 18, "semi": 26, "online": 26, "grpo": 26}
"""Problems right out of 40, before the seed's own shift."""
SHIFTS = (0, 1, -1, 2, 0)
CLAIMS = [
    {"name": "online beats offline", "kind": "better", "arm": "online", "than": "offline", "smallest_effect": 0.05},
    {"name": "semi-online within 10", "kind": "equivalent", "arm": "semi", "than": "online", "smallest_effect": 0.1},
    {"name": "offline beats seed", "kind": "better", "arm": "offline", "than": "seed model", "smallest_effect": 0.05},
    {"name": "GRPO differs", "kind": "different", "arm": "grpo", "than": "online", "smallest_effect": 0.03},
]


def right(arm: str, seed: int) -> int:
    """Test problems right at the end."""
    wobble = {"semi": (seed * 7) % 3 - 1, "online": (seed * 3) % 4 - 1, "grpo": (seed * 5) % 4 - 2}.get(arm, 0)
    return LEVELS[arm] + SHIFTS[seed % len(SHIFTS)] + wobble


@dataclass
class Synthetic:
    """Rows of a study, to be changed at will before `write`."""

    arms: tuple[str, ...] = tuple(LABELS)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    labels: Mapping[str, str] = field(default_factory=lambda: dict(LABELS))
    claims: list[dict[str, Any]] = field(default_factory=lambda: [dict(claim) for claim in CLAIMS])
    steps: Callable[[str], int] = lambda arm: STEPS
    drop_metrics: tuple[str, ...] = ()
    change: Callable[[str, int, str, int, float], float] = lambda arm, seed, metric, step, value: value
    unfinished: tuple[tuple[str, int], ...] = ()
    absent: tuple[tuple[str, int], ...] = ()
    with_tables: bool = True
    question: str = "Does it matter how often the generator is synchronised with the learner?"
    name: str = "mini_sync"

    def data(self) -> StudyData:
        """The frames."""
        cells = [(a, s) for a in sorted(self.arms) for s in self.seeds if (a, s) not in self.absent]
        history = [row for arm, seed in cells for row in self._history(arm, seed)]
        tables = [
            row for a, s in cells if self.with_tables and (a, s) not in self.unfinished for row in self._table(a, s)
        ]
        runs = pd.DataFrame([self._run(arm, seed) for arm, seed in cells], columns=RUN_COLUMNS)
        runs["started_at"] = pd.to_datetime(runs["started_at"], utc=True)
        return StudyData(
            history=pd.DataFrame(history, columns=["arm", "seed", "run_id", "step", "metric", "value"]),
            runs=runs,
            tables=pd.DataFrame(tables, columns=None if tables else ["run_id", "arm", "seed", "step", "table"]),
            duplicates=pd.DataFrame(columns=[*RUN_COLUMNS, "instead"]),
            unreadable=pd.DataFrame(columns=["path", "reason"]),
        )

    def write(self, folder: Path, **changes: Any) -> Path:
        """study.json into `folder`, with keys changed or (None) left out; the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({key: value for key, value in (self.declaration() | changes).items() if value is not None})
        (folder / "study.json").write_text(text, encoding="utf-8")
        return folder

    def declaration(self) -> dict[str, Any]:
        """What the sweep writes down."""
        arms = [
            {"name": a, "label": self.labels[a], "differs": _differs(a, self.arms[0]), "inert": None} for a in self.arms
        ]
        return {
            "name": self.name,
            "question": self.question,
            "metric": "eval/test/accuracy",
            "control": self.arms[0] if self.arms else "",
            "arms": arms,
            "seeds": list(self.seeds),
            "claims": [{**claim, "metric": "eval/test/accuracy"} for claim in self.claims],
            "cells": [self._cell(arm, seed) for seed in self.seeds for arm in self.arms],
            "commit": COMMIT,
            "dirty": False,
            "versions": {"torch": "2.13.0", "transformers": "5.16.1"},
            "command": f"suite run {self.name} --workers 2",
        }

    def _cell(self, arm: str, seed: int) -> dict[str, Any]:
        failed, waiting = (arm, seed) in self.unfinished, (arm, seed) in self.absent
        error = "Traceback (most recent call last):\nFloatingPointError: the loss is NaN at step 12" if failed else None
        status = "failed" if failed else "waiting" if waiting else "complete"
        name = f"{arm}-seed{seed}"
        cell = {"arm": arm, "seed": seed, "name": name, "fingerprint": _fingerprint(arm, seed), "status": status}
        return {**cell, "folder": name, "error": error}

    def _run(self, arm: str, seed: int) -> dict[str, Any]:
        done = (arm, seed) not in self.unfinished
        resolved = {
            "seed": seed,
            "rollout": {"sync_period": PERIODS[arm], "num_prompts": 32},
            "objective": {"name": "policy_gradient" if arm == "grpo" else "dpo"},
            "eval": {"num_samples": 4, "test_problems": PROBLEMS, "validation_problems": 20},
            "train": {"steps": self.steps(arm)},
        }
        return {
            "run_id": f"{arm}{seed}",
            "arm": arm,
            "seed": seed,
            "name": f"{arm}-seed{seed}",
            "fingerprint": _fingerprint(arm, seed),
            "commit": COMMIT,
            "dirty": False,
            "finished": done,
            "exit_code": 0 if done else 1,
            "truncated": False,
            "damage": "",
            "segments": 1,
            "started_at": f"2026-02-0{seed % 9 + 1}T10:00:00",
            "seconds": 40.0 + seed,
            "path": f"{arm}-seed{seed}/wandb/run.wandb",
            "config": {"arm": arm, "seed": seed, "label": self.labels[arm], "run": resolved, "differs": {}},
        }

    def _history(self, arm: str, seed: int) -> Iterable[tuple[str, int, str, int, str, float]]:
        steps = 12 if (arm, seed) in self.unfinished else self.steps(arm)
        tokens = 0.0
        for step in range(steps + 1):
            values: dict[str, float] = {}
            if step:
                period = PERIODS[arm]
                version = 0 if period == "inf" else (step - 1) // period * period
                tokens += 1000 + 10 * seed + {"grpo": 200}.get(arm, 0)
                values |= {"sync/version": version, "sync/staleness": step - 1 - version}
                values |= {"cost/generated_tokens": tokens, "cost/trained_tokens": tokens / 2}
                values |= {"time/sample_s": 0.5, "time/train_s": 0.25, "time/eval_s": 0.1, "time/reward_s": 0.01}
            if step % 2 == 0:
                share = 1 - np.exp(-4 * step / self.steps(arm))
                values["eval/validation/accuracy"] = 0.4 + share * (right(arm, seed) / PROBLEMS - 0.4) + 0.004 * seed
                values["policy/entropy"] = 0.7 - share * {"offline": 0.05, "semi": 0.3}.get(arm, 0.4) + 0.01 * seed
                values["policy/probe_length"] = 4.2 + share * {"grpo": 0.6}.get(arm, 0.1) + 0.02 * seed
            if step == 0:
                values |= {"eval/test/accuracy": 0.4, "eval/test/avg@4": 0.35}
            elif step == self.steps(arm):
                values |= {"eval/test/accuracy": right(arm, seed) / PROBLEMS}
                values |= {"eval/test/avg@4": right(arm, seed) / PROBLEMS - 0.03}
            for metric, value in values.items():
                if metric not in self.drop_metrics:
                    changed = self.change(arm, seed, metric, step, float(value))
                    yield arm, seed, f"{arm}{seed}", step, metric, changed

    def _table(self, arm: str, seed: int) -> Iterable[dict[str, Any]]:
        # problem i is answered right when its place in a seed's own order is below the number right
        order = np.random.default_rng(seed).permutation(PROBLEMS)
        for i in range(PROBLEMS):
            ok = _rank(order, i) < right(arm, seed)
            outcome = "right" if ok else ("wrong", "no_answer", "wrong", "timeout")[i % 4]
            yield {
                "run_id": f"{arm}{seed}",
                "arm": arm,
                "seed": seed,
                "step": self.steps(arm),
                "table": "eval/test/problems",
                "uid": f"add-{i:03d}",
                "sample": -1,
                "outcome": outcome,
                "reward": float(ok),
                "truncated": i % 10 == 9,
                "tokens": 5,
                "completion": f"<b>{i}</b> & \\boxed{{{i + 3 if ok else i + 4}}}",
                "prompt": f"{i}+3=",
                "gold": str(i + 3),
                "answer": str(i + 3 if ok else i + 4),
            }


RUN_COLUMNS = [
    *("run_id", "arm", "seed", "name", "fingerprint", "commit", "dirty", "finished", "exit_code", "truncated"),
    *("damage", "segments", "started_at", "seconds", "path", "config"),
]


def _rank(order: np.ndarray, i: int) -> int:
    """Rank of problem i by difficulty (its number) mixed with the seed's own order."""
    scores = np.arange(PROBLEMS) * 2 + order
    return int((scores < scores[i]).sum() + (scores[:i] == scores[i]).sum())


def _fingerprint(arm: str, seed: int) -> str:
    return f"{_number(arm) % 10**8:08d}{seed:08d}"


def _number(text: str) -> int:
    """A number for a string, the same in every process."""
    return sum(ord(char) * 31**i for i, char in enumerate(text))


def _differs(arm: str, control: str) -> dict[str, list[Any]]:
    differs = {"rollout.sync_period": [PERIODS[control], PERIODS[arm]]} if PERIODS[arm] != PERIODS[control] else {}
    if arm == "grpo":
        differs["objective.name"] = ["dpo", "policy_gradient"]
    return {} if arm == control else differs
