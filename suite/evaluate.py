"""Evaluation inside a run: held-out accuracy, greedy and sampled, and the probe of entropy and length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from suite import distributed
from suite.grading import Verdict
from suite.protocols import Completion, Prompt, Request, Sampler, Sampling, Split, Task
from suite.rewards import mean, scored
from suite.tasks import parts_of

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
    benchmark: str = "",
) -> Evaluation:
    """Greedy reward and its mean over k samples on a held-out split, with one row per problem kept.

    Logged under `eval/<benchmark>/`, the split's name unless another is given. For a verified task they are `accuracy`
    and `avg@k`; for a scored one `reward` and `reward@k`, over what was scored. What a task measures beside its
    reward is averaged over the greedy completions. Samples are keyed by (seed, step, problem, sample).
    """
    place = f"eval/{benchmark or split}"
    count = config.eval.validation_problems if split == "validation" else config.eval.test_problems
    prompts = task.held_out(split, count)
    budget, k = task.max_completion_length, config.eval.num_samples
    greedy = _complete(sampler, task, prompts, 1, Sampling(0.0, 1.0, 0, budget), ())
    texts = [decode(tokenizer, c.token_ids) for c in greedy]
    verdicts = distributed.on_main(lambda: task.grade(prompts, texts))
    sampling = Sampling(config.eval.temperature, config.eval.top_p, 0, budget)
    sampled = _complete(sampler, task, prompts, k, sampling, (config.seed, step, f"eval {split}"))
    repeated = [prompt for prompt in prompts for _ in range(k)]
    tries = [decode(tokenizer, c.token_ids) for c in sampled]
    tried = distributed.on_main(lambda: task.grade(repeated, tries))
    marks = [verdict.reward for verdict in tried]
    rows: list[dict[str, Any]] = []
    for i, (prompt, completion, text, verdict) in enumerate(zip(prompts, greedy, texts, verdicts, strict=True)):
        rows.append(
            {
                "uid": prompt.uid, "prompt": prompt.text, "gold": prompt.gold, "completion": text,
                "answer": verdict.answer, "outcome": verdict.outcome, "reward": verdict.reward,
                "truncated": completion.finish_reason == "length", "tokens": len(completion.token_ids),
                "sampled_right": sum(marks[i * k : (i + 1) * k]), "sampled": k, **verdict.measures,
            }
        )  # fmt: skip
    n = len(prompts)
    metrics = {
        f"{place}/truncated_frac": sum(row["truncated"] for row in rows) / n,
        f"{place}/mean_tokens": sum(row["tokens"] for row in rows) / n,
        **_means(place, verdicts, marks, k),
        **distributed.on_main(lambda: _best_of(config.eval.reward_model, place, repeated, tries, tried, k)),
    }
    tokens = sum(len(c.token_ids) for c in (*greedy, *sampled))
    return Evaluation(metrics, {f"{place}/problems": rows}, tokens)


def _means(place: str, verdicts: Sequence[Verdict], marks: Sequence[float], k: int) -> dict[str, float]:
    """The means over greedy verdicts and over the rewards of k samples a problem; an abstention is in none of them."""
    if any(verdict.score is not None for verdict in verdicts):
        greedy = scored(verdict.reward for verdict in verdicts)
        of_problem = [scored(marks[i * k : (i + 1) * k]) for i in range(len(verdicts))]
        samples = [mean(rewards) for rewards in of_problem if rewards]
        out = {f"{place}/scored_frac": len(greedy) / len(verdicts)}
        out |= {f"{place}/reward": mean(greedy)} if greedy else {}
        out |= {f"{place}/reward@{k}": mean(samples)} if samples else {}
    else:
        out = {
            f"{place}/accuracy": mean([verdict.reward for verdict in verdicts]),
            f"{place}/no_answer_frac": mean([float(verdict.outcome == "no_answer") for verdict in verdicts]),
        }
        out |= {f"{place}/avg@{k}": mean(marks)} if k else {}
    for measure in sorted({name for verdict in verdicts for name in verdict.measures}):
        out[f"{place}/{measure}"] = mean([v.measures[measure] for v in verdicts if measure in v.measures])
    return out


def _best_of(
    reward_model: str,
    place: str,
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    verdicts: Sequence[Verdict],
    k: int,
) -> dict[str, float]:
    """What choosing one of k samples a problem gives, averaged over the problems whose chosen sample has a reward.

    `best_of@k`: the reward of the sample that the reward model scores highest, the first of equals; for a verified
    task the share of problems with the selected sample right. `pass@k`, for a verified task: the share with any
    sample right, which bounds it. Without a reward model a scored task's own reward chooses.
    """
    if k < 2:
        return {}
    marks, verified = [verdict.reward for verdict in verdicts], all(verdict.score is None for verdict in verdicts)
    problems = [range(start, start + k) for start in range(0, len(marks), k)]
    highest = mean([max(rewards) for tries in problems if (rewards := scored(marks[i] for i in tries))])
    out = {f"{place}/pass@{k}": highest} if verified else {}
    if reward_model:
        from suite.tasks.scored import load

        scores = load(reward_model).score([prompt.text for prompt in prompts], texts)
        out[f"{place}/best_of@{k}"] = mean(scored(marks[max(tries, key=scores.__getitem__)] for tries in problems))
    elif not verified:
        out[f"{place}/best_of@{k}"] = highest
    return {name: value for name, value in out.items() if not math.isnan(value)}


def probe(config: RunConfig, sampler: Sampler, task: Task, policy: Policy, *, step: int) -> Evaluation:
    """Entropy and length on the fixed probe prompts with fresh samples of the current policy, for every method alike.

    `policy/entropy`: full vocabulary, nats, fp32, temperature 1, mean over the sampled tokens. Every task of a mixture
    has as many probe prompts, and its own two values beside those over all tasks.
    """
    total, tokens, samples, metrics = 0.0, 0, 0, dict[str, float]()
    for name, part in parts_of(task).items():
        prompts = part.held_out("validation", 0)[-config.eval.probe_prompts :]
        sampling = Sampling(1.0, 1.0, 0, part.max_completion_length)
        completions = _complete(
            sampler, part, prompts, config.eval.probe_samples, sampling, (config.seed, step, "probe")
        )
        asked = [ids for p in prompts for ids in [part.encode(p)] * config.eval.probe_samples]
        entropy, count = policy.mean_entropy(asked, [c.token_ids for c in completions])
        total, tokens, samples = total + entropy * count, tokens + count, samples + len(completions)
        if name:
            metrics |= {f"task/{name}/entropy": entropy, f"task/{name}/probe_length": count / len(completions)}
    metrics |= {"policy/entropy": total / tokens, "policy/probe_length": tokens / samples}
    return Evaluation(metrics, generated_tokens=tokens)
