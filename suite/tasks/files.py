"""Tasks from data: a JSONL or Parquet file, or a data set of the hub, graded by math-verify."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from suite.config import RunConfig, TaskConfig
from suite.grading import Grader, Verdict
from suite.protocols import Prompt, Split
from suite.registry import unknown
from suite.tasks import TASKS
from suite.tasks.encoding import draw, encode_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

DEFAULT_BUDGET = 1024
"""Completion budget, tokens, where the configuration names none."""


def read_jsonl(path: Path) -> list[Row]:
    """One object per line; ValueError names file and line of the first that is not one."""
    rows: list[Row] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not valid JSON ({error.msg}, column {error.colno})"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is expected, not {type(row).__name__}")
            rows.append(row)
    return rows


def read_file(path: Path, option: str = "task.source") -> list[Row]:
    """Rows of a .jsonl or .parquet file; ValueError for another ending, no file, or an unreadable one."""
    if not path.is_file():
        raise ValueError(f"{option}: there is no file {path}")
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_table(path).to_pylist())
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{option}: {path} is not a Parquet file ({error})") from error
    raise ValueError(f"{option}: {path} ends in {path.suffix!r}; a .jsonl or .parquet file is read")


def read_hub(name: str, split: str, option: str = "task.source") -> Iterable[Row]:
    """Rows of a hub data set's split, read from disk as they are asked for; ValueError if it cannot be had."""
    import datasets

    if not name:
        raise ValueError(f"{option} is empty; it must be a data set id")
    try:
        return cast(Iterable[Row], datasets.load_dataset(name, split=split))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{option}: cannot load data set {name!r}, split {split!r}: {error}") from error


def read_rows(source: str, option: str) -> Iterable[Row]:
    """Rows of a .jsonl or .parquet file, else of the `train` split of a hub data set."""
    path = Path(source).expanduser()
    return read_file(path, option) if path.suffix in (".jsonl", ".parquet") else read_hub(source, "train", option)


def gold_text(value: object) -> str:
    """The gold answer as text: an integral float loses its point (27.0 is 27), text is stripped."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _text(row: Row, column: str, where: str) -> Any:
    if column not in row:
        raise unknown("column", column, row, where)
    if row[column] is None or row[column] == "":
        raise ValueError(f"{where}: column {column!r} is empty")
    return row[column]


def uid_of(text: str) -> str:
    """A prompt's identity: a hash of its text, so that it depends on no order."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_prompts(rows: Iterable[Row], config: TaskConfig, source: str, *, pairs: bool) -> list[Prompt]:
    """Problems by column mapping; ValueError names source, row and column of the first that lacks a value.

    A problem's uid is a hash of its text, so that it does not depend on the file's order.
    """
    prompts = []
    for number, row in enumerate(rows, 1):
        where = f"{source}, row {number}"
        text = str(_text(row, config.problem_column, where))
        gold = gold_text(_text(row, config.answer_column, where))
        chosen = str(_text(row, config.chosen_column, where)) if pairs else None
        rejected = str(_text(row, config.rejected_column, where)) if pairs and config.rejected_column else None
        prompts.append(Prompt(uid_of(text), config.template.replace("{problem}", text), gold, chosen, rejected))
    return prompts


def split_by_hash(
    prompts: Sequence[Prompt], test: int, validation: int, source: str, remedy: str
) -> dict[Split, list[Prompt]]:
    """Distinct prompts in the order of their hashes: the first are the test problems, the next the validation problems,
    the rest trains. ValueError, with the remedy, if nothing is left to train on."""
    unique = sorted({prompt.uid: prompt for prompt in prompts}.values(), key=lambda prompt: prompt.uid)
    if len(unique) <= test + validation:
        raise ValueError(
            f"{source} has {len(unique)} distinct problems; {test} test and {validation} validation problems leave "
            f"none to train on: {remedy}"
        )
    return {
        "test": unique[:test],
        "validation": unique[test : test + validation],
        "train": unique[test + validation :],
    }


def _column_task(name: str, rows: Iterable[Row], config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataTask:
    prompts = to_prompts(rows, config.task, config.task.source, pairs=config.rollout.source == "external")
    remedy = "lower eval.test_problems or eval.validation_problems"
    test, validation = config.eval.test_problems, config.eval.validation_problems
    if not (test and validation):
        raise ValueError(
            f"eval.test_problems is {test} and eval.validation_problems {validation}; for task {name!r} both must "
            "be at least 1, since they say how many problems are held out from training"
        )
    return DataTask(name, split_by_hash(prompts, test, validation, config.task.source, remedy), config, tokenizer)


class DataTask:
    """Problems with splits of their own; answers are boxed and graded by math-verify."""

    def __init__(
        self, name: str, splits: dict[Split, list[Prompt]], config: RunConfig, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.name = name
        self.max_completion_length = config.rollout.max_completion_length or DEFAULT_BUDGET
        self._config, self._tokenizer, self._grader = config.task, tokenizer, Grader()
        self._splits = splits

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        """See `Task.draw`."""
        return draw(self._splits["train"], seed, batch, count)

    def held_out(self, split: Split, count: int) -> list[Prompt]:
        """See `Task.held_out`."""
        return self._splits[split][: count or None]

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """See `Task.encode`; ValueError for a prompt above `task.max_prompt_length`."""
        ids = encode_prompt(self._tokenizer, prompt.text, chat=self._config.chat)
        if len(ids) > self._config.max_prompt_length:
            raise ValueError(
                f"a prompt of {len(ids)} tokens is above task.max_prompt_length = {self._config.max_prompt_length}: "
                f"{prompt.text[:60]!r}"
            )
        return ids

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        """The verdict on each boxed answer; math-verify's raw verdict is kept beside it."""
        return self._grader.grade_batch([(p.gold, text) for p, text in zip(prompts, completions, strict=True)])


@TASKS.register(
    "file",
    reads=[
        "task.source", "task.problem_column", "task.answer_column", "task.chosen_column", "task.rejected_column",
        "task.template", "task.chat", "task.max_prompt_length",
    ],
)  # fmt: skip
def file_task(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataTask:
    """Problems of a local JSONL or Parquet file."""
    return _column_task("file", read_file(Path(config.task.source).expanduser()), config, tokenizer)


@TASKS.register(
    "hub",
    reads=[
        "task.source", "task.split", "task.problem_column", "task.answer_column", "task.chosen_column",
        "task.rejected_column", "task.template", "task.chat", "task.max_prompt_length",
    ],
)  # fmt: skip
def hub_task(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataTask:
    """Problems of a hub data set."""
    return _column_task("hub", read_hub(config.task.source, config.task.split), config, tokenizer)
