"""Rollouts as tensors: prompts padded on the left, completions on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from suite.protocols import LossOutput, Selected


@dataclass
class Batch:
    """B sequences. Values of masked positions mean nothing and never reach a result."""

    input_ids_BL: torch.Tensor
    attention_mask_BL: torch.Tensor
    mask_BT: torch.Tensor
    """Trained tokens: the completion's, its EOS included (bool)."""
    sampler_logprobs_BT: torch.Tensor
    rewards_B: torch.Tensor
    group_B: torch.Tensor
    """Index of the row's prompt in the rollout batch: rows of a group share it."""
    truncated_B: torch.Tensor
    units: list[list[int]]
    fresh: bool = False
    """Whether the weights have not moved since the batch was sampled from: its first update is to come."""
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per-row values of the objective, shape (B,)."""
    token_rewards_BT: torch.Tensor | None = None
    """Rewards given token by token, beside the scalar one; None where there are none."""
    learner_logprobs_BT: torch.Tensor | None = None
    ref_logprobs_BT: torch.Tensor | None = None
    values_BT: torch.Tensor | None = None
    """The critic's value of the state in which each token was chosen, as the batch was prepared."""
    rewards_BT: torch.Tensor | None = None
    """Every reward that the advantages were made of, token by token, the scalar one on the last trained token."""
    returns_BT: torch.Tensor | None = None
    """The critic's targets."""
    advantages_BT: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids_BL.shape[0]

    @property
    def completion_ids_BT(self) -> torch.Tensor:
        return self.input_ids_BL[:, -self.mask_BT.shape[1] :]

    def to(self, device: torch.device) -> Batch:
        """The batch with all its tensors on a device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved, targets={name: value.to(device) for name, value in self.targets.items()})

    def take(self, units: Sequence[int]) -> Batch:
        """The sub-batch of the given units, in their order; padding stays as wide as it was."""
        rows = [row for unit in units for row in self.units[unit]]
        index = torch.tensor(rows, dtype=torch.long, device=self.mask_BT.device)
        new_units, start = [], 0
        for unit in units:
            size = len(self.units[unit])
            new_units.append(list(range(start, start + size)))
            start += size

        def pick(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[index]

        return replace(
            self,
            input_ids_BL=self.input_ids_BL[index],
            attention_mask_BL=self.attention_mask_BL[index],
            mask_BT=self.mask_BT[index],
            sampler_logprobs_BT=self.sampler_logprobs_BT[index],
            rewards_B=self.rewards_B[index],
            group_B=self.group_B[index],
            truncated_B=self.truncated_B[index],
            units=new_units,
            targets={name: tensor[index] for name, tensor in self.targets.items()},
            token_rewards_BT=pick(self.token_rewards_BT),
            learner_logprobs_BT=pick(self.learner_logprobs_BT),
            ref_logprobs_BT=pick(self.ref_logprobs_BT),
            values_BT=pick(self.values_BT),
            rewards_BT=pick(self.rewards_BT),
            returns_BT=pick(self.returns_BT),
            advantages_BT=pick(self.advantages_BT),
        )

    def micro_batches(self, size: int) -> list[Batch]:
        """The batch in order, cut between units into parts of at most `size` rows (0: one part)."""
        if size == 0 or len(self) <= size:
            return [self]
        parts: list[list[int]] = []
        rows = size
        for unit, members in enumerate(self.units):
            if rows + len(members) > size:
                parts.append([])
                rows = 0
            parts[-1].append(unit)
            rows += len(members)
        return [self.take(part) for part in parts]


def pad(
    prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids (B, L), attention (B, L) and completion mask (B, T): prompts padded on the left, completions on the right."""
    width = max((len(p) for p in prompts), default=1)
    budget = max((len(c) for c in completions), default=1)
    ids = torch.full((len(prompts), width + budget), pad_id, dtype=torch.long)
    attention = torch.zeros((len(prompts), width + budget), dtype=torch.long)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = prompt + completion
        start = width - len(prompt)
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        attention[row, start : start + len(tokens)] = 1
    return ids, attention, attention[:, width:].bool()


def collate(selected: Selected, pad_id: int, group_of: Sequence[int], *, mask_truncated: bool = False) -> Batch:
    """Tensors from selected rollouts, token for token as sampled. `group_of` gives each row's prompt index.

    With `mask_truncated` (overlong filtering) truncated rows have no trained token: they are in no numerator and no
    denominator of a loss. Their rewards still count in the statistics of their group.
    """
    rollouts = selected.rollouts
    prompts, completions = [r.prompt_ids for r in rollouts], [r.completion.token_ids for r in rollouts]
    ids, attention, mask = pad(prompts, completions, pad_id)
    logprobs = _rows([r.completion.logprobs for r in rollouts], mask)
    token_rewards = _rows([r.token_rewards for r in rollouts], mask) if any(r.token_rewards for r in rollouts) else None
    truncated_B = torch.tensor([r.truncated for r in rollouts], dtype=torch.bool)
    return Batch(
        input_ids_BL=ids,
        attention_mask_BL=attention,
        mask_BT=mask & ~truncated_B[:, None] if mask_truncated else mask,
        sampler_logprobs_BT=logprobs,
        rewards_B=torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
        group_B=torch.tensor(list(group_of), dtype=torch.long),
        truncated_B=truncated_B,
        units=selected.units,
        targets={name: torch.tensor(values, dtype=torch.float32) for name, values in selected.targets.items()},
        token_rewards_BT=token_rewards,
    )


def _rows(values: Sequence[tuple[float, ...]], mask_BT: torch.Tensor) -> torch.Tensor:
    """(B, T) of per-token values, 0 where a row has none."""
    out_BT = torch.zeros(mask_BT.shape)
    for row, row_values in enumerate(values):
        assert len(row_values) in (0, int(mask_BT[row].sum()))
        out_BT[row, : len(row_values)] = torch.tensor(row_values)
    return out_BT


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Mean over the masked-in positions, in float64; NaN if there are none."""
    return float(values_BT[mask_BT].double().mean())


def compare(out: LossOutput, micro: Batch, logprobs_BT: torch.Tensor, tokens: int) -> None:
    """Add a micro-batch's share of what tells the learner from the sampler and the reference, over the `tokens` trained
    tokens of an optimizer step. Nothing where a batch has no such log-probs.

    `kl/sampler` and `kl/ref`: means of sampler_logprobs - logprobs and of logprobs - ref_logprobs (k1).
    `mismatch/ratio_mean`, `mismatch/ratio_max`: of exp(logprobs - sampler_logprobs), which no bound has touched.
    """
    for name, other_BT, sign in (("kl/sampler", micro.sampler_logprobs_BT, -1), ("kl/ref", micro.ref_logprobs_BT, 1)):
        if other_BT is None or other_BT[micro.mask_BT].isnan().any():
            continue
        gaps = (logprobs_BT - other_BT)[micro.mask_BT].double()
        out.sums[name] = sign * float(gaps.sum()) / max(tokens, 1)
        if name == "kl/sampler" and len(gaps):
            ratios = gaps.exp()
            out.sums["mismatch/ratio_mean"] = float(ratios.sum()) / tokens
            out.maxima["mismatch/ratio_max"] = float(ratios.max())
