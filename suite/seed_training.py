"""How an embedded seed model is trained: supervised, on a verified task, until greedy accuracy is at the target.

Accuracy rises steeply where it starts to rise, so training looks at every step there, and where one step leaps over
the target it goes back to the state before and on at half the learning rate.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.randomness import generator
from suite.tasks import arithmetic, replies

if TYPE_CHECKING:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FAR = 0.15
"""Accuracy below the target up to which only every `check_every`-th step is examined, and on few problems."""


@dataclass(frozen=True)
class SeedRecipe:
    """A tiny Llama and its supervised training. Steps, not seconds, bound it."""

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
    tolerance: float = 0.02
    """How far from the target the accuracy may lie."""
    check_every: int = 10
    """Steps between two examinations while accuracy is far below the target."""
    seed: int = 0


@dataclass(frozen=True)
class Lesson:
    """What a task teaches a seed model."""

    tokens: Sequence[str]
    """Its alphabet."""
    examples: Callable[[], list[tuple[str, str]]]
    """Prompts and completions of its training split."""


def lesson(task: str) -> Lesson:
    """The lesson of an embedded task."""
    if task in arithmetic.FAMILIES:
        family = arithmetic.FAMILIES[task]
        return Lesson(
            arithmetic.CHARACTERS,
            lambda: [(problem.text, family.solve(problem)) for problem in family.problems()["train"]],
        )
    return Lesson(replies.TOKENS, replies.examples)


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


def architecture(plan: SeedRecipe, words: PreTrainedTokenizerFast) -> LlamaConfig:
    """The model's configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(words), hidden_size=plan.hidden_size, num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads, num_key_value_heads=plan.heads, intermediate_size=plan.intermediate_size,
        max_position_embeddings=128, tie_word_embeddings=False, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip


def new_model(plan: SeedRecipe, words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The model before training; its weights are those of the recipe's seed."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        return LlamaForCausalLM(architecture(plan, words)).eval()


def train(plan: SeedRecipe, file: Path, say: Callable[[str], None] | None = None) -> None:
    """Train by a recipe and write the weights, float16, with the recipe and what came out in the file's metadata.

    Raises RuntimeError if the target is not reached within the recipe's steps.
    """
    import torch

    words = tokenizer(*plan.tasks)
    model = new_model(plan, words)
    lessons = [_tensors(task, words) for task in plan.tasks]
    accuracy_of = _examination(plan, model, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.01)
    start, accuracy, peak, near = time.monotonic(), 0.0, plan.lr, False
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
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
            group["lr"] = peak * min(1.0, step / plan.warmup_steps)
        optimizer.step()
        if say and step % 100 == 0:
            shown = ", ".join(f"{loss.item():.3f}" for loss in losses)
            say(f"step {step} of at most {plan.max_steps}, loss {shown}, {time.monotonic() - start:.0f} s")
        if not plan.target or step <= plan.head_start or (not near and step % plan.check_every):
            continue
        accuracy = accuracy_of(near)
        if abs(accuracy - plan.target) <= plan.tolerance:
            break
        if accuracy > plan.target:
            model.load_state_dict(before[0])
            optimizer.load_state_dict(copy.deepcopy(before[1]))
            peak /= 2
        else:
            before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        near = near or accuracy >= plan.target - FAR
    if plan.target and abs(accuracy - plan.target) > plan.tolerance:
        raise RuntimeError(
            f"the seed model of {' and '.join(plan.tasks)} with seed {plan.seed} was at {accuracy:.1%} after "
            f"{plan.max_steps} steps; its target is {plan.target:.0%}"
        )
    seconds = round(time.monotonic() - start, 1)
    held_out = accuracy if plan.target else None
    save(model, file, {"recipe": asdict(plan), "steps": step, "validation_accuracy": held_out})
    if say:
        say(f"{step} steps, {seconds:.0f} s" + (f", {accuracy:.1%} on held-out problems" if plan.target else ""))


def save(model: torch.nn.Module, file: Path, about: dict[str, Any]) -> None:
    """Write float16 weights and, in the file's metadata, JSON about them."""
    import torch
    from safetensors.torch import save_file

    tensors = {name: value.to(torch.float16).contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, file, {"about": json.dumps(about, sort_keys=True)})


def about(file: Path) -> dict[str, Any]:
    """What a file that `save` wrote says of itself."""
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        found: dict[str, Any] = json.loads(opened.metadata()["about"])
    return found


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


def _examination(plan: SeedRecipe, model: LlamaForCausalLM, words: PreTrainedTokenizerFast) -> Callable[[bool], float]:
    """Greedy validation accuracy of the model as it is saved, in half precision; while far off, on few problems."""

    from suite.protocols import Request, Sampling
    from suite.rollout.in_process import InProcessSampler

    if not plan.target:
        return lambda near: 0.0
    family = arithmetic.FAMILIES[plan.tasks[0]]
    problems = family.problems()["validation"]
    rounded = copy.deepcopy(model)
    sampler = InProcessSampler(rounded, pad_id=words.pad_token_id, stop_ids=(words.eos_token_id,))
    requests = [
        Request((words.bos_token_id, *words.encode(problem.text, add_special_tokens=False)), (number,))
        for number, problem in enumerate(problems)
    ]

    def share(count: int) -> float:
        sampling = Sampling(0.0, 1.0, 0, family.max_completion_length)
        texts = [
            words.decode(list(made.token_ids), skip_special_tokens=True)
            for made in sampler.generate(requests[:count], sampling)
        ]
        answers = [family.answer(text) for text in texts]
        right = [answer == problem.gold for answer, problem in zip(answers, problems[:count], strict=True)]
        return sum(right) / count

    def accuracy(near: bool) -> float:
        rounded.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
        found = 0.0 if near else share(100)
        return share(len(problems)) if near or found >= plan.target - FAR - 0.05 else found

    return accuracy
