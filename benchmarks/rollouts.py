"""Rollouts in process and through vLLM: tokens a second, what a sync costs, what keeping an engine saves.

The model is an untrained Llama with heads of 32, which vLLM's CPU kernels know. Without vLLM only the first figure.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from suite.config import RunConfig, apply
from suite.parts import Parts, assemble
from suite.protocols import Collected
from suite.rollout.vllm_engine import release_all
from suite.seed_model import tokenizer

Figures = Iterator[tuple[str, float, str]]

BATCHES = 20
COMMON = {"train.steps": BATCHES, "rollout.max_completion_length": 32, "rollout.memory_share": 0.02}
CELLS = 6


def make(folder: Path, width: int, layers: int) -> Path:
    """An untrained Llama with the tokenizer of addition."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer("addition")
    shape = LlamaConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=3 * width, max_position_embeddings=256, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(shape).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def tokens_per_second(parts: Parts, sync_every: int) -> float:
    """Twenty batches of 32 prompts x 8 rollouts, the weights handed over every so many of them."""
    began, tokens = time.perf_counter(), 0
    for batch in range(BATCHES):
        if batch and batch % sync_every == 0:
            parts.generator.load(parts.policy.model.state_dict(), batch)
        tokens += parts.rollouts(batch).generated_tokens
    return tokens / (time.perf_counter() - began)


def matching(config: RunConfig) -> float:
    """Share of the rollouts' tokens that a window in one call has in common with a call for each batch, percent.

    Rollouts are compared up to the first token that differs: what follows has another beginning.
    """
    equal = total = 0
    whole = assemble(config)
    windows = [whole.rollouts(batch) for batch in range(BATCHES)]
    alone = assemble(apply(config, {"rollout.window_rollouts": 1}))
    for batch, window in enumerate(windows):
        for mine, theirs in zip(sampled(window), sampled(alone.rollouts(batch)), strict=True):
            same = [a == b for a, b in zip(mine, theirs, strict=False)]
            equal += same.index(False) if False in same else len(same)
            total += max(len(mine), len(theirs))
    return 100 * equal / total


def sampled(batch: Collected) -> list[tuple[int, ...]]:
    """The token ids of a batch's rollouts."""
    return [rollout.completion.token_ids for group in batch.groups for rollout in group]


def figures() -> Figures:
    """One thread, 32 prompts x 8 rollouts of at most 32 tokens, a Llama of 4 layers, 96 wide."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        small = str(make(Path(place) / "small", 96, 4))
        base = apply(RunConfig(), {**COMMON, "rollout.memory_share": 0.0, "model.path": small})
        yield "in process, s=1", tokens_per_second(assemble(base), 1), "tokens/s"
        if importlib.util.find_spec("vllm") is None:
            return
        try:
            yield from _engine(Path(place), small)
        finally:
            release_all()


def _engine(place: Path, small: str) -> Figures:
    online = apply(RunConfig(), {**COMMON, "model.path": small, "rollout.engine": "vllm"})
    assemble(online).rollouts(0)
    yield "vLLM, s=1", tokens_per_second(assemble(online), 1), "tokens/s"
    ten = apply(online, {"rollout.sync_period": 10})
    yield "vLLM, s=10, a window in one call", tokens_per_second(assemble(ten), 10), "tokens/s"
    offline = apply(online, {"rollout.sync_period": "inf", "rollout.window_rollouts": 10**6})
    yield "vLLM, offline, the whole run in one call", tokens_per_second(assemble(offline), BATCHES), "tokens/s"
    for dtype in ("float32", "bfloat16"):
        half = apply(offline, {"rollout.engine_dtype": dtype})
        yield f"vLLM, {dtype}, tokens of a window that are those of step by step", matching(half), "%"
    release_all()
    for kept, words in ((True, "worker"), (False, "cell")):
        began = time.perf_counter()
        for seed in range(CELLS):
            assemble(apply(online, {"seed": seed}))
            if not kept:
                release_all()
        yield f"{CELLS} cells, start-up paid once per {words}", time.perf_counter() - began, "s"
        release_all()
    for width, layers in ((96, 4), (512, 8), (1024, 12)):
        model = str(make(place / str(width), width, layers))
        sync = assemble(apply(online, {"model.path": model}))
        sync.generator.load(sync.policy.model.state_dict(), 1)
        found = sync.generator.measured()
        yield f"sync of {found['sync/bytes'] / 1e6:,.1f} MB, verified", 1000 * found["sync/seconds"], "ms"
