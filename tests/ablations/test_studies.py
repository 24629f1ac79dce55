"""Every study of the project: what it compares, and that it can be planned without network, models or a pilot."""

from __future__ import annotations

import socket

import pytest

from ablations.load import load_preset, load_study, presets, studies
from ablations.parts import Ablation, Part
from suite import cli
from suite.commands.cost import Cost, cost
from suite.config import RunConfig, apply, flatten
from suite.study import SEED_MODEL
from suite.tasks.mixture import proportions

MINIATURES = {"algorithms", "dapo", "entropy", "group_size", "grpo_axes", "mix", "sync", "vapo"}
AT_SCALE = {
    "paper_verifiable", "paper_nonverifiable", "paper_mixed", "paper_group_size", "dapo_ablation", "vapo_ablation",
}  # fmt: skip


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty cache and no network: whoever opens a connection or loads a model or data set fails."""

    def refuse(*args, **more):
        raise AssertionError(f"the network was asked for {args}")

    monkeypatch.setenv("SUITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_studies_that_must_be_there():
    assert {f"mini_{name}" for name in MINIATURES} | AT_SCALE <= set(studies())


@pytest.mark.parametrize("name", studies())
def test_a_dry_run_needs_nothing_but_the_study(name, alone, capsys, monkeypatch):
    monkeypatch.setattr("suite.commands.plan.is_cheap", lambda config: False)
    study = load_study(name)
    assert study.question.endswith("?")
    if study.search is not None:
        assert cli.main(["run", name, "--dry-run"]) == 2
        assert "declares a search" in capsys.readouterr().err
        return
    assert cli.main(["run", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(study.arms)} arms x {len(study.seeds)} seeds = {len(study.cells())} cells" in printed
    assert "time   not estimated: no cell is finished, and a pilot of this model may take long" in printed
    assert all(f"claim  {claim.name}: " in printed for claim in study.claims)
    dynamic = [arm.name for arm in study.arms if study.config(arm.name).rollout.dynamic_sampling]
    assert printed.count("dynamic sampling may take up to 10 times the rollouts") == len(dynamic)
    assert list(alone.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("name", sorted(AT_SCALE))
def test_studies_at_scale_take_the_papers_model_and_published_rates(name):
    study = load_study(name)
    for arm in study.arms:
        config = study.config(arm.name)
        eldest = [arm.name, *study.lineage(arm.name)][-1]
        assert study.config(eldest).model.path == "meta-llama/Llama-3.1-8B-Instruct"
        assert config.model.dtype == "bfloat16"
        assert config.optim.lr == 1e-6
        assert config.task.chat
        assert cost(config).tokens > 1e6


def test_every_preset_is_compared_under_one_budget():
    """Steps, prompts and samples a prompt; what differs beyond the preset is beta, for the whole DPO family."""
    study = load_study("mini_algorithms")
    assert {arm.name for arm in study.arms} == {name for name in presets() if not load_preset(name).evaluates}
    for arm in study.arms:
        config = study.config(arm.name)
        budget = (config.train.steps, config.rollout.num_prompts, config.rollout.num_generations)
        assert budget == (120, 32, 8)
        assert config.objective.beta == (0.7 if config.objective.name == "dpo" else 0.1)
    claimed = {(claim.arm, claim.than) for claim in study.claims if claim.kind == "better"}
    assert {("dpo_online", "dpo_offline"), ("dpo_offline", "sft"), ("sft", SEED_MODEL)} <= claimed


def test_table_4():
    """Row by row as the paper has it: beta or KL, Adam eps, reference, length, prompts."""
    tables = {
        "paper_verifiable": (1e-4, 2048, 64, {"online": 0.1, "offline": 0.1, "semi_online_10": 0.1, "grpo": 0.001}),
        "paper_nonverifiable": (
            1e-8,
            1024,
            32,
            {"online": 0.01, "offline": 0.01, "semi_online_5": 0.01, "grpo": 0.001},
        ),
    }
    for name, (eps, length, prompts, coefficients) in tables.items():
        study = load_study(name)
        for arm, coefficient in coefficients.items():
            config = study.config(arm)
            assert (config.optim.eps, config.optim.max_grad_norm) == (eps, 0.1)
            assert (config.rollout.max_completion_length, config.rollout.num_prompts) == (length, prompts)
            assert (config.objective.kl_coef if arm == "grpo" else config.objective.beta) == coefficient
            moves = name == "paper_verifiable" and arm not in ("grpo", "offline")
            assert config.rollout.reference_sync == ("with_generator" if moves else "none")
    periods = {arm.name: load_study("paper_verifiable").config(arm.name).rollout.sync_period for arm in study.arms[:2]}
    assert periods == {"online": 1, "offline": "inf"}
    mixed = load_study("paper_mixed").config("mixed")
    assert (mixed.objective.beta, mixed.optim.eps, mixed.rollout.max_completion_length) == (0.01, 1e-8, 1024)
    assert mixed.rollout.reference_sync == "none"
    after = load_study("paper_mixed").config("wildchat_first")
    assert (after.objective.beta, after.optim.eps, after.rollout.max_completion_length) == (0.1, 1e-4, 2048)
    assert after.rollout.reference_sync == "with_generator"


@pytest.mark.parametrize("name", ["mini_mix", "paper_mixed"])
def test_one_task_after_the_other_in_both_orders(name):
    """The first half of a sequence is an arm of the study, and trains on the other task."""
    study = load_study(name)
    sequences = {arm.name: study.lineage(arm.name) for arm in study.arms if study.lineage(arm.name)}
    assert len(sequences) == 2
    trained = set()
    for last, (first,) in sequences.items():
        tasks = [{task for task, share in proportions(study.config(arm)).items() if share} for arm in (first, last)]
        assert [len(names) for names in tasks] == [1, 1]
        trained.add(tuple(names.pop() for names in tasks))
    assert len(trained) == 2
    assert {order[::-1] for order in trained} == trained


@pytest.mark.parametrize("name", ["mini_dapo", "dapo_ablation"])
def test_dapo_is_reached_step_by_step(name):
    """The last arm is the preset's own options, overlong filtering apart; the first has none of them."""
    study = load_study(name)
    values = flatten(study.config("full"))
    own = load_preset("dapo").slots
    assert {o: values[o] for o in own if o != "rollout.mask_truncated_completions"} == {
        o: v.value for o, v in own.items() if o != "rollout.mask_truncated_completions"
    }
    plain = study.config("plain")
    assert (plain.objective.epsilon_high, plain.objective.loss_agg_mode) == (0.2, "seq-mean-token-mean")
    assert not plain.rollout.dynamic_sampling
    assert not plain.rollout.mask_truncated_completions
    assert (plain.reward.shaping, plain.objective.kl) == ("none", "none")
    steps = [arm.name for arm in study.arms if arm.name.startswith("plus_")]
    assert steps == ["plus_overlong_filtering", "plus_clip_higher", "plus_soft_punishment", "plus_token_loss"]


