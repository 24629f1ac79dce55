"""What is refused, and what is reported as inert."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from suite.config import ObjectiveConfig, RunConfig, apply, flatten
from suite.inert import effective, inert_reason
from suite.optim import learning_rate
from suite.options import RANGES, Range, choices, reads
from suite.validate import validate

PG = {"objective.name": "policy_gradient"}
OFFLINE = {"rollout.sync_period": "inf"}
GIVEN = OFFLINE | {"rollout.source": "external"}
JUDGED = {"objective.pair_rule": "judge", "judge.url": "http://localhost:1/v1", "judge.model": "m"}


MIXED = {"task.name": "mixture", "task.mixture": "addition=1,replies=1"}
IS = {"objective.importance_sampling_mode": "token_truncate"}


def config(*parts, **options):
    """A configuration from dictionaries of overrides."""
    overrides = {name: value for part in parts for name, value in part.items()}
    return apply(RunConfig(), overrides)


def refusal(*parts):
    """The one sentence with which a configuration is refused."""
    with pytest.raises(ValueError) as caught:
        validate(config(*parts))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_valid():
    validate(RunConfig())
    validate(config(PG))


@pytest.mark.parametrize("option", sorted(RANGES))
def test_every_range_is_enforced(option):
    allowed = RANGES[option]
    default = flatten(RunConfig())[option]
    assert default == "inf" or default in allowed
    for end, outward in ((allowed.low, -1), (allowed.high, 1)):
        if math.isfinite(end):
            outside = type(default)(end + outward * 0.5) if isinstance(default, float) else int(end) + outward
            assert f"{option} is {outside} and must be {allowed}" == refusal({option: outside})
    if isinstance(default, float):
        for value in (math.nan, math.inf):
            assert refusal({option: value}).startswith(f"{option} is {value}")


def test_ranges_in_words():
    assert str(Range(0, 1, low_open=True)) == "above 0 and at most 1"
    assert str(Range(0, 1, high_open=True)) == "at least 0 and below 1"
    assert 0 not in Range(0, 1, low_open=True)
    assert 1 in Range(0, 1, low_open=True)
    assert 1 not in Range(0, 1, high_open=True)


@pytest.mark.parametrize(
    ("option", "value", "near"),
    [
        ("objective.name", "policy_gradents", "policy_gradient"),
        ("objective.loss_agg_mode", "token_mean", "token-mean"),
        ("objective.advantage", "groups", "group"),
        ("objective.kl_estimator", "k33", "k3"),
        ("task.name", "aditon", "addition"),
        ("model.path", "seed:adition", "addition"),
    ],
)
def test_unknown_slots_suggest_near_names(option, value, near):
    message = refusal({option: value})
    assert message.startswith("unknown")
    assert repr(near) in message


def _words(changed):
    """Why a configuration is refused; empty if it is not."""
    try:
        validate(changed)
    except ValueError as error:
        return str(error)
    return ""


def _other(name, value):
    """Another value of an objective's option, within its range."""
    known = choices().get(f"objective.{name}")
    if known:
        return next(choice for choice in known if choice != value)
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2 + 0.0625


@pytest.mark.parametrize("family", ["dpo", "policy_gradient"])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ObjectiveConfig)])
def test_every_objective_option_is_read_or_refused(family, name):
    """Under either family an option that is not read is refused; one that is read may be, for another reason only."""
    if name in ("name", "advantage", "pair_rule"):  # choices of one, or the family itself
        pytest.skip("has no other value")
    base = config({"objective.name": family})
    changed = apply(base, {f"objective.{name}": _other(name, getattr(base.objective, name))})
    if f"objective.{name}" in reads(changed):
        assert "nothing reads it" not in _words(changed)
    else:
        with pytest.raises(ValueError, match="nothing reads it") as caught:
            validate(changed)
        assert f"objective.{name} is" in str(caught.value)
        assert "it is read with" in str(caught.value)


def test_no_family_reads_everything():
    """The test above has something to refuse under both families."""
    names = {f"objective.{field.name}" for field in dataclasses.fields(ObjectiveConfig)}
    assert "objective.beta" in reads(RunConfig())
    assert {"objective.epsilon_high", "objective.scale_rewards", "objective.kl_coef"} <= names - reads(RunConfig())
    assert {"objective.beta", "objective.pair_rule", "objective.entropy_over"} <= names - reads(config(PG))


