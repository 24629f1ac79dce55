"""Everything that a step needs, filled from the configuration, saved in checkpoints and put back from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from suite import critic, distributed, optim, sharding, tasks
from suite.checkpoint import Checkpoint, Writer
from suite.config import RunConfig, fingerprint
from suite.critic import Critic
from suite.objectives import build as build_objective
from suite.policy import Policy
from suite.protocols import Generator, Objective, Task
from suite.reference import Memory
from suite.rollout import collect, engines
from suite.rollout.in_process import InProcessSampler
from suite.tracking import Tracker


@dataclass
class Counters:
    """What a run has used so far; kept in checkpoints."""

    loads: int = 1
    generated_tokens: int = 0
    trained_tokens: int = 0
    prompts: int = 0


@dataclass
class Parts:
    """Everything that a step needs and a configuration decides."""

    policy: Policy
    generator: Generator
    evaluator: InProcessSampler
    """Samples from the learner's own weights, or from a copy that `evaluate_learner` brings up to date."""
    whole_policy: Policy
    """The evaluator's model, whole on every rank, as a policy."""
    reference: PreTrainedModel | None
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    rollouts: collect.Collect
    critic: Critic | None = None
    reference_memory: Memory = field(default_factory=lambda: Memory(keep=False))
    counters: Counters = field(default_factory=Counters)
    first_batch: int = 0

    def evaluate_learner(self, step: int) -> None:
        """Make the evaluator sample from the learner's weights as they are after `step`."""
        if self.evaluator.model is not self.policy.model:
            self.evaluator.load(sharding.whole(self.policy.model.state_dict()), step)


def assemble(config: RunConfig, start: Checkpoint | None = None) -> Parts:
    """Load the model and fill every slot; with a checkpoint, put back all that it holds."""
    policy = Policy.load(config.model)
    evaluator = InProcessSampler(
        policy.model,
        pad_id=policy.pad_id,
        stop_ids=policy.stop_ids,
        chunk_size=config.rollout.chunk_size,
        spread=distributed.size() > 1,
    )
    if distributed.shards(config) or config.learner.activation_checkpointing or config.learner.compile:
        # the learner's own model is not one to sample from then
        evaluator = evaluator.separate()
        sharding.cast(evaluator.model, config)
    task = tasks.build(config, policy.tokenizer)
    generator = engines.build(config, policy, task, evaluator)
    objective = build_objective(config, task.max_completion_length)
    # copies first: sharding replaces the parameters that are copied here
    reference = copy.deepcopy(policy.model).requires_grad_(False) if objective.needs_reference else None
    value_model = critic.build(config, policy)
    sharding.prepare(policy.model, config, trains=True)
    if reference is not None:
        sharding.prepare(reference, config, trains=False)
    optimizer = optim.build(policy.model.parameters(), config.optim)
    source = collect.SOURCES[config.rollout.source]
    parts = Parts(
        policy,
        generator,
        evaluator,
        replace(policy, model=evaluator.model),
        reference,
        task,
        objective,
        optimizer,
        source(config, task, generator, policy),
        value_model,
        Memory(keep=config.rollout.precompute_ref_log_probs),
    )
    if start:
        sharding.load(policy.model, start.tensors["policy"])
        generator.load(start.tensors["generator"], start.state["generator_version"])
        if reference is not None:
            sharding.load(reference, start.tensors["reference"])
        optim.load_state_tensors(optimizer, start.tensors["optimizer"])
        objective.load_state(start.tensors.get("objective", {}))
        if parts.critic:
            parts.critic.load(start.tensors)
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
        "generator": parts.generator.weights(),
        "optimizer": optim.state_tensors(parts.optimizer),
    }
    if parts.reference is not None:
        tensors["reference"] = parts.reference.state_dict()
    if held := parts.objective.state():
        tensors["objective"] = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in held.items()}
    if parts.critic:
        tensors |= parts.critic.tensors()
    state = {
        "batches": batches, "generator_version": parts.generator.version, "counters": vars(parts.counters),
        "run_id": tracker.run_id, "logged": tracker.logged, "rows": tracker.rows_hash, "fingerprint": fingerprint(config), "latest": latest,
        "pending": pending,
    }  # fmt: skip
    step = batches * config.updates_per_batch
    if distributed.size() > 1:
        writer.save_shards(step, tensors, state)
    else:
        writer.save(step, {name: sharding.whole(group) for name, group in tensors.items()}, state)
