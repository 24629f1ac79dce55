"""Every axis and every study of the project, found by their files; files elsewhere, by path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ablations.axis import one_at_a_time
from ablations.load import AXES, axes, axis_file, load_axis, load_study, studies, study_file
from ablations.new import new_axis
from suite.config import RewardConfig, RunConfig, apply, fingerprint
from suite.inert import inert_reason
from suite.rewards import SHAPINGS
from suite.validate import validate

SYNC_ARMS = {
    "s5": (5, "generator"),
    "s10": (10, "generator"),
    "s30": (30, "generator"),
    "offline_fresh": ("inf", "generator"),
    "offline_fixed": ("inf", "fixed"),
    "offline_external": ("inf", "external"),
}
INERT = {
    "clip_higher": {"clip_higher"},
    "importance_sampling": {"is_token_truncate", "is_token_mask", "is_sequence_truncate", "is_sequence_mask"},
}
"""Arms that cannot differ in the plainest base: one update per batch, sampled in process."""


@pytest.mark.parametrize("name", axes())
def test_axis(name):
    """Loads; the control comes first; each arm is valid in the plainest base, and another run than the control."""
    axis = load_axis(name)
    base = apply(RunConfig(), axis.needs)
    validate(base)
    assert axis.name == name
    assert axis.question.endswith("?")
    assert axis.sources
    assert dict(axis.arms[0].overrides) == {}
    assert len(axes()[name].read_text(encoding="utf-8").splitlines()) <= 80
    arms = one_at_a_time([axis], base)
    assert len(arms) >= 2
    identities = set()
    for arm in arms:
        config = apply(base, arm.overrides)
        validate(config)
        identities.add(fingerprint(config))
    assert len(identities) == len(arms)
    inert = {arm.name for arm in arms[1:] if inert_reason(apply(base, arm.overrides), base)}
    assert inert == INERT.get(name, set())


def test_arm_names_are_the_projects_own():
    """So that any axes can be put together without a rename."""
    names = [arm.name for name in axes() for arm in load_axis(name).arms[1:]]
    assert len(set(names)) == len(names)
    assert set(axes()) >= {
        "sync_period", "objective", "scale_rewards", "clip_higher", "loss_aggregation", "entropy_coef",
        "reference_sync", "kl",
    }  # fmt: skip


def test_the_offline_kinds_are_three():
    axis = load_axis("sync_period")
    configs = {arm.name: apply(RunConfig(), arm.overrides).rollout for arm in axis.arms[1:]}
    assert {name: (rollout.sync_period, rollout.source) for name, rollout in configs.items()} == SYNC_ARMS


def test_grpo_follows_the_text_and_grpo_code_the_code():
    arms = {arm.name: apply(RunConfig(), arm.overrides).objective for arm in load_axis("objective").arms}
    text, code = arms["grpo"], arms["grpo_code"]
    assert (text.scale_rewards, text.loss_agg_mode) == ("none", "seq-mean-token-sum")
    assert (code.scale_rewards, code.loss_agg_mode) == ("group", "seq-mean-token-mean")
    for arm in (text, code):
        assert (arm.name, arm.kl, arm.kl_estimator, arm.kl_coef) == ("policy_gradient", "loss", "k3", 0.001)


def test_an_arm_of_the_objective_axis_takes_nothing_from_the_other_family():
    base = apply(RunConfig(), {"objective.beta": 0.5})
    validate(apply(base, load_axis("objective").arms[1].overrides))


@pytest.mark.parametrize(
    "updates", [{"objective.num_minibatches": 4, "rollout.sync_period": 4}, {"rollout.sync_period": 10}]
)
def test_clip_higher_is_live_with_several_updates_or_stale_rollouts(updates):
    axis = load_axis("clip_higher")
    base = apply(RunConfig(), {**axis.needs, **updates})
    validate(base)
    assert inert_reason(apply(base, axis.arms[1].overrides), base) is None


def test_the_corrections_are_live_where_sampler_and_learner_are_not_the_same():
    axis = load_axis("importance_sampling")
    base = apply(RunConfig(), {**axis.needs, "model.dtype": "bfloat16"})
    assert [inert_reason(apply(base, arm.overrides), base) for arm in axis.arms[1:]] == [None] * 4


@pytest.mark.parametrize("name", studies())
def test_study(name):
    """Resolves; every arm is valid and can differ from the control."""
    study = load_study(name)
    assert study.name == name
    assert len(study.cells()) == len(study.arms) * len(study.seeds)
    control = study.config(study.control.name)
    for arm in study.arms:
        config = study.config(arm.name)
        validate(config)
        if arm is not study.control:
            assert inert_reason(config, control) is None


def test_unknown_names_suggest_near_ones():
    with pytest.raises(ValueError, match="unknown axis 'sync_perod'; did you mean 'sync_period'"):
        load_axis("sync_perod")
    with pytest.raises(ValueError, match="unknown study 'minisync'; did you mean 'mini_sync'"):
        load_study("minisync")


def test_a_file_elsewhere_works_by_path(tmp_path):
    path = new_axis("brevity", tmp_path)
    assert path == tmp_path / "brevity.py"
    axis = load_axis(str(path))
    assert load_axis(str(path)) is axis, "a second look must not register the shaping again"
    assert axis_file(str(path)) == path.resolve()
    base = apply(RunConfig(), axis.needs)
    config = apply(base, axis.arms[1].overrides)
    validate(config)
    assert fingerprint(config) != fingerprint(base)


def test_what_the_scaffold_computes(tmp_path):
    """Two groups by hand: 0.01 for each token beyond the group's shortest."""
    load_axis(str(new_axis("terse", tmp_path)))

    def rollout(tokens, reward):
        return SimpleNamespace(completion=SimpleNamespace(token_ids=tuple(range(tokens))), reward=reward)

    groups = [[rollout(5, 1.0), rollout(3, 0.0)], [rollout(10, 1.0), rollout(14, 1.0)]]
    SHAPINGS["terse"](groups, RewardConfig(shaping_coef=0.01))
    assert [[r.reward for r in group] for group in groups] == [[0.98, 0.0], [1.0, 0.96]]


