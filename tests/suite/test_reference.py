"""The reference's log-probs, kept where answers are met again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import small, trained
from objectives.objective_cases import make_batch

from suite import train as core
from suite.reference import Memory


class Counting:
    """Gives every row a value of its own and notes which rows it is asked for."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        self.rows.append(batch.input_ids_BL[:, 0].tolist())
        return torch.where(batch.mask_BT, batch.input_ids_BL[:, :1].float() / 8 + 1, torch.nan)


def numbered(order: list[int]) -> Any:
    batch = make_batch()
    batch.input_ids_BL = torch.arange(7)[:, None].expand(7, 7).clone()
    return batch.take(order)


def test_only_rows_that_are_new_are_computed() -> None:
    compute, memory = Counting(), Memory(keep=True)
    first = memory(numbered([0, 1, 2]), compute)
    second = memory(numbered([4, 1, 0, 3]), compute)
    third = memory(numbered([3, 4]), compute)
    assert compute.rows == [[0, 1, 2], [4, 3]]
    assert first[1].tolist() == [1.125, 1.125, 1.125, 0.0, 0.0]
    assert second[:, 0].tolist() == [1.5, 1.125, 1.0, 0.0]  # row 3 has no trained token
    assert torch.equal(third[1], second[0])
    assert third[1].tolist() == [1.5, 1.5, 0.0, 1.5, 0.0]


def test_without_keeping_everything_is_computed_each_time() -> None:
    compute, memory = Counting(), Memory(keep=False)
    for _ in range(2):
        memory(numbered([0, 1]), compute)
    assert compute.rows == [[0, 1], [0, 1]]


FIXED = {"rollout__source": "fixed", "rollout__sync_period": "inf", "rollout__fixed_batches": 2}


def reference_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the rows of every forward pass without a gradient that prepares a batch."""
    seen: list[int] = []
    plain = core._logprobs

    def noting(config: Any, model: Any, batch: Any) -> Any:
        if not next(model.parameters()).requires_grad:
            seen.append(len(batch))
        return plain(config, model, batch)

    monkeypatch.setattr(core, "_logprobs", noting)
    return seen


def test_a_fixed_set_trains_to_the_same_bits_with_one_pass_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = reference_passes(monkeypatch)
    plain, _ = trained(small(**FIXED, objective__pair_rule="group"), tmp_path / "plain")
    assert len(seen) == 6
    seen.clear()
    kept, _ = trained(
        small(**FIXED, objective__pair_rule="group", rollout__precompute_ref_log_probs=True), tmp_path / "kept"
    )
    assert len(seen) == 2
    assert kept.weights == plain.weights


def test_given_pairs_are_referred_to_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"problem": f"{10 + i}+{20 + i}=", "answer": str(30 + 2 * i), "good": str(30 + 2 * i)[::-1], "bad": "1"}
            for i in range(22)]  # fmt: skip
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "task__name": "file", "task__source": str(path), "task__chosen_column": "good", "task__rejected_column": "bad",
        "rollout__source": "external", "rollout__sync_period": "inf", "rollout__num_prompts": 4, "train__steps": 12,
        "eval__validation_problems": 4, "eval__test_problems": 2, "rollout__max_completion_length": 6,
    }  # fmt: skip
    seen = reference_passes(monkeypatch)
    _, plain = trained(small(**given), tmp_path / "plain")
    assert sum(seen) == 12 * 8
    seen.clear()
    _, kept = trained(small(**given, rollout__precompute_ref_log_probs=True), tmp_path / "kept")
    assert sum(seen) == 16 * 2
    assert kept.column("loss/total") == pytest.approx(plain.column("loss/total"), rel=1e-5)
    # chosen answers alone are enough for supervised training
    del given["task__rejected_column"]
    given["train__steps"] = 24
    _, sft = trained(small(**given, objective__name="sft", optim__lr=3e-3), tmp_path / "sft")
    assert sft.column("sft/rows") == [4.0] * 24
    losses = sft.column("loss/nll")
    # .30 to .48 over three seeds
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
