"""Grading on one worker: plain integers (no process), and expressions that need math-verify."""

from __future__ import annotations

import time
from collections.abc import Iterator

from suite.grading import Grader


def figures() -> Iterator[tuple[str, float, str]]:
    """Distinct pairs, so that the cache serves none."""
    integers = [(str(i), f"\\boxed{{{i + i % 2}}}") for i in range(20_000)]
    fractions = [(f"\\frac{{{i}}}{{7}}", f"\\boxed{{\\frac{{{2 * i}}}{{14}}}}") for i in range(1, 600)]
    with Grader(want_raw=False) as grader:
        for what, pairs in (("plain integers", integers), ("equal fractions", fractions)):
            grader.grade_batch([("\\frac{1}{3}", "\\boxed{\\frac{2}{6}}")])
            start = time.perf_counter()
            grader.grade_batch(pairs)
            yield what, len(pairs) / (time.perf_counter() - start), "pairs/s"
