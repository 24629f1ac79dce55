"""Everything that a step needs, filled from the configuration, saved in checkpoints and put back from them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from suite import critic, optim, tasks
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
    """Samples from the learner's own weights."""
    reference: PreTrainedModel | None
    task: Task
    objective: Objective
    optimizer: torch.optim.Optimizer
    rollouts: collect.Collect
    critic: Critic | None = None
    reference_memory: Memory = field(default_factory=lambda: Memory(keep=False))
    counters: Counters = field(default_factory=Counters)
    first_batch: int = 0


def assemble(config: RunConfig, start: Checkpoint | None = None) -> Parts:
    """Load the model and fill every slot; with a checkpoint, put back all that it holds."""
    policy = Policy.load(config.model)
    evaluator = InProcessSampler(
        policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids, chunk_size=config.rollout.chunk_size
    )
    task = tasks.build(config, policy.tokenizer)
    generator = engines.build(config, policy, task, evaluator)
    objective = build_objective(config, task.max_completion_length)
    reference = copy.deepcopy(policy.model).requires_grad_(False) if objective.needs_reference else None
    optimizer = optim.build(policy.model.parameters(), config.optim)
    source = collect.SOURCES[config.rollout.source]
    parts = Parts(
        policy,
        generator,
        evaluator,
        reference,
        task,
        objective,
        optimizer,
        source(config, task, generator, policy),
        critic.build(config, policy),
        Memory(keep=config.rollout.precompute_ref_log_probs),
    )
    if start:
        policy.model.load_state_dict(start.tensors["policy"])
        generator.load(start.tensors["generator"], start.state["generator_version"])
        if reference is not None:
            reference.load_state_dict(start.tensors["reference"])
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
        "run_id": tracker.run_id, "logged": tracker.logged, "fingerprint": fingerprint(config), "latest": latest,
        "pending": pending,
    }  # fmt: skip
    writer.save(batches * config.updates_per_batch, tensors, state)
