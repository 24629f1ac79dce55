"""The embedded tasks: procedural arithmetic for a model of a few hundred thousand parameters.

`addition`: two two-digit numbers; the answer is written least significant digit first ("34+57=" -> "19"),
which a tiny model can learn. `sums`: three to six digits, added from the right in a written-out scratchpad of
running sums of two places, then boxed ("7+9+5=" -> "14;21;\\boxed{21}").

An answer counts only if it is a plain number: math-verify would also accept the problem restated ("34+57").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from suite.config import RunConfig
from suite.grading import Grader, Verdict, extract
from suite.protocols import Prompt, Split
from suite.randomness import generator
from suite.tasks import TASKS
from suite.tasks.encoding import draw, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = ["\\boxed{", "}", "+", "=", ";", *"0123456789"]
"""The alphabet; `\\boxed{` is one token."""

_DATA_KEY = "arithmetic problems, version 1"


@dataclass(frozen=True)
class Problem:
    """Numbers to be added, and the completion a perfect model writes."""

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def gold(self) -> str:
        return str(sum(self.terms))


def solve_addition(problem: Problem, total: int | None = None) -> str:
    """The completion for an addition; with `total`, the completion that gives this (wrong) total."""
    return str(sum(problem.terms) if total is None else total)[::-1]


def solve_sums(problem: Problem, total: int | None = None) -> str:
    """The scratchpad and the box; with `total`, the last sum and the box hold this (wrong) total."""
    running = [sum(problem.terms[-count:]) for count in range(2, len(problem.terms) + 1)]
    if total is not None:
        running[-1] = total
    written = [f"{value:02d}" for value in running]
    return ";".join(written) + f";\\boxed{{{written[-1]}}}"


@lru_cache(maxsize=2)
def addition_problems() -> dict[Split, list[Problem]]:
    """Disjoint splits of all sums of two two-digit numbers; a+b and b+a are always in the same split."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    order = generator(_DATA_KEY, "addition").permutation(len(pairs))
    splits: dict[Split, list[Problem]] = {"test": [], "validation": [], "train": []}
    for index in order:
        a, b = pairs[int(index)]
        split: Split = "test" if len(splits["test"]) < 2000 else "validation"
        split = split if len(splits[split]) < (2000 if split == "test" else 500) else "train"
        splits[split] += [Problem((a, b))] if a == b else [Problem((a, b)), Problem((b, a))]
    return splits


@lru_cache(maxsize=100_000)
def _share(digits: tuple[int, ...]) -> float:
    """A keyed uniform number that decides the split."""
    return float(generator(_DATA_KEY, "split", *digits).random())


@lru_cache(maxsize=2)
def sums_problems() -> dict[Split, list[Problem]]:
    """Disjoint splits of sums of three to six digits; all orders of the same digits are in one split."""
    rng = generator(_DATA_KEY, "sums")
    sizes: dict[Split, int] = {"test": 2000, "validation": 500, "train": 10000}
    splits: dict[Split, dict[tuple[int, ...], Problem]] = {split: {} for split in sizes}
    while any(len(splits[split]) < size for split, size in sizes.items()):
        terms = tuple(int(x) for x in rng.integers(1, 10, size=rng.integers(3, 7)))
        share = _share(tuple(sorted(terms)))
        split: Split = "test" if share < 0.15 else "validation" if share < 0.2 else "train"
        if len(splits[split]) < sizes[split]:
            splits[split].setdefault(terms, Problem(terms))
    return {split: list(problems.values()) for split, problems in splits.items()}


@dataclass(frozen=True)
class Family:
    """What tells one arithmetic task from the other."""

    name: str
    problems: Callable[[], dict[Split, list[Problem]]]
    solve: Callable[..., str]
    answer: Callable[[str], str | None]
    """Completion to answer in the usual digit order, None if there is none."""
    max_completion_length: int


def _plain(answer: str | None) -> str | None:
    return answer if answer is not None and re.fullmatch(r"\d{1,9}", answer) else None


FAMILIES = {
    "addition": Family("addition", addition_problems, solve_addition, lambda text: _plain(text[::-1]), 5),
    "sums": Family("sums", sums_problems, solve_sums, lambda text: _plain(extract(text)), 20),
}


class ArithmeticTask:
    """Procedural sums; held-out problems are disjoint from the training problems."""

    def __init__(self, family: Family, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = family.name
        self.max_completion_length = config.rollout.max_completion_length or family.max_completion_length
        self._family, self._tokenizer = family, tokenizer
        self._external = config.rollout.source == "external"
        self._grader = Grader(want_raw=False)

    def _prompt(self, split: Split, problem: Problem) -> Prompt:
        uid = f"{self.name}/{split}/{problem.text}"
        if not self._external or split != "train":
            return Prompt(uid, problem.text, problem.gold)
        # an outside source of pairs: the right answer against a slip of 1 or 10, one per problem
        slip = int(generator(_DATA_KEY, "slip", uid).choice([-10, -1, 1, 10]))
        wrong = self._family.solve(problem, abs(int(problem.gold) + slip))
        return Prompt(uid, problem.text, problem.gold, chosen=self._family.solve(problem), rejected=wrong)

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        """See `Task.draw`."""
        return [
            self._prompt("train", problem) for problem in draw(self._family.problems()["train"], seed, batch, count)
        ]

    def held_out(self, split: Split, count: int) -> list[Prompt]:
        """See `Task.held_out`; raises ValueError if fewer than `count` problems are there."""
        problems = self._family.problems()[split]
        if count > len(problems):
            raise ValueError(f"task {self.name!r} has {len(problems)} {split} problems, and {count} are asked for")
        return [self._prompt(split, problem) for problem in problems[: count or None]]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Task.encode`."""
        return encode_prompt(self._tokenizer, prompt.text, chat=False)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        """Right if the answer, a plain number, is the gold number; no process is needed for that."""
        verdicts = [Verdict("no_answer", None, None)] * len(completions)
        answers = [self._family.answer(text) for text in completions]
        found = [(i, prompts[i].gold, answer) for i, answer in enumerate(answers) if answer is not None]
        graded = self._grader.grade_batch([(gold, answer) for _, gold, answer in found], extraction="whole")
        for (index, _, _), verdict in zip(found, graded, strict=True):
            verdicts[index] = verdict
        return verdicts


@TASKS.register("addition")
def addition(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ArithmeticTask:
    """Two-digit addition, answer reversed: 2 to 3 digits and the EOS."""
    return ArithmeticTask(FAMILIES["addition"], config, tokenizer)


@TASKS.register("sums")
def sums(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ArithmeticTask:
    """Sums with a scratchpad and a boxed answer: 11 to 20 tokens, and 20 is the budget."""
    return ArithmeticTask(FAMILIES["sums"], config, tokenizer)