def test_the_scaffold_overwrites_nothing(tmp_path):
    new_axis("brevity2", tmp_path)
    with pytest.raises(ValueError, match="exists already"):
        new_axis("brevity2", tmp_path)
    for taken in ("kl", "sync_period"):
        with pytest.raises(ValueError, match="has an axis"):
            new_axis(taken, tmp_path)
        with pytest.raises(ValueError, match="exists already"):
            new_axis(taken)
    for bad in ("length-penalty", "class", "_x", "1st", "a/b", "größe"):
        with pytest.raises(ValueError, match="must be a Python name"):
            new_axis(bad, tmp_path)
    assert not (AXES / "brevity2.py").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "must define AXIS = Axis"),
        ("AXIS = 3", "must define AXIS = Axis"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def", "raises SyntaxError"),
        (
            "from suite.study import Arm, Axis\nAXIS = Axis('a', '?', (Arm('one', {'seed': 1}),))",
            "first arm is the control",
        ),
        ("from suite.study import Arm, Axis\nAXIS = Axis('a', '?', (Arm('a/b'),))", "arm 'a/b' must be"),
    ],
)
def test_broken_axis_files_are_explained(tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_axis(str(path))
    assert words in str(caught.value)


def test_a_study_whose_arms_are_one_configuration_is_refused(tmp_path):
    path = tmp_path / "same.py"
    path.write_text(
        "from suite.config import RunConfig\n"
        "from suite.study import Arm, Study\n"
        "STUDY = Study('same', '?', RunConfig(), (Arm('a'), Arm('b', {'objective.beta': 0.1})), (0, 1))\n"
    )
    assert study_file(str(path)) == path
    with pytest.raises(ValueError, match="arms 'a' and 'b' resolve to the same configuration"):
        load_study(str(path))
    with pytest.raises(ValueError, match="there is no study file"):
        load_study(str(tmp_path / "none.py"))
