"""`suite reward-model train` and `suite reward-model eval`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suite.commands.catalogue import console
from suite.reward_config import RewardModelConfig


def _show(found: Mapping[str, Any]) -> None:
    screen = console()
    for name, value in found.items():
        screen.print(f"{name:20} {value:.6g}", highlight=False)


def train(config: RewardModelConfig, folder: Path) -> int:
    """Train a reward model into `folder` and print its quality on held-out prompts."""
    from suite.reward_model import train as work

    with console().status("loading") as line:
        found = work(config, folder, say=line.update)
    _show(found)
    console().print(f"reward model  {folder}", highlight=False, soft_wrap=True)
    return 0


def evaluate(config: RewardModelConfig) -> int:
    """Print how well the reward model `config.model` predicts the configured preferences, all of them."""
    from suite.preferences import load
    from suite.reward_model import ScalarReward
    from suite.reward_model import evaluate as work

    reward = ScalarReward.load(config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    _show(asdict(work(reward, load(config), config.max_length)))
    return 0
