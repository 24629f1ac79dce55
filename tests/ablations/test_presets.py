"""Every preset, found by its file: what it sets, against its parent, and where its values stand."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ablations.load import load_preset, presets
from ablations.pages import MARK, ROOT, sources, write
from ablations.preset import Preset, Value, chain, check, objective, origins, ours, overrides, preset
from suite import cli
from suite.config import ObjectiveConfig, RunConfig, apply, differences, flatten, identity
from suite.options import reads
from suite.validate import validate

G = "policy_gradient"

CHANGES = {
    "best_of_n": {"eval.num_samples": (4, 16)},
    "dapo": {
        "objective.epsilon_high": (0.2, 0.28),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "token-mean"),
        "objective.kl": ("loss", "none"),
        "objective.kl_coef": (0.04, 0.001),
        "objective.kl_estimator": ("k3", "auto"),
        "rollout.dynamic_sampling": (False, True),
        "reward.shaping": ("none", "soft_overlong"),
        "reward.shaping_coef": (0.0, 0.5),
    },
    "dpo_nll": {"objective.nll_coef": (0.0, 1.0)},
    "dpo_offline": {"rollout.sync_period": (1, "inf")},
    "dpo_online": {},
    "dpo_semi_online": {"rollout.sync_period": (1, 10)},
    "dr_grpo": {
        "objective.scale_rewards": ("group", "none"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-sum-norm"),
        "objective.kl": ("loss", "none"),
        "objective.kl_coef": (0.04, 0.001),
        "objective.kl_estimator": ("k3", "auto"),
    },
    "group_dpo": {"objective.pair_rule": ("random", "group")},
    "group_dpo_grpo": {
        "objective.grpo_coef": (0.0, 0.01),
        "objective.scale_rewards": ("group", "none"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-sum"),
        "objective.kl": ("none", "loss"),
        "objective.kl_estimator": ("auto", "k3"),
    },
    "grpo": {
        "objective.name": ("dpo", G),
        "objective.kl": ("none", "loss"),
        "objective.kl_coef": (0.001, 0.04),
        "objective.kl_estimator": ("auto", "k3"),
    },
    "grpo_text": {
        "objective.scale_rewards": ("group", "none"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-sum"),
        "objective.kl_coef": (0.04, 0.001),
    },
    "grpo_code": {
        "objective.scale_rewards": ("none", "group"),
        "objective.loss_agg_mode": ("seq-mean-token-sum", "seq-mean-token-mean"),
    },
    "ppo": {
        "objective.name": ("dpo", G),
        "objective.advantage": ("group", "gae"),
        "objective.whiten_advantages": (False, True),
        "critic.init": ("", "policy"),
    },
    "reinforce": {"objective.advantage": ("rloo", "reinforce")},
    "reinforce_mean": {"objective.kl": ("loss", "reward"), "objective.kl_estimator": ("k3", "k1")},
    "reinforce_pp": {
        "objective.name": ("dpo", G),
        "objective.advantage": ("group", "reinforce_pp"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "token-mean"),
        "objective.kl": ("none", "reward"),
        "objective.kl_coef": (0.001, 0.01),
        "objective.kl_estimator": ("auto", "k1"),
    },
    "reinforce_pp_baseline": {
        "objective.advantage": ("reinforce_pp", "reinforce_pp_baseline"),
        "objective.kl": ("reward", "loss"),
        "objective.kl_estimator": ("k1", "k2"),
    },
    "remax": {
        "objective.name": ("dpo", G),
        "objective.advantage": ("group", "remax"),
        "objective.trust_region": ("clip", "none"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "token-mean"),
        "objective.kl": ("none", "reward"),
        "objective.kl_coef": (0.001, 0.05),
        "objective.kl_estimator": ("auto", "k1"),
    },
    "rloo": {
        "objective.name": ("dpo", G),
        "objective.advantage": ("group", "rloo"),
        "objective.trust_region": ("clip", "none"),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-sum"),
        "objective.kl": ("none", "reward"),
        "objective.kl_coef": (0.001, 0.03),
        "objective.kl_estimator": ("auto", "k1"),
    },
    "rloo_token": {"objective.advantage": ("rloo", "rloo_token")},
    "sft": {"objective.name": ("dpo", "sft"), "rollout.sync_period": (1, "inf")},
    "vapo": {
        "objective.length_adaptive_alpha": (0.0, 1.0),
        "objective.epsilon_high": (0.2, 0.28),
        "objective.loss_agg_mode": ("seq-mean-token-mean", "token-mean"),
        "objective.positive_nll_coef": (0.0, 0.1),
    },
    "vc_ppo": {"critic.pretrain_steps": (0, 10), "critic.gae_lambda_value": (0.95, 1.0)},
}
"""What a preset changes in its parent (the defaults where it has none), at any scale: option -> (there, here)."""

PUBLISHED = {
    "dapo": {
        "rollout.num_prompts": 512, "rollout.num_generations": 16, "rollout.max_completion_length": 20480,
        "objective.num_minibatches": 16, "optim.lr": 1e-6, "optim.warmup_steps": 320, "eval.num_samples": 32,
    },
    "dpo_online": {
        "objective.beta": 0.1, "optim.lr": 1e-6, "optim.eps": 1e-4, "optim.max_grad_norm": 0.1,
        "rollout.reference_sync": "with_generator", "rollout.max_completion_length": 2048, "rollout.num_prompts": 64,
    },
    "dpo_offline": {"rollout.reference_sync": "none", "optim.eps": 1e-4},
    "dr_grpo": {"rollout.num_generations": 8, "rollout.max_completion_length": 3000, "optim.weight_decay": 0.0},
    "grpo": {"rollout.num_generations": 64, "rollout.max_completion_length": 1024, "optim.lr": 1e-6},
    "grpo_text": {"objective.kl_coef": 0.001, "rollout.num_generations": 8, "rollout.num_prompts": 64},
    "ppo": {"rollout.num_prompts": 8192, "rollout.num_generations": 1, "critic.lr": 2e-6},
    "reinforce": {"rollout.num_generations": 1},
    "remax": {"objective.gamma": 0.99, "optim.schedule": "cosine", "optim.weight_decay": 0.1},
    "rloo": {"rollout.num_generations": 4, "objective.num_minibatches": 2, "optim.lr": 1e-6},
    "vapo": {
        "objective.length_adaptive_alpha": 0.05, "rollout.num_prompts": 512, "rollout.num_generations": 16,
        "objective.gae_lambda_policy": 0.95, "critic.gae_lambda_value": 1.0, "objective.num_minibatches": 16,
    },
}  # fmt: skip
"""Of the published layer, what the papers' tables have, written down here from them."""


