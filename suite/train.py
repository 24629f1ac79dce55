"""The training loop, top to bottom.

sync? -> prompts -> rollouts -> rewards -> batch -> minibatches -> loss -> optimizer -> log -> evaluate -> checkpoint.
Arms differ in the functions that fill the slots, never in branches here.

A rollout batch gives U optimizer steps. Row k of the log is what optimizer step k (1-based) saw; evaluations at
step k are of the weights after it, and at step 0 of the seed model.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from suite import checkpoint, optim, tasks
from suite.batch import Batch, collate, kl_metrics
from suite.checkpoint import Checkpoint, Writer
from suite.config import RunConfig, fingerprint
from suite.evaluate import Evaluation, evaluate, probe
from suite.objectives import build as build_objective
from suite.policy import Policy, token_logprobs
from suite.protocols import Group, Objective, Split, Task
from suite.randomness import permutation
from suite.rewards import SHAPINGS, statistics
from suite.rollout import collect
from suite.rollout.in_process import InProcessSampler
from suite.run import Interrupted, NonFiniteLoss, Progress
from suite.tracking import Tracker


@dataclass
class Counters:
    """What a run has used so far; kept in checkpoints."""

    loads: int = 1
    generated_tokens: int = 0
    trained_tokens: int = 0
    prompts: int = 0


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    step: int
    metrics: dict[str, float]
    """The last value of every metric."""
    weights: str
    """Hash of the final weights, bit for bit."""


@dataclass
class Parts:
    """Everything that a step needs and a configuration decides."""

    policy: Policy
    generator: InProcessSampler
    evaluator: InProcessSampler
    """Samples from the learner's own weights."""
    reference: PreTrainedModel | None
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    rollouts: collect.Collect
    counters: Counters = field(default_factory=Counters)
    first_batch: int = 0


def assemble(config: RunConfig, start: Checkpoint | None = None) -> Parts:
    """Load the model and fill every slot; with a checkpoint, put back all that it holds."""
    policy = Policy.load(config.model)
    evaluator = InProcessSampler(
        policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids, chunk_size=config.rollout.chunk_size
    )
    generator = evaluator.separate()
    task = tasks.build(config, policy.tokenizer)
    objective = build_objective(config, task.max_completion_length)
    reference = copy.deepcopy(policy.model).requires_grad_(False) if objective.needs_reference else None
    optimizer = optim.build(policy.model.parameters(), config.optim)
    source = collect.SOURCES[config.rollout.source]
    parts = Parts(
        policy, generator, evaluator, reference, task, objective, optimizer, source(config, task, generator, policy)
    )
    if start:
        policy.model.load_state_dict(start.tensors["policy"])
        generator.load(start.tensors["generator"], start.state["generator_version"])
        if reference is not None:
            reference.load_state_dict(start.tensors["reference"])
        optim.load_state_tensors(optimizer, start.tensors["optimizer"])
        parts.counters = Counters(**start.state["counters"])
        parts.first_batch = start.state["batches"]
    return parts


def save(
    config: RunConfig, writer: Writer, parts: Parts, batches: int, tracker: Tracker, latest: dict[str, float],
    pending: bool,
) -> None:  # fmt: skip
    """Checkpoint after `batches` rollout batches; `pending`: the evaluation of that step is still to come."""
    tensors = {
        "policy": parts.policy.model.state_dict(),
        "generator": parts.generator.model.state_dict(),
        "optimizer": optim.state_tensors(parts.optimizer),
    }
    if parts.reference is not None:
        tensors["reference"] = parts.reference.state_dict()
    state = {
        "batches": batches, "generator_version": parts.generator.version, "counters": vars(parts.counters),
        "run_id": tracker.run_id, "logged": tracker.logged, "fingerprint": fingerprint(config), "latest": latest,
        "pending": pending,
    }  # fmt: skip
    writer.save(batches * config.updates_per_batch, tensors, state)


def full_evaluation(config: RunConfig, parts: Parts, step: int) -> Evaluation:
    """Probe and validation problems; at step 0 and at the end the test problems too."""
    splits: tuple[Split, ...] = ("validation", "test") if step in (0, config.train.steps) else ("validation",)
    out = probe(config, parts.evaluator, parts.task, parts.policy, step=step)
    for split in splits:
        found = evaluate(config, split, parts.evaluator, parts.task, parts.policy.tokenizer, step=step)
        out.metrics.update(found.metrics)
        out.tables.update(found.tables)
    return out


def prepare(config: RunConfig, parts: Parts, groups: list[Group], step: int) -> tuple[Batch | None, dict[str, float]]:
    """Select what is trained on, collate it, add the learner's and the reference's log-probs, fill in advantages.

    No batch if the objective finds nothing to train on.
    """
    selected = parts.objective.select(groups, (config.seed, step, "select"))
    metrics = dict(selected.metrics)
    if not selected.rollouts:
        return None, metrics
    place = {id(rollout): index for index, group in enumerate(groups) for rollout in group}
    batch = collate(selected, parts.policy.pad_id, [place[id(rollout)] for rollout in selected.rollouts])
    if parts.objective.needs_learner_logprobs:
        batch.learner_logprobs_BT = _logprobs(config, parts.policy.model, batch)
    if parts.reference is not None:
        batch.ref_logprobs_BT = _logprobs(config, parts.reference, batch)
    metrics.update(parts.objective.prepare(batch))
    return batch, metrics


