"""What a finished cell was made from: code, plugins, data; what changed makes it stale and is named."""

import json
from pathlib import Path

import pytest
from sweeping import finish, study

from suite import provenance, source
from suite.config import RunConfig, apply
from suite.study import Arm, Study
from suite.sweep import CODE, Sweep


def errors(one: Sweep) -> set[str | None]:
    return {cell.error for cell in one.snapshot().cells}


def test_the_closure_is_what_a_run_imports() -> None:
    found = source.modules()
    for name in (
        "suite.run",
        "suite.train",
        "suite.objectives.dpo",
        "suite.rollout.vllm_sampler",
    ):
        assert name in found
    assert not {"suite.cli", "suite.sweep", "suite.doctor", "suite.commands", "ablations"} & found.keys()


def test_comments_layout_and_docstrings_change_no_code(tmp_path: Path) -> None:
    import ast

    plain = 'def f(x: int) -> int:\n    """Doc."""\n    return x + 1\n'
    for other in (plain.replace("Doc.", "Other."), plain.replace("    return", "    # a word\n\n    return")):
        assert source._hash(ast.parse(other)) == source._hash(ast.parse(plain))
    assert source._hash(ast.parse(plain.replace("+ 1", "+ 2"))) != source._hash(ast.parse(plain))


def test_an_edited_module_makes_cells_stale_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Sweep.open(study(), tmp_path)
    finish(one)
    assert one.snapshot().count("complete") == 6
    known = source.modules()
    edited = known | {"suite.train": "0" * 12}
    monkeypatch.setattr("suite.source.modules", lambda: edited)
    monkeypatch.setattr("suite.source.source_hash", lambda: "f" * 16)
    monkeypatch.setattr(provenance, "source_hash", lambda: "f" * 16)
    assert errors(Sweep.attach(tmp_path)) == {"changed since it finished: the code of suite.train"}
    again = Sweep.open(study(), tmp_path)
    assert again.snapshot().count("stale") == 6
    assert json.loads((tmp_path / CODE / f"{'f' * 16}.json").read_text()) == edited


def test_another_commit_of_equal_code_makes_nothing_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(Sweep.open(study(), tmp_path))
    versions = tuple(provenance.provenance()["versions"].items())
    monkeypatch.setattr(provenance, "_provenance", lambda: ("another", True, versions))
    assert Sweep.open(study(), tmp_path).snapshot().count("complete") == 6


PLUGIN = "from suite.registry import Registry\n\n\ndef reward(x):\n    return x\n"


def test_a_plugin_is_archived_and_its_edit_is_named(tmp_path: Path) -> None:
    plugin, folder = tmp_path / "mine.py", tmp_path / "folder"
    plugin.write_text(PLUGIN)
    finish(Sweep.open(study(), folder, [plugin]))
    (kept,) = (folder / CODE).glob("*-mine.py")
    assert kept.read_text() == PLUGIN
    plugin.write_text("# said more\n" + PLUGIN)
    assert Sweep.open(study(), folder, [plugin]).snapshot().count("complete") == 6
    plugin.write_text(PLUGIN.replace("return x", "return 2 * x"))
    again = Sweep.open(study(), folder, [plugin])
    assert errors(again) == {"changed since it finished: mine.py"}
    assert len(list((folder / CODE).glob("*-mine.py"))) == 3


def test_of_a_study_file_its_functions_count_and_not_its_arms(tmp_path: Path) -> None:
    file = tmp_path / "study.py"
    text = "ARMS = (1,)\n\n\ndef reward(x):\n    return x\n\n\nSTUDY = make(ARMS)\n"
    hashes = []
    for number, words in enumerate((text, text.replace("(1,)", "(1, 2)"), text.replace("return x", "return -x"))):
        file = tmp_path / str(number) / "study.py"
        file.parent.mkdir()
        file.write_text(words)
        hashes.append(source.plugin_hashes([file])["study.py"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_edited_data_makes_cells_stale_by_the_option_that_names_it(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text('{"problem": "1+1=", "answer": "2"}\n')
    base = apply(RunConfig(), {"task.name": "file", "task.source": str(data)})
    made = Study("mini", "?", base, (Arm("online"), Arm("k", {"rollout.sync_period": 10})), (3,))
    one = Sweep.open(made, tmp_path / "folder")
    finish(one)
    assert one.snapshot().count("complete") == 2
    data.write_text('{"problem": "1+1=", "answer": "3"}\n')
    assert errors(Sweep.attach(tmp_path / "folder")) == {"changed since it finished: the content of task.source"}


def test_another_definition_is_told_by_its_options(tmp_path: Path) -> None:
    base = apply(RunConfig(), {"optim.lr": 1e-5})
    arms = (Arm("online"), Arm("k", {"rollout.sync_period": 10}))
    finish(Sweep.open(Study("mini", "?", base, arms, (3,)), tmp_path))
    other = Sweep.open(Study("mini", "?", apply(base, {"optim.lr": 2e-5}), arms, (3,)), tmp_path)
    assert errors(other) == {"finished under another definition of the arm: optim.lr 1e-05 -> 2e-05"}


def test_records_of_earlier_versions_are_told_by_commit() -> None:
    old, new = {"commit": "a", "dirty": False}, {"commit": "a", "dirty": False, "source": "x"}
    assert provenance.same_code(old, new)
    assert not provenance.same_code(old | {"commit": "b"}, new)
    assert not provenance.same_code(new, new | {"source": "y"})


def test_the_machine_is_named() -> None:
    found = provenance.machine()
    assert isinstance(found["instruction_set"], str)
    assert found["threads"] >= 1
