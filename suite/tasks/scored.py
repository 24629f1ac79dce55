"""Rewards from a reward model, as verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from suite.grading import Verdict
from suite.protocols import Prompt

if TYPE_CHECKING:
    from suite.reward_model import ScalarReward


@lru_cache(maxsize=2)
def load(path: str) -> ScalarReward:
    """The reward model of a hub id or folder, loaded once per process."""
    from suite.reward_model import ScalarReward

    return ScalarReward.load(path)


def score(path: str, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
    """One scored verdict per completion; a score that is not finite, or no model at all, is an abstention."""
    if not path:
        return [verdict_of(math.nan)] * len(prompts)
    return [verdict_of(value) for value in load(path).score([prompt.text for prompt in prompts], completions)]


def verdict_of(value: float) -> Verdict:
    """A score as a verdict: one that is no finite number is an abstention."""
    finite = math.isfinite(value)
    return Verdict("scored" if finite else "abstained", None, None, value if finite else math.nan)
