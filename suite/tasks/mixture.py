"""Several tasks in one batch, in stated proportions; each keeps its own reward, completion budget and pair rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from suite.config import RunConfig, apply
from suite.grading import Verdict
from suite.protocols import Prompt, Split, Task
from suite.randomness import permutation
from suite.registry import unknown
from suite.tasks import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "mixture"


def named(text: str, option: str) -> dict[str, str]:
    """`a=1,b=2` as name -> value, in its order; ValueError names the option and what is wrong."""
    out: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{option} is {text!r}; {part!r} must be written as name=value")
        if name in out:
            raise ValueError(f"{option} is {text!r} and names {name!r} twice")
        out[name] = value
    return out


def proportions(config: RunConfig) -> dict[str, float]:
    """The tasks of the mixture and their proportions, not negative, at least one above 0; ValueError otherwise."""
    out = {}
    for name, value in named(config.task.mixture, "task.mixture").items():
        if name not in TASKS or name == NAME:
            raise unknown("task", name, set(TASKS) - {NAME}, "task.mixture")
        out[name] = _number(value, f"task.mixture: the proportion of {name!r}")
    if not any(out.values()):
        raise ValueError(f"task.mixture is {config.task.mixture!r} and must name a task with a proportion above 0")
    return out


def lengths(config: RunConfig) -> dict[str, int]:
    """Completion budgets by task, tokens: the mixture's, else the run's, else 0 for the task's own."""
    given = dict.fromkeys(proportions(config), config.rollout.max_completion_length)
    for name, value in named(config.task.lengths, "task.lengths").items():
        if name not in given:
            raise unknown("task", name, given, "task.lengths")
        given[name] = int(_number(value, f"task.lengths: the budget of {name!r}", whole=True))
    return given


def pair_rules(config: RunConfig) -> dict[str, str]:
    """Pair rules by task, empty where `objective.pair_rule` holds."""
    given = dict.fromkeys(proportions(config), "")
    for name, value in named(config.task.pair_rules, "task.pair_rules").items():
        if name not in given:
            raise unknown("task", name, given, "task.pair_rules")
        given[name] = value
    return given


def _number(text: str, what: str, *, whole: bool = False) -> float:
    try:
        value = float(int(text) if whole else float(text))
    except ValueError:
        value = -1.0
    if not (1 if whole else 0) <= value < float("inf"):
        wanted = "a whole number of at least 1" if whole else "a number of at least 0"
        raise ValueError(f"{what} is {text!r} and must be {wanted}")
    return value


def counts(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` places by proportion, the same in every batch: whole parts first, then by largest remainder.

    Equal remainders go to the task named first. [1, 2] of 8 places are [3, 5] (2.67 and 5.33).
    """
    whole = sum(shares.values())
    exact = {name: total * share / whole for name, share in shares.items()}
    out = {name: int(value) for name, value in exact.items()}
    # rounded, so that 1/3 + 1/3 + 1/3 leaves the order of naming to decide
    by_remainder = sorted(exact, key=lambda name: -round(exact[name] - out[name], 9))
    for name in by_remainder[: total - sum(out.values())]:
        out[name] += 1
    return out


def part_config(config: RunConfig, name: str) -> RunConfig:
    """The configuration that one task of the mixture sees."""
    return apply(config, {"task.name": name, "rollout.max_completion_length": lengths(config)[name]})


def mixture_reads(config: RunConfig) -> frozenset[str]:
    """What a mixture and its tasks look at."""
    from suite.objectives import objective_reads

    names = {"task.mixture", "task.lengths"}
    if "objective.pair_rule" in objective_reads(config):
        names.add("task.pair_rules")
    return frozenset(names).union(*(TASKS.entry(name).reads for name in proportions(config)))


class Mixture:
    """Batches in which every task has its count of prompts; each prompt says in `task` where it comes from.

    A task draws its own prompts as it would alone, so its order is keyed and passes over its data; the places of the
    tasks within a batch are keyed too. Completions are graded by their task. `parts` are the tasks themselves, which
    is what samples (each within its budget) and evaluates (each under its own name).
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name = NAME
        self._shares, self._pair_rules = proportions(config), pair_rules(config)
        self.parts: dict[str, Task] = {name: TASKS[name](part_config(config, name), tokenizer) for name in self._shares}
        self.max_completion_length = max(part.max_completion_length for part in self.parts.values())

    def _own(self, name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [replace(prompt, task=name, pair_rule=self._pair_rules[name]) for prompt in prompts]

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        """See `Task.draw`: the tasks' counts are `counts` of their proportions."""
        prompts = [
            prompt
            for name, share in counts(self._shares, count).items()
            if share
            for prompt in self._own(name, self.parts[name].draw(seed, batch, share))
        ]
        return [prompts[i] for i in permutation(len(prompts), seed, batch, "mixture")]

    def held_out(self, split: Split, count: int) -> list[Prompt]:
        """The first `count` problems of every task, task by task."""
        return [prompt for name, part in self.parts.items() for prompt in self._own(name, part.held_out(split, count))]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Task.encode`."""
        return self.parts[prompt.task].encode(prompt)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        """One verdict per completion, by its prompt's task."""
        verdicts: dict[int, Verdict] = {}
        for name, part in self.parts.items():
            mine = [index for index, prompt in enumerate(prompts) if prompt.task == name]
            if mine:
                found = part.grade([prompts[i] for i in mine], [completions[i] for i in mine])
                verdicts.update(zip(mine, found, strict=True))
        return [verdicts[index] for index in range(len(prompts))]


TASKS.register(NAME)(Mixture)
