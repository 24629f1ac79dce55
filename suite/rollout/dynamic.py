"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups without a gradient make room for further prompts."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

from suite.config import RunConfig
from suite.protocols import Collected, Group, Prompt, Task
from suite.randomness import generator
from suite.rewards import constant, scored
from suite.rollout.greedy import with_greedy

Sample = Callable[[Sequence[Prompt], int, int], list[Group]]
"""(prompts, rollout batch number, place of the first prompt in the batch) -> their groups, graded."""

_log = logging.getLogger(__name__)


def refill_seed(seed: int) -> int:
    """The seed of the order in which further prompts come: another one than the run's own order."""
    return int(generator(seed, "dynamic sampling").integers(2**31))


def fill(config: RunConfig, task: Task, sample: Sample, batch: int) -> Collected:
    """A rollout batch of `num_prompts` groups whose rewards differ, in at most `max_gen_batches` rounds of sampling.

    The first round takes the prompts that the batch has without dynamic sampling. The order in which further ones
    come is keyed by (run seed, rollout batch, round) and lies apart from the batches' own, so that the next
    batches meet the prompts they would have met, whatever was thrown away, and a resumed run draws the same.
    Rewards are the task's, before any shaping. A round asks for as many prompts as the share kept so far promises to
    need, no prompt twice in a batch; what is missing of a task in a mixture is filled from that task. Whatever was
    sampled is counted as cost; a batch that is not full after the last round is reported and trained on as it is.
    """
    size, rounds = config.rollout.num_prompts, config.rollout.max_gen_batches
    prompts = task.draw(config.seed, batch, size)
    missing = Counter(prompt.task for prompt in prompts)
    asked, kept_of = Counter[str](), Counter[str]()
    seen, groups = set[tuple[str, str]](), list[Group]()
    tokens = used = 0
    for number in range(rounds):
        if number:
            if not missing.total():
                break
            used = number
            drawn = task.draw(refill_seed(config.seed), batch * (rounds - 1) + number - 1, size)
            prompts = _choose(drawn, seen, _needed(missing, asked, kept_of))
        seen |= {(prompt.task, prompt.uid) for prompt in prompts}
        asked += Counter(prompt.task for prompt in prompts)
        for group in sample(prompts, batch, number * size):
            tokens += sum(len(rollout.completion.token_ids) for part in with_greedy([group]) for rollout in part)
            name = group[0].prompt.task
            if constant(scored(rollout.reward for rollout in group)):
                continue
            kept_of[name] += 1
            if missing[name]:
                missing[name] -= 1
                groups.append(group)
    if missing.total():
        _log.warning(
            "rollout batch %d: %d of %d groups missing after %d rounds of dynamic sampling; it is trained on as it is",
            batch, missing.total(), size, used + 1,
        )  # fmt: skip
    metrics = {
        "rollout/gen_batches": float(used + 1),
        "rollout/dropped_groups": float(asked.total() - len(groups)),
        "rollout/unfilled_groups": float(missing.total()),
    }
    return Collected(groups, tokens, asked.total(), metrics)


def _needed(missing: Counter[str], asked: Counter[str], kept: Counter[str]) -> Counter[str]:
    """How many prompts of each task promise to fill what is missing, at the share of groups kept so far."""
    return Counter({name: math.ceil(n * asked[name] / max(kept[name], 1)) for name, n in missing.items() if n})


def _choose(drawn: Sequence[Prompt], seen: set[tuple[str, str]], needed: Counter[str]) -> list[Prompt]:
    """The first prompts of each task that are needed and not in the batch yet."""
    chosen, left = dict[tuple[str, str], Prompt](), Counter(needed)
    for prompt in drawn:
        key = prompt.task, prompt.uid
        if left[prompt.task] and key not in seen and key not in chosen:
            left[prompt.task] -= 1
            chosen[key] = prompt
    return list(chosen.values())
