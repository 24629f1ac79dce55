"""NuminaMath and WildChat: the paper's filters on made-up rows in the columns that the hub's data sets have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest

from suite.config import RunConfig, apply
from suite.seed_model import tokenizer
from suite.tasks import build, scored
from suite.tasks.numina import answer_of, numina_math
from suite.tasks.wildchat import WildChat, first_turn
from suite.validate import validate

CHAT = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def words():
    out = tokenizer()
    out.chat_template = CHAT
    return out


def cot(problem: str, solution: str, source: str = "olympiads") -> dict[str, Any]:
    """A row of NuminaMath-CoT."""
    messages = [{"content": problem, "role": "user"}, {"content": solution, "role": "assistant"}]
    return {"source": source, "problem": problem, "solution": solution, "messages": messages}


def v15(problem: str, answer: str | None, question_type: str = "math-word-problem", **more: Any) -> dict[str, Any]:
    """A row of NuminaMath-1.5."""
    return {
        "problem": problem, "solution": "So it is.", "answer": answer, "problem_type": "Algebra",
        "question_type": question_type, "problem_is_valid": "Yes", "solution_is_valid": "Yes", "source": "olympiads",
        "synthetic": False, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (cot("What is 1+1?", "It is $\\boxed{3}$, no: $\\boxed{2}$."), "2"),
        (cot("What is 1+1?", "Two."), None),
        (cot("What is 1+1?", "\\boxed{2}", "orca_math"), None),
        (cot("What is 1+1?", "\\boxed{2}", "synthetic_math"), None),
        (cot("What is 1+1?", "\\boxed{2}", "synthetic_amc"), None),
        (cot("What is 1+1?", "\\boxed{2}", "amc_aime"), "2"),
        (cot("Prove that 1+1=2.", "\\boxed{2}"), None),
        (cot("Show that $x = 2$ and find y.", "\\boxed{2}"), None),
        (cot("Improve the estimate of x.", "\\boxed{2}"), "2"),
        (cot("Which? (A) 1 (B) 2 (C) 3 (D) 4", "\\boxed{B}"), None),
        (cot("Which? $\\textbf{(A)}\\ 1 \\qquad \\textbf{(B)}\\ 2 \\qquad \\textbf{(C)}\\ 3$", "\\boxed{2}"), None),
        (cot("Which is larger?\nA. 1\nB. 2", "\\boxed{\\text{B}}"), None),
        (cot("Triangle ABC has a right angle. Which corner is it?", "\\boxed{A}"), "A"),
        (v15("What is 1+1?", "2"), "2"),
        (v15("What is 1+1?", "proof"), None),
        (v15("What is 1+1?", "notfound"), None),
        (v15("What is 1+1?", "Proof "), None),
        (v15("What is 1+1?", ""), None),
        (v15("Is it so?", "2", "proof"), None),
        (v15("Is it so?", "A", "MCQ"), None),
        (v15("What is 1+1?", "2", synthetic=True), None),
        (v15("What is 1+1?", "2", source="orca-math"), None),
    ],
)
def test_what_the_paper_keeps(row: dict[str, Any], wanted: str | None) -> None:
    assert answer_of(row) == wanted


def numina_rows(count: int = 12) -> list[dict[str, Any]]:
    rows = [cot(f"What is {n}+1?", f"\\boxed{{{n + 1}}}") for n in range(count)]
    return [*rows, cot("Prove that 1=1.", "\\boxed{1}"), rows[0]]


def write(rows: list[dict[str, Any]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numina_config(source: str, **options: object) -> RunConfig:
    return apply(RunConfig(), {"task.name": "numina_math", "task.numina_source": source, **options})


def test_numina_splits_by_hash_whatever_the_order_and_keeps_the_prompt_of_figure_4(tmp_path: Path) -> None:
    rows = numina_rows()
    config = numina_config(write(rows, tmp_path / "a.jsonl"))
    task = numina_math(config, words(), held_out=3)
    again = numina_math(numina_config(write(rows[::-1], tmp_path / "b.jsonl")), words(), held_out=3)
    splits = {split: {p.text for p in task.held_out(split, 0)} for split in ("test", "validation", "train")}
    assert {split: len(texts) for split, texts in splits.items()} == {"test": 3, "validation": 3, "train": 6}
    assert len(set.union(*splits.values())) == 12
    assert all(splits[s] == {p.text for p in again.held_out(s, 0)} for s in splits)
    prompt = task.held_out("test", 1)[0]
    assert prompt.text.startswith(
        "Given the following problem, reason and give a final answer to the problem.\nProblem: What is "
    )
    assert prompt.text.endswith(
        "'The final answer is $\\boxed{[answer]}$. I hope it is correct.' "
        "where [answer] is the response to the problem."
    )
    assert [v.reward for v in task.grade([prompt] * 2, [f"\\boxed{{{prompt.gold}}}", "\\boxed{0}"])] == [1.0, 0.0]
    # how many are evaluated does not move the split
    fewer = numina_math(apply(config, {"eval.test_problems": 1}), words(), held_out=3)
    assert fewer.held_out("validation", 0) == task.held_out("validation", 0)


def test_numina_reads_the_hub_and_holds_out_the_paper_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        return datasets.Dataset.from_list(numina_rows(4000))

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = build(apply(RunConfig(), {"task.name": "numina_math", "task.chat": True}), words())
    assert asked == [("AI-MO/NuminaMath-CoT", "train")]
    assert [len(task.held_out(split, 0)) for split in ("validation", "test", "train")] == [1980, 1980, 40]
    assert len(task.encode(task.held_out("test", 1)[0])) > 5


def test_faulty_numina_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none to train on: take the whole data set"):
        build(numina_config(write(numina_rows(), tmp_path / "a.jsonl")), words())
    with pytest.raises(ValueError, match="row 1 has no column solution"):
        build(numina_config(write([{"problem": "1", "source": "x"}], tmp_path / "b.jsonl")), words())
    with pytest.raises(ValueError, match=r"task.numina_source: there is no file .*none.jsonl"):
        build(numina_config(str(tmp_path / "none.jsonl")), words())


def chat_row(text: str, **more: Any) -> dict[str, Any]:
    """A row of WildChat-1M, the columns that are read and some others."""
    said = [(text, "user", 1), ("an answer", "assistant", 1), ("a second question", "user", 2)]
    turns = [
        {"content": c, "role": r, "language": "English", "toxic": False, "redacted": False, "turn_identifier": n}
        for c, r, n in said
    ]
    return {"conversation_hash": "x", "model": "gpt-4", "conversation": turns, "turn": 2, "language": "English",
            "toxic": False, "redacted": False, "country": None, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "wanted"),
    [(chat_row(" Hello? "), "Hello?"), (chat_row("Hello?", language="French"), None),
     (chat_row("Hello?", toxic=True), None), (chat_row("Hello?", redacted=True), None), (chat_row("  "), None),
     (chat_row("x", conversation=[]), None),
     (chat_row("x", conversation=[{"content": "I begin", "role": "assistant"}]), None)],
)  # fmt: skip
def test_first_turns(row: dict[str, Any], wanted: str | None) -> None:
    assert first_turn(row) == wanted


def wildchat_config(source: str, **options: object) -> RunConfig:
    base = {"task.name": "wildchat", "task.wildchat_source": source, "task.wildchat_prompts": 5, "task.chat": True}
    return apply(RunConfig(), {**base, **options})


def test_wildchat_samples_by_hash_and_scores_with_its_reward_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat_row(f"{n}+{n}=") for n in range(12)]
    rows += [chat_row("1+" * 40), chat_row("7+7="), chat_row("1", toxic=True)]
    config = wildchat_config(write(rows, tmp_path / "a.jsonl"), **{"task.max_prompt_length": 20})
    task = WildChat(config, words(), held_out=2)
    backwards = apply(config, {"task.wildchat_source": write(rows[::-1], tmp_path / "b.jsonl")})
    again = WildChat(backwards, words(), held_out=2)
    found = {split: [p.text for p in task.held_out(split, 0)] for split in ("test", "validation", "train")}
    assert {split: len(texts) for split, texts in found.items()} == {"test": 2, "validation": 2, "train": 5}
    assert len({text for texts in found.values() for text in texts}) == 9
    assert "1+" * 40 not in found["train"]
    assert found["train"] == [p.text for p in again.held_out("train", 0)]
    assert len(task.draw(0, 3, 4)) == 4

    prompts = task.held_out("test", 2)
    silent = task.grade(prompts, ["a", "b"])
    assert [verdict.outcome for verdict in silent] == ["abstained"] * 2
    assert all(math.isnan(verdict.reward) for verdict in silent)

    class Model:
        def score(self, prompts: list[str], completions: list[str]) -> list[float]:
            assert prompts == found["test"]
            return [2.5, math.inf]

    monkeypatch.setattr(scored, "load", lambda path: Model())
    judged = WildChat(apply(config, {"task.reward_model": "org/reward"}), words(), held_out=2)
    verdicts = judged.grade(prompts, ["a", "b"])
    assert [verdict.outcome for verdict in verdicts] == ["scored", "abstained"]
    assert verdicts[0].reward == 2.5


def test_faulty_wildchat_data_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 1 usable first turns; .* = 5 and 940 held out need 945"):
        build(wildchat_config(write([chat_row("Hello?")], tmp_path / "a.jsonl")), words())
    with pytest.raises(ValueError, match="row 1 has no column language or redacted"):
        build(wildchat_config(write([{"conversation": [], "toxic": False}], tmp_path / "b.jsonl")), words())


def test_the_paper_s_mixture_is_a_valid_configuration() -> None:
    options = {
        "task.name": "mixture", "task.mixture": "numina_math=100000,wildchat=50000", "task.wildchat_prompts": 50000,
        "task.lengths": "numina_math=2048,wildchat=1024", "task.pair_rules": "wildchat=best_worst",
        "task.reward_model": "Nexusflow/Athene-RM-8B", "task.chat": True,
        "model.path": "meta-llama/Llama-3.1-8B-Instruct",
    }  # fmt: skip
    validate(apply(RunConfig(), options))


def test_scores_without_a_model_are_refused_unless_a_judge_chooses() -> None:
    with pytest.raises(ValueError, match=r"task\.reward_model is empty"):
        validate(apply(RunConfig(), {"task.name": "wildchat", "task.chat": True}))
