"""The embedded seed models: tiny Llamas trained once on the embedded tasks and cached in the user's cache folder.

Supervised training on a verified task stops when greedy validation accuracy first reaches the target, so that
reinforcement learning starts from a model that is right about two times in five. Replies are written as the
people of that task write them: what is to be learnt is which of them are liked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from suite.registry import unknown

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


@dataclass(frozen=True)
class SeedRecipe:
    """A tiny Llama and its supervised training. Steps, not seconds, bound it, so that it is the same everywhere."""

    tasks: tuple[str, ...]
    """What it learns; a loss is the mean of the tasks' losses."""
    max_steps: int
    hidden_size: int = 96
    layers: int = 3
    heads: int = 4
    intermediate_size: int = 256
    batch_sizes: tuple[int, ...] = (128,)
    """Examples of each task at every step."""
    head_start: int = 0
    """Steps on the last task alone, which come first: a slow task beside one that is learnt suddenly."""
    lr: float = 3e-3
    warmup_steps: int = 50
    target: float = 0.40
    """Greedy validation accuracy on the first task at which training stops; 0 = after `max_steps`."""
    check_every: int = 10
    seed: int = 0


RECIPES = {
    "addition": SeedRecipe(("addition",), max_steps=1500),
    "sums": SeedRecipe(("sums",), max_steps=1500, batch_sizes=(64,)),
    "replies": SeedRecipe(("replies",), max_steps=400, batch_sizes=(64,), target=0.0),
    "mixed": SeedRecipe(("addition", "replies"), max_steps=1500, batch_sizes=(64, 64), head_start=300, check_every=4),
}


@dataclass(frozen=True)
class Lesson:
    """What a task teaches a seed model."""

    tokens: Sequence[str]
    """Its alphabet."""
    examples: Callable[[], list[tuple[str, str]]]
    """Prompts and completions of its training split."""


def lesson(task: str) -> Lesson:
    """The lesson of an embedded task."""
    from suite.tasks import arithmetic, replies

    if task in arithmetic.FAMILIES:
        family = arithmetic.FAMILIES[task]
        return Lesson(
            arithmetic.CHARACTERS,
            lambda: [(problem.text, family.solve(problem)) for problem in family.problems()["train"]],
        )
    return Lesson(replies.TOKENS, replies.examples)


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

    parts = [json.dumps(dataclasses.asdict(recipe(name)), sort_keys=True), torch.__version__.split("+")[0]]
    parts += [inspect.getsource(module) for module in dict.fromkeys(map(_module, recipe(name).tasks))]
    parts += [inspect.getsource(train)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _module(task: str) -> ModuleType:
    from suite.tasks import arithmetic, replies

    return arithmetic if task in arithmetic.FAMILIES else replies


def tokenizer(*tasks: str) -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded tasks (arithmetic alone if none is named), with BOS, EOS and PAD.

    A character is a token, `\\boxed{` is one, and so is a word with the space before it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = dict.fromkeys(token for task in tasks or ("addition",) for token in lesson(task).tokens)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *tokens])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{| ?[a-z]+|."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def ensure(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The folder of the trained seed model, training it first if it is not in the cache; safe in parallel processes."""
    return cached(f"seed-{name}-{content_hash(name)}", lambda folder: train(recipe(name), folder, say))


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of the cache, made first if it is not there; whole or absent, safe in parallel processes."""
    from filelock import FileLock

    folder = cache_root() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
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


def _tensors(task: str, words: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of a task's examples, padded on the right; prompts carry no loss."""
    import torch

    rows = []
    for prompt, completion in lesson(task).examples():
        asked = words.encode(prompt, add_special_tokens=False)
        answer = words.encode(completion, add_special_tokens=False)
        rows.append(([words.bos_token_id, *asked], [*answer, words.eos_token_id]))
    width = max(len(asked) + len(answer) for asked, answer in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (asked, answer) in enumerate(rows):
        ids[row, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[row, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
    return ids, labels


def train(plan: SeedRecipe, folder: Path, say: Callable[[str], None] | None = None) -> None:
    """Train by a recipe and write a plain Hugging Face folder with `seed.json` (steps, accuracy, seconds).

    Raises RuntimeError if a target is not reached within the recipe's steps.
    """
    import torch

    from suite.randomness import generator

    words = tokenizer(*plan.tasks)
    model = _new_model(plan, words)
    lessons = [_tensors(task, words) for task in plan.tasks]
    accuracy_of = _examination(plan, model, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    start, accuracy = time.monotonic(), 0.0
    for step in range(1, plan.max_steps + 1):
        losses = []
        for number, (ids, labels) in enumerate(lessons):
            if step <= plan.head_start and number < len(lessons) - 1:
                continue
            rng = generator(plan.seed, step, "seed model", *([number] if number else []))
            chosen = torch.from_numpy(rng.integers(len(ids), size=plan.batch_sizes[number]))
            width = int((labels[chosen] != -100).any(0).nonzero().max()) + 1
            losses.append(model(input_ids=ids[chosen, :width], labels=labels[chosen, :width]).loss)
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * min(1.0, step / plan.warmup_steps)
        optimizer.step()
        if plan.target and step > plan.head_start and step % plan.check_every == 0 and losses[0].item() < 1.0:
            accuracy = accuracy_of()
            if accuracy >= plan.target:
                break
        if say and step % 100 == 0:
            shown = ", ".join(f"{loss.item():.3f}" for loss in losses)
            say(f"seed model {plan.tasks}: step {step}, loss {shown}, {accuracy:.1%}, {time.monotonic() - start:.0f} s")
    if accuracy < plan.target:
        raise RuntimeError(
            f"the seed model of {plan.tasks} reached {accuracy:.1%} in {plan.max_steps} steps; "
            f"its target is {plan.target:.0%}"
        )
    _save(model, words, folder, {"tasks": plan.tasks, "steps": step, "validation_accuracy": accuracy}, start)
    if say:
        say(f"seed model {plan.tasks}: {accuracy:.1%} on held-out problems, {time.monotonic() - start:.0f} s")


def _examination(plan: SeedRecipe, model: LlamaForCausalLM, words: PreTrainedTokenizerFast) -> Callable[[], float]:
    """Greedy validation accuracy on the first task; on 100 problems only while it is far from the target."""
    from suite.config import RunConfig, TaskConfig
    from suite.evaluate import greedy_accuracy
    from suite.rollout.in_process import InProcessSampler
    from suite.tasks import build

    if not plan.target:
        return lambda: 0.0
    task = build(RunConfig(task=TaskConfig(name=plan.tasks[0])), words)
    sampler = InProcessSampler(model, pad_id=words.pad_token_id, stop_ids=(words.eos_token_id,))
    held_out = task.held_out("validation", 0)

    def accuracy() -> float:
        # most checks come long before the target
        found = greedy_accuracy(sampler, task, held_out[:100], words)
        return greedy_accuracy(sampler, task, held_out, words) if found >= plan.target - 0.08 else found

    return accuracy


def _save(
    model: LlamaForCausalLM, words: PreTrainedTokenizerFast, folder: Path, report: dict[str, object], start: float
) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    seconds = round(time.monotonic() - start, 1)
    (folder / "seed.json").write_text(json.dumps({**report, "seconds": seconds}, indent=1))
