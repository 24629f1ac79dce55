"""The embedded seed models: tiny Llamas trained once on an arithmetic task and cached in the user's cache folder.

A recipe's supervised training stops when greedy validation accuracy first reaches the target, so that
reinforcement learning starts from a model that is right about two times in five.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from suite.registry import unknown

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class SeedRecipe:
    """A tiny Llama and its supervised training. Steps, not seconds, bound it, so that it is the same everywhere."""

    task: str
    max_steps: int
    hidden_size: int = 96
    layers: int = 3
    heads: int = 4
    intermediate_size: int = 256
    batch_size: int = 128
    lr: float = 3e-3
    warmup_steps: int = 50
    target: float = 0.40
    check_every: int = 10
    seed: int = 0


RECIPES = {
    "addition": SeedRecipe("addition", max_steps=1500),
    "sums": SeedRecipe("sums", max_steps=1500, batch_size=64),
}


def recipe(name: str) -> SeedRecipe:
    """The recipe called `name`; ValueError with near names if there is none."""
    if name not in RECIPES:
        raise unknown("seed model", name, RECIPES)
    return RECIPES[name]


def cache_root() -> Path:
    """Where seed models are kept: SUITE_CACHE, else the user's cache folder."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("SUITE_CACHE") or user_cache_path("rl-ablation-suite", appauthor=False))


def content_hash(name: str) -> str:
    """Hash of all that decides the weights: the recipe, the task's code, this module's code and torch's version."""
    import torch

    from suite.tasks import arithmetic

    parts = [json.dumps(dataclasses.asdict(recipe(name)), sort_keys=True), torch.__version__.split("+")[0]]
    parts += [inspect.getsource(arithmetic), inspect.getsource(train)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def tokenizer() -> PreTrainedTokenizerFast:
    """The character tokenizer of the arithmetic tasks, with BOS, EOS and PAD; `\\boxed{` is one token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from suite.tasks.arithmetic import CHARACTERS

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def ensure(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The folder of the trained seed model, training it first if it is not in the cache; safe in parallel processes."""
    from filelock import FileLock

    folder = cache_root() / f"seed-{name}-{content_hash(name)}"
    if (folder / "seed.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "seed.json").is_file():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            train(recipe(name), partial, say)
            partial.rename(folder)
    return folder


def _new_model(plan: SeedRecipe, words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words), hidden_size=plan.hidden_size, num_hidden_layers=plan.layers,
                num_attention_heads=plan.heads, num_key_value_heads=plan.heads,
                intermediate_size=plan.intermediate_size, max_position_embeddings=128, tie_word_embeddings=False,
                bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
            )
        ).eval()  # fmt: skip


def train(plan: SeedRecipe, folder: Path, say: Callable[[str], None] | None = None) -> None:
    """Train by a recipe and write a plain Hugging Face folder with `seed.json` (steps, accuracy, seconds).

    Raises RuntimeError if the target is not reached within the recipe's steps.
    """
    import torch
    import transformers

    from suite.config import RunConfig, TaskConfig
    from suite.evaluate import greedy_accuracy
    from suite.randomness import generator
    from suite.rollout.in_process import InProcessSampler
    from suite.tasks import build
    from suite.tasks.arithmetic import FAMILIES

    words = tokenizer()
    model = _new_model(plan, words)
    task = build(RunConfig(task=TaskConfig(name=plan.task)), words)
    family = FAMILIES[plan.task]
    rows = []
    for problem in family.problems()["train"]:
        prompt = words.encode(problem.text, add_special_tokens=False)
        answer = words.encode(family.solve(problem), add_special_tokens=False)
        rows.append(([words.bos_token_id, *prompt], [*answer, words.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)

    sampler = InProcessSampler(model, pad_id=words.pad_token_id, stop_ids=(words.eos_token_id,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    held_out = task.held_out("validation", 0)
    start, accuracy = time.monotonic(), 0.0
    for step in range(1, plan.max_steps + 1):
        chosen = torch.from_numpy(generator(plan.seed, step, "seed model").integers(len(rows), size=plan.batch_size))
        width = int((labels[chosen] != -100).any(0).nonzero().max()) + 1
        loss = model(input_ids=ids[chosen, :width], labels=labels[chosen, :width]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, step / plan.warmup_steps)
        optimizer.step()
        if step % plan.check_every == 0 and loss.item() < 1.0:
            # a look at 100 problems first: most checks come long before the target
            accuracy = greedy_accuracy(sampler, task, held_out[:100], words)
            if accuracy >= plan.target - 0.08:
                accuracy = greedy_accuracy(sampler, task, held_out, words)
                if accuracy >= plan.target:
                    break
            if say and step % 100 == 0:
                seconds = time.monotonic() - start
                say(f"seed model {plan.task}: step {step}, loss {loss.item():.3f}, {accuracy:.1%}, {seconds:.0f} s")
    else:
        raise RuntimeError(
            f"the seed model {plan.task!r} reached {accuracy:.1%} in {plan.max_steps} steps, short of {plan.target:.0%}"
        )
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    seconds = time.monotonic() - start
    report = {"task": plan.task, "steps": step, "validation_accuracy": accuracy, "problems": len(held_out)}
    (folder / "seed.json").write_text(json.dumps({**report, "seconds": round(seconds, 1)}, indent=1))
    if say:
        say(f"seed model {plan.task}: {accuracy:.1%} on {len(held_out)} held-out problems, {seconds:.0f} s")
