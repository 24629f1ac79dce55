"""The configuration: identity, overrides, docstrings."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json

import pytest

from suite import config as module
from suite.config import ObjectiveConfig, RunConfig, apply, differences, fingerprint, flatten, from_json, to_json
from suite.options import RANGES, choices

FREE_TEXT = {
    *("model.path", "model.revision", "model.weights", "model.parent", "model.folder"),
    *("critic.init", "eval.reward_model"),
    *("task.source", "task.split", "task.problem_column", "task.answer_column", "task.chosen_column"),
    *("task.rejected_column", "task.template", "task.numina_source", "task.wildchat_source", "task.reward_model"),
    *("task.mixture", "task.lengths", "task.pair_rules"),
    *("judge.url", "judge.model", "judge.template", "judge.api_key_env"),
    *("rollout.server_url", "rollout.transfer_folder"),
}


def test_fingerprint_is_the_hash_of_what_differs_and_the_seed():
    """Written out by hand: an identity must not change when the code around it does."""
    config = apply(RunConfig(), {"objective.beta": 0.5, "rollout.sync_period": "inf", "seed": 7})
    text = '{"options":{"objective.beta":0.5,"rollout.sync_period":"inf"},"seed":7}'
    assert fingerprint(config) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert fingerprint(RunConfig()) == hashlib.sha256(b'{"options":{},"seed":0}').hexdigest()[:16]


def test_values_equal_to_their_defaults_do_not_enter():
    assert fingerprint(apply(RunConfig(), flatten(RunConfig()))) == fingerprint(RunConfig())


@dataclasses.dataclass(frozen=True)
class Wider(ObjectiveConfig):
    new_option: float = 3.0


@dataclasses.dataclass(frozen=True)
class WiderRun(RunConfig):
    objective: Wider = Wider()


def test_adding_an_option_orphans_nothing():
    old = apply(RunConfig(), {"objective.beta": 0.5})
    new = WiderRun(objective=Wider(beta=0.5))
    assert fingerprint(new) == fingerprint(old)
    assert fingerprint(WiderRun(objective=Wider(beta=0.5, new_option=4.0))) != fingerprint(old)


def test_every_option_that_computes_enters_and_execution_options_do_not():
    execution = {"rollout.chunk_size", "optim.micro_batch_size", "train.checkpoint_every", "train.keep_checkpoints"}
    execution |= {
        "rollout.precompute_ref_log_probs",
        "rollout.tensor_parallel_size",
        "rollout.memory_share",
        "rollout.prefix_caching",
        "rollout.max_model_len",
        "rollout.window_rollouts",
        "rollout.server_url",
        "rollout.transfer",
        "rollout.transfer_folder",
        "rollout.sleep",
        "model.folder",
        "model.attention",
        "train.export_model",
        "judge.url",
        "judge.api_key_env",
        "judge.concurrency",
        "learner.activation_checkpointing",
        "learner.compile",
    }
    other = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.125, str: lambda v: v + "x"}
    for name, value in flatten(RunConfig()).items():
        literal = choices().get(name)
        if literal == (value,):  # a choice of one
            continue
        new = next(v for v in literal or (other[type(value)](value),) if v != value)
        same = fingerprint(apply(RunConfig(), {name: new})) == fingerprint(RunConfig())
        assert same == (name in execution), name


def test_seed_enters_once():
    one, two = (apply(RunConfig(), {"seed": seed}) for seed in (1, 2))
    assert fingerprint(one) != fingerprint(two)
    assert differences(one, two) == {}


def test_one_and_one_point_zero_are_one_value():
    whole, point = (apply(RunConfig(), {"objective.beta": value}) for value in (1, 1.0))
    assert fingerprint(whole) == fingerprint(point)
    assert fingerprint(apply(RunConfig(), {"rollout.temperature": 1})) == fingerprint(RunConfig())


def test_the_order_of_overrides_does_not_matter_and_sections_come_first():
    section = ObjectiveConfig(name="policy_gradient", kl="loss")
    forth = apply(RunConfig(), {"objective.kl_coef": 0.02, "objective": section})
    back = apply(RunConfig(), {"objective": section, "objective.kl_coef": 0.02})
    assert forth == back
    assert (forth.objective.name, forth.objective.kl_coef) == ("policy_gradient", 0.02)


def test_json_goes_there_and_back():
    config = apply(RunConfig(), {"rollout.sync_period": "inf", "optim.lr": 3e-6, "seed": 5})
    assert from_json(json.loads(json.dumps(to_json(config)))) == config
    with pytest.raises(ValueError, match=r"unknown option 'optim\.learning_rate'"):
        from_json({"optim": {"learning_rate": 1.0}})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"objective.epsilonhigh": 0.3}, "did you mean 'objective.epsilon_high'"),
        ({"objektive.beta": 0.3}, "did you mean 'objective.beta'"),
        ({"optim.lr": "1e-6"}, "optim.lr is '1e-6' and must be a number"),
        ({"train.steps": 10.0}, "train.steps is 10.0 and must be a whole number"),
        ({"train.steps": True}, "train.steps is True and must be a whole number"),
        ({"rollout.sync_period": "Inf"}, "rollout.sync_period is 'Inf' and must be a whole number or 'inf'"),
        ({"objective.scale_rewards": False}, "must be 'group' or 'batch' or 'none'"),
        ({"objective": {"beta": 1.0}}, "objective takes a ObjectiveConfig"),
    ],
)
def test_bad_overrides_are_named(overrides, words):
    with pytest.raises(ValueError) as caught:
        apply(RunConfig(), overrides)
    assert words in str(caught.value)


def test_every_option_has_a_docstring():
    tree = ast.parse(inspect.getsource(module))
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "RunConfig"):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert documented, f"{cls.name}.{field.target.id}"


def test_every_option_has_a_range_or_choices():
    for name, value in flatten(RunConfig()).items():
        ways = [name in RANGES, name in choices(), name in FREE_TEXT, isinstance(value, bool)]
        assert sum(ways) == 1, name
