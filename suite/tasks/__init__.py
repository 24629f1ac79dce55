"""Tasks: prompts and their reward, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from suite.config import RunConfig
from suite.protocols import Task
from suite.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TaskFactory = Callable[[RunConfig, "PreTrainedTokenizerBase"], Task]

TASKS: Registry[TaskFactory] = Registry("task")

from suite.tasks import arithmetic, files  # noqa: E402, F401  the entries register themselves


def build(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that a configuration names, reading its data; ValueError if the data are not what they should be."""
    return TASKS[config.task.name](config, tokenizer)
