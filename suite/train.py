"""The training loop, top to bottom.

sync? -> prompts -> rollouts -> rewards -> batch -> minibatches -> loss -> optimizer -> log -> evaluate -> checkpoint.
Arms differ in the functions that fill the slots, never in branches here.

A rollout batch gives U optimizer steps. Row k of the log is what optimizer step k (1-based) saw; evaluations at
step k are of the weights after it, and at step 0 of the seed model.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from suite import checkpoint, distributed, optim, sharding
from suite.batch import Batch, collate, compare
from suite.checkpoint import Checkpoint, Writer
from suite.config import RunConfig
from suite.evaluate import Evaluation, evaluate, probe
from suite.parts import Parts, assemble, save
from suite.policy import token_logprobs
from suite.protocols import Group, Objective, Selected, Split
from suite.randomness import permutation
from suite.rewards import SHAPINGS, statistics
from suite.rollout import collect
from suite.rollout.greedy import with_greedy
from suite.rollout.in_process import verify_copy
from suite.run import Interrupted, NonFiniteLoss, Progress
from suite.tasks import parts_of
from suite.tracking import Tracker


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    step: int
    metrics: dict[str, float]
    """The last value of every metric."""
    weights: str
    """Hash of the final weights, bit for bit."""


def full_evaluation(config: RunConfig, parts: Parts, step: int) -> Evaluation:
    """Probe and validation problems; at step 0 and at the end the test problems too."""
    splits: tuple[Split, ...] = ("validation", "test") if step in (0, config.train.steps) else ("validation",)
    parts.evaluate_learner(step)
    out = probe(config, parts.evaluator, parts.task, parts.whole_policy, step=step)
    for split, (name, task) in itertools.product(splits, parts_of(parts.task).items()):
        where = f"{name}-{split}" if name else split
        found = evaluate(config, split, parts.evaluator, task, parts.policy.tokenizer, step=step, benchmark=where)
        out.metrics.update(found.metrics)
        out.tables.update(found.tables)
    return out


def prepare(config: RunConfig, parts: Parts, groups: list[Group], step: int) -> tuple[Batch | None, dict[str, float]]:
    """Select what is trained on, collate it, add log-probs and values, fill in advantages and the critic's targets.

    No batch if the objective finds nothing to train on.
    """
    selected = select(parts.objective, groups, (config.seed, step, "select"))
    metrics = dict(selected.metrics)
    if not selected.rollouts:
        return None, metrics
    place = {id(rollout): index for index, group in enumerate(groups) for rollout in group}
    rows = [place[id(rollout)] for rollout in selected.rollouts]
    masked = config.rollout.mask_truncated_completions
    batch = collate(selected, parts.policy.pad_id, rows, mask_truncated=masked).to(distributed.device())
    if not batch.mask_BT.any():
        return None, metrics
    if parts.objective.needs_learner_logprobs:
        batch.learner_logprobs_BT = _logprobs(config, parts.policy.model, batch)
    if (reference := parts.reference) is not None:
        batch.ref_logprobs_BT = parts.reference_memory(batch, lambda rows: _logprobs(config, reference, rows))
    if parts.critic:
        parts.critic.evaluate(batch)
    metrics.update(parts.objective.prepare(batch))
    if parts.critic:
        metrics.update(parts.critic.aim(batch, step))
    return batch, metrics


def select(objective: Objective, groups: list[Group], key: tuple[int | str, ...]) -> Selected:
    """What the objective selects from the groups, asked of it once, whatever the number of ranks: a judge may be."""
    flat = [rollout for group in groups for rollout in group]
    place = {id(rollout): index for index, rollout in enumerate(flat)}

    def choose() -> tuple[list[int], Selected]:
        selected = objective.select(groups, key)
        return [place[id(rollout)] for rollout in selected.rollouts], replace(selected, rollouts=[])

    chosen, rest = distributed.on_main(choose)
    return replace(rest, rollouts=[flat[index] for index in chosen])


@torch.no_grad()
def _logprobs(config: RunConfig, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Log-probs of the batch under a model, at the sampling temperature, micro-batch by micro-batch."""
    temperature = config.rollout.temperature

    def compute(micro: Batch) -> torch.Tensor:
        return token_logprobs(model, micro, temperature=temperature)[0]

    return distributed.values(batch, config.optim.micro_batch_size, compute)


