"""The study of the drill: a few seconds a cell, three arms whose checkpoints hold different things, graded outside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from suite.config import RunConfig, apply
from suite.grading import Grader, Verdict
from suite.protocols import Prompt
from suite.study import SEED_MODEL, Arm, Claim, Study
from suite.tasks import TASKS
from suite.tasks.arithmetic import FAMILIES, ArithmeticTask

if TYPE_CHECKING:  # every launcher imports this file
    from transformers import PreTrainedTokenizerBase


class Judged(ArithmeticTask):
    """Addition whose answers a process of the grader has to compare: text does not decide between 12 and 24/2."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(FAMILIES["addition"], config, tokenizer)
        self._judge = Grader(want_raw=False)

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        answers = [FAMILIES["addition"].answer(text) for text in completions]
        pairs = [
            (rf"\frac{{{2 * int(prompt.gold)}}}{{2}}", answer or "")
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return self._judge.grade_batch(pairs, extraction="whole")


if "judged" not in TASKS:
    TASKS.register("judged")(Judged)

BASE = {
    "task.name": "judged", "rollout.num_prompts": 8, "rollout.num_generations": 4, "rollout.max_completion_length": 5,
    "train.steps": 8, "train.checkpoint_every": 2, "optim.lr": 1e-4, "eval.every": 3, "eval.validation_problems": 20,
    "eval.test_problems": 20, "eval.num_samples": 1, "eval.probe_prompts": 4,
}  # fmt: skip

ARMS = (
    Arm("dpo", {"rollout.sync_period": 2, "rollout.reference_sync": "with_generator"}),
    Arm("grpo", {"objective.name": "policy_gradient", "objective.kl": "loss", "objective.num_minibatches": 2,
                 "rollout.sync_period": 4}),
    Arm("fixed", {"rollout.sync_period": "inf", "rollout.source": "fixed", "rollout.fixed_batches": 2}),
)  # fmt: skip


def study(seeds: Sequence[int]) -> Study:
    """The drill under these seeds."""
    claim = Claim("dpo beats the seed model", "better", "dpo", SEED_MODEL, smallest_effect=0.05)
    return Study("drill", "Does anything get lost?", apply(RunConfig(), BASE), ARMS, tuple(seeds), (claim,))


def write(folder: Path, seeds: Sequence[int]) -> Path:
    """A study file for the command line."""
    path = folder / "drill.py"
    path.write_text(f"from tests.drill.study import study\n\nSTUDY = study({tuple(seeds)!r})\n")
    return path
