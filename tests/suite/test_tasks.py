"""Tasks: disjoint splits, equal prompts for equal seeds, rewards that cannot be talked into, faults of data named."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from suite.config import RunConfig, apply
from suite.protocols import Prompt
from suite.seed_model import tokenizer
from suite.tasks import TASKS, build
from suite.tasks.arithmetic import FAMILIES, Problem, solve_addition, solve_sums

ARITHMETIC = sorted(FAMILIES)


def task_of(name: str, **options: object):
    return build(apply(RunConfig(), {"task.name": name, **options}), tokenizer())


@pytest.mark.parametrize("name", ARITHMETIC)
def test_splits_are_disjoint_and_large_enough(name: str) -> None:
    splits = FAMILIES[name].problems()
    # a reordered sum is the same problem
    keys = {split: {tuple(sorted(p.terms)) for p in problems} for split, problems in splits.items()}
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    assert len(splits["test"]) >= 2000
    assert len(splits["validation"]) >= 500
    for problems in splits.values():
        assert len({p.terms for p in problems}) == len(problems)


@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_written_solution_is_right_and_any_other_total_wrong(name: str) -> None:
    task, family = task_of(name), FAMILIES[name]
    problems = family.problems()["test"][:200]
    prompts = [Prompt("", p.text, p.gold) for p in problems]
    right = task.grade(prompts, [family.solve(p) for p in problems])
    assert {v.outcome for v in right} == {"right"}
    assert [int(v.answer) for v in right] == [int(p.gold) for p in problems]
    wrong = task.grade(prompts, [family.solve(p, sum(p.terms) + 1) for p in problems])
    assert {v.outcome for v in wrong} == {"wrong"}


def test_solutions_by_hand() -> None:
    assert solve_addition(Problem((34, 57))) == "19"
    assert solve_sums(Problem((7, 9, 5))) == "14;21;\\boxed{21}"
    assert solve_sums(Problem((7, 9, 5)), 22) == "14;22;\\boxed{22}"
    assert solve_sums(Problem((1, 2, 3))) == "05;06;\\boxed{06}"


def test_lengths_leave_room_to_be_truncated() -> None:
    words, family = tokenizer(), FAMILIES["sums"]
    lengths = [len(words.encode(family.solve(p), add_special_tokens=False)) + 1 for p in family.problems()["train"]]
    assert sorted(Counter(lengths)) == [11, 14, 17, 20]
    assert family.max_completion_length == 20


@pytest.mark.parametrize(
    ("name", "completion"),
    [("addition", "75+43"), ("addition", ""), ("addition", "19="), ("sums", "\\boxed{34+57}"), ("sums", "91"),
     ("sums", "\\boxed{91"), ("sums", "\\boxed{}")],
)  # fmt: skip
def test_only_a_plain_number_is_an_answer(name: str, completion: str) -> None:
    verdict = task_of(name).grade([Prompt("", "34+57=", "91")], [completion])[0]
    assert verdict.outcome == "no_answer"


@pytest.mark.parametrize("name", ARITHMETIC)
def test_draws_depend_on_seed_and_batch_alone_and_a_pass_repeats_nothing(name: str) -> None:
    task = task_of(name)
    assert task.draw(3, 5, 32) == task_of(name).draw(3, 5, 32)
    assert task.draw(3, 5, 32) != task.draw(4, 5, 32)
    size = len(FAMILIES[name].problems()["train"])
    first = [prompt.uid for batch in range(size // 32) for prompt in task.draw(0, batch, 32)]
    assert len(set(first)) == len(first)
    later = [prompt.uid for prompt in task.draw(0, size // 32 + 1, 32)]
    assert later != first[32:64]  # each pass has an order of its own


def test_held_out_problems_are_fixed_and_counted() -> None:
    task = task_of("addition")
    assert task.held_out("test", 10) == task.held_out("test", 2000)[:10]
    with pytest.raises(ValueError, match="and 99999 are asked for"):
        task.held_out("test", 99_999)


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def file_task(path: Path, **options: object):
    sizes = {"eval.test_problems": 2, "eval.validation_problems": 2}
    return task_of("file", **{"task.source": str(path), **sizes, **options})


def problems(count: int) -> list[object]:
    return [{"problem": f"What is {i}+{i}?", "answer": float(2 * i)} for i in range(count)]


def test_a_file_is_split_by_content_not_by_order(tmp_path: Path) -> None:
    rows = problems(10)
    one = file_task(jsonl(tmp_path / "a.jsonl", rows))
    two = file_task(jsonl(tmp_path / "b.jsonl", rows[::-1]))
    assert one.held_out("test", 0) == two.held_out("test", 0)
    everything = [p.text for split in ("test", "validation") for p in one.held_out(split, 0)]
    everything += [p.text for p in one.draw(0, 0, 6)]
    assert sorted(everything) == sorted(row["problem"] for row in rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert file_task(tmp_path / "a.parquet").held_out("test", 0) == one.held_out("test", 0)


def test_a_files_answers_are_graded_as_mathematics(tmp_path: Path) -> None:
    task = file_task(jsonl(tmp_path / "a.jsonl", problems(10)), **{"task.template": "Q: {problem}\nA:"})
    prompt = task.held_out("test", 0)[0]
    assert prompt.text.startswith("Q: What is ")
    assert prompt.text.endswith("?\nA:")
    assert "." not in prompt.gold  # 4.0 is 4
    fraction = f"\\boxed{{\\frac{{{2 * int(prompt.gold)}}}{{2}}}}"
    verdicts = task.grade([prompt] * 3, [fraction, "\\boxed{-1}", prompt.gold])
    assert [v.outcome for v in verdicts] == ["right", "wrong", "no_answer"]
    assert verdicts[0].raw is True


def test_the_faults_of_a_file_are_named(tmp_path: Path) -> None:
    rows = problems(10)
    with pytest.raises(ValueError, match=r"unknown column 'answr' in .*a\.jsonl, row 1; did you mean 'answer'"):
        file_task(jsonl(tmp_path / "a.jsonl", rows), **{"task.answer_column": "answr"})
    rows[6] = {"problem": "What is 6+6?", "answer": None}
    with pytest.raises(ValueError, match=r"row 7: column 'answer' is empty"):
        file_task(jsonl(tmp_path / "a.jsonl", rows))
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"problem": "1+1?", "answer": 2}\n{"problem": "2+2?", "answer": \n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2: not valid JSON \(.*column \d+\)"):
        file_task(broken)
    with pytest.raises(ValueError, match=r"line 1: a JSON object is expected, not list"):
        file_task(jsonl(tmp_path / "list.jsonl", [[1, 2]]))
    with pytest.raises(ValueError, match="there is no file"):
        file_task(tmp_path / "none.jsonl")
    (tmp_path / "a.csv").write_text("problem,answer\n")
    with pytest.raises(ValueError, match=r"ends in '\.csv'"):
        file_task(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="is not a Parquet file"):
        file_task(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="leave none to train on"):
        file_task(jsonl(tmp_path / "few.jsonl", problems(4)))


def test_given_pairs_come_from_their_columns(tmp_path: Path) -> None:
    rows = [{**row, "good": "yes", "bad": "no"} for row in problems(10)]  # type: ignore[dict-item]
    options = {"rollout.source": "external", "task.chosen_column": "good", "task.rejected_column": "bad"}
    prompt = file_task(jsonl(tmp_path / "a.jsonl", rows), **options).draw(0, 0, 1)[0]
    assert (prompt.chosen, prompt.rejected) == ("yes", "no")
    with pytest.raises(ValueError, match="unknown column 'worse'"):
        file_task(tmp_path / "a.jsonl", **{**options, "task.rejected_column": "worse"})


def test_a_long_prompt_is_refused_by_name(tmp_path: Path) -> None:
    task = file_task(jsonl(tmp_path / "a.jsonl", problems(10)), **{"task.max_prompt_length": 5})
    with pytest.raises(ValueError, match=r"above task\.max_prompt_length = 5: 'What is"):
        task.encode(task.draw(0, 0, 1)[0])


def test_a_hub_data_set_is_loaded_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, split: str) -> object:
        asked.append((name, split))
        return datasets.Dataset.from_list(problems(10))

    monkeypatch.setattr(datasets, "load_dataset", load)
    sizes = {"eval.test_problems": 2, "eval.validation_problems": 2}
    task = task_of("hub", **{"task.source": "someone/sums", "task.split": "part", **sizes})
    assert asked == [("someone/sums", "part")]
    assert len(task.held_out("test", 0)) == 2


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].__module__.startswith("suite.")])
def test_every_task_is_covered(name: str) -> None:
    covered = {*ARITHMETIC, "file", "hub", "mixture", "numina_math", "replies", "wildchat"}
    assert name in covered, f"test task {name!r}, here or in a file of its own"