def minibatches(config: RunConfig, batch: Batch, step: int) -> Iterator[Batch]:
    """The U optimizer steps of a rollout batch: per epoch, the units in a keyed order, cut into `num_minibatches`.

    A single minibatch keeps its order. The first carries no `learner_logprobs_BT`: the weights have not moved, and
    the objective takes the log-probs of its own forward pass, so that the ratio is 1 to the last bit.
    """
    count = config.objective.num_minibatches
    for epoch in range(config.objective.num_epochs):
        order = list(range(len(batch.units)))
        if count > 1:
            order = permutation(len(order), config.seed, step, "minibatches", epoch)
        for part in range(count):
            chosen = order[part * len(order) // count : (part + 1) * len(order) // count]
            mini = batch.take(chosen) if count > 1 else batch
            yield replace(mini, learner_logprobs_BT=None, fresh=True) if epoch == part == 0 else mini


def learners(config: RunConfig, parts: Parts) -> list[tuple[int, Callable[[Batch, int], dict[str, float]]]]:
    """Who learns from every minibatch, and from which optimizer step on: a critic at once, the policy after it."""
    critics = [(0, parts.critic.update)] if parts.critic else []
    return [*critics, (config.critic.pretrain_steps, partial(update, config, parts))]


def update(config: RunConfig, parts: Parts, mini: Batch, step: int) -> dict[str, float]:
    """One optimizer step on a minibatch; returns its metrics. Without a trained sequence the weights stay as they are.

    Denominators are counted over the whole minibatch before the first forward pass. Raises NonFiniteLoss.
    """
    model, objective = parts.policy.model, parts.objective
    rate = optim.learning_rate(config.optim, config.policy_steps(step), config.policy_steps(config.train.steps))
    denominators = objective.denominators(mini)
    sums, maxima, total = dict[str, float](), dict[str, float](), 0.0
    parts.optimizer.zero_grad()
    for micro, real in distributed.micro_batches(mini, config.optim.micro_batch_size) if mini.units else []:
        logprobs_BT, entropy_BT = token_logprobs(
            model, micro, temperature=config.rollout.temperature, entropy=objective.needs_entropy
        )
        if not real:
            logprobs_BT.sum().backward()
            continue
        out = objective.loss(micro, logprobs_BT, entropy_BT, denominators)
        out.loss.backward()
        if mini.fresh:
            compare(out, micro, logprobs_BT.detach(), int(mini.mask_BT.sum()))
        total += float(out.loss.detach())
        for name, value in out.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in out.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    sums, maxima = distributed.merged({**sums, "loss/total": total}, maxima)
    total = sums.pop("loss/total")
    norm = sharding.clip(model.parameters(), config.optim.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NonFiniteLoss(f"step {step + 1}: the loss is {total} and its gradient's norm {norm}")
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    if sums.get("loss/trained_sequences"):
        parts.optimizer.step()
    objective.observe(sums)
    parts.counters.trained_tokens += int(sums.get("loss/trained_tokens", 0))
    return {**sums, **maxima, "loss/total": total, "loss/grad_norm": norm, "optim/lr": rate}


def train(
    config: RunConfig,
    folder: Path,
    tracker: Tracker,
    start: Checkpoint | None = None,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Train from step 0 or a checkpoint to the last step; see `suite.run.run`, which surrounds it."""
    parts = assemble(config, start)
    counters, steps, updates = parts.counters, config.train.steps, config.updates_per_batch
    learning = learners(config, parts)
    latest: dict[str, float] = dict(start.state["latest"]) if start else {}

    def record(step: int, metrics: dict[str, float]) -> None:
        tracker.log(step, metrics)
        latest.update(metrics)
        if on_progress:
            on_progress(Progress(step, steps, latest))

    def evaluate_at(step: int) -> None:
        began = time.perf_counter()
        found = full_evaluation(config, parts, step)
        for name, rows in found.tables.items() if distributed.is_main() else []:
            collect.write_table(rows, folder / "evaluations" / f"{name.replace('/', '-')}-{step:06d}.parquet")
            if name.endswith("test/problems"):
                tracker.log_table(step, name, (list(rows[0]), [list(row.values()) for row in rows]))
        entropy = found.metrics.get("policy/entropy", 0.0)
        if config.train.on_divergence == "fail" and not math.isfinite(entropy):
            raise NonFiniteLoss(f"step {step}: the policy has diverged, its entropy is {entropy}")
        record(step, {**found.metrics, "time/eval_s": time.perf_counter() - began})

    if not start or start.state["pending"]:
        evaluate_at(start.step if start else 0)
    with Writer(folder / "checkpoints", keep=config.train.keep_checkpoints, first=tracker.sync) as writer:
        for number in range(parts.first_batch, steps // updates):
            step = number * updates
            clock = [time.perf_counter()]
            writer.check()

            if config.syncs_at(step):
                weights = sharding.whole(parts.policy.model.state_dict())
                parts.generator.load(weights, step)
                verify_copy(parts.generator, weights, step)
                counters.loads += 1
                if parts.reference is not None and config.rollout.reference_sync == "with_generator":
                    parts.reference.load_state_dict(parts.policy.model.state_dict())

            collected = parts.rollouts(number)
            groups = collected.groups
            clock.append(time.perf_counter())
            SHAPINGS[config.reward.shaping](with_greedy(groups), config.reward)
            if distributed.is_main():
                collect.store(groups, folder / "rollouts" / f"batch-{number:06d}.parquet")
            counters.generated_tokens += collected.generated_tokens
            counters.prompts += collected.prompts
            clock.append(time.perf_counter())

            batch, batch_metrics = prepare(config, parts, groups, step)
            row = {
                **statistics(groups), **collected.metrics, **batch_metrics, "sync/loads": counters.loads,
                "sync/version": parts.generator.version,
                "sync/staleness": config.policy_steps(step) - config.policy_steps(parts.generator.version),
                **parts.generator.measured(), "time/sample_s": clock[1] - clock[0],
                "time/reward_s": clock[2] - clock[1],
            }  # fmt: skip
            for offset, mini in enumerate(minibatches(config, batch, step) if batch else [None] * updates):
                began = time.perf_counter() if offset else clock[2]
                try:
                    for first, learn in learning:
                        row.update(learn(mini, step + offset) if mini and step + offset >= first else {})
                except NonFiniteLoss as error:
                    if distributed.is_main():
                        collect.store(groups, folder / "failure" / "rollouts.parquet")
                        checkpoint.save_failure(folder / "failure", step + offset + 1, vars(mini), str(error))
                    raise
                now = time.perf_counter()
                record(
                    step + offset + 1,
                    {
                        **row, "time/train_s": now - began, "time/step_s": now - (began if offset else clock[0]),
                        "cost/generated_tokens": counters.generated_tokens, "cost/prompts": counters.prompts,
                        "cost/trained_tokens": counters.trained_tokens,
                    },
                )  # fmt: skip
                row = {}
                if offset + 1 < updates and (step + offset + 1) % config.eval.every == 0:
                    evaluate_at(step + offset + 1)

            done, period = step + updates, config.train.checkpoint_every
            pending = done % config.eval.every == 0 or done == steps
            # an evaluation is repeated exactly, so what the step has cost is kept before it
            asked = distributed.on_main(lambda: stop is not None and stop())
            if asked or done == steps or (period and done // period > step // period):
                save(config, writer, parts, number + 1, tracker, latest, pending)
            if asked:
                raise Interrupted(f"stopped after step {done} of {steps}")
            if pending:
                evaluate_at(done)
    return Outcome(steps, latest, checkpoint.tensors_hash(sharding.whole(parts.policy.model.state_dict())))
