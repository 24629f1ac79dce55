"""Preferences: which of several answers to a prompt were judged better, read from files, the hub or a task."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.registry import unknown
from suite.reward_config import RewardModelConfig


@dataclass(frozen=True, slots=True)
class Preference:
    """The answers to one prompt and every comparison among them."""

    prompt: str
    answers: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    """(better, worse) as positions in `answers`."""

    @classmethod
    def ranked(cls, prompt: str, answers: Sequence[str]) -> Preference:
        """All pairs of answers that are ordered from best to worst."""
        return cls(prompt, tuple(answers), tuple(itertools.combinations(range(len(answers)), 2)))


def group_by_prompt(preferences: Iterable[Preference]) -> list[Preference]:
    """One element per prompt, in order of first appearance: equal answers are one, and every comparison is kept once.

    A pair of equal answers is no comparison and is dropped, and so is a prompt that has no other.
    """
    answers: dict[str, dict[str, int]] = {}
    pairs: dict[str, dict[tuple[int, int], None]] = {}
    for preference in preferences:
        known = answers.setdefault(preference.prompt, {})
        place = [known.setdefault(answer, len(known)) for answer in preference.answers]
        mine = pairs.setdefault(preference.prompt, {})
        mine.update(dict.fromkeys((place[w], place[x]) for w, x in preference.pairs if place[w] != place[x]))
    return [Preference(prompt, tuple(answers[prompt]), tuple(mine)) for prompt, mine in pairs.items() if mine]


def split(preferences: Sequence[Preference], share: float) -> tuple[list[Preference], list[Preference]]:
    """Those to train on and those held out, by a hash of the prompt: a fixed share, whatever the order."""

    def held(preference: Preference) -> bool:
        digest = hashlib.sha256(preference.prompt.encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64 < share

    return [p for p in preferences if not held(p)], [p for p in preferences if held(p)]


def length_accuracy(preferences: Sequence[Preference]) -> float:
    """How often the longer answer (characters) was preferred; equal lengths count half. NaN without pairs."""
    marks = [
        0.5 + 0.5 * ((len(p.answers[w]) > len(p.answers[x])) - (len(p.answers[w]) < len(p.answers[x])))
        for p in preferences
        for w, x in p.pairs
    ]
    return sum(marks) / len(marks) if marks else math.nan


def load(config: RewardModelConfig) -> list[Preference]:
    """The configured preferences, one element per prompt; ValueError names file, row and column of a mistake."""
    if bool(config.data) == bool(config.task):
        raise ValueError("give either data (a file or a hub data set id) or task (an embedded task that gives pairs)")
    if config.task:
        found = from_task(config.task, config.task_pairs)
    else:
        found = [p for n, row in enumerate(_rows(config), 1) for p in _of_row(row, config, f"{config.data}, row {n}")]
    grouped = group_by_prompt(found)
    if not grouped:
        raise ValueError(f"{config.data or config.task} gives no pair of different answers with a preference")
    return grouped


def from_task(name: str, count: int) -> list[Preference]:
    """The first `count` preferences of a task that gives pairs; ValueError if it does not."""
    from suite.config import RolloutConfig, RunConfig, TaskConfig
    from suite.seed_model import tokenizer
    from suite.tasks import TASKS, replies

    drawn = {replies.NAME: replies.comparisons}
    if name in drawn:
        return [Preference.ranked(c.prompt, (c.chosen, c.rejected)) for c in drawn[name](count)]
    config = RunConfig(task=TaskConfig(name=name), rollout=RolloutConfig(source="external"))
    prompts = TASKS[name](config, tokenizer(name)).draw(0, 0, count)
    if any(prompt.chosen is None or prompt.rejected is None for prompt in prompts):
        raise ValueError(f"task {name!r} gives no preference pairs")
    return [Preference.ranked(p.text, (str(p.chosen), str(p.rejected))) for p in prompts]


def _rows(config: RewardModelConfig) -> Iterable[Mapping[str, Any]]:
    from suite.tasks.files import read_file, read_hub

    path = Path(config.data).expanduser()
    if path.suffix not in (".json", ".jsonl", ".parquet"):
        return read_hub(config.data, config.split)
    if path.suffix != ".json":
        return read_file(path)
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}")
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: a list of objects is expected")
    return rows


def _of_row(row: Mapping[str, Any], config: RewardModelConfig, where: str) -> list[Preference]:
    prompt = str(_cell(row, config.prompt_column, where))
    if config.ranked_column:
        answers = _cell(row, config.ranked_column, where)
        if not isinstance(answers, Sequence) or isinstance(answers, str) or len(answers) < 2:
            raise ValueError(f"{where}: column {config.ranked_column!r} must hold a list of at least two answers")
        return [Preference.ranked(prompt, [str(answer) for answer in answers])]
    answers = [str(_cell(row, column, where)) for column in (config.chosen_column, config.rejected_column)]
    if not config.preference_column:
        return [Preference.ranked(prompt, answers)]
    if config.preference_column not in row:
        raise unknown("column", config.preference_column, row, where)
    value = row[config.preference_column]
    if value is None or value in (0, 1.5) or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 2:
        raise ValueError(f"{where}: column {config.preference_column!r} is {value!r} and must be from 1 to 2")
    return [Preference.ranked(prompt, answers if value < 1.5 else answers[::-1])]


def _cell(row: Mapping[str, Any], column: str, where: str) -> Any:
    if column not in row:
        raise unknown("column", column, row, where)
    if row[column] is None:
        raise ValueError(f"{where}: column {column!r} is empty")
    return row[column]
