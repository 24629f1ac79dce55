"""Axes to arms: names, controls, needs, clashes."""

from __future__ import annotations

import pytest

from ablations.axis import check_name, cross, one_at_a_time, paired
from suite.config import ObjectiveConfig, RunConfig, apply
from suite.starts import pinned
from suite.study import Arm, Axis, Study

BETA = Axis(
    "beta", "?", (Arm("control"), Arm("b05", {"objective.beta": 0.5}, "0.5"), Arm("b1", {"objective.beta": 1.0}))
)
SYNC = Axis("sync", "?", (Arm("control", label="s=1"), Arm("s10", {"rollout.sync_period": 10}, "s=10")))
LR = Axis("lr", "?", (Arm("control"), Arm("hot", {"optim.lr": 1e-3}), Arm("cold", {"optim.lr": 1e-6})))


def test_one_at_a_time_is_the_control_and_each_other_arm_once():
    arms = one_at_a_time([BETA, SYNC], RunConfig())
    assert [(arm.name, dict(arm.overrides)) for arm in arms] == [
        ("control", {}),
        ("b05", {"objective.beta": 0.5}),
        ("b1", {"objective.beta": 1.0}),
        ("s10", {"rollout.sync_period": 10}),
    ]
    assert one_at_a_time([SYNC], RunConfig())[0].title == "s=1"


def test_cross_is_every_combination_and_adding_an_axis_renames_nothing():
    arms = cross([BETA, SYNC], RunConfig())
    assert [(arm.name, dict(arm.overrides)) for arm in arms] == [
        ("control", {}),
        ("s10", {"rollout.sync_period": 10}),
        ("b05", {"objective.beta": 0.5}),
        ("b05-s10", {"objective.beta": 0.5, "rollout.sync_period": 10}),
        ("b1", {"objective.beta": 1.0}),
        ("b1-s10", {"objective.beta": 1.0, "rollout.sync_period": 10}),
    ]
    assert arms[3].title == "0.5, s=10"
    alone = {arm.name: dict(arm.overrides) for arm in one_at_a_time([BETA, SYNC], RunConfig())}
    wider = {arm.name: dict(arm.overrides) for arm in cross([BETA, SYNC, LR], RunConfig())}
    assert alone.items() <= {arm.name: dict(arm.overrides) for arm in arms}.items() <= wider.items()
    assert len(wider) == 3 * 2 * 3


def test_paired_goes_in_step():
    arms = paired([BETA, LR], RunConfig())
    assert [(arm.name, dict(arm.overrides)) for arm in arms] == [
        ("control", {}),
        ("b05-hot", {"objective.beta": 0.5, "optim.lr": 1e-3}),
        ("b1-cold", {"objective.beta": 1.0, "optim.lr": 1e-6}),
    ]
    with pytest.raises(ValueError, match="equally many arms: beta 3, sync 2"):
        paired([BETA, SYNC], RunConfig())


def test_arms_make_a_study():
    study = Study("both", "?", RunConfig(), cross([BETA, SYNC], RunConfig()), (3, 5))
    cells = study.cells()
    assert len(cells) == 12
    assert cells[3].config == pinned(apply(RunConfig(), {"objective.beta": 0.5, "rollout.sync_period": 10, "seed": 3}))


def test_what_an_axis_needs_is_asked_of_the_base():
    needy = Axis(
        "std",
        "?",
        (Arm("control"), Arm("none", {"objective.scale_rewards": "none"})),
        needs={"objective.name": "policy_gradient"},
    )
    with pytest.raises(
        ValueError, match=r"axis 'std' needs objective\.name = 'policy_gradient', and the base has 'dpo'"
    ):
        one_at_a_time([needy], RunConfig())
    base = apply(RunConfig(), {"objective.name": "policy_gradient"})
    assert len(one_at_a_time([needy], base)) == 2
    # another axis of the combination may bring what is needed, but then it must do so in every arm
    grpo = Axis("objective", "?", (Arm("control"), Arm("grpo", {"objective": ObjectiveConfig(name="policy_gradient")})))
    assert [arm.name for arm in paired([grpo, needy], RunConfig())] == ["control", "grpo-none"]
    with pytest.raises(ValueError, match="axis 'std' needs"):
        cross([grpo, needy], RunConfig())


def test_clashes_are_refused():
    other = Axis("lr2", "?", (Arm("control"), Arm("warm", {"optim.lr": 1e-4})))
    with pytest.raises(ValueError, match=r"axis 'lr2' and another axis both change optim\.lr"):
        cross([LR, other], RunConfig())
    twin = Axis("twin", "?", (Arm("control"), Arm("S10", {"rollout.sync_period": 20})))
    with pytest.raises(ValueError, match="two arms are called"):
        one_at_a_time([SYNC, twin], RunConfig())


@pytest.mark.parametrize("name", ["", "a/b", "a b", "..", ".hidden", "ends.", "ä", "x" * 101, "-flag"])
def test_names_that_are_no_folder_everywhere(name):
    with pytest.raises(ValueError, match="must be 1 to 100 letters"):
        check_name("arm", name)


@pytest.mark.parametrize("name", ["s10", "entropy_1e-4", "clip-0.28", "K"])
def test_names_that_are(name):
    check_name("arm", name)
