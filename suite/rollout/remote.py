"""What a sampler asks of a vLLM engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

Asked = tuple[tuple[int, ...], int]
"""Prompt ids, and the seed of the request's own noise."""

Answered = tuple[tuple[int, ...], tuple[float, ...]]
"""Token ids and their processed log-probs."""


class Remote(Protocol):
    """A vLLM engine out of this process."""

    comparable: dict[str, int]
    """Tensors that can be compared with the learner's bit for bit, and how many copies of each the engine holds."""

    @property
    def dtype(self) -> str:
        """Precision of its weights."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion together."""
        ...

    @property
    def generating(self) -> bool:
        """Whether a generation is under way, which anything that is asked now would end."""
        ...

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the request of that name gives: see `suite.rollout.vllm_host.Host`."""
        ...

    def stream(self, batches: Sequence[Sequence[Asked]], sampling: dict[str, Any]) -> Iterator[list[Answered]]:
        """The batches' completions, batch by batch, while the later ones are being generated."""
        ...

    def close(self) -> None:
        """Have nothing more to do with it; an engine that was started for this process ends."""
        ...