@pytest.mark.parametrize(
    ("overrides", "reader"),
    [
        ({"objective.epsilon_high": 0.28}, "objective.name = policy_gradient"),
        (PG | {"objective.beta": 0.5}, "objective.name = dpo"),
        (PG | {"objective.kl_coef": 0.01}, "objective.kl = reward or objective.kl = loss"),
        ({"objective.kl_coef": 0.01}, "objective.name = policy_gradient and objective.kl = loss"),
        (PG | {"objective.trust_region": "none", "objective.epsilon_low": 0.1}, "objective.trust_region = clip"),
        (PG | {"objective.scale_rewards": "none", "objective.advantage_eps": 1e-4}, "objective.scale_rewards = group"),
        (PG | {"objective.entropy_coef": 0.1, "objective.entropy_over": "chosen"}, "objective.name = dpo"),
        (PG | {"objective.scale_rewards": "none", "objective.advantage_ddof": 0}, "objective.advantage = reinforce_pp"),
        (PG | {"objective.advantage": "rloo", "objective.scale_rewards": "none"}, "objective.advantage = group"),
        (PG | {"objective.advantage": "rloo", "objective.gamma": 0.9}, "objective.advantage = remax"),
        (
            PG | {"objective.advantage": "reinforce_pp", "objective.whiten_advantages": True},
            "objective.advantage = rloo",
        ),
        (PG | {"objective.baseline_decay": 0.9}, "objective.advantage = reinforce"),
        (PG | {"objective.kl_penalty_coef": 2.0}, "objective.trust_region = kl_penalty"),
        (PG | {"objective.entropy_coef_max": 1.0}, "objective.entropy_target above 0"),
        (PG | {"rollout.reference_sync": "with_generator"}, "objective.kl = loss"),
        ({"rollout.fixed_batches": 7}, "rollout.source = fixed"),
        ({"rollout.precompute_ref_log_probs": True}, "rollout.source = fixed or rollout.source = external"),
        ({"objective.nll_length_normalized": False}, "objective.nll_coef above 0"),
        ({"judge.model": "m"}, "objective.pair_rule = judge"),
        ({"objective.sft_rows": "best"}, "objective.name = sft"),
        ({"task.source": "problems.jsonl"}, "task.name = file"),
        ({"rollout.memory_share": 0.5}, "rollout.engine = vllm"),
        ({"rollout.prefix_caching": False}, "rollout.engine = vllm"),
        ({"rollout.engine_dtype": "bfloat16"}, "rollout.engine = vllm"),
        ({"reward.shaping_coef": 0.5}, ""),
        (IS, "objective.name = policy_gradient or objective.grpo_coef above 0"),
        (IS | {"objective.name": "sft"}, "objective.name = policy_gradient"),
        (PG | {"objective.importance_sampling_clip_max": 3.0}, "objective.importance_sampling_mode = token_truncate"),
    ],
)
def test_an_unread_option_names_its_reader(overrides, reader):
    message = refusal(overrides)
    assert "nothing reads it here" in message
    assert reader in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout.sync_period": 6, "objective.num_minibatches": 4}, "rollout.sync_period is 6 and must be a multiple"),
        ({"rollout.sync_period": 1, "objective.num_epochs": 2}, "such as 2, or inf"),
        ({"rollout.sync_period": 8, "objective.num_minibatches": 4, "objective.num_epochs": 3}, "the 12 optimizer"),
        (
            {"rollout.sync_period": 7, "objective.num_minibatches": 7},
            "train.steps is 120 and must be a multiple of the 7",
        ),
        ({"objective.num_minibatches": 40, "rollout.sync_period": 40}, "at most rollout.num_prompts, 32"),
        ({"optim.micro_batch_size": 1}, "must be 0 or at least 2"),
        ({"rollout.source": "fixed"}, "rollout.sync_period is 1 and must be inf"),
        ({"rollout.source": "external", "rollout.sync_period": 10}, "rollout.sync_period is 10 and must be inf"),
        (PG | OFFLINE | {"rollout.source": "external"}, "cannot train on; take 'dpo' or 'sft'"),
        ({"objective.pair_rule": "given"}, "pairs are given by 'external' alone"),
        ({"objective.pair_rule": "judge"}, "judge.url is empty; judge.name = 'openai' needs it"),
        (JUDGED | {"judge.model": ""}, "judge.model is empty"),
        (JUDGED | {"judge.url": "localhost:8000"}, "must begin with http:// or https://"),
        (JUDGED | {"judge.template": "{prompt}: {first}?"}, "judge.template lacks {second}; it must contain {prompt}"),
        (GIVEN | {"objective.grpo_coef": 0.01}, "take objective.grpo_coef = 0"),
        ({"eval.reward_model": "rm", "eval.num_samples": 1}, "eval.reward_model picks one"),
        (GIVEN | {"objective.name": "sft", "objective.sft_rows": "best"}, "picks among sampled answers"),
        (OFFLINE | {"rollout.source": "external", "task.name": "file", "task.source": "a.jsonl"}, "chosen_column"),
        ({"rollout.num_generations": 1}, "a pair is two rollouts"),
        ({"learner.compute_dtype": "bfloat16", "model.dtype": "bfloat16"}, "no weight is kept in more"),
        *(
            (PG | {"rollout.num_generations": 1, "objective.advantage": name}, "with others of its prompt")
            for name in ("group", "rloo", "rloo_token", "reinforce_pp_baseline")
        ),
        (
            PG | {"objective.entropy_target": 1.0, "objective.entropy_coef": 0.1},
            "objective.entropy_coef is 0.1 and must be at most objective.entropy_coef_max, 0.005",
        ),
        (PG | {"objective.kl": "loss", "objective.kl_estimator": "k1"}, "take k2, k3 or k3+"),
        ({"task.name": "file"}, "task.source is empty"),
        ({"task.name": "hub"}, "task.source is empty"),
        ({"task.name": "file", "task.source": "a.jsonl", "task.template": "{question}"}, "must contain {problem}"),
        ({"model.path": ""}, "model.path is empty"),
        ({"model.path": "./no/such/model"}, "model.path"),
        ({"task.name": "replies"}, "task 'replies' gives scores; take objective.pair_rule = 'best_worst'"),
        ({"task.name": "replies", "objective.pair_rule": "group"}, "objective.pair_rule is 'group', which sets right"),
        ({"task.name": "wildchat", "task.reward_model": "rm"}, "task 'wildchat' gives scores"),
        ({"task.name": "replies", "objective.name": "sft"}, "take objective.sft_rows = 'best'"),
        (MIXED, "objective.pair_rule is 'random', which sets right answers against wrong ones, but task 'replies'"),
        (MIXED | {"task.pair_rules": "addition=random"}, "take task.pair_rules = 'replies=best_worst'"),
        (
            MIXED | {"objective.pair_rule": "best_worst", "task.pair_rules": "replies=random"},
            "task.pair_rules has replies=random",
        ),
        (PG | OFFLINE | {"rollout.top_p": 0.9}, "take top_p = 1 and top_k = 0"),
        (PG | {"rollout.sync_period": 10, "rollout.top_k": 5}, "take top_p = 1 and top_k = 0"),
        (PG | IS | {"rollout.top_p": 0.9}, "needs the sampler's log-probs over the whole vocabulary"),
        (PG | IS | {"rollout.top_k": 5}, "rollout.top_k is 5"),
        (PG | IS | {"objective.ratio_reference": "generator"}, "whose ratio is taken against the sampler already"),
        (PG | IS | {"rollout.sync_period": 10}, "rollout.sync_period is 10; take rollout.sync_period = 1"),
        (PG | IS | OFFLINE | {"objective.ratio_reference": "learner"}, "under the same weights"),
        (PG | IS | {"objective.num_minibatches": 4, "rollout.sync_period": 8}, "take rollout.sync_period = 4"),
        ({"objective.grpo_coef": 0.01, "rollout.sync_period": 2} | IS, "under the same weights"),
    ],
)
def test_clashes_are_refused(overrides, words):
    assert words in refusal(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rollout.sync_period": 12, "objective.num_minibatches": 4, "objective.num_epochs": 3},
        OFFLINE | {"rollout.source": "fixed", "rollout.fixed_batches": 3},
        GIVEN | {"rollout.num_generations": 1},
        GIVEN | {"objective.pair_rule": "given", "rollout.precompute_ref_log_probs": True},
        GIVEN | {"objective.name": "sft"},
        GIVEN | {"objective.name": "sft", "task.name": "file", "task.source": "a.jsonl", "task.chosen_column": "best"},
        {"objective.name": "sft", "rollout.num_generations": 1},
        JUDGED,
        {"objective.grpo_coef": 0.01, "objective.kl": "loss", "objective.epsilon_high": 0.28},
        {"objective.nll_coef": 1.0, "objective.nll_length_normalized": False},
        PG | {"rollout.top_p": 0.9},
        PG | {"objective.kl": "reward", "objective.kl_estimator": "k1", "rollout.reference_sync": "with_generator"},
        OFFLINE | {"rollout.reference_sync": "with_generator"},
        {"objective.entropy_coef": 0.1, "objective.entropy_over": "chosen", "objective.entropy_mean": "sequence"},
        PG | {"optim.micro_batch_size": 1},
        {"learner.compute_dtype": "bfloat16", "learner.compile": True, "learner.activation_checkpointing": True},
        *(
            PG | {"rollout.num_generations": 1, "objective.advantage": name}
            for name in ("reinforce", "remax", "reinforce_pp")
        ),
        PG | {"objective.entropy_target": 1.0, "objective.entropy_coef": 0.005, "objective.entropy_mean": "sequence"},
        PG | {"objective.trust_region": "kl_penalty", "objective.kl_penalty_target": 0.01},
        PG | IS | {"objective.num_minibatches": 4, "rollout.sync_period": 4},
        PG | IS | {"objective.ratio_reference": "learner", "objective.importance_sampling_clip_min": 0.5},
        IS | {"objective.grpo_coef": 0.01},
        {"task.name": "replies", "objective.pair_rule": "best_worst"},
        JUDGED | {"task.name": "replies"},
        {"task.name": "replies", "objective.name": "sft", "objective.sft_rows": "best"},
        PG | {"task.name": "replies"},
        GIVEN | {"task.name": "replies"},
        MIXED | {"task.pair_rules": "replies=best_worst"},
        MIXED | {"task.mixture": "addition=1,replies=0"},
        {"objective.pair_rule": "best_worst"},
    ],
)
def test_neighbours_of_clashes_are_accepted(overrides):
    validate(config(overrides))


