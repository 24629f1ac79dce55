"""The shapes that parts of the suite have for each other: Task, Sampler, Objective, Benchmark.

Letters in names: P prompts, G rollouts per prompt, B sequences, L prompt and completion tokens, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from suite.grading import Verdict

if TYPE_CHECKING:
    import torch

    from suite.batch import Batch

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: what the model reads and what the reward needs."""

    uid: str
    text: str
    gold: str
    chosen: str | None = None
    rejected: str | None = None
    """A given preference pair (`rollout.source = external`), completions without the closing EOS."""
    task: str = ""
    """Which task of a mixture it comes from; empty where there is but one task."""
    pair_rule: str = ""
    """The pair rule that the mixture names for its task; empty = `objective.pair_rule`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion asked of a sampler. `key` keys its noise: nothing else does."""

    prompt_ids: tuple[int, ...]
    key: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler returns: the token ids (a terminating EOS included), never text to be encoded again."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was drawn from (temperature, top-p, top-k applied)."""
    finish_reason: Literal["stop", "length"]
    version: int
    """Version (optimizer step) of the weights that sampled it."""


@dataclass(slots=True)
class Rollout:
    """One completion with its reward."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    verdict: Verdict
    reward: float
    """NaN where the reward abstained: the rollout is then in no mean and no group statistic."""
    sample: int
    """Index within its group."""
    budget: int = 0
    """The completion budget that it was sampled with, tokens."""
    token_rewards: tuple[float, ...] = ()
    """Rewards given token by token, in addition to `reward`, which sits on the last trained token; empty = none."""
    greedy: Rollout | None = None
    """The greedy completion of the same prompt by the same weights, where the objective's baseline is its reward."""

    @property
    def truncated(self) -> bool:
        return self.completion.finish_reason == "length"


Group = Sequence[Rollout]
"""The G rollouts of one prompt."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A rollout batch and what it cost, thrown-away groups included."""

    groups: list[Group]
    generated_tokens: int
    prompts: int
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """Prompts and their reward: the same object trains and evaluates."""

    name: str
    max_completion_length: int
    """Completion budget, tokens."""

    def draw(self, seed: int, batch: int, count: int) -> list[Prompt]:
        """The training prompts of a rollout batch: equal for equal (seed, batch), distinct within a pass."""
        ...

    def held_out(self, split: Split, count: int) -> list[Prompt]:
        """The first `count` problems (0 = all) of a held-out split, in a fixed order."""
        ...

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt's token ids, with exactly one BOS."""
        ...

    def grade(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Verdict]:
        """One verdict per completion, in order, in bounded time."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """Draws completions from weights of its own, which change only in `load`."""

    @property
    def version(self) -> int:
        """Version (optimizer step) of the weights that it samples from."""
        ...

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take a copy of the learner's weights."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; equal weights, keys and batches give equal tokens."""
        ...


class Generator(Sampler, Protocol):
    """The sampler of a run's rollouts: may generate ahead, and can say what it samples from."""

    def window(self, batches: Sequence[Sequence[Request]], sampling: Sampling) -> Iterator[list[Completion]]:
        """The completions of several batches from one call, batch by batch, equal to those of a call for each."""
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that it samples from, under the learner's names."""
        ...

    def measured(self) -> dict[str, float]:
        """Metrics of the loads since the last call of this."""
        ...


@dataclass(frozen=True, slots=True)
class Selected:
    """What an objective takes from a rollout batch."""

    rollouts: list[Rollout]
    units: list[list[int]]
    """Rows that must stay in one micro-batch: single rows, or the rows of a pair."""
    targets: dict[str, list[float]] = field(default_factory=dict)
    """Extra per-row values, which reach `Batch.targets` as tensors of shape (B,)."""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class LossOutput:
    """The part of an optimizer step's loss that one micro-batch contributes.

    `loss` and the values of `sums` are divided by the step's denominators already: they add up over
    micro-batches. The values of `maxima` are combined by maximum.
    """

    loss: torch.Tensor
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)


State = dict[str, "torch.Tensor | float"]
"""What a part that learns from the run carries from step to step, by name; kept in checkpoints."""


class Controller(Protocol):
    """A number that an objective adapts while it trains, and what it needs to go on after a resume."""

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take note of an optimizer step: the sums that its loss reported, empty where nothing was trained on."""
        ...

    def state(self) -> State:
        """Everything that the next step depends on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave, numbers as they were or as tensors of one element."""
        ...


class Objective(Protocol):
    """A family of losses whose slots are filled from the configuration.

    Subclass it: an objective that keeps state lists it in `controllers`, and one that has none needs nothing more.
    """

    needs_reference: bool
    needs_entropy: bool
    needs_learner_logprobs: bool = False
    """Whether the loss reads `learner_logprobs_BT`, beyond the first update of a batch."""
    controllers: Mapping[str, Controller] = MappingProxyType({})
    """What it adapts while it trains, by name."""

    def select(self, groups: Sequence[Group], key: tuple[int | str, ...]) -> Selected:
        """Which rollouts are trained on, with keyed randomness."""
        ...

    def prepare(self, batch: Batch) -> dict[str, float]:
        """Fill `batch.advantages_BT` or whatever the loss needs from rewards and prepared log-probs; metrics."""
        ...

    def denominators(self, batch: Batch) -> dict[str, float]:
        """Counts over one whole optimizer step, taken before its first forward pass. They add up over ranks."""
        ...

    def loss(
        self,
        micro: Batch,
        logprobs_BT: torch.Tensor,
        entropy_BT: torch.Tensor | None,
        denominators: Mapping[str, float],
    ) -> LossOutput:
        """The micro-batch's share of the step's loss, with gradient through `logprobs_BT` and `entropy_BT`."""
        ...

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Called after every optimizer step with the sums that its micro-batches reported."""
        for controller in self.controllers.values():
            controller.observe(metrics)

    def state(self) -> State:
        """What a resumed run needs to be the uninterrupted one."""
        found = {name: controller.state() for name, controller in self.controllers.items()}
        return {f"{name}.{key}": value for name, state in found.items() for key, value in state.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave."""
        for name, controller in self.controllers.items():
            mine = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            controller.load_state(mine)


class Benchmark(Protocol):
    """A set of problems with its own protocol, evaluated on any model."""

    name: str

    def problems(self) -> Iterable[Prompt]:
        """The problems in a fixed order."""
        ...