def config(name: str, *, published: bool = False, **more) -> RunConfig:
    """A preset over the defaults, with enough steps for its batches."""
    out = apply(RunConfig(), preset(name, published=published))
    return apply(out, {"train.steps": 30 * out.updates_per_batch, **more})


def test_there_is_one_of_each():
    assert set(presets()) == set(CHANGES)


@pytest.mark.parametrize("name", presets())
def test_a_preset_changes_what_it_should_in_its_parent(name):
    """Whole configurations are compared, so that an option left behind shows."""
    found = load_preset(name)
    before = apply(RunConfig(), preset(found.parent) if found.parent else {})
    assert differences(apply(RunConfig(), preset(name)), before) == CHANGES[name]


@pytest.mark.parametrize("name", presets())
def test_a_preset_runs_and_names_only_what_is_read(name):
    """In the miniature, and with its published settings on a task at their scale."""
    found = load_preset(name)
    check(found)
    small, large = config(name), config(name, published=True, **{"task.name": "numina_math", "task.chat": True})
    validate(small)
    validate(large)
    assert set(found.slots) <= reads(small)
    assert set(found.published) <= reads(large)
    assert len(re.findall(r"arXiv:? ?\d{4}\.\d{5}", found.paper)) >= 1
    for value in (*found.slots.values(), *found.published.values()):
        assert len(value.source) >= 5
        assert not value.source.startswith("ours")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_values(name):
    values = flatten(config(name, published=True))
    assert {option: values[option] for option in PUBLISHED[name]} == PUBLISHED[name]


def test_length_adaptive_gae_is_vapos():
    assert "objective.length_adaptive_alpha" not in origins(load_preset("vc_ppo"), published=True)
    assert origins(load_preset("vapo"))["objective.length_adaptive_alpha"].preset.name == "vapo"
    assert "Length-adaptive GAE is VAPO's, not VC-PPO's" in sources()


def test_layers_and_chains():
    """Slots of a descendant stand before what its ancestors published; published values before slots of their own."""
    assert [elder.name for elder in chain(load_preset("vapo"))] == ["ppo", "vc_ppo", "vapo"]
    slots, published = origins(load_preset("vapo")), origins(load_preset("vapo"), published=True)
    assert (slots["critic.pretrain_steps"].preset.name, slots["critic.pretrain_steps"].value.value) == ("vc_ppo", 10)
    assert published["critic.pretrain_steps"].preset.name == "vapo"
    assert published["objective.length_adaptive_alpha"].value.value == 0.05
    assert published["critic.lr"].preset.name == "ppo"
    offline = origins(load_preset("dpo_offline"), published=True)
    assert offline["rollout.sync_period"].value.value == "inf"
    assert offline["rollout.reference_sync"].value.value == "none"


def test_an_arm_of_a_preset_leaves_nothing_of_another_loss_behind():
    base = apply(RunConfig(), {**preset("dapo"), "objective.entropy_coef": 0.1})
    arm = apply(base, preset("rloo"))
    assert arm.objective == objective("rloo")
    assert arm.objective.entropy_coef == 0.0
    assert arm.rollout.dynamic_sampling, "what is not the objective's stays the base's"


