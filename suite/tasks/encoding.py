"""Text to token ids and the order in which problems are drawn."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from suite.randomness import permutation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@functools.lru_cache(maxsize=100_000)
def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, *, chat: bool) -> tuple[int, ...]:
    """The ids of a prompt, ending where the completion begins, with exactly one BOS if the tokenizer has one.

    With `chat`, the text is one user turn of the tokenizer's chat template, which prints the BOS itself.
    Raises ValueError if there is no template, or if the template prints more than one BOS.
    """
    bos = tokenizer.bos_token_id
    if not chat:
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        return tuple(ids if bos is None or ids[:1] == [bos] else [bos, *ids])
    if not tokenizer.chat_template:
        raise ValueError("task.chat is on and the tokenizer has no chat template; turn it off or use a chat model")
    turn = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer.encode(str(rendered), add_special_tokens=False))
    # where BOS and EOS are one token (GPT-2) a template may close turns with it
    if bos is not None and bos != tokenizer.eos_token_id:
        if ids.count(bos) > 1:
            raise ValueError(f"the chat template prints {ids.count(bos)} BOS tokens, and one is right")
        if bos not in ids:
            ids.insert(0, bos)
    return tuple(ids)


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids of a given completion, closed by the EOS."""
    assert isinstance(tokenizer.eos_token_id, int)
    return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> list[int]:
    return permutation(count, seed, epoch, "prompts")


def draw(items: Sequence[T], seed: int, batch: int, count: int) -> list[T]:
    """Batch number `batch` of `count` items: passes over all items, each pass in a keyed order of its own."""
    out = []
    for position in range(batch * count, (batch + 1) * count):
        epoch, index = divmod(position, len(items))
        out.append(items[_order(len(items), seed, epoch)[index]])
    return out
