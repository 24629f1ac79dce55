"""Pairwise judges: what is asked, how a reply is read, and what happens where none comes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from suite import judges
from suite.config import JudgeConfig
from suite.judges import JUDGES, TEMPLATE, Comparison, fill, parse


class FakeServer:
    """An OpenAI-compatible endpoint on the loopback: notes requests and answers by a function of the prompt."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answer: Callable[[str], tuple[int, str]] = lambda prompt: (200, "[[A]]")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                code, text = outer.answer(body["messages"][0]["content"])
                raw = text if text.startswith("{") else json.dumps({"choices": [{"message": {"content": text}}]})
                self.send_response(code)
                self.end_headers()
                self.wfile.write(raw.encode())

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(judges, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    fake = FakeServer()
    thread = threading.Thread(target=fake.server.serve_forever, args=(0.01,))
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()


def options(server: FakeServer, **changes: Any) -> JudgeConfig:
    return JudgeConfig(**({"url": server.url, "model": "judge-1", "timeout_s": 20.0, "retries": 2} | changes))


def longer(prompt: str) -> tuple[int, str]:
    """The longer of the two answers of the default template."""
    first = prompt.split("[Answer A]\n")[1].split("\n\n[Answer B]")[0]
    second = prompt.split("[Answer B]\n")[1].split("\n\nReply")[0]
    return 200, "[[C]]" if len(first) == len(second) else "[[A]]" if len(first) > len(second) else "[[B]]"


def test_each_comparison_gets_the_answer_of_its_own_request(server: FakeServer) -> None:
    server.answer = longer
    asked = [Comparison(f"p{i}", "x" * (1 + i % 3), "y" * 2) for i in range(30)]
    answers = JUDGES["openai"](asked, options(server, concurrency=5))
    assert list(answers) == [["second", None, "first"][i % 3] for i in range(30)]
    swapped = JUDGES["openai"]([Comparison(c.prompt, c.second, c.first) for c in asked], options(server))
    assert list(swapped) == [["first", None, "second"][i % 3] for i in range(30)]


def test_what_is_sent(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE_VARIABLE", "abc")
    asked = [Comparison("Why {first}?", "{second} because", "no")]
    template = "Q: {prompt} 1: {first} 2: {second}"
    JUDGES["openai"](asked, options(server, template=template, api_key_env="MY_JUDGE_VARIABLE", max_tokens=7))
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer abc"
    # an answer that holds a field's name is not filled in again
    assert body == {
        "model": "judge-1", "temperature": 0, "max_tokens": 7,
        "messages": [{"role": "user", "content": "Q: Why {first}? 1: {second} because 2: no"}],
    }  # fmt: skip
    JUDGES["openai"](asked, options(server))
    assert "Authorization" not in server.requests[1][1]
    assert server.requests[1][2]["messages"][0]["content"] == fill(TEMPLATE, asked[0])


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("[[A]]", "first"),
        ("Both are fine, but B is shorter. [[B]]", "second"),
        ("B", "second"),
        ("**A**.", "first"),
        ("[[C]]", None),
        ("[[A]] or rather [[B]]", None),
        ("[[A]] and again [[A]]", "first"),
        ("Answer A is better", None),
        ("AB", None),
        ("", None),
    ],
)
def test_how_a_reply_is_read(reply: str, answer: str | None) -> None:
    assert parse(reply) == answer


def test_a_busy_server_is_asked_again(server: FakeServer) -> None:
    codes = iter([503, 429, 200])
    server.answer = lambda prompt: (next(codes), "[[B]]")
    assert list(JUDGES["openai"]([Comparison("p", "x", "y")], options(server))) == ["second"]
    assert len(server.requests) == 3


def test_one_lost_request_is_no_answer_and_all_lost_is_an_error(server: FakeServer) -> None:
    server.answer = lambda prompt: (500, "down") if "lost" in prompt else (200, "[[A]]")
    asked = [Comparison("p", "x", "y"), Comparison("lost", "x", "y")]
    assert list(JUDGES["openai"](asked, options(server))) == ["first", None]
    assert len(server.requests) == 1 + 3
    with pytest.raises(RuntimeError, match="answered none of 1 requests: HTTP 500"):
        JUDGES["openai"](asked[1:], options(server, retries=0))


def test_a_reply_that_is_no_chat_completion_is_no_answer(server: FakeServer) -> None:
    server.answer = lambda prompt: (200, '{"choices": []}') if "odd" in prompt else (200, "[[A]]")
    asked = [Comparison("odd", "x", "y"), Comparison("p", "x", "y")]
    assert list(JUDGES["openai"](asked, options(server, retries=0))) == [None, "first"]


def test_a_refused_request_is_not_repeated(server: FakeServer) -> None:
    server.answer = lambda prompt: (401, "no key")
    with pytest.raises(RuntimeError, match=r"refuses model 'judge-1': HTTP 401: .*no key"):
        JUDGES["openai"]([Comparison("p", "x", "y")], options(server))
    assert len(server.requests) == 1


def test_a_silent_server_is_given_up(server: FakeServer) -> None:
    silent = threading.Event()
    server.answer = lambda prompt: (200, "[[A]]" if silent.wait(30) else "")
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            JUDGES["openai"]([Comparison("p", "x", "y")], options(server, timeout_s=0.1, retries=1))
    finally:
        silent.set()
    assert len(server.requests) == 2
