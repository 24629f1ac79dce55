"""What commands say and do around a run: presets, names from elsewhere, declaring alone, progress in a pipe."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import SMALL
from sweeping import finish, study

from suite import cli, train
from suite.commands import plan
from suite.config import RunConfig, apply, flatten
from suite.foreign_names import HINTS, hint
from suite.launch.local import run_study
from suite.run import NonFiniteLoss, RunInfo, run
from suite.sweep import Sweep


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configurations that `suite train` would run."""
    out: list[RunConfig] = []
    monkeypatch.setattr("suite.commands.single.train", lambda config, *rest: out.append(config) or 0)
    return out


def test_a_preset_gives_way_to_what_is_given(ran: list[RunConfig]) -> None:
    default = RunConfig().objective.epsilon_high
    assert cli.main(["train", "--preset", "dapo"]) == 0
    assert ran[0].objective.epsilon_high == 0.28
    assert cli.main(["train", "--preset", "dapo", "--objective.epsilon-high", str(default), "--seed", "7"]) == 0
    assert (ran[1].objective.epsilon_high, ran[1].seed) == (default, 7)
    assert ran[1].rollout.dynamic_sampling is True
    assert cli.main(["train", "--preset", "dappo"]) == 2


def test_names_of_trl_and_verl_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for word, ours in (("--learning_rate", "optim.lr"), ("--num-generations=4", "rollout.num_generations")):
        assert cli.main(["train", word]) == 2
        assert f"is {ours} here" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"what TRL or verl call actor.clip_ratio_high is objective.epsilon_high here"):
        apply(RunConfig(), {"actor.clip_ratio_high": 0.3})
    assert cli.main(["train", "--objective.name", "grpo"]) == 2
    assert "a whole algorithm is a preset: suite train --preset NAME" in capsys.readouterr().err
    assert hint("nonsense") == ""


@pytest.mark.parametrize("name", HINTS)
def test_every_hint_names_options_that_exist(name: str) -> None:
    words = HINTS[name].replace(",", " ").split()
    options = [word for word in words if "." in word]
    assert options
    assert set(options) <= flatten(RunConfig()).keys()


def test_no_workers_declare_and_run_nothing(tmp_path: Path) -> None:
    status = run_study(study(), tmp_path, 0)
    assert status.count("waiting") == 6
    assert (tmp_path / "study.json").is_file()


def test_a_dry_run_leaves_out_what_is_finished_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "is_cheap", lambda config: False)
    one = Sweep.open(study(), tmp_path)
    finish(one, 4)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix == ".json"}
    plan.dry_run(study(), study().cells(), tmp_path, 2)
    assert "4 of them are finished and not run again: 2 are left" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.suffix == ".json"} == before


def test_a_run_in_a_pipe_says_how_far_it_is_and_whether_it_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if not isinstance(value, bool)]
    given = [*options, "--train.steps=2", "--objective.beta=0.5"]
    assert cli.main(["train", *given, "--folder", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "step 2 of 2   reward/mean" in text
    assert "no token was trained" not in text


def test_a_policy_that_diverges_without_a_nan_loss_fails_or_scores_by_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    found = train.full_evaluation

    def broken(*args: object) -> object:
        out = found(*args)  # type: ignore[arg-type]
        return replace(out, metrics=out.metrics | {"policy/entropy": float("nan")})

    monkeypatch.setattr(train, "full_evaluation", broken)
    config = apply(RunConfig(), {**SMALL, "train.steps": 1})
    with pytest.raises(NonFiniteLoss, match="the policy has diverged, its entropy is nan"):
        run(config, tmp_path / "fails", RunInfo("s", "a", "a", {}))
    scored = apply(config, {"train.on_divergence": "score"})
    assert "eval/test/accuracy" in run(scored, tmp_path / "scores", RunInfo("s", "a", "a", {}))


def test_wandb_online_without_a_key_is_found_before_the_first_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert cli.main(["run", "mini_sync", "--folder", str(tmp_path / "f")]) == 2
    assert "W&B finds no key; run `wandb login`" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
