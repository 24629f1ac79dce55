"""Windows: between two syncs the generator's weights stay, so what several batches ask for is generated in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from suite.config import RunConfig
from suite.protocols import Completion, Generator, Request, Sampling

Plan = Callable[[int], list[tuple[Sampling, list[Request]]]]
"""Rollout batch number -> what it asks the generator for."""

ENGINE_ROLLOUTS = 4096
"""`rollout.window_rollouts = 0` for an engine out of this process."""


def window(config: RunConfig, batch: int, most: int) -> range:
    """The batches from `batch` on that are sampled from its weights, at most `most` of them, within the run."""
    updates, end = config.updates_per_batch, batch + 1
    last = config.rollout.fixed_batches if config.rollout.source == "fixed" else config.train.steps // updates
    while end < last and end - batch < most and not config.syncs_at(end * updates):
        end += 1
    return range(batch, end)


class Ahead:
    """A generator that also generates what the coming batches of a window will ask for, and keeps it for them.

    Noise is keyed, so they get the completions that they would have got. What was not planned for, such as further
    rounds of dynamic sampling, is generated when it is asked for. A run that is killed generates what is left of its
    window again.
    """

    def __init__(self, config: RunConfig, inner: Generator, plan: Plan) -> None:
        self._config, self._inner, self._plan = config, inner, plan
        self._kept: dict[tuple[Sampling, Request], Completion] = {}
        self._coming: Iterator[None] = iter(())
        self._until = -1

    @property
    def version(self) -> int:
        """Of the weights that it samples from."""
        return self._inner.version

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """See the generator's own."""
        self._inner.load(weights, version)

    def begin(self, batch: int) -> None:
        """A batch is about to ask: unless an earlier call covers it, the window that it opens is generated now."""
        if batch < self._until:
            return
        rollout = self._config.rollout
        limit = rollout.window_rollouts or (0 if rollout.engine == "in_process" else ENGINE_ROLLOUTS)
        batches = window(self._config, batch, max(limit // (rollout.num_prompts * rollout.num_generations), 1))
        self._kept, self._until = {}, batches.stop
        self._coming = self._generate(batches) if len(batches) > 1 else iter(())

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """See the generator's own; what was planned comes from the window's call, waiting for it if need be."""
        for _ in self._until_there(requests, sampling):
            pass
        found = [self._kept.pop((sampling, request), None) for request in requests]
        missing = [request for request, completion in zip(requests, found) if completion is None]
        rest = iter(self._inner.generate(missing, sampling) if missing else [])
        return [next(rest) if completion is None else completion for completion in found]

    def _until_there(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[None]:
        while any((sampling, request) not in self._kept for request in requests):
            try:
                yield next(self._coming)
            except StopIteration:
                return

    def _generate(self, batches: range) -> Iterator[None]:
        asked: dict[Sampling, list[list[Request]]] = {}
        for batch in batches:
            for sampling, requests in self._plan(batch):
                asked.setdefault(sampling, []).append(requests)
        for sampling, groups in asked.items():
            for requests, completions in zip(groups, self._inner.window(groups, sampling), strict=True):
                self._kept.update(zip(((sampling, request) for request in requests), completions, strict=True))
                yield
