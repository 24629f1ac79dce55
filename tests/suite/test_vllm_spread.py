"""Engines on the CPU that are not of the plain kind: tensor parallel and fed through vLLM's own weight transfer, and in
another precision than the learner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny_llama import make
from vllm_rig import REAL_ENGINE, Rig, skipping

from suite.config import ModelConfig
from suite.policy import Policy
from suite.protocols import Request, Sampling
from suite.rollout.in_process import InProcessSampler
from suite.rollout.sync import TOLERANCE, SyncError
from suite.rollout.vllm_engine import Settings, acquire, architecture, release_all
from suite.rollout.vllm_sampler import VllmSampler

pytestmark = REAL_ENGINE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tied", tied=True, kv_heads=2)


def test_a_tensor_parallel_engine_takes_weights_through_vllms_transfer_and_every_shard_is_checked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import standin_transfer

    from suite.rollout.direct import DirectTransfer

    standin_transfer.register()
    places = [standin_transfer.installed(tmp_path / "plugin"), Path(standin_transfer.__file__).parent]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    policy = Policy.load(ModelConfig(path=str(model)))
    settings = Settings(architecture(str(model)), "float32", 128, 2, 0.005, True, False, standin_transfer.NAME)
    engine = acquire(settings, str(model))
    try:
        in_process = InProcessSampler(policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids)
        transfer = DirectTransfer(engine, "float32", standin_transfer.TrainerInfo(rank=0, folder=str(tmp_path / "w")))
        sampler = VllmSampler(
            engine, transfer, in_process.separate().model, dtype="float32", max_model_len=128,
            stop_ids=policy.stop_ids, probes=[tuple(range(3, 13)) * 8] * 2,
        )  # fmt: skip
        held, _ = engine.ask("fingerprint")
        assert {len(sums) for sums in held.values()} == {engine.ask("world_size")} == {2}
        assert set(engine.comparable) == set(held)
        move(policy, 0.05)
        sampler.load(policy.model.state_dict(), 7)
        asked = [Request((1, token), (0, token)) for token in range(4, 10)]
        greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=12)
        theirs, mine = sampler.generate(asked, greedy), in_process.generate(asked, greedy)
        assert [(c.token_ids, c.version) for c in theirs] == [(c.token_ids, 7) for c in mine]
        for name, tensor in sampler.weights().items():
            assert torch.equal(tensor, policy.model.state_dict()[name])
        move(policy, 1e-6)
        monkeypatch.setattr(transfer._sender, "send_weights", lambda: None)
        with pytest.raises(SyncError, match="nothing was taken over"):
            sampler.load(policy.model.state_dict(), 8)
        assert not engine.alive
    finally:
        release_all()


def move(policy: Policy, size: float) -> None:
    """Change every weight by about the size."""
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))


def test_a_bfloat16_engine_holds_the_weights_of_a_float32_learner_cast(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        rig = Rig(model, monkeypatch, rollout__engine_dtype="bfloat16")
        held, _ = rig.engine.ask("fingerprint")
        assert set(rig.engine.comparable) == set(held)
        rig.move(0.05)
        assert TOLERANCE["float32"] < rig.load(3) < TOLERANCE["bfloat16"]
        learner = rig.policy.model.state_dict()
        for name, tensor in rig.sampler.weights().items():
            assert torch.equal(tensor, learner[name].to(torch.bfloat16))
        rig.move(1e-4)
        skipping("reload", "derive")(rig, monkeypatch)
        with pytest.raises(SyncError, match="not the learner's: the checksum of"):
            rig.load(4)
    finally:
        release_all()
