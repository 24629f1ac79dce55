"""NuminaMath as the paper uses it: verifiable competition problems, without proofs, multiple choice and synthetic ones.

arXiv 2506.21495, section on data: 261,440 problems remain, of which 1,980 validate and 1,980 test. The subsets that
it drops are named there; how proofs and multiple choice are told apart is not, so these two rules are ours, and so is
the split (by a hash of the text). Rows of NuminaMath-CoT (`source`, `problem`, `solution`) and of NuminaMath-1.5
(with `answer`, `question_type` and `synthetic`) are both read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from suite.config import RunConfig
from suite.grading import extract
from suite.protocols import Prompt
from suite.tasks import TASKS
from suite.tasks.files import DataTask, Row, read_rows, split_by_hash, uid_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE = (
    "Given the following problem, reason and give a final answer to the problem.\nProblem: {problem}\n"
    "Your response should end with 'The final answer is $\\boxed{[answer]}$. I hope it is correct.' "
    "where [answer] is the response to the problem."
)
"""arXiv 2506.21495, figure 4."""

SYNTHETIC = frozenset({"orca_math", "synthetic_amc", "synthetic_math"})
"""Subsets whose problems a model wrote."""

SENTINELS = frozenset({"proof", "notfound", ""})
"""What stands in the answer column of a problem that has no answer."""

HELD_OUT = 1980
"""Validation problems, and as many test problems."""

_PROOF = re.compile(r"\bprove\b|\bshow that\b|\bdemonstrate that\b", re.IGNORECASE)
_LETTER = re.compile(r"\(?\s*(?:\\(?:text|textbf|mathrm|mathbf|bf)\s*\{?)?\s*\(?\s*[A-E]\s*\)?\s*\}?\s*\)?\.?")
_OPTION = re.compile(r"(?:^|[\s$({~])\(?([A-E])\s*[).:](?=[\s$}\\~]|$)")


def is_multiple_choice(problem: str, answer: str) -> bool:
    """Whether the answer is a letter and the problem lists options, or the problem lists at least options A to C.

    `Find the angle A` with answer `A` alone lists none.
    """
    options = set(_OPTION.findall(problem))
    return {"A", "B", "C"} <= options or (bool(_LETTER.fullmatch(answer)) and {"A", "B"} <= options)


def answer_of(row: Row) -> str | None:
    """The gold answer of a row that is to be kept: the answer column, else the last box of the solution; None if not.

    Dropped: synthetic subsets, proofs, multiple choice, problems without an answer.
    """
    if row["source"].replace("-", "_").lower() in SYNTHETIC or row.get("synthetic"):
        return None
    if str(row.get("question_type") or "").lower() in ("proof", "mcq"):
        return None
    answer = row["answer"] if row.get("answer") is not None else extract(row["solution"] or "")
    answer = (answer or "").strip()
    if answer.lower() in SENTINELS or _PROOF.search(row["problem"]) or is_multiple_choice(row["problem"], answer):
        return None
    return answer


def to_prompts(rows: Iterable[Row]) -> list[Prompt]:
    """The problems that are kept, in the paper's prompt; ValueError if the rows have not NuminaMath's columns."""
    prompts = []
    for number, row in enumerate(rows, 1):
        missing = {"source", "problem", "solution"} - row.keys()
        if missing:
            raise ValueError(f"task.numina_source, row {number} has no column {' or '.join(sorted(missing))}")
        answer = answer_of(row) if row["problem"] else None
        if answer is not None:
            text = row["problem"].strip()
            prompts.append(Prompt(uid_of(text), TEMPLATE.replace("{problem}", text), answer))
    return prompts


@TASKS.register("numina_math", reads=["task.numina_source", "task.chat", "task.max_prompt_length"])
def numina_math(config: RunConfig, tokenizer: PreTrainedTokenizerBase, held_out: int = HELD_OUT) -> DataTask:
    """NuminaMath with the paper's filters and prompt."""
    source = config.task.numina_source
    prompts = to_prompts(read_rows(source, "task.numina_source"))
    splits = split_by_hash(prompts, held_out, held_out, source, "take the whole data set")
    return DataTask("numina_math", splits, config, tokenizer)
