"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from suite import cli
from suite.commands import study as commands
from suite.commands.cost import Cost, cost
from suite.commands.plan import duration
from suite.config import RunConfig, apply
from suite.launch import local
from suite.tasks.arithmetic import addition_problems

ROOT = Path(__file__).resolve().parents[2]

STUDY = """
from suite.config import RunConfig, apply
from suite.study import Arm, Claim, Study

STUDY = Study(
    "little", "Does it run?",
    apply(RunConfig(), {"objective.name": "policy_gradient", "train.steps": 6}),
    (Arm("plain"), Arm("wide", {"objective.epsilon_high": 0.28}), Arm("stale", {"rollout.sync_period": 3}, "s=3")),
    (4, 7),
    (Claim("fresh is better", "better", "plain", "stale", 0.05),),
)
"""


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A study file of three arms, one of them inert, two seeds; no seed model, so that no pilot can run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "little.py"
    path.write_text(STUDY)
    return str(path)


def refused(capsys, *args):
    """The line on stderr with which a command is refused."""
    assert cli.main(list(args)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("suite: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_help_and_config_import_nothing_heavy():
    """The check is what is imported; times depend on the machine."""
    code = (
        "import sys\n"
        "from suite.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'wandb', 'optuna', 'pandas', 'numpy', 'transformers', 'scipy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for command in ("train", "run", "status", "retry", "report", "axes", "new", "studies", "serve", "doctor"):
        assert command in done.stdout


def test_what_only_watches_workers_imports_no_model():
    code = (
        "import sys\nimport suite.tune, suite.launch.local, suite.launch.ranks, suite.worker\n"
        "heavy = {'torch', 'wandb', 'pandas', 'transformers', 'scipy', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_train_shows_every_option_with_its_docstring(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--objective.epsilon-high" in text
    assert "DAPO's clip-higher takes 0.28" in text
    assert "optimizer steps between loads of the generator" in text


def test_train_parses_options_and_hands_them_over(monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr("suite.commands.single.train", lambda *args: seen.update(args=args) or 0)
    words = "train --objective.name policy_gradient --objective.epsilon-high 0.28 --rollout.sync-period inf --seed 3"
    words += " --nproc 2"
    assert (
        cli.main([*words.split(), "--name", "x", "--folder", str(tmp_path), "--plugin", "a.py", "--plugin", "b.py"])
        == 0
    )
    config, name, folder, plugins, nproc = seen["args"]
    wanted = {
        "objective.name": "policy_gradient",
        "objective.epsilon_high": 0.28,
        "rollout.sync_period": "inf",
        "seed": 3,
    }
    assert config == apply(RunConfig(), wanted)
    assert (name, folder, plugins, nproc) == ("x", tmp_path, (Path("a.py"), Path("b.py")), 2)


def test_mistakes_are_one_line_and_code_2(capsys, little):
    assert "nothing reads it here" in refused(capsys, "train", "--objective.epsilon-high", "0.28")
    assert "did you mean 'sync_period'" in refused(capsys, "axes", "show", "sync_perid")
    assert "did you mean 'mini_sync'" in refused(capsys, "run", "mini_sink", "--dry-run")
    assert "unknown arm 'wid'" in refused(capsys, "run", little, "--arm", "wid", "--dry-run")
    assert "has no seed 5; it has 4, 7" in refused(capsys, "run", little, "--seeds", "4", "5", "--dry-run")
    assert "needs objective.name = 'dpo'" in refused(capsys, "run", little, "--axis", "objective", "--dry-run")
    assert "there is no study in" in refused(capsys, "status", little)
    assert "--workers is -1" in refused(capsys, "run", little, "--workers", "-1", "--dry-run")
    assert "--leave-within is -1.0" in refused(capsys, "run", little, "--leave-within", "-1", "--dry-run")
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "--rollout.sync-perid", "3"])
    assert end.value.code == 2


def test_a_bad_arm_is_named_before_any_work(capsys, tmp_path, little):
    path = tmp_path / "bad.py"
    path.write_text(STUDY.replace('"rollout.sync_period": 3', '"objective.beta": 3.0'))
    message = refused(capsys, "run", str(path))
    assert "study 'little', arm 'stale': objective.beta is 3.0, but nothing reads it" in message
    assert not (tmp_path / "runs").exists()


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("SUITE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown axis"):
        cli.main(["axes", "show", "nope"])


def test_ctrl_c_is_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("suite.commands.catalogue.studies", interrupt)
    assert cli.main(["studies"]) == 130


def test_dry_run_says_what_would_happen_and_writes_nothing(capsys, little, tmp_path):
    assert cli.main(["run", little, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "3 arms x 2 seeds = 6 cells in runs/little" in text
    assert "rollout.sync_period: 1 → 3" in text
    assert "inert  wide cannot differ from plain: objective.epsilon_high: the ratio to the learner is 1" in text
    assert "claim  fresh is better: plain better than stale, smallest effect 0.05 of eval/test/accuracy" in text
    # 6 steps of 32 x 8 rollouts, two seeds
    assert "3,072" in text
    assert "on 2 workers (a pilot of two rollout batches an arm)" in text
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__", "cache"} == {"little.py"}


def test_dry_run_of_some_cells(capsys, little):
    assert cli.main(["run", little, "--dry-run", "--arm", "stale", "--arm", "plain", "--seeds", "7"]) == 0
    assert "2 arms x 1 seeds = 2 cells" in capsys.readouterr().out


def test_an_axis_goes_around_the_base(capsys, little):
    assert cli.main(["run", little, "--axis", "scale_rewards", "--axis", "kl", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "6 arms x 2 seeds = 12 cells in runs/little-scale_rewards-kl" in text
    assert "objective.scale_rewards: group → batch" in text
    assert "claim" not in text


@pytest.mark.parametrize(("failed", "code"), [(0, 0), (1, 1)])
def test_run_hands_over_and_passes_the_exit_code_on(monkeypatch, little, tmp_path, failed, code):
    seen = {}

    class Status:
        exit_code = code

        def count(self, status):
            return 1

    def fake(study, folder, workers, plugins, **options):
        seen.update(study=study, folder=folder, workers=workers, plugins=plugins, **options)
        return Status()

    monkeypatch.setattr(local, "run_study", fake)
    axis = tmp_path / "mine.py"
    axis.write_text(
        "from suite.study import Arm, Axis\n"
        "AXIS = Axis('mine', '?', (Arm('control'), Arm('hot', {'optim.lr': 1e-3})))\n"
    )
    assert cli.main(["run", little, "--workers", "3", "--axis", str(axis), "--arm", "hot", "--seeds", "4"]) == code
    assert seen["study"].name == "little-mine"
    assert [arm.name for arm in seen["study"].arms] == ["control", "hot"]
    assert (seen["folder"], seen["workers"]) == (Path("runs/little-mine"), 3)
    assert seen["plugins"] == [Path(little).resolve(), axis.resolve()]
    assert (seen["arms"], seen["seeds"]) == (["hot"], [4])
    assert seen["command"] == f"suite run {little} --axis {axis}"


def test_a_started_study_is_found_by_name_file_and_folder(little, tmp_path):
    folder = tmp_path / "runs" / "little-kl"
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps({}))
    assert commands.study_folder("little-kl", None) == Path("runs/little-kl")
    assert commands.study_folder(str(folder), None) == folder
    assert commands.study_folder(little, None) == Path("runs/little")
    assert commands.study_folder(little, Path("elsewhere")) == Path("elsewhere")


def test_new_axis_says_what_to_do_next(capsys, little, tmp_path):
    assert cli.main(["new", "axis", "shorter", "--folder", str(tmp_path / "mine")]) == 0
    path = tmp_path / "mine" / "shorter.py"
    text = capsys.readouterr().out
    assert f"suite axes show {path}" in text
    assert f"suite run mini_sync --axis {path} --dry-run" in text
    assert cli.main(["axes", "show", str(path)]) == 0
    assert "reward.shaping: none → shorter" in capsys.readouterr().out
    assert "exists already" in refused(capsys, "new", "axis", "shorter", "--folder", str(tmp_path / "mine"))
    assert cli.main(["run", "mini_sync", "--axis", str(path), "--dry-run", "--seeds", "0"]) == 0
    assert "reward.shaping_coef: 0.0 → 0.01" in capsys.readouterr().out


def test_catalogues(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["axes"]) == 0
    assert "sync_period" in capsys.readouterr().out
    assert cli.main(["studies"]) == 0
    assert "mini_sync" in capsys.readouterr().out
    assert cli.main(["axes", "show", "clip_higher"]) == 0
    text = capsys.readouterr().out
    assert "objective.epsilon_high: 0.2 → 0.28" in text
    assert "the ratio to the learner is 1" in text
    assert "2503.14476" in text


def test_doctor(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COLUMNS", "250")
    assert cli.main(["doctor", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in ("cores", "memory", "disk", "GPUs", "vLLM", "math-verify 0.9.0", "HF_HUB_OFFLINE is set", "offline"):
        assert words in text


def test_doctor_never_prints_a_key(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "https://tracker.example.org")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine other.example.org login user password secret0\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert cli.main(["doctor", "--folder", str(tmp_path)]) == 1
    assert "not logged in" in capsys.readouterr().out
    netrc.write_text("machine tracker.example.org login user password secret1\n")
    assert cli.main(["doctor", "--folder", str(tmp_path)]) == 0
    monkeypatch.setenv("WANDB_API_KEY", "secret2")
    assert cli.main(["doctor", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "key in WANDB_API_KEY" in text
    assert "secret" not in text


def test_cost_by_hand():
    """10 steps, U = 2: 5 batches of 3 x 4; evaluations at 0, 4, 8, 10 of 6 problems and twice 7, 1 + 2 samples each."""
    config = apply(
        RunConfig(),
        {
            "train.steps": 10, "objective.num_epochs": 2, "rollout.sync_period": 2, "rollout.num_prompts": 3,
            "rollout.num_generations": 4, "rollout.max_completion_length": 9, "eval.every": 4,
            "eval.validation_problems": 6, "eval.test_problems": 7, "eval.num_samples": 2, "eval.probe_prompts": 5,
            "eval.probe_samples": 1,
        },
    )  # fmt: skip
    evaluations = 4 * (6 * 3 + 5) + 2 * 7 * 3
    assert cost(config) == Cost(10, 60, evaluations, (60 + evaluations) * 9)
    offline = {"rollout.sync_period": "inf"}
    assert cost(apply(config, {**offline, "rollout.source": "fixed", "rollout.fixed_batches": 2})).rollouts == 24
    assert cost(apply(config, {**offline, "rollout.source": "external"})).rollouts == 0
    everything = cost(apply(config, {"eval.test_problems": 0, "task.name": "addition"}))
    assert everything.evaluations == 4 * (6 * 3 + 5) + 2 * len(addition_problems()["test"]) * 3
    assert cost(apply(RunConfig(), {"train.steps": 1})).tokens == (256 + 2 * (2500 + 256) + 2 * 10000) * 5


@pytest.mark.parametrize(("seconds", "words"), [(45.2, "45 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations(seconds, words):
    assert duration(seconds) == words
