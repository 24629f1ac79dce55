"""The learner on one GPU: every way to compute gives the loss and the gradient of the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpus
import pytest
import torch
from fakes import small
from torch.distributed.tensor import DTensor
from transformers.utils import is_flash_attn_2_available

from suite import distributed, sharding
from suite.batch import Batch, pad
from suite.policy import Policy

pytestmark = gpus.needs(1)

FLOAT32, BFLOAT16 = 1e-4, 5e-2
"""Tolerated, relative to the plain loss and norm: orders of addition differ from kernel to kernel."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpus.model(tmp_path_factory.mktemp("models") / "llama", scale=2.0)


def batch(policy: Policy) -> Batch:
    """Four prompts of different lengths, each with a completion."""
    prompts = [tuple(range(3, 3 + length)) for length in (5, 2, 7, 3)]
    completions = [tuple(range(4, 4 + length)) for length in (8, 12, 3, 10)]
    ids, attention, mask = (part.to(policy.model.device) for part in pad(prompts, completions, policy.pad_id))
    none_BT, none_B = torch.zeros(mask.shape, device=ids.device), torch.zeros(len(ids), device=ids.device)
    return Batch(ids, attention, mask, none_BT, none_B, none_B, none_B, [[row] for row in range(len(ids))])


def learned(model: Path, **options: Any) -> tuple[float, float, Policy]:
    """Loss, norm of its gradient, and the learner, whose gradients are there."""
    config = small(model__path=str(model), **options)
    with distributed.session(config):
        policy = Policy.load(config.model)
        sharding.prepare(policy.model, config, trains=True)
        given = batch(policy)
        logprobs_BT, _ = policy.logprobs(given, temperature=1.0)
        loss = -logprobs_BT.sum() / given.mask_BT.sum()
        loss.backward()
        return float(loss.detach()), sharding.clip(policy.model.parameters(), 0.0), policy


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[float, float]:
    loss, norm, _ = learned(model, model__attention="eager")
    assert loss > 1.0
    assert norm > 0.1
    return loss, norm


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, FLOAT32),
        ({"learner__activation_checkpointing": True}, FLOAT32),
        ({"learner__compile": True}, FLOAT32),
        ({"learner__compute_dtype": "bfloat16"}, BFLOAT16),
        (
            {
                "learner__compute_dtype": "bfloat16",
                "learner__activation_checkpointing": True,
                "learner__compile": True,
            },
            BFLOAT16,
        ),
        ({"model__dtype": "bfloat16"}, BFLOAT16),
    ],
    ids=["sdpa", "recomputed", "compiled", "bfloat16", "bfloat16 recomputed compiled", "bfloat16 weights"],
)
def test_every_way_to_compute_gives_the_loss_and_gradient_of_the_plain_one(
    options: dict[str, Any], tolerance: float, model: Path, plain: tuple[float, float]
) -> None:
    loss, norm, _ = learned(model, **options)
    assert (loss, norm) == pytest.approx(plain, rel=tolerance)


def test_bfloat16_computes_on_float32_weights_and_gradients(model: Path, plain: tuple[float, float]) -> None:
    loss, _, policy = learned(model, learner__compute_dtype="bfloat16")
    assert loss != plain[0]
    for parameter in policy.model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device.type == "cuda"
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


def test_the_attention_kernel_is_the_best_one_that_is_there(model: Path, plain: tuple[float, float]) -> None:
    loss, norm, policy = learned(model, model__dtype="bfloat16")
    best = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    assert policy.model.config._attn_implementation == best
    eager, their_norm, _ = learned(model, model__dtype="bfloat16", model__attention="eager")
    assert (loss, norm) == pytest.approx((eager, their_norm), rel=2e-2)