def test_presets_over_each_other():
    both = preset("grpo", "best_of_n", objective={"num_minibatches": 4})
    assert apply(RunConfig(), both).eval.num_samples == 16
    assert apply(RunConfig(), both).objective.num_minibatches == 4
    assert apply(RunConfig(), both).objective.kl_coef == 0.04
    later = preset("dapo", "rloo")
    assert apply(RunConfig(), later).objective == objective("rloo")
    assert "objective" not in preset("best_of_n")
    assert preset("rloo")["objective"] == ObjectiveConfig()


def test_mistakes_are_said():
    with pytest.raises(ValueError, match="unknown preset 'dappo'; did you mean 'dapo'"):
        preset("dappo")
    wrong = Preset("wrong", "", "", slots={"objective.epsilon_hihg": Value(0.3, "section 1")})
    with pytest.raises(ValueError, match=r"unknown option 'objective\.epsilon_hihg' in preset 'wrong'; did you mean"):
        check(wrong)
    with pytest.raises(ValueError, match=r"preset 'wrong': objective\.kl is 'los'"):
        check(Preset("wrong", "", "", slots={"objective.kl": Value("los", "section 1")}))
    with pytest.raises(ValueError, match=r"preset 'wrong' is without objective\.beta, which none of its ancestors"):
        check(Preset("wrong", "", "", "dapo", without=("objective.beta",)))
    with pytest.raises(ValueError, match="unknown preset 'nobody'"):
        chain(Preset("wrong", "", "", "nobody"))


def test_a_circle_is_refused(tmp_path):
    for name, parent in (("one", "two"), ("two", "one")):
        made = f"PRESET = Preset({name!r}, '', '', {str(tmp_path / parent) + '.py'!r})"
        (tmp_path / f"{name}.py").write_text(f"from ablations.preset import Preset\n{made}\n")
    with pytest.raises(ValueError, match="descends from itself"):
        chain(load_preset(str(tmp_path / "one.py")))


def test_ours_is_marked():
    assert ours(3, "not reported").words == "ours: not reported"
    assert Value(3, "Table 4").words == "Table 4"


def test_the_pages_are_up_to_the_presets(tmp_path):
    """`python -c "from ablations.pages import write; write()"` brings them there."""
    # in a process of its own: other tests register entries too
    code = "from ablations.pages import algorithms, sources; print(algorithms(), sources(), sep=chr(0), end='')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    page, part = done.stdout.split("\0")
    assert (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8") == page
    assert (ROOT / "SOURCES.md").read_text(encoding="utf-8").partition(MARK)[2] == part.partition(MARK)[2]
    for name in presets():
        found = load_preset(name)
        assert f"| `{name}` |" in page
        own = part.partition(f"### {name}: ")[2].partition("\n### ")[0]
        for option in (*found.slots, *found.published):
            assert f"| `{option}` |" in own
    (tmp_path / "docs").mkdir()
    (tmp_path / "SOURCES.md").write_text(f"# Sources\n\nby hand\n\n{MARK}old")
    write(tmp_path)
    assert (tmp_path / "SOURCES.md").read_text() == f"# Sources\n\nby hand\n\n{part}"


def test_suite_presets_lists_and_shows(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    assert cli.main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in presets())
    assert cli.main(["presets", "show", "vapo"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1:] for row in rows if row and row[0]}
    assert shown["objective.epsilon_high"] == ["0.28", "section 4.3: clip-higher", "", ""]
    assert shown["objective.length_adaptive_alpha"][0] == "1.0"
    assert shown["objective.length_adaptive_alpha"][2:] == ["0.05", "section 5.1"]
    assert shown["critic.lr"] == ["0.0001", "default", "2e-06", "ppo: VAPO, section 5.1"]
    assert shown["objective.entropy_coef"][:2] == ["0.0", "default"]
    assert cli.main(["presets", "show", "dapo", "--diff", "grpo"]) == 0
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines()]
    shown = {row[0]: row[1:] for row in rows if row and row[0]}
    assert shown["objective.kl"] == ["none", "loss", "none", "loss"]
    assert shown["rollout.num_generations"] == ["8", "8", "16", "64"]
    assert "objective.epsilon_low" not in shown
    assert cli.main(["presets", "show", "dappo"]) == 2
    assert "did you mean 'dapo'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dapo", "dpo_offline", "vapo"])
def test_the_command_that_show_prints_trains_that_preset(name, capsys, monkeypatch):
    seen = {}
    monkeypatch.setattr("suite.commands.single.train", lambda config, *rest, **more: seen.update(config=config) or 0)
    assert cli.main(["presets", "show", name]) == 0
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:3] == ["train", "suite", "train"]
    assert cli.main(command[2:]) == 0
    assert identity(seen["config"]) == identity(apply(RunConfig(), overrides(load_preset(name))))
