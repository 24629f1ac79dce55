"""From axes to arms: one at a time, all combinations, or varied together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from suite.config import RunConfig, apply, flatten
from suite.study import Arm, Axis

CONTROL = "control"


def one_at_a_time(axes: Sequence[Axis], base: RunConfig) -> tuple[Arm, ...]:
    """The control, then every other arm of each axis alone.

    Raises ValueError if the base lacks what an axis needs, or if two arms share a name.
    """
    for axis in axes:
        _check_needs(axis, base)
    arms = [Arm(CONTROL, label=_control_label(axes)), *(arm for axis in axes for arm in axis.arms[1:])]
    return _checked(arms)


def cross(axes: Sequence[Axis], base: RunConfig) -> tuple[Arm, ...]:
    """All combinations of the axes' arms, the first axis varying slowest; the control is the combination of controls.

    A combination is named by its arms that are not controls, so that adding an axis renames nothing.
    Raises ValueError if two axes change one option, or if a combination lacks what an axis needs.
    """
    return _merged(axes, itertools.product(*(axis.arms for axis in axes)), base)


def paired(axes: Sequence[Axis], base: RunConfig) -> tuple[Arm, ...]:
    """The axes varied together: the first arms of all, the second arms of all, and so on.

    Raises ValueError unless all axes have equally many arms, and as `cross` does.
    """
    counts = {axis.name: len(axis.arms) for axis in axes}
    if len(set(counts.values())) > 1:
        words = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"axes varied together need equally many arms: {words}")
    return _merged(axes, zip(*(axis.arms for axis in axes), strict=True), base)


def check_name(kind: str, name: str) -> None:
    """Raises ValueError unless a name can be a folder's on every file system: letters, digits, '_', '-', '.'."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name) or name.endswith("."):
        raise ValueError(
            f"{kind} {name!r} must be 1 to 100 letters, digits, '_', '-' or '.', the first a letter or digit"
        )


def _merged(axes: Sequence[Axis], combinations: Any, base: RunConfig) -> tuple[Arm, ...]:
    arms = []
    for combination in combinations:
        overrides: dict[str, Any] = {}
        for axis, arm in zip(axes, combination, strict=True):
            clash = sorted(overrides.keys() & arm.overrides.keys())
            if clash:
                raise ValueError(f"axis {axis.name!r} and another axis both change {', '.join(clash)}")
            overrides.update(arm.overrides)
        changed = [arm for axis, arm in zip(axes, combination, strict=True) if arm is not axis.arms[0]]
        for axis, arm in zip(axes, combination, strict=True):
            if arm is not axis.arms[0]:
                others = {name: value for name, value in overrides.items() if name not in arm.overrides}
                _check_needs(axis, apply(base, others))
        label = ", ".join(arm.title for arm in changed) or _control_label(axes)
        arms.append(Arm("-".join(arm.name for arm in changed) or CONTROL, overrides, label))
    return _checked(arms)


def _control_label(axes: Sequence[Axis]) -> str:
    return axes[0].arms[0].label if len(axes) == 1 else ""


def _check_needs(axis: Axis, base: RunConfig) -> None:
    values: Mapping[str, Any] = flatten(base)
    for option, value in axis.needs.items():
        if values.get(option) != value:
            raise ValueError(
                f"axis {axis.name!r} needs {option} = {value!r}, and the base has {values.get(option)!r}; "
                "change the base or leave the axis out"
            )


def _checked(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    for arm in arms:
        check_name("arm", arm.name)
    names = [arm.name.lower() for arm in arms]
    for arm in arms:
        if names.count(arm.name.lower()) > 1:
            raise ValueError(f"two arms are called {arm.name!r} (or differ only in case); rename one in its axis")
    return tuple(arms)