def test_a_model_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    message = refusal({"model.path": str(tmp_path)})
    assert str(tmp_path) in message
    assert "no weights" in message


VLLM = {"rollout.engine": "vllm"}
BF16 = PG | {"model.dtype": "bfloat16"}
U4 = PG | {"objective.num_minibatches": 4, "rollout.sync_period": 4}
KL = PG | {"objective.kl": "loss"}
REWARD_KL = PG | {"objective.kl": "reward"}
FIXED = OFFLINE | {"rollout.source": "fixed"}


@pytest.mark.parametrize(
    ("control", "arm", "reason"),
    [
        (PG, {"objective.epsilon_high": 0.28}, "the only update"),
        (PG, {"objective.epsilon_low": 0.1, "objective.epsilon_high": 0.28}, "the only update"),
        (PG, {"objective.trust_region": "none"}, "the only update"),
        (PG, {"objective.trust_region": "kl_penalty", "objective.kl_penalty_target": 0.01}, "the only update"),
        (U4, {"objective.trust_region": "kl_penalty"}, None),
        (PG, {"objective.entropy_target": 1.0}, None),
        (PG, {"objective.advantage_ddof": 0}, None),
        (PG | {"rollout.sync_period": 10}, {"objective.epsilon_high": 0.28}, None),
        (
            PG | {"rollout.sync_period": 10, "objective.ratio_reference": "learner"},
            {"objective.epsilon_high": 0.3},
            "1 at",
        ),
        (U4, {"objective.epsilon_high": 0.28}, None),
        (U4, {"objective.trust_region": "none"}, None),
        (PG | OFFLINE, {"objective.ratio_reference": "generator"}, "auto is generator"),
        (PG, {"objective.ratio_reference": "learner"}, "auto is learner"),
        (PG | {"rollout.sync_period": 5}, {"objective.ratio_reference": "learner"}, None),
        (OFFLINE, {"rollout.reference_sync": "with_generator"}, "never synced"),
        ({"rollout.sync_period": 10}, {"rollout.reference_sync": "with_generator"}, None),
        (OFFLINE, {"rollout.sync_period": 120}, "no sync falls within 120 steps"),
        (OFFLINE, {"rollout.sync_period": 500, "rollout.reference_sync": "with_generator"}, "no sync falls"),
        (OFFLINE, {"rollout.sync_period": 119}, None),
        (VLLM, {"rollout.engine_dtype": "float32"}, "auto is float32"),
        (VLLM, {"rollout.engine_dtype": "bfloat16"}, None),
        (VLLM | {"learner.compute_dtype": "bfloat16"}, {"rollout.engine_dtype": "bfloat16"}, "auto is bfloat16"),
        (VLLM, {"rollout.prefix_caching": False, "rollout.max_model_len": 64}, "how the run is carried out"),
        ({}, VLLM, None),
        (GIVEN, VLLM, "given pairs are not sampled"),
        (OFFLINE, {"rollout.window_rollouts": 500}, "how the run is carried out"),
        (OFFLINE, FIXED | {"rollout.fixed_batches": 120}, "not reused"),
        (OFFLINE, FIXED | {"rollout.fixed_batches": 119}, None),
        (FIXED, {"rollout.fixed_batches": 31}, None),
        (OFFLINE | {"rollout.source": "external"}, {"rollout.num_generations": 4}, "given pairs are not sampled"),
        (GIVEN, {"rollout.temperature": 0.5}, None),
        (GIVEN, {"objective.pair_rule": "given"}, "the pairs are given"),
        (GIVEN, {"objective.pair_rule": "best_worst"}, "the pairs are given"),
        (GIVEN, JUDGED, None),
        (GIVEN, {"rollout.precompute_ref_log_probs": True}, "how the run is carried out"),
        ({}, {"objective.pair_rule": "group"}, None),
        ({}, {"objective.label_smoothing": 0.1}, None),
        ({}, {"rollout.num_generations": 4}, None),
        (KL, {"objective.kl_estimator": "k3"}, "auto is k3"),
        (KL, {"objective.kl_estimator": "k2"}, None),
        (REWARD_KL, {"objective.kl_estimator": "k1"}, "auto is k1"),
        (REWARD_KL | {"objective.kl_estimator": "k3"}, {"objective.kl_estimator": "k3+"}, "no gradient flows"),
        (KL | {"objective.kl_estimator": "k3"}, {"objective.kl_estimator": "k3+"}, None),
        (PG, {"objective.kl": "loss", "objective.kl_coef": 0.0}, "kl_coef is 0"),
        (PG | {"rollout.num_prompts": 1}, {"objective.scale_rewards": "batch"}, "one group"),
        (PG, {"objective.scale_rewards": "batch"}, None),
        (PG, IS, "agree to rounding"),
        (PG | IS, {"objective.importance_sampling_clip_max": 5.0}, "agree to rounding"),
        (U4, {"objective.importance_sampling_mode": "sequence_mask"}, "agree to rounding"),
        (PG, IS | {"objective.importance_sampling_clip_max": 1.0001}, None),
        (BF16, IS, None),
        (BF16 | IS, {"objective.importance_sampling_clip_min": 0.5}, None),
        ({"optim.warmup_steps": 120}, {"optim.schedule": "cosine"}, "lasts to the end"),
        ({"optim.warmup_steps": 119}, {"optim.schedule": "cosine"}, "lasts to the end"),
        ({"optim.warmup_steps": 118}, {"optim.schedule": "cosine"}, None),
        ({}, {"optim.warmup_steps": 1}, "a warm-up of one step is none"),
        ({"optim.schedule": "linear"}, {"optim.warmup_steps": 1}, None),
        ({}, {"optim.micro_batch_size": 8}, "how the run is carried out"),
        ({}, {"seed": 3}, "it changes nothing"),
        ({}, {"objective.beta": 0.5}, None),
        ({}, {"objective": ObjectiveConfig(name="policy_gradient")}, None),
    ],
)
def test_inertness(control, arm, reason):
    """An arm is inert if it provably computes its control's run; the neighbouring case that is live is not."""
    base = config(control)
    changed = apply(base, arm)
    for one in (base, changed):
        validate(one)
    found = inert_reason(changed, base)
    assert (found is None) == (reason is None), found
    assert reason is None or reason in found
    assert inert_reason(base, changed) == found  # it does not matter which of the two is the control


def test_effective_says_what_it_set_back_and_stops_there():
    arm = config(PG, {"objective.epsilon_high": 0.28, "objective.entropy_coef": 0.1, "seed": 4})
    plain, reasons = effective(arm)
    assert plain == config(PG, {"objective.entropy_coef": 0.1, "seed": 4})
    assert list(reasons) == ["objective.epsilon_high"]
    assert effective(plain) == (plain, {})
    assert effective(RunConfig()) == (RunConfig(), {})


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_schedules_called_equal_give_equal_rates_and_others_do_not(steps):
    """Against the learning rates themselves, over all short runs."""
    runs = [
        config({"train.steps": steps, "optim.warmup_steps": warmup, "optim.schedule": schedule})
        for warmup in range(steps + 2)
        for schedule in ("constant", "linear", "cosine")
    ]
    rates = [[learning_rate(run.optim, step, steps) for step in range(steps)] for run in runs]
    plain = [effective(run)[0] for run in runs]
    for one, other in itertools.combinations(range(len(runs)), 2):
        if plain[one] == plain[other]:
            assert rates[one] == rates[other]
    longest = [one for one, run in enumerate(runs) if run.optim.warmup_steps == steps + 1]
    assert len({plain[one] for one in longest}) == 1
