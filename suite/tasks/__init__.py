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

from suite.tasks import arithmetic, files, mixture, numina, replies, wildchat  # noqa: E402, F401  the entries register themselves


def build(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Task:
    """The task that a configuration names, reading its data; ValueError if the data are not what they should be."""
    return TASKS[config.task.name](config, tokenizer)


def parts_of(task: Task) -> dict[str, Task]:
    """The tasks that sample and grade, by the name that their prompts carry: a mixture's, else the task under ''."""
    return task.parts if isinstance(task, mixture.Mixture) else {"": task}


def names_of(config: RunConfig) -> list[str]:
    """The names that prompts may carry in `task`, in the order of the configuration: a mixture's tasks, else ''."""
    return list(mixture.proportions(config)) if config.task.name == mixture.NAME else [""]


def is_scored(name: str) -> bool:
    """Whether a task's rewards are scores of a reward model, on a scale of its own, instead of right and wrong."""
    return "task.reward_model" in TASKS.entry(name).reads


def task_reads(config: RunConfig) -> frozenset[str]:
    """The `task.*` (and other) options that the configured task looks at."""
    mixed = mixture.mixture_reads(config) if config.task.name == mixture.NAME else frozenset[str]()
    return TASKS.entry(config.task.name).reads | mixed
