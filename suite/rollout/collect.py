"""Rollout batches: prompts to graded groups, from the generator, from a fixed set, or from given pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet

from suite import distributed
from suite.config import RunConfig
from suite.evaluate import decode
from suite.grading import Verdict
from suite.policy import Policy
from suite.protocols import Collected, Completion, Generator, Group, Prompt, Request, Rollout, Sampler, Sampling, Task
from suite.registry import Registry
from suite.rollout.dynamic import fill
from suite.rollout.greedy import attach, copies, greedy_sampling, needs_greedy, with_greedy
from suite.rollout.window import Ahead
from suite.tasks import parts_of
from suite.tasks.encoding import encode_completion

Collect = Callable[[int], Collected]
"""Rollout batch number -> its groups, graded (`reward` is the verdict's), and their cost."""

Key = tuple[int | str, ...]

Source = Callable[[RunConfig, Task, Generator, Policy], Collect]
"""Built once per run from the configuration, the task, the generator and the policy (for its tokenizer)."""

SOURCES: Registry[Source] = Registry("rollout source")

GIVEN = -1
"""Weights version of a completion that no weights of the run sampled."""


@SOURCES.register("generator")
def from_generator(config: RunConfig, task: Task, sampler: Generator, policy: Policy) -> Collect:
    """G completions for each of P prompts. Noise is keyed by (seed, step, purpose, place, prompt, sample).

    Batches between two syncs may be generated in one call: `suite.rollout.window`. With `rollout.dynamic_sampling`
    groups that teach nothing make room for further prompts: `suite.rollout.dynamic`.
    """

    def keys(prompts: Sequence[Prompt], batch: int, first: int) -> list[Key]:
        step = batch * config.updates_per_batch
        # a prompt may stand twice in a batch, across the end of a pass: its place keeps the two apart
        return [(config.seed, step, "rollout", first + place, prompt.uid) for place, prompt in enumerate(prompts)]

    def plan(batch: int) -> list[tuple[Sampling, list[Request]]]:
        prompts = task.draw(config.seed, batch, config.rollout.num_prompts)
        return planned(config, task, prompts, keys(prompts, batch, 0))

    ahead = Ahead(config, sampler, plan)

    def sample(prompts: Sequence[Prompt], batch: int, first: int) -> list[Group]:
        ahead.begin(batch)
        return sample_groups(config, task, ahead, policy, prompts, keys(prompts, batch, first))

    def collect(batch: int) -> Collected:
        groups = sample(task.draw(config.seed, batch, config.rollout.num_prompts), batch, 0)
        return Collected(groups, sampled_tokens(groups), len(groups))

    return partial(fill, config, task, sample) if config.rollout.dynamic_sampling else collect


def sample_groups(
    config: RunConfig,
    task: Task,
    sampler: Sampler,
    policy: Policy,
    prompts: Sequence[Prompt],
    keys: Sequence[Key],
) -> list[Group]:
    """The graded groups of the prompts, in order; the key of a prompt and the sample's number key a rollout's noise.

    Each task of a mixture samples within its own budget and grades its own completions. Where the objective's
    baseline is the greedy completion, it is sampled and graded along with its group.
    """
    groups = dict[int, Group]()
    for part, mine in _shares(task, prompts):
        asked = [(prompts[index], keys[index]) for index in mine]
        found, *best = [_sample(part, sampler, policy, asked, *kind) for kind in _kinds(config, part)]
        for greedy in best:
            attach(found, [one for (one,) in greedy])
        groups.update(zip(mine, found, strict=True))
    return [groups[index] for index in range(len(prompts))]


def planned(
    config: RunConfig, task: Task, prompts: Sequence[Prompt], keys: Sequence[Key]
) -> list[tuple[Sampling, list[Request]]]:
    """What `sample_groups` will ask the sampler for, call by call."""
    return [
        (sampling, _requests(part, [(prompts[index], keys[index]) for index in mine], count))
        for part, mine in _shares(task, prompts)
        for sampling, count in _kinds(config, part)
    ]


def _shares(task: Task, prompts: Sequence[Prompt]) -> list[tuple[Task, list[int]]]:
    """Each task of a mixture that has prompts here, and their places."""
    places = {name: [i for i, prompt in enumerate(prompts) if prompt.task == name] for name in parts_of(task)}
    return [(part, places[name]) for name, part in parts_of(task).items() if places[name]]


def _kinds(config: RunConfig, part: Task) -> list[tuple[Sampling, int]]:
    """How a prompt of the task is sampled and how often: its group, and its greedy completion where one is needed."""
    rollout, budget = config.rollout, part.max_completion_length
    group = (Sampling(rollout.temperature, rollout.top_p, rollout.top_k, budget), rollout.num_generations)
    return [group, (greedy_sampling(budget), 1)] if needs_greedy(config) else [group]


def _requests(task: Task, asked: Sequence[tuple[Prompt, Key]], count: int) -> list[Request]:
    """`count` requests for each prompt; its key and the sample's number key the noise."""
    encoded = [(task.encode(prompt), key) for prompt, key in asked]
    return [Request(ids, (*key, number)) for ids, key in encoded for number in range(count)]


def _sample(
    task: Task,
    sampler: Sampler,
    policy: Policy,
    asked: Sequence[tuple[Prompt, Key]],
    sampling: Sampling,
    count: int,
) -> list[list[Rollout]]:
    """`count` graded completions of each prompt."""
    requests = _requests(task, asked, count)
    rows = [(prompt, number) for prompt, _ in asked for number in range(count)]
    completions = sampler.generate(requests, sampling)
    texts = [decode(policy.tokenizer, completion.token_ids) for completion in completions]
    # graded once: a time limit or a judge need not say the same twice
    verdicts = distributed.on_main(lambda: task.grade([prompt for prompt, _ in rows], texts))
    found = [
        Rollout(prompt, request.prompt_ids, completion, text, verdict, verdict.reward, number, sampling.max_tokens)
        for (prompt, number), request, completion, text, verdict in zip(
            rows, requests, completions, texts, verdicts, strict=True
        )
    ]
    return [found[start : start + count] for start in range(0, len(found), count)]


@SOURCES.register("fixed")
def from_fixed_set(config: RunConfig, task: Task, sampler: Generator, policy: Policy) -> Collect:
    """One set of `fixed_batches` rollout batches of the seed model, sampled once and reused over epochs.

    After a resume a batch is sampled again where it is needed: the generator is never synced and noise is
    keyed, so it comes out token for token the same. Tokens are counted when a batch is met first.
    """
    sample, kept = from_generator(config, task, sampler, policy), dict[int, Collected]()

    def collect(batch: int) -> Collected:
        number = batch % config.rollout.fixed_batches
        if number not in kept:
            kept[number] = sample(number)
        groups = [copies(group) for group in kept[number].groups]
        tokens = kept[number].generated_tokens if batch == number else 0
        return replace(kept[number], groups=groups, generated_tokens=tokens)

    return collect


@SOURCES.register("external")
def from_given_pairs(config: RunConfig, task: Task, sampler: Generator, policy: Policy) -> Collect:
    """Groups of two: the given chosen completion (reward 1) and the rejected one (reward 0). Nothing is sampled.

    Where only chosen answers are given, a group is that answer alone. Raises ValueError for a task that gives none.
    """

    def given(prompt: Prompt, text: str, right: bool) -> Rollout:
        ids = encode_completion(policy.tokenizer, text)
        completion = Completion(ids, (float("nan"),) * len(ids), "stop", GIVEN)
        verdict = Verdict("right" if right else "wrong", None, None)
        return Rollout(prompt, task.encode(prompt), completion, text, verdict, verdict.reward, sample=int(not right))

    def collect(batch: int) -> Collected:
        prompts = task.draw(config.seed, batch, config.rollout.num_prompts)
        if any(prompt.chosen is None for prompt in prompts):
            raise ValueError(f"task {task.name!r} gives no answers of its own; rollout.source must not be 'external'")
        sides = [[(p.chosen, True), (p.rejected, False)] for p in prompts]
        groups: list[Group] = [
            [given(p, text, right) for text, right in both if text is not None] for p, both in zip(prompts, sides)
        ]
        return Collected(groups, 0, len(groups))

    return collect


def sampled_tokens(groups: Sequence[Group]) -> int:
    """Tokens of all completions, greedy ones included."""
    return sum(len(rollout.completion.token_ids) for group in with_greedy(groups) for rollout in group)


def store(groups: Sequence[Group], path: Path) -> None:
    """Write a rollout batch as Parquet (ids, text, log-probs, reward, verdict, weights version), to be regraded.

    Greedy completions follow the others, as sample -1.
    """
    rows: list[dict[str, object]] = [
        {
            "uid": r.prompt.uid, "prompt": r.prompt.text, "gold": r.prompt.gold, "sample": r.sample,
            "token_ids": r.completion.token_ids, "sampler_logprobs": r.completion.logprobs, "completion": r.text,
            "finish_reason": r.completion.finish_reason, "version": r.completion.version, "reward": r.reward,
            "outcome": r.verdict.outcome, "answer": r.verdict.answer, "raw": r.verdict.raw,
        }
        for group in with_greedy(groups)
        for r in group
    ]  # fmt: skip
    write_table(rows, path)


def write_table(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Write rows as Parquet; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
    partial.replace(path)
