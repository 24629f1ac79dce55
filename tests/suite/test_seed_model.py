"""Seed models: files of the project, trained others, and their place in a run's identity."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_llama import make

from suite import seed_model, seed_training, starts
from suite.commands.plan import check_arms
from suite.config import RunConfig, apply, fingerprint, identity
from suite.evaluate import greedy_accuracy
from suite.policy import Policy
from suite.rollout.in_process import InProcessSampler
from suite.seed_models.make import SHIPPED
from suite.starts import pinned, prepare
from suite.study import Arm, Study
from suite.sweep import Sweep
from suite.tasks import build, replies
from suite.validate import validate

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _model(path: str, **options: object) -> RunConfig:
    return apply(RunConfig(), {"model.path": path, **{f"model.{name}": value for name, value in options.items()}})


@pytest.mark.parametrize("name", SHIPPED)
def test_a_packaged_model_is_by_the_present_recipe_and_at_its_target(name: str) -> None:
    recipe, said = seed_model.recipe(name), seed_model.about(name)
    assert seed_model.file_of(name) == seed_model.packaged(name)
    assert said["recipe"] == json.loads(json.dumps(recipe.__dict__))
    if recipe.target:
        assert abs(said["validation_accuracy"] - 0.40) <= 0.02


def test_the_packaged_reward_model_is_by_the_present_recipe() -> None:
    said = seed_training.about(replies.PACKAGED_REWARD)
    assert said["options"] == json.loads(json.dumps(replies.reward_recipe().__dict__))
    assert json.loads((replies.embedded_reward_model() / "reward_model.json").read_text()) == said


def test_all_packaged_models_together_are_small() -> None:
    files = list(seed_model.PACKAGED.glob("*.safetensors"))
    assert {file.name for file in files} == {
        *(seed_model.packaged(name).name for name in SHIPPED), replies.PACKAGED_REWARD.name
    }  # fmt: skip
    assert sum(file.stat().st_size for file in files) < 20e6


@pytest.mark.parametrize("name", ["addition/3", "mixed"])
def test_a_packaged_model_is_as_accurate_here_as_its_file_says(name: str) -> None:
    task = seed_model.recipe(name).tasks[0]
    policy = Policy.load(_model(f"seed:{name}").model)
    config = apply(RunConfig(), {"task.name": task})
    family = build(config, policy.tokenizer)
    sampler = InProcessSampler(policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids)
    found = greedy_accuracy(sampler, family, family.held_out("validation", 0), policy.tokenizer)
    # rounding of another machine may turn single answers whose two best tokens are all but equal
    assert found == pytest.approx(seed_model.about(name)["validation_accuracy"], abs=0.01)


def test_names_mean_a_recipe_and_its_seed() -> None:
    assert seed_model.recipe("addition") == seed_model.recipe("addition/0")
    assert seed_model.recipe("addition/7").seed == 7
    assert seed_model.weights("addition") == seed_model.weights("addition/0")
    assert seed_model.weights("addition/1") != seed_model.weights("addition/2")
    with pytest.raises(ValueError, match=r"unknown seed model 'adition'.*addition"):
        seed_model.recipe("adition/1")
    with pytest.raises(ValueError, match="must be a whole number, as in addition/3"):
        seed_model.recipe("addition/x")


def test_validation_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path))
    for path in ("seed:addition", "seed:addition/{seed}", "seed:addition/90000"):
        validate(_model(path))
    assert pinned(_model("seed:addition")).model.weights == seed_model.weights("addition")
    assert pinned(_model("seed:addition/90000")).model.weights == ""
    study = Study("s", "?", _model("seed:addition/{seed}"), (Arm("a"),), (90000,))
    check_arms(study)
    assert study.cells()[0].config.model.path == "seed:addition/90000"
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_training_stops_within_its_tolerance_and_repeats_itself(tmp_path: Path) -> None:
    easy = seed_training.SeedRecipe(("addition",), max_steps=600, target=0.12, tolerance=0.02, seed=4)
    for name in ("one", "two"):
        seed_training.train(easy, tmp_path / name)
    assert abs(seed_training.about(tmp_path / "one")["validation_accuracy"] - 0.12) <= 0.02
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with pytest.raises(RuntimeError, match=r"after 3 steps; its target is 40%"):
        seed_training.train(seed_training.SeedRecipe(("addition",), max_steps=3), tmp_path / "three")


def test_what_decides_the_weights_is_in_the_cache_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = seed_model.content_hash("addition/90000")
    read = []
    monkeypatch.setattr(seed_model.inspect, "getsource", lambda module: read.append(module.__name__) or "other")
    seed_model.content_hash.cache_clear()
    assert seed_model.content_hash("addition/90000") != before
    seed_model.content_hash.cache_clear()
    assert {"suite.seed_training", "suite.tasks.arithmetic", "suite.rollout.in_process"} <= set(read)


def test_weights_are_identity(tmp_path: Path) -> None:
    seeds = [pinned(apply(_model("seed:addition/{seed}"), {"seed": seed})) for seed in (1, 2)]
    assert [config.model.path for config in seeds] == ["seed:addition/1", "seed:addition/2"]
    assert identity(seeds[0])["model.weights"] == seed_model.weights("addition/1")
    make(tmp_path / "m", tied=False)
    one = pinned(_model(str(tmp_path / "m")))
    Path(tmp_path / "m" / "notes.md").write_text("read by nobody")
    assert pinned(_model(str(tmp_path / "m"))) == one
    shutil.copytree(tmp_path / "m", tmp_path / "n")
    assert pinned(_model(str(tmp_path / "n"))).model.weights == one.model.weights
    _flip(tmp_path / "m" / "model.safetensors")
    assert fingerprint(pinned(_model(str(tmp_path / "m")))) != fingerprint(one)
    with pytest.raises(ValueError, match="this run was declared with"):
        Policy.load(one.model)


def _flip(file: Path) -> None:
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)


def test_a_hub_models_commit_is_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(starts, "_asked", {})
    assert pinned(_model("some/model")).model.weights == ""
    with pytest.raises(ValueError, match="'some/model' is neither on the hub nor in the local cache"):
        prepare([_model("some/model").model])
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    prepare([_model("some/model").model])
    assert pinned(_model("some/model")).model.weights == COMMIT
    assert pinned(_model("some/model", revision="f" * 40)).model.weights == "f" * 40
    with pytest.raises(ValueError, match="at revision 'v2' is neither"):
        prepare([_model("some/model", revision="v2").model])


def test_cells_of_one_study_share_a_start_or_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "m", tied=False)
    base = _model(str(tmp_path / "m"))
    study = Study("s", "?", base, (Arm("a"), Arm("b", {"optim.lr": 1e-4})), (0,))
    Sweep.open(study, tmp_path / "folder")
    _flip(tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match=r"would start from weights .* and cell .* starts from .*--rerun-stale"):
        Sweep.open(study, tmp_path / "folder")
    _flip(tmp_path / "m" / "model.safetensors")
    Sweep.open(study, tmp_path / "folder")


def test_arms_may_start_from_two_revisions_of_one_hub_model(tmp_path: Path) -> None:
    arms = (Arm("a", {}), Arm("b", {"model.revision": "b" * 40}))
    Sweep.open(Study("s", "?", _model("org/model", revision="a" * 40), arms, (0,)), tmp_path)


def test_half_precision_is_kept_exactly() -> None:
    from safetensors.torch import load_file

    halves = load_file(seed_model.packaged("addition/5"))
    whole = Policy.load(_model("seed:addition/5").model).model.state_dict()
    assert all(value.dtype == torch.float16 for value in halves.values())
    assert all(torch.equal(whole[name], value.float()) for name, value in halves.items())
