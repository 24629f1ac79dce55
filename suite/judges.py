"""Pairwise judges: which of two answers to a prompt is the better one.

A judge is any registered callable; `openai` asks a model behind an OpenAI-compatible endpoint.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from suite.config import JudgeConfig
from suite.masking import masked
from suite.registry import Registry

Answer = Literal["first", "second"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt, in the order in which the judge reads them."""

    prompt: str
    first: str
    second: str


Judge = Callable[[Sequence[Comparison], JudgeConfig], Sequence[Answer | None]]
"""(comparisons, options) -> the better side of each, in order; None where it names neither."""

JUDGES: Registry[Judge] = Registry("judge")

TEMPLATE = """Which of two answers to a prompt is better: more helpful, correct and to the point? \
Neither their length nor their order counts.

[Prompt]
{prompt}

[Answer A]
{first}

[Answer B]
{second}

Reply with [[A]] if answer A is better and with [[B]] if answer B is better."""
"""What `openai` sends where `judge.template` is empty."""

FIELDS = ("{prompt}", "{first}", "{second}")

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S = 0.5


def fill(template: str, comparison: Comparison) -> str:
    """The template with its fields replaced in one pass, so that braces in an answer stay what they are."""
    values = {"{prompt}": comparison.prompt, "{first}": comparison.first, "{second}": comparison.second}
    return re.sub("|".join(map(re.escape, FIELDS)), lambda found: values[found[0]], template)


def parse(reply: str) -> Answer | None:
    """The side that a reply names: the only letter in double brackets, or a reply of nothing but the letter.

    A tie ([[C]]), both letters or none is None.
    """
    found = set(re.findall(r"\[\[\s*(\w+)\s*\]\]", reply)) or {reply.strip().strip(".\"'*()[]")}
    sides: dict[str, Answer] = {"A": "first", "B": "second"}
    return sides.get(found.pop()) if len(found) == 1 else None


@JUDGES.register(
    "openai",
    reads=[
        "judge.url", "judge.model", "judge.template", "judge.api_key_env", "judge.max_tokens", "judge.timeout_s",
        "judge.retries", "judge.concurrency",
    ],
)  # fmt: skip
def openai_judge(comparisons: Sequence[Comparison], options: JudgeConfig) -> list[Answer | None]:
    """Ask `judge.model` at `judge.url` about each comparison, several at a time, at temperature 0.

    The API key is read from the environment variable `judge.api_key_env`; without one none is sent. A request
    that times out or meets a busy server (429, 5xx) is repeated `judge.retries` times after growing pauses; one that
    still fails counts as no answer. Raises RuntimeError if all of them fail, and at once where the endpoint refuses
    the request itself (no such model, no valid key).
    """
    with ThreadPoolExecutor(options.concurrency) as pool:
        replies = list(pool.map(lambda comparison: _ask(comparison, options), comparisons))
    failed = [reply.reason for reply in replies if isinstance(reply, _Failed)]
    if failed and len(failed) == len(replies):
        raise RuntimeError(f"the judge at {masked(options.url)} answered none of {len(failed)} requests: {failed[0]}")
    if failed:
        logging.getLogger(__name__).warning("the judge left %d of %d requests", len(failed), len(replies))
    return [None if isinstance(reply, _Failed) else parse(reply) for reply in replies]


@dataclass(frozen=True, slots=True)
class _Failed:
    reason: str


def _ask(comparison: Comparison, options: JudgeConfig) -> str | _Failed:
    key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": fill(options.template or TEMPLATE, comparison)}],
        "temperature": 0,
        "max_tokens": options.max_tokens,
    }
    request = urllib.request.Request(
        f"{options.url.rstrip('/')}/chat/completions", data=json.dumps(body).encode(), headers=headers
    )
    reason = ""
    for attempt in range(options.retries + 1):
        if attempt:
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            with urllib.request.urlopen(request, timeout=options.timeout_s) as response:
                return str(json.load(response)["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}: {error.read(300).decode(errors='replace')}"
            if error.code not in _RETRIED:
                raise RuntimeError(
                    f"the judge at {masked(options.url)} refuses model {options.model!r}: {reason}"
                ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        except (ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"its reply is not a chat completion ({error!r})"
    return _Failed(reason)
