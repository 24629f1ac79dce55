"""Writes the file of a new axis: a working example to be changed."""

from __future__ import annotations

import keyword
from pathlib import Path

from ablations.load import AXES, axes


def new_axis(name: str, folder: Path | None = None) -> Path:
    """Write `NAME.py`, an axis that loads and runs as it is, into `folder` (default: the project's axes); its path.

    Raises ValueError if the name is no Python name, or taken; nothing is overwritten.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or not name.isascii():
        raise ValueError(f"axis name {name!r} must be a Python name, such as length_penalty")
    folder = folder or AXES
    path = folder / f"{name}.py"
    if path.exists():
        raise ValueError(f"{path} exists already; choose another name or edit that file")
    if name in axes():
        raise ValueError(f"the project has an axis {name!r} already; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(TEMPLATE.replace("NAME", name), encoding="utf-8")
    return path


TEMPLATE = '''\
"""What is varied, in one sentence."""

from collections.abc import Sequence

from suite.config import RewardConfig
from suite.protocols import Group
from suite.rewards import SHAPINGS
from suite.study import Arm, Axis


@SHAPINGS.register("NAME", reads=["reward.shaping_coef"])
def NAME(groups: Sequence[Group], reward: RewardConfig) -> None:
    """Takes `shaping_coef` reward units per token beyond the shortest rollout of the group."""
    for group in groups:
        shortest = min(len(rollout.completion.token_ids) for rollout in group)
        for rollout in group:
            rollout.reward -= reward.shaping_coef * (len(rollout.completion.token_ids) - shortest)


AXIS = Axis(
    name="NAME",
    question="What should the reader know once the study is done?",
    arms=(
        # the first arm is the control and changes nothing
        Arm("control"),
        Arm("NAME_1e-2", {"reward.shaping": "NAME", "reward.shaping_coef": 0.01}, "NAME 0.01"),
    ),
    # where the idea and the values come from: paper and equation, or code
    sources=(),
    # options that the base must have for the axis to make sense, such as {"objective.name": "dpo"}
    needs={},
)
'''
