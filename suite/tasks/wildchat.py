"""WildChat as the paper uses it: the first turns of real conversations, answered for a reward model.

arXiv 2506.21495, section on data: a random sample of 1,000 first-turn prompts of WildChat-1M, given as they are in the
model's chat template. That they are English, neither toxic nor redacted, and no longer than `task.max_prompt_length` is
ours, and so is the sample (the lowest hashes of their text) and what is held out: the paper validates on 470
prompts of other sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from suite.config import RunConfig
from suite.grading import Verdict
from suite.protocols import Prompt, Split
from suite.tasks import TASKS
from suite.tasks.encoding import draw, encode_prompt
from suite.tasks.files import DEFAULT_BUDGET, Row, read_rows, uid_of
from suite.tasks.scored import score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 470
"""Validation prompts, and as many test prompts: the paper's number."""


def first_turn(row: Row) -> str | None:
    """What the user asked first; None if it is empty, not in English, toxic or redacted."""
    if row["language"] != "English" or row["toxic"] or row["redacted"]:
        return None
    turns = row["conversation"]
    if not turns or turns[0]["role"] != "user":
        return None
    return (turns[0]["content"] or "").strip() or None


def to_prompts(rows: Iterable[Row]) -> list[Prompt]:
    """The distinct first turns in the order of their hashes; ValueError if the rows have not WildChat's columns."""
    found: dict[str, Prompt] = {}
    for number, row in enumerate(rows, 1):
        missing = {"conversation", "language", "toxic", "redacted"} - row.keys()
        if missing:
            raise ValueError(f"task.wildchat_source, row {number} has no column {' or '.join(sorted(missing))}")
        text = first_turn(row)
        if text is not None:
            prompt = Prompt(uid_of(text), text, "")
            found[prompt.uid] = prompt
    return [found[uid] for uid in sorted(found)]


class WildChat:
    """First turns, scored by `task.reward_model`; without one every reward abstains, and a judge must choose pairs."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, held_out: int = HELD_OUT) -> None:
        self.name = "wildchat"
        self.max_completion_length = config.rollout.max_completion_length or DEFAULT_BUDGET
        self._config, self._tokenizer = config.task, tokenizer
        self._splits = self._split(to_prompts(read_rows(config.task.wildchat_source, "task.wildchat_source")), held_out)

    def _split(self, prompts: Sequence[Prompt], held_out: int) -> dict[Split, list[Prompt]]:
        wanted, short = 2 * held_out + self._config.wildchat_prompts, list[Prompt]()
        for prompt in prompts:
            if len(short) == wanted:
                break
            if len(self.encode(prompt)) <= self._config.max_prompt_length:
                short.append(prompt)
        if len(short) < wanted:
            raise ValueError(
                f"task.wildchat_source: {self._config.wildchat_source} has {len(short)} usable first turns; "
                f"task.wildchat_prompts = {self._config.wildchat_prompts} and {2 * held_out} held out need {wanted}"
            )
        return {
            "test": short[:held_out],
            "validation": short[held_out : 2 * held_out],
            "train": short[2 * held_out :],
        }

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        """See `Task.draw`."""
        return draw(self._splits["train"], seed, batch, count)

    def held_out(self, split: Split, count: int) -> list[Prompt]:
        """See `Task.held_out`."""
        return self._splits[split][: count or None]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Task.encode`."""
        return encode_prompt(self._tokenizer, prompt.text, chat=self._config.chat)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        """The reward model's score of each completion."""
        return score(self._config.reward_model, prompts, completions)


TASKS.register(
    "wildchat",
    reads=[
        "task.wildchat_source", "task.wildchat_prompts", "task.reward_model", "task.chat", "task.max_prompt_length",
    ],
)(WildChat)  # fmt: skip
