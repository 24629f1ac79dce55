r"""Is an answer right? One verdict per completion, in bounded time, whatever a model writes.

`grade(gold, completion)` for one, `Grader.grade_batch` for many. The answer is the last `\boxed{...}` (or the whole
completion), compared with the gold answer first as text (`suite.grading_text`), then as mathematics by math-verify
under stricter rules (`suite.grading_math`), in processes that can be killed (`suite.grading_pool`). Every policy, and
what stays wrong, is in docs/grading.md.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Literal

from suite.grading_pool import Job, Outcome, Reply, WorkerPool
from suite.grading_text import clean, compare, last_box

__all__ = ["Extraction", "Grader", "Outcome", "Verdict", "check_versions", "extract", "grade"]

Extraction = Literal["boxed", "whole"]

_ANTLR = "4.13.2"
_PACKAGES = ("math-verify", "latex2sympy2_extended", "antlr4-python3-runtime", "sympy")
_COUNTERS = (
    *("right", "wrong", "no_answer", "timeout", "error"),
    *("by_text", "cache_hits", "respawns", "gold_unparsed", "sympy_error", "batch_deadline"),
    *("raw_asked", "raw_only_right", "ours_only_right"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one completion."""

    outcome: Outcome
    """`no_answer`: nothing to compare. `timeout`: not decided within the limits. `error`: the grader itself failed."""
    answer: str | None
    """The extracted answer as the model wrote it; None for `no_answer`."""
    raw: bool | None
    """math-verify's own verdict on the untouched completion; None where it was not asked or did not finish."""
    score: float | None = None
    """A scalar reward (a reward model's, a judge's), NaN where it abstained; None where right and wrong decide."""
    measures: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What else was measured, by name: logged beside the reward, never trained on."""

    @property
    def reward(self) -> float:
        """The score; without one 1.0 for right, else 0.0."""
        return self.score if self.score is not None else 1.0 if self.outcome == "right" else 0.0


def extract(completion: str, extraction: Extraction = "boxed") -> str | None:
    r"""The answer in a completion, as written, without the space around it; None where there is none.

    `boxed`: the content of the last `\boxed{...}` or `\fbox{...}` with balanced braces; an unclosed one is no answer.
    `whole`: the completion. Either way what stands between `<think>` and `</think>` is not an answer. An empty answer
    is none. ValueError for another `extraction`.
    """
    if extraction not in ("boxed", "whole"):
        raise ValueError(f"extraction must be 'boxed' or 'whole', got {extraction!r}")
    said = completion.rpartition("</think>")[2].partition("<think>")[0]
    answer = last_box(said) if extraction == "boxed" else said
    return (answer or "").strip() or None


def check_versions() -> dict[str, str]:
    """The versions that decide verdicts, for the run's manifest.

    RuntimeError where the antlr runtime is not the one math-verify's grammar was built for: it would answer differently
    without a word (`28\\%` against `28`).
    """
    versions = {package: version(package) for package in _PACKAGES}
    found = versions["antlr4-python3-runtime"]
    if found != _ANTLR:
        raise RuntimeError(
            f"antlr4-python3-runtime is {found}, but math-verify grades wrongly with any version other than {_ANTLR}: "
            f"install antlr4-python3-runtime=={_ANTLR} (hydra-core and lm-eval[math] ask for older ones)"
        )
    return versions


class Grader:
    """Grades batches: verdicts in order, one per pair, in bounded time.

    `workers` processes are started when first needed: not for batches that text alone decides (integers, equal
    strings), unless `want_raw`. `deadline_s` seconds bound one comparison, and one raw verdict; `batch_deadline_s` a
    whole batch, the start of workers included (default: four single deadlines and 50 ms per pair), after which the
    remaining verdicts are timeouts that are not remembered. `memory_gib` bounds each worker. Verdicts, timeouts too,
    are remembered for `cache_size` different pairs. `counters` counts outcomes, cache hits, worker replacements and
    disagreements with math-verify (`raw_only_right`, `ours_only_right`). Safe to use from several threads.
    """

    def __init__(
        self,
        workers: int = 1,
        deadline_s: float = 30.0,
        batch_deadline_s: float | None = None,
        memory_gib: float = 3.0,
        want_raw: bool = True,
        cache_size: int = 100_000,
    ) -> None:
        if workers < 1 or deadline_s <= 0 or memory_gib <= 0 or cache_size < 0:
            raise ValueError(
                "a grader needs workers >= 1, deadline_s > 0, memory_gib > 0 and cache_size >= 0, got "
                f"workers={workers}, deadline_s={deadline_s}, memory_gib={memory_gib}, cache_size={cache_size}"
            )
        if batch_deadline_s is not None and batch_deadline_s <= 0:
            raise ValueError(f"batch_deadline_s must be positive or None, got {batch_deadline_s}")
        self.deadline_s, self.batch_deadline_s = deadline_s, batch_deadline_s
        self.want_raw, self.cache_size = want_raw, cache_size
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._cache: OrderedDict[bytes, Reply] = OrderedDict()
        self._lock = threading.Lock()
        self._checked = False
        self._pool = WorkerPool(workers, deadline_s, memory_gib)
        weakref.finalize(self, self._pool.close)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes; grading that needs them is refused from then on."""
        self._pool.close()

    def warm_up(self) -> None:
        """Start all workers now and wait for them, so that the first batch does not."""
        self._check()
        self._pool.warm_up()

    def worker_pids(self) -> list[int]:
        """Process ids of the workers running now; empty before the first need of one."""
        return self._pool.pids()

    @property
    def counters(self) -> dict[str, int]:
        """What has happened since this grader was made."""
        with self._lock:
            return self._counts | {"respawns": self._pool.respawns}

    def grade_batch(self, pairs: Sequence[tuple[str, str]], *, extraction: Extraction = "boxed") -> list[Verdict]:
        """One verdict per (gold, completion) pair, in order.

        A gold answer that holds a box itself (a worked solution) counts by its box. ValueError for a gold answer that
        is empty or not text.
        """
        pairs = list(pairs)
        budget = 4 * self.deadline_s + 0.05 * len(pairs) if self.batch_deadline_s is None else self.batch_deadline_s
        until = time.monotonic() + budget
        golds = [_gold(gold, position) for position, (gold, _) in enumerate(pairs)]
        answers = [extract(completion, extraction) for _, completion in pairs]
        replies = self._judge(golds, answers, until)
        raws = self._ask_raw(golds, [completion for _, completion in pairs], replies, until)
        verdicts = [
            Verdict(reply.outcome, answer, raw) for reply, answer, raw in zip(replies, answers, raws, strict=True)
        ]
        self._count(verdicts, replies)
        return verdicts

    def _judge(self, golds: list[str], answers: list[str | None], until: float) -> list[Reply]:
        decided = [_by_text(gold, answer) for gold, answer in zip(golds, answers, strict=True)]
        asked = self._ask([job for job in decided if isinstance(job, Job)], until)
        return [asked[found] if isinstance(found, Job) else found for found in decided]

    def _ask_raw(
        self, golds: list[str], completions: list[str], replies: list[Reply], until: float
    ) -> list[bool | None]:
        """math-verify's verdicts; not asked for an answer that ran out of time, on which it would hang as well."""
        if not self.want_raw:
            return [None] * len(golds)
        jobs = [
            None if reply.outcome == "timeout" else Job("raw", gold, completion)
            for gold, completion, reply in zip(golds, completions, replies, strict=True)
        ]
        asked = self._ask([job for job in jobs if job], until)
        return [{"right": True, "wrong": False}.get(asked[job].outcome) if job else None for job in jobs]

    def _ask(self, jobs: list[Job], until: float) -> dict[Job, Reply]:
        """Replies from the cache where it has them, else from the workers; equal jobs are asked once."""
        keys = {job: _key(job) for job in jobs}
        known: dict[Job, Reply] = {}
        with self._lock:
            for job, key in keys.items():
                if key in self._cache:
                    self._cache.move_to_end(key)
                    known[job] = self._cache[key]
        missing = [job for job in keys if job not in known]
        if missing:
            self._check()
            fresh = dict(zip(missing, self._pool.run(missing, until), strict=True))
        else:
            fresh = {}
        with self._lock:
            self._counts["cache_hits"] += len(jobs) - len(missing)
            for job, reply in fresh.items():
                if reply.final:
                    self._cache[keys[job]] = reply
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return known | fresh

    def _check(self) -> None:
        if not self._checked:
            check_versions()
            self._checked = True

    def _count(self, verdicts: list[Verdict], replies: list[Reply]) -> None:
        with self._lock:
            for verdict, reply in zip(verdicts, replies, strict=True):
                self._counts[verdict.outcome] += 1
                for flag in reply.flags:
                    self._counts[flag] += 1
                if verdict.raw is not None:
                    self._counts["raw_asked"] += 1
                    ours = verdict.outcome == "right"
                    self._counts["raw_only_right"] += verdict.raw and not ours
                    self._counts["ours_only_right"] += ours and not verdict.raw


def _gold(gold: object, position: int) -> str:
    if not isinstance(gold, str):
        raise ValueError(f"gold answers are text: pair {position} has {gold!r}, write it as {str(gold)!r}")
    if not gold.strip():
        raise ValueError(f"the gold answer of pair {position} is empty: a prompt without an answer cannot be graded")
    return (last_box(gold) or gold).strip()


def _by_text(gold: str, answer: str | None) -> Reply | Job:
    """The verdict where text alone gives one, else the question for a worker."""
    if answer is None:
        return Reply("no_answer")
    wanted, given = clean(gold), clean(answer)
    same = compare(wanted, given)
    if same is None:
        return Job("judge", wanted.body, given.body)
    return Reply("right" if same else "wrong", ("by_text",))


def _key(job: Job) -> bytes:
    """Completions are long and many: the cache keeps their digest only."""
    return hashlib.blake2b(
        "\0".join((job.kind, job.gold, job.text)).encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


_default: Grader | None = None
_default_lock = threading.Lock()


def grade(gold: str, completion: str, *, extraction: Extraction = "boxed") -> Verdict:
    """The verdict on one completion, by a grader of one worker that all callers in this process share."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Grader()
    return _default.grade_batch([(gold, completion)], extraction=extraction)[0]
