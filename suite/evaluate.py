"""Evaluation inside a run: held-out accuracy, greedy and sampled, and the probe of entropy and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from suite.protocols import Completion, Prompt, Request, Sampler, Sampling, Split, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from suite.config import RunConfig
    from suite.policy import Policy


@dataclass
class Evaluation:
    """Metrics by name and, per table, one row per problem."""

    metrics: dict[str, float]
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    generated_tokens: int = 0


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of sampled ids, for reading and grading only."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _complete(
    sampler: Sampler,
    task: Task,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    key: tuple[int | str, ...],
) -> list[Completion]:
    encoded = [(prompt, task.encode(prompt)) for prompt in prompts]
    requests = [Request(ids, (*key, prompt.uid, sample)) for prompt, ids in encoded for sample in range(samples)]
    return sampler.generate(requests, sampling)


def greedy_accuracy(
    sampler: Sampler, task: Task, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> float:
    """Share of prompts whose greedy completion is right."""
    completions = _complete(sampler, task, prompts, 1, Sampling(0.0, 1.0, 0, task.max_completion_length), ())
    verdicts = task.grade(prompts, [decode(tokenizer, c.token_ids) for c in completions])
    return sum(v.reward for v in verdicts) / len(verdicts)


def evaluate(
    config: RunConfig,
    split: Split,
    sampler: Sampler,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
) -> Evaluation:
    """Greedy accuracy and avg@k on a held-out split, with one row per problem kept.

    avg@k is the mean over problems of the mean over k sampled completions, keyed by (seed, step, problem, sample).
    """
    count = config.eval.validation_problems if split == "validation" else config.eval.test_problems
    prompts = task.held_out(split, count)
    budget, k = task.max_completion_length, config.eval.num_samples
    greedy = _complete(sampler, task, prompts, 1, Sampling(0.0, 1.0, 0, budget), ())
    texts = [decode(tokenizer, c.token_ids) for c in greedy]
    verdicts = task.grade(prompts, texts)
    sampling = Sampling(config.eval.temperature, config.eval.top_p, 0, budget)
    sampled = _complete(sampler, task, prompts, k, sampling, (config.seed, step, f"eval {split}"))
    repeated = [prompt for prompt in prompts for _ in range(k)]
    marks = [v.reward for v in task.grade(repeated, [decode(tokenizer, c.token_ids) for c in sampled])]
    rows: list[dict[str, Any]] = []
    for i, (prompt, completion, text, verdict) in enumerate(zip(prompts, greedy, texts, verdicts, strict=True)):
        rows.append(
            {
                "uid": prompt.uid, "prompt": prompt.text, "gold": prompt.gold, "completion": text,
                "answer": verdict.answer, "outcome": verdict.outcome, "reward": verdict.reward,
                "truncated": completion.finish_reason == "length", "tokens": len(completion.token_ids),
                "sampled_right": sum(marks[i * k : (i + 1) * k]), "sampled": k,
            }
        )  # fmt: skip
    n = len(prompts)
    metrics = {
        f"eval/{split}/accuracy": sum(row["reward"] for row in rows) / n,
        f"eval/{split}/truncated_frac": sum(row["truncated"] for row in rows) / n,
        f"eval/{split}/no_answer_frac": sum(row["outcome"] == "no_answer" for row in rows) / n,
        f"eval/{split}/mean_tokens": sum(row["tokens"] for row in rows) / n,
    }
    if k:
        metrics[f"eval/{split}/avg@{k}"] = sum(marks) / (n * k)
    tokens = sum(len(c.token_ids) for c in (*greedy, *sampled))
    return Evaluation(metrics, {f"eval/{split}/problems": rows}, tokens)


def probe(config: RunConfig, sampler: Sampler, task: Task, policy: Policy, *, step: int) -> Evaluation:
    """Entropy and length on the fixed probe prompts with fresh samples of the current policy, for every method alike.

    `policy/entropy`: full vocabulary, nats, fp32, temperature 1, mean over the sampled tokens.
    """
    prompts = task.held_out("validation", 0)[-config.eval.probe_prompts :]
    sampling = Sampling(1.0, 1.0, 0, task.max_completion_length)
    key = (config.seed, step, "probe")
    completions = _complete(sampler, task, prompts, config.eval.probe_samples, sampling, key)
    asked = [ids for p in prompts for ids in [task.encode(p)] * config.eval.probe_samples]
    entropy, tokens = policy.mean_entropy(asked, [c.token_ids for c in completions])
    metrics = {"policy/entropy": entropy, "policy/probe_length": tokens / len(completions)}
    return Evaluation(metrics, generated_tokens=tokens)
