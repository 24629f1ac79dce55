"""Choosing among samples at evaluation, by the reward itself and by a reward model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from suite.evaluate import _best_of
from suite.grading import Verdict
from suite.protocols import Prompt
from suite.tasks import scored

PROMPTS = [Prompt(f"p{i // 3}", f"{i // 3}", "") for i in range(9)]
TEXTS = ["1", "5", "2", "3", "3", "0", "9", "1", "1"]
MARKS = [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A reward model that likes high numbers, and what it was asked."""
    asked: list[Any] = []

    class Digits:
        def score(self, prompts: list[str], texts: list[str]) -> list[float]:
            asked.append((prompts, texts))
            return [float(text) for text in texts]

    monkeypatch.setattr(scored, "load", lambda path: Digits())
    return asked


def right(marks: list[float]) -> list[Verdict]:
    return [Verdict("right" if mark else "wrong", None, None) for mark in marks]


def test_worked_by_hand(digits: list[Any]) -> None:
    # chosen: "5" (right), the first "3" (wrong), "9" (wrong); each problem has a right sample
    found = _best_of("rm", "eval/test", PROMPTS, TEXTS, right(MARKS), 3)
    assert found == {"eval/test/pass@3": 1.0, "eval/test/best_of@3": pytest.approx(1 / 3)}
    assert digits == [(["0"] * 3 + ["1"] * 3 + ["2"] * 3, TEXTS)]


def test_without_a_reward_model_a_verified_task_has_pass_at_k() -> None:
    verdicts = right([0, 0, 0, 0, 1, 1, 0, 0, 1])
    assert _best_of("", "eval/test", PROMPTS, TEXTS, verdicts, 3) == {"eval/test/pass@3": pytest.approx(2 / 3)}
    assert _best_of("", "eval/test", PROMPTS, TEXTS, verdicts, 1) == {}


def test_scores_are_averaged_and_abstentions_left_out(digits: list[Any]) -> None:
    nan = math.nan
    verdicts = [scored.verdict_of(value) for value in [0.5, -2.0, 1.5, nan, 3.0, 1.0, nan, nan, nan]]
    # of the selected only the first, -2, has a reward; highest of each: 1.5 and 3
    assert _best_of("rm", "eval/test", PROMPTS, TEXTS, verdicts, 3) == {"eval/test/best_of@3": -2.0}
    assert _best_of("", "eval/test", PROMPTS, TEXTS, verdicts, 3) == {"eval/test/best_of@3": 2.25}
    assert _best_of("", "eval/test", PROMPTS, TEXTS, [scored.verdict_of(nan)] * 9, 3) == {}