@torch.no_grad()
def _logprobs(config: RunConfig, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Log-probs of the batch under a model, at the sampling temperature, micro-batch by micro-batch."""
    micros = batch.micro_batches(config.optim.micro_batch_size)
    return torch.cat([token_logprobs(model, micro, temperature=config.rollout.temperature)[0] for micro in micros])


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
            yield replace(mini, learner_logprobs_BT=None) if epoch == part == 0 else mini


def update(config: RunConfig, parts: Parts, mini: Batch, step: int, *, first: bool) -> dict[str, float]:
    """One optimizer step on a minibatch; returns its metrics. Without a trained sequence the weights stay as they are.

    Denominators are counted over the whole minibatch before the first forward pass. Raises NonFiniteLoss.
    """
    model, objective = parts.policy.model, parts.objective
    rate = optim.learning_rate(config.optim, step, config.train.steps)
    denominators = objective.denominators(mini)
    sums, maxima, total = dict[str, float](), dict[str, float](), 0.0
    parts.optimizer.zero_grad()
    for micro in mini.micro_batches(config.optim.micro_batch_size) if mini.units else []:
        logprobs_BT, entropy_BT = token_logprobs(
            model, micro, temperature=config.rollout.temperature, entropy=objective.needs_entropy
        )
        out = objective.loss(micro, logprobs_BT, entropy_BT, denominators)
        out.loss.backward()
        if first:
            for name, share in kl_metrics(micro, logprobs_BT.detach(), int(mini.mask_BT.sum())).items():
                sums[name] = sums.get(name, 0.0) + share
        total += float(out.loss.detach())
        for name, value in out.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in out.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    limit = config.optim.max_grad_norm or float("inf")
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NonFiniteLoss(f"step {step + 1}: the loss is {total} and its gradient's norm {norm}")
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    if sums.get("loss/trained_sequences"):
        parts.optimizer.step()
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
    latest: dict[str, float] = dict(start.state["latest"]) if start else {}

    def record(step: int, metrics: dict[str, float]) -> None:
        tracker.log(step, metrics)
        latest.update(metrics)
        if on_progress:
            on_progress(Progress(step, steps, latest))

    def evaluate_at(step: int) -> None:
        began = time.perf_counter()
        found = full_evaluation(config, parts, step)
        for name, rows in found.tables.items():
            collect.write_table(rows, folder / "evaluations" / f"{name.replace('/', '-')}-{step:06d}.parquet")
            if name.startswith("eval/test"):
                tracker.log_table(step, name, (list(rows[0]), [list(row.values()) for row in rows]))
        record(step, {**found.metrics, "time/eval_s": time.perf_counter() - began})

    if not start or start.state["pending"]:
        evaluate_at(start.step if start else 0)
    with Writer(folder / "checkpoints", keep=config.train.keep_checkpoints, first=tracker.sync) as writer:
        for number in range(parts.first_batch, steps // updates):
            step = number * updates
            clock = [time.perf_counter()]
            writer.check()

            if step and config.rollout.sync_period != "inf" and step % config.rollout.sync_period == 0:
                parts.generator.load(parts.policy.model.state_dict(), step)
                counters.loads += 1
                if parts.reference is not None and config.rollout.reference_sync == "with_generator":
                    parts.reference.load_state_dict(parts.policy.model.state_dict())

            groups = parts.rollouts(number)
            clock.append(time.perf_counter())
            SHAPINGS[config.reward.shaping](groups, config.reward.shaping_coef)
            collect.store(groups, folder / "rollouts" / f"batch-{number:06d}.parquet")
            counters.generated_tokens += collect.generated_tokens(config, number, groups)
            counters.prompts += len(groups)
            clock.append(time.perf_counter())

            batch, batch_metrics = prepare(config, parts, groups, step)
            row = {
                **statistics(groups), **batch_metrics, "sync/loads": counters.loads,
                "sync/version": parts.generator.version, "sync/staleness": step - parts.generator.version,
                "time/sample_s": clock[1] - clock[0], "time/reward_s": clock[2] - clock[1],
            }  # fmt: skip
            for offset, mini in enumerate(minibatches(config, batch, step) if batch else [None] * updates):
                began = time.perf_counter() if offset else clock[2]
                try:
                    row.update(update(config, parts, mini, step + offset, first=not offset) if mini else {})
                except NonFiniteLoss as error:
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
            asked = stop is not None and stop()
            if asked or done == steps or (period and done // period > step // period):
                save(config, writer, parts, number + 1, tracker, latest, pending)
            if asked:
                raise Interrupted(f"stopped after step {done} of {steps}")
            if pending:
                evaluate_at(done)
    return Outcome(steps, latest, checkpoint.tensors_hash(parts.policy.model.state_dict()))
