"""Arms that start from other arms: order, identity, failures, cycles, and the weights that are handed over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_runner import one_code
from fakes import SMALL, small
from transformers import AutoModelForCausalLM, AutoTokenizer

from suite.checkpoint import latest
from suite.config import RunConfig, apply, fingerprint
from suite.declaration import Choice
from suite.failures import Failure
from suite.lease import new_owner
from suite.lineage import check_chosen
from suite.policy import Policy
from suite.run import RunInfo, run
from suite.study import Arm, Study
from suite.sweep import Sweep
from suite.validate import validate

INFO = RunInfo("s", "a", "a", {})


@pytest.fixture(autouse=True)
def _one_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with one_code(monkeypatch):
        yield


def study(first: dict[str, object] | None = None, seeds: tuple[int, ...] = (3, 5), **more: dict[str, object]) -> Study:
    """b starts from a, c from b; declared in the order that cannot be run."""
    arms = {
        "control": {},
        "c": {"model.path": "arm:b", "optim.lr": 3e-6},
        "b": {"model.path": "arm:a", "optim.lr": 2e-6},
        "a": {"optim.lr": 1e-6, **(first or {})},
        **more,
    }
    return Study("chain", "?", RunConfig(), tuple(Arm(name, changes) for name, changes in arms.items()), seeds)


def test_lineage_and_what_the_cells_say() -> None:
    made = study()
    assert [made.lineage(name) for name in ("control", "a", "b", "c")] == [[], [], ["a"], ["b", "a"]]
    cells = {(cell.arm, cell.seed): cell for cell in made.cells()}
    assert cells["b", 3].starts_from == cells["a", 3].fingerprint
    assert cells["c", 5].starts_from == cells["b", 5].fingerprint
    assert cells["a", 3].starts_from == ""
    exported = {arm for (arm, _), cell in cells.items() if cell.config.train.export_model}
    assert exported == {"a", "b"}
    assert cells["b", 3].config.model.parent == cells["a", 3].fingerprint
    assert made.differs("b") == {"model.path": ("seed:addition", "arm:a"), "optim.lr": (3e-5, 2e-6)}
    validate(cells["c", 3].config)


def test_the_identity_changes_with_what_it_starts_from_and_with_nothing_else() -> None:
    before, after = study(), study({"optim.eps": 1e-6})
    for seed in (3, 5):
        old = {cell.arm: cell.fingerprint for cell in before.cells() if cell.seed == seed}
        new = {cell.arm: cell.fingerprint for cell in after.cells() if cell.seed == seed}
        assert {arm for arm in old if old[arm] != new[arm]} == {"a", "b", "c"}
    # where the model lies, and that it is to be written, is no part of an identity
    config = before.cells()[1].config
    assert fingerprint(config) == fingerprint(apply(config, {"model.folder": "/x", "train.export_model": True}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"a": {"model.path": "arm:c"}}, "arm '.' from '.' from '.' from '.': no arm can start from itself"),
        ({"a": {"model.path": "arm:a"}}, "arm 'a' from 'a': no arm can start from itself"),
        ({"a": {"model.path": "arm:controll"}}, "unknown arm 'controll' in study 'chain'; did you mean 'control'"),
        ({"a": {"model.path": "arm:"}}, "unknown arm ''"),
    ],
)
def test_cycles_and_unknown_arms_are_refused(changes: dict[str, dict[str, object]], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        study(**{k: v for k, v in changes.items() if k != "a"}, first=changes["a"]).check()


def test_only_a_study_knows_other_arms() -> None:
    with pytest.raises(ValueError, match="only an arm of a study can start from it"):
        validate(small(model__path="arm:a"))
    with pytest.raises(ValueError, match=r"model\.parent is 'abc', but nothing reads it here"):
        validate(small(model__parent="abc"))


def finish(one: Sweep) -> str:
    """Claims a cell and finishes it; its name without the fingerprint."""
    held = one.claim(new_owner())
    if held is None:
        return "none"
    config = one.config(held)
    assert not config.model.parent or Path(config.model.folder).parent.parent == (one.folder / "cells").resolve()
    one.finish(held, {"eval/test/accuracy": 0.5})
    return f"{held.arm}{held.seed}"


def test_a_cell_waits_until_the_one_it_starts_from_is_complete(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    # nothing but a and the control can start; b and c are declared before a
    first = [one.claim(new_owner()) for _ in range(4)]
    assert [f"{held.arm}{held.seed}" for held in first if held] == ["control3", "a3", "control5", "a5"]
    assert one.claim(new_owner()) is None
    assert one.unfinished()
    assert first[1] is not None
    one.finish(first[1], {"eval/test/accuracy": 0.5})
    assert finish(one) == "b3"  # of the same seed only
    assert finish(one) == "c3"
    assert finish(one) == "none"
    assert first[3] is not None
    one.finish(first[3], {"eval/test/accuracy": 0.5})
    assert [finish(one) for _ in range(3)] == ["b5", "c5", "none"]


def test_the_model_is_that_of_the_cell_it_starts_from(tmp_path: Path) -> None:
    one = Sweep.open(study(seeds=(3,)), tmp_path)
    while (held := one.claim(new_owner())) is not None:
        config = one.config(held)
        if config.model.parent:
            place = Path(config.model.folder)
            parent = json.loads((place.parent / "config.json").read_text())
            assert place.name == "model"
            assert parent["fingerprint"] == config.model.parent
            assert parent["arm"] == {"b": "a", "c": "b"}[held.arm]
        one.finish(held, {"eval/test/accuracy": 0.5})
    assert one.snapshot().exit_code == 0


def test_what_starts_from_a_failed_cell_fails_with_one_sentence_and_comes_back_with_it(tmp_path: Path) -> None:
    one = Sweep.open(study(seeds=(3,)), tmp_path)
    held = one.claim(new_owner(), Choice(["a"], None))
    assert held is not None
    assert not one.fail(held, Failure("not finite", "NonFiniteLoss", "the loss is nan", 2))
    for arm, parent in (("b", "a"), ("c", "b")):
        held = one.claim(new_owner(), Choice(["a", "b", "c"], None))
        assert held is not None
        assert held.arm == arm
        with pytest.raises(
            ValueError, match=f"arm '{arm}' starts from arm '{parent}', which failed in {parent}-seed3-"
        ):
            one.config(held)
        assert not one.fail(held, Failure("mistake", "ValueError", "as above", 0))
    assert not one.unfinished(Choice(["a", "b", "c"], None))  # nobody waits for what will not come
    assert one.retry() == 3
    assert [finish(one) for _ in range(4)] == ["control3", "a3", "b3", "c3"]


def test_what_cannot_come_is_not_waited_for(tmp_path: Path) -> None:
    made = study(seeds=(3,))
    one = Sweep.open(made, tmp_path)
    with pytest.raises(ValueError, match="arm 'b' starts from arm 'a', whose cell of seed 3 is not finished; run that"):
        check_chosen(made, one.snapshot(), Choice(["b"], None), made.seeds)
    check_chosen(made, one.snapshot(), Choice(["a", "b"], None), made.seeds)
    held = one.claim(new_owner(), Choice(["a"], None))
    check_chosen(made, one.snapshot(), Choice(["b"], None), made.seeds)  # somebody is at it
    assert held is not None
    one.finish(held, {"eval/test/accuracy": 0.5})
    check_chosen(made, one.snapshot(), Choice(["b"], None), made.seeds)


def trained_pair(tmp_path: Path) -> tuple[Study, Path, RunConfig]:
    base = apply(RunConfig(), {**SMALL, "train.steps": 2, "train.checkpoint_every": 0})
    arms = (Arm("a"), Arm("b", {"model.path": "arm:a", "optim.lr": 1e-5}))
    made = Study("pair", "?", base, arms, (0,))
    first, second = made.cells()
    run(first.config, tmp_path / first.name, INFO)
    return made, tmp_path / first.name, apply(second.config, {"model.folder": str(tmp_path / first.name / "model")})


def test_the_second_run_starts_from_the_first_one_s_final_weights(tmp_path: Path) -> None:
    _, folder, config = trained_pair(tmp_path)
    final = latest(folder / "checkpoints")
    assert final is not None
    plain = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(plain[name], value) for name, value in final.tensors["policy"].items())
    assert AutoTokenizer.from_pretrained(folder / "model").encode("1+1=")
    start = Policy.load(config.model).model.state_dict()
    seed_model = Policy.load(RunConfig().model).model.state_dict()
    assert all(torch.equal(plain[name], start[name]) for name in plain)
    assert not all(torch.equal(plain[name], seed_model[name]) for name in plain)
    metrics = run(config, tmp_path / "second", INFO)
    assert metrics["sync/loads"] == 2
    assert not (tmp_path / "second" / "model").exists()  # nobody starts from it


def test_a_model_that_was_not_written_is_made_from_the_last_checkpoint_or_missed(tmp_path: Path) -> None:
    _, folder, config = trained_pair(tmp_path)
    kept = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    shutil.rmtree(folder / "model")
    run(config, tmp_path / "second", INFO)
    again = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="holds neither its final model nor its last checkpoint; run it again"):
        run(config, tmp_path / "third", INFO)
