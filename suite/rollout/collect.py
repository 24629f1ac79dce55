"""Rollout batches: prompts to graded groups, from the generator, from a fixed set, or from given pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet

from suite.config import RunConfig
from suite.evaluate import decode
from suite.grading import Verdict
from suite.policy import Policy
from suite.protocols import Completion, Group, Prompt, Request, Rollout, Sampler, Sampling, Task
from suite.registry import Registry
from suite.tasks.encoding import encode_completion

Collect = Callable[[int], list[Group]]
"""Rollout batch number -> its groups, graded; `reward` is the verdict's."""

Source = Callable[[RunConfig, Task, Sampler, Policy], Collect]
"""Built once per run from the configuration, the task, the generator and the policy (for its tokenizer)."""

SOURCES: Registry[Source] = Registry("rollout source")

GIVEN = -1
"""Weights version of a completion that no weights of the run sampled."""


@SOURCES.register("generator")
def from_generator(config: RunConfig, task: Task, sampler: Sampler, policy: Policy) -> Collect:
    """G completions for each of P prompts. Noise is keyed by (seed, step, purpose, prompt, sample)."""
    rollout = config.rollout
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, task.max_completion_length)

    def collect(batch: int) -> list[Group]:
        prompts = task.draw(config.seed, batch, rollout.num_prompts)
        step = batch * config.updates_per_batch
        encoded = [task.encode(prompt) for prompt in prompts]
        # a prompt may stand twice in a batch, across the end of a pass: its place keeps the two apart
        requests = [
            Request(ids, (config.seed, step, "rollout", place, prompt.uid, sample))
            for place, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True))
            for sample in range(rollout.num_generations)
        ]
        completions = sampler.generate(requests, sampling)
        repeated = [prompt for prompt in prompts for _ in range(rollout.num_generations)]
        texts = [decode(policy.tokenizer, completion.token_ids) for completion in completions]
        verdicts = task.grade(repeated, texts)
        rollouts = [
            Rollout(repeated[i], encoded[i // rollout.num_generations], completions[i], texts[i], verdicts[i],
                    verdicts[i].reward, i % rollout.num_generations)
            for i in range(len(repeated))
        ]  # fmt: skip
        return [rollouts[i : i + rollout.num_generations] for i in range(0, len(rollouts), rollout.num_generations)]

    return collect


@SOURCES.register("fixed")
def from_fixed_set(config: RunConfig, task: Task, sampler: Sampler, policy: Policy) -> Collect:
    """One set of `fixed_batches` rollout batches of the seed model, sampled once and reused over epochs.

    After a resume a batch is sampled again where it is needed: the generator is never synced and noise is
    keyed, so it comes out token for token the same.
    """
    sample, kept = from_generator(config, task, sampler, policy), dict[int, list[Group]]()

    def collect(batch: int) -> list[Group]:
        number = batch % config.rollout.fixed_batches
        if number not in kept:
            kept[number] = sample(number)
        return [[replace(rollout) for rollout in group] for group in kept[number]]

    return collect


@SOURCES.register("external")
def from_given_pairs(config: RunConfig, task: Task, sampler: Sampler, policy: Policy) -> Collect:
    """Groups of two: the given chosen completion (reward 1) and the rejected one (reward 0). Nothing is sampled."""

    def given(prompt: Prompt, text: str | None, right: bool) -> Rollout:
        assert text is not None
        ids = encode_completion(policy.tokenizer, text)
        completion = Completion(ids, (float("nan"),) * len(ids), "stop", GIVEN)
        verdict = Verdict("right" if right else "wrong", None, None)
        return Rollout(prompt, task.encode(prompt), completion, text, verdict, verdict.reward, sample=int(not right))

    def collect(batch: int) -> list[Group]:
        prompts = task.draw(config.seed, batch, config.rollout.num_prompts)
        return [[given(p, p.chosen, True), given(p, p.rejected, False)] for p in prompts]

    return collect


def generated_tokens(config: RunConfig, batch: int, groups: Sequence[Group]) -> int:
    """Tokens that had to be sampled for a rollout batch: none for given pairs or for a fixed batch met again."""
    if config.rollout.source == "fixed" and batch >= config.rollout.fixed_batches:
        return 0
    return sum(len(r.completion.token_ids) for group in groups for r in group if r.completion.version != GIVEN)


def store(groups: Sequence[Group], path: Path) -> None:
    """Write a rollout batch as Parquet (ids, text, log-probs, reward, verdict, weights version), to be regraded."""
    rows: list[dict[str, object]] = [
        {
            "uid": r.prompt.uid, "prompt": r.prompt.text, "gold": r.prompt.gold, "sample": r.sample,
            "token_ids": r.completion.token_ids, "sampler_logprobs": r.completion.logprobs, "completion": r.text,
            "finish_reason": r.completion.finish_reason, "version": r.completion.version, "reward": r.reward,
            "outcome": r.verdict.outcome, "answer": r.verdict.answer, "raw": r.verdict.raw,
        }
        for group in groups
        for r in group
    ]  # fmt: skip
    write_table(rows, path)


def write_table(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Write rows as Parquet; a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
    partial.replace(path)
