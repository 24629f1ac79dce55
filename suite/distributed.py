"""Many processes for one run: who computes what, and how the parts become one result.

Every rank holds the whole rollout batch and walks the same loop; a rank samples and trains on its own share only.
Alone (one rank, nothing to shard) no function here changes or communicates anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from suite.batch import Batch
from suite.config import RunConfig

T = TypeVar("T")
U = TypeVar("U")

PATIENCE = timedelta(hours=1)
"""How long a rank waits for the others: rank 0 grades and asks judges alone."""


class Abandoned(RuntimeError):
    """Another rank failed; its own words are the reason."""


def size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's place among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_main() -> bool:
    """Whether this is rank 0: it alone grades, logs and writes."""
    return rank() == 0


def device() -> torch.device:
    """Where this rank computes: the GPU of its place on the machine, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def shards(config: RunConfig) -> bool:
    """Whether models are sharded: with several ranks, and where the learner computes in another precision than its
    weights have, which FSDP provides."""
    return size() > 1 or config.learner.compute_dtype != "model"


@contextmanager
def session(config: RunConfig) -> Iterator[None]:
    """A process group for as long as a run lasts: as the environment says (torchrun's variables), or of one rank where
    models are sharded; none at all where neither asks for it. One that is there is used and left as it is."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if dist.is_initialized() or not (several or shards(config)):
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        backend = "cpu:gloo,cuda:nccl"
    if several:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_main(compute: Callable[[], T]) -> T:
    """What `compute` gives on rank 0, on every rank; the others do not compute. All ranks must call it.

    An error on rank 0 is raised there as it is, and as Abandoned on the others, so that no rank waits for ever.
    """
    if size() == 1:
        return compute()
    value, failed = _tried(compute) if is_main() else (None, None)
    box = [(value, _words(failed))]
    dist.broadcast_object_list(box, src=0)
    value, words = box[0]
    _agree(failed, [words])
    return value  # type: ignore[return-value]


def together(compute: Callable[[], T]) -> T:
    """What `compute` gives on this rank, once every rank has its own. All ranks must call it.

    An error on a rank is raised there as it is, and as Abandoned on the others.
    """
    if size() == 1:
        return compute()
    value, failed = _tried(compute)
    _agree(failed, gathered(_words(failed)))
    return value  # type: ignore[return-value]


def everywhere(compute: Callable[[], T]) -> list[T]:
    """What `compute` gives on every rank, in their order, to all of them; errors as in `together`."""
    if size() == 1:
        return [compute()]
    value, failed = _tried(compute)
    found = gathered((value, _words(failed)))
    _agree(failed, [words for _, words in found])
    return [value for value, _ in found]  # type: ignore[misc]


def _tried(compute: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return compute(), None
    except BaseException as error:  # noqa: BLE001 - raised by `_agree`, once the others know
        return None, error


def _words(failed: BaseException | None) -> str:
    return "" if failed is None else f"{type(failed).__name__}: {failed}"


def _agree(failed: BaseException | None, words: Sequence[str]) -> None:
    """Raises this rank's error, else Abandoned with another rank's words, if there are any."""
    if failed is not None:
        raise failed
    if any(words):
        raise Abandoned(next(filter(None, words)))


def gathered(value: T) -> list[T]:
    """The value of every rank, in their order. All ranks must call it."""
    if size() == 1:
        return [value]
    out: list[T | None] = [None] * size()
    dist.all_gather_object(out, value)
    return out  # type: ignore[return-value]


def merged(sums: Mapping[str, float], maxima: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums added up over ranks, in their order and in float64, and maxima combined: equal on every rank."""
    all_sums, all_maxima = dict[str, float](), dict[str, float]()
    for their_sums, their_maxima in gathered((dict(sums), dict(maxima))):
        for name, value in their_sums.items():
            all_sums[name] = all_sums[name] + value if name in all_sums else value
        for name, value in their_maxima.items():
            all_maxima[name] = max(all_maxima.get(name, value), value)
    return all_sums, all_maxima


def in_turns(parts: Sequence[T], compute: Callable[[T], U]) -> list[U]:
    """`compute` of every part, in order; part i is computed by rank i modulo their number. All ranks must call it."""
    mine = [compute(part) for part in parts[rank() :: size()]]
    theirs = gathered(mine)
    return [theirs[i % size()][i // size()] for i in range(len(parts))]


def _share(batch: Batch, number: int) -> list[int]:
    """The units of rank `number`: a stretch of the batch, of as many units as the others' but for one."""
    units = len(batch.units)
    return list(range(number * units // size(), (number + 1) * units // size()))


def micro_batches(batch: Batch, rows: int) -> list[tuple[Batch, bool]]:
    """This rank's share, cut into micro-batches of at most `rows` rows (0: one), as many as any other rank has.

    Sharded models are assembled by all ranks together, so all must run equally often: a rank that has fewer gets
    the first unit again, without a trained token, marked False. Alone: `Batch.micro_batches`.
    """
    if size() == 1:
        return [(micro, True) for micro in batch.micro_batches(rows)]
    parts = [[batch.take(units)] if (units := _share(batch, number)) else [] for number in range(size())]
    cut = [[micro for part in own for micro in part.micro_batches(rows)] for own in parts]
    mine, passes = cut[rank()], max(map(len, cut))
    first = batch.take([0])
    idle = replace(first, mask_BT=torch.zeros_like(first.mask_BT))
    return [(micro, True) for micro in mine] + [(idle, False)] * (passes - len(mine))


def values(batch: Batch, rows: int, compute: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
    """(B, T) of `compute`, which gives a micro-batch's values: each rank computes its share, and all get the whole.

    Exact: a row comes from one rank. Rows that are in no unit are 0 with several ranks.
    """
    found = [(compute(micro), real) for micro, real in micro_batches(batch, rows)]
    if size() == 1:
        return torch.cat([values_BT for values_BT, _ in found])
    own = [row for unit in _share(batch, rank()) for row in batch.units[unit]]
    out_BT = torch.zeros(batch.mask_BT.shape, dtype=found[0][0].dtype, device=batch.mask_BT.device)
    if own:
        out_BT[own] = torch.cat([values_BT for values_BT, real in found if real])
    dist.all_reduce(out_BT)
    return out_BT