@pytest.mark.parametrize("name", ["mini_vapo", "vapo_ablation"])
def test_vapo_loses_one_part_at_a_time(name):
    study = load_study(name)
    full, plain = flatten(study.config("full")), flatten(study.config("plain"))
    values = {
        "clip_higher": ("objective.epsilon_high", 0.2), "decoupled_gae": ("critic.gae_lambda_value", 0.95),
        "value_pretraining": ("critic.pretrain_steps", 0), "positive_nll": ("objective.positive_nll_coef", 0.0),
        "length_adaptive_gae": ("objective.length_adaptive_alpha", 0.0),
        "token_loss": ("objective.loss_agg_mode", "seq-mean-token-mean"),
        "group_sampling": ("rollout.num_generations", 1),
    }  # fmt: skip
    for part, (option, without) in values.items():
        arm = f"no_{part}" if f"no_{part}" in {a.name for a in study.arms} else "plus_positive_nll"
        lacking = flatten(study.config(arm))
        changed = {o for o in full if lacking[o] != full[o]}
        assert lacking[option] == plain[option] == without != full[option]
        assert changed == {option} | ({"rollout.num_prompts"} if part == "group_sampling" else set())


def test_parts_by_hand():
    full = apply(RunConfig(), {"objective.beta": 0.5, "optim.lr": 1e-3, "rollout.top_k": 7})
    parts = (Part("b", "beta", ("objective.beta",)), Part("l", "rate", ("optim.lr",)))
    made = Ablation(full, RunConfig(), parts, "GRPO", "DAPO")
    assert made.base == apply(RunConfig(), {"rollout.top_k": 7})
    assert [(arm.name, dict(arm.overrides), arm.label) for arm in made.both()] == [
        ("plain", {}, "GRPO"),
        ("plus_b", {"objective.beta": 0.5}, "+ beta"),
        ("full", {"objective.beta": 0.5, "optim.lr": 1e-3}, "DAPO"),
        ("no_b", {"optim.lr": 1e-3}, "w/o beta"),
    ]
    assert [arm.name for arm in made.leave_one_out()] == ["no_b", "no_l"]
    assert (made.without("b"), made.without("l")) == ("no_b", "plus_b")
    with pytest.raises(ValueError, match=r"unknown option 'objective\.bta'"):
        Ablation(full, RunConfig(), (Part("b", "beta", ("objective.bta",)),)).base  # noqa: B018


def test_the_cost_of_a_mixture_is_that_of_its_tasks():
    """By hand: 3 batches of 8 prompts, 6 additions of 5 tokens and 2 replies of 16, 4 rollouts a prompt."""
    config = apply(
        RunConfig(),
        {
            "task.name": "mixture", "task.mixture": "addition=3,replies=1", "rollout.num_prompts": 8,
            "rollout.num_generations": 4, "train.steps": 3, "eval.every": 3, "eval.validation_problems": 10,
            "eval.test_problems": 0, "eval.num_samples": 1, "eval.probe_prompts": 2, "eval.probe_samples": 3,
        },
    )  # fmt: skip
    # all test problems: 2,001 additions, as a + b and b + a stay together, and 2,000 replies
    additions, replies = (2 * (10 * 2 + 6) + 2 * tests * 2 for tests in (2001, 2000))
    tokens = (3 * 6 * 4 + additions) * 5 + (3 * 2 * 4 + replies) * 16
    assert cost(config) == Cost(3, 96, additions + replies, tokens)
