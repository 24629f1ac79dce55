"""Reward models: one number for an answer to a prompt, learnt from preferences.

A reward model is any `AutoModelForSequenceClassification` with one label. Training is Bradley and Terry's model of
comparisons as in InstructGPT (arXiv 2203.02155, eq. 1).
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from suite.preferences import Preference, length_accuracy, load, split
from suite.randomness import permutation
from suite.reward_config import RewardModelConfig
from suite.starts import resolve_path
from suite.tasks.encoding import encode_completion, encode_prompt

REPORT = "reward_model.json"
"""What a trained reward model's folder holds beside the model: its options and how good it is."""

CALIBRATION_BINS = 10

_HEADS = {r"^v_head\.": "score."}
"""Heads of other names that mean the same: Athene-RM's."""


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, max_length: int = 0) -> tuple[int, ...]:
    """The ids that are scored, with exactly one BOS if the tokenizer has one; at most `max_length` (0 = all).

    With a chat template: a user turn and the answer as the assistant's, closed by the CLS token if the tokenizer
    has one (where Athene-RM reads its score). Without: prompt and answer, closed by the EOS.
    """
    if not tokenizer.chat_template:
        ids = (*encode_prompt(tokenizer, prompt, chat=False), *encode_completion(tokenizer, answer))
    else:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        found = list(
            tokenizer.encode(str(tokenizer.apply_chat_template(turns, tokenize=False)), add_special_tokens=False)
        )
        bos, cls = tokenizer.bos_token_id, tokenizer.cls_token_id
        if bos is not None and bos != tokenizer.eos_token_id and bos not in found:
            found.insert(0, bos)
        ids = (*found, *([] if cls is None else [cls]))
    return ids[: max_length or None]


def pad(rows: Sequence[tuple[int, ...]], pad_id: int, side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention (B, L), padded on either side."""
    width = max(map(len, rows))
    ids, attention = torch.full((len(rows), width), pad_id), torch.zeros((len(rows), width), dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[number, place], attention[number, place] = torch.tensor(row), 1
    return ids, attention


def read_scores(model: PreTrainedModel, ids_BL: torch.Tensor, attention_BL: torch.Tensor) -> torch.Tensor:
    """One score (B,), fp32, per row, read at its last token with attention, whatever the side of the padding.

    The attention mask alone says what padding is: the EOS may serve as padding and is still read where it closes an
    answer. A model without a head per token (an encoder with a pooler) reads where it was trained to.
    """
    head = getattr(model, "score", None)
    if head is None:
        return model(input_ids=ids_BL, attention_mask=attention_BL).logits[:, 0].float()
    backbone = model.base_model
    position = {"position_ids": (attention_BL.cumsum(-1) - 1).clamp(min=0)}
    takes = inspect.signature(backbone.forward).parameters
    hidden_BLD = backbone(
        input_ids=ids_BL, attention_mask=attention_BL, **(position if "position_ids" in takes else {})
    ).last_hidden_state
    last_B = (attention_BL * torch.arange(1, ids_BL.shape[1] + 1, device=ids_BL.device)).argmax(-1)
    return head(hidden_BLD[torch.arange(len(last_B), device=ids_BL.device), last_B]).squeeze(-1).float()


class ScalarReward:
    """A reward model that scores answers."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 32) -> None:
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size

    @classmethod
    def load(cls, path: str, *, dtype: str = "float32", trust_remote_code: bool = False) -> ScalarReward:
        """From a hub id or folder; safetensors only.

        Raises ValueError if it cannot be had, has more than one label, or has no trained head.
        """
        return cls(*_load(path, dtype, trust_remote_code, new_head=False))

    def score(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """One score per completion, in order; the higher the better, without a unit."""
        return self.score_ids([encode(self.tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)])

    @torch.inference_mode()
    def score_ids(self, rows: Sequence[tuple[int, ...]]) -> list[float]:
        """One score per sequence of ids, in order. Batches hold rows of like length."""
        out, order = [math.nan] * len(rows), sorted(range(len(rows)), key=lambda index: len(rows[index]))
        for start in range(0, len(order), self.batch_size):
            chosen = order[start : start + self.batch_size]
            ids, attention = pad([rows[index] for index in chosen], _pad_id(self.tokenizer))
            found = read_scores(self.model, ids.to(self.model.device), attention.to(self.model.device))
            for index, value in zip(chosen, found.tolist(), strict=True):
                out[index] = value
        return out


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def _load(
    path: str, dtype: str, trust_remote_code: bool, *, new_head: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer. With `new_head` a model without a trained head gets a random one."""
    folder, common = resolve_path(path, "reward model"), {"trust_remote_code": trust_remote_code}
    words = transformers.utils.logging
    words.disable_progress_bar()
    before = words.get_verbosity()
    words.set_verbosity_error()  # what its report says of missing weights is said below, or is meant
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **common)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=getattr(torch, dtype), use_safetensors=True, key_mapping=_HEADS,
            ignore_mismatched_sizes=True, output_loading_info=True, **common,
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"reward model: cannot load {path!r}: {str(error).splitlines()[0]}") from error
    finally:
        words.set_verbosity(before)
    if found["mismatched_keys"]:
        name, theirs, _ = sorted(found["mismatched_keys"])[0]
        raise ValueError(f"the reward model {path!r} has {theirs[0]} labels ({name}); a scalar reward has one")
    if found["missing_keys"] and not new_head:
        missing = ", ".join(sorted(found["missing_keys"]))
        raise ValueError(
            f"{path!r} is no reward model: its weights lack {missing}; train one with `suite reward-model train`"
        )
    model.config.pad_token_id = _pad_id(tokenizer)
    return model, tokenizer


def bradley_terry_loss(scores_B: torch.Tensor, pairs: Sequence[Sequence[tuple[int, int]]]) -> torch.Tensor:
    """Mean over prompts of the mean over a prompt's pairs of -logsigmoid(score of better - score of worse).

    `pairs` holds, for each prompt, rows of `scores_B` (InstructGPT, eq. 1: 1 / C(K, 2) within a prompt).
    """
    total = scores_B.new_zeros(())
    for mine in pairs:
        better, worse = (torch.tensor([pair[side] for pair in mine]) for side in (0, 1))
        total = total - logsigmoid(scores_B[better] - scores_B[worse]).mean()
    return total / max(len(pairs), 1)


@dataclass(frozen=True)
class Quality:
    """How well scores predict preferences; means over pairs, each prompt's pairs counted alone."""

    pairs: int
    accuracy: float
    """Share of pairs whose better answer has the higher score; equal scores count half."""
    margin: float
    """Mean of score of better - score of worse."""
    loss: float
    """Mean of -log P, with P = sigmoid(margin) the probability given to the preference that was stated, nats."""
    brier: float
    """Mean of (1 - P)^2: 0 is perfect, 0.25 is what no opinion has."""
    ece: float
    """Expected calibration error: |share right - mean confidence|, over ten bins of confidence max(P, 1 - P)."""
    length_accuracy: float
    """Share of pairs whose better answer is the longer one (characters), equal lengths counting half."""


def quality(margins: Sequence[float], longer_wins: float) -> Quality:
    """The measures of margins (score of better - score of worse). NaN without any."""
    margin = torch.tensor(margins, dtype=torch.float64)
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    sure = torch.sigmoid(margin.abs())
    place = ((sure - 0.5) * 2 * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    gaps = [(right - sure)[place == index].sum().abs() for index in range(CALIBRATION_BINS)]
    return Quality(
        len(margins), float(right.mean()), float(margin.mean()), float(-logsigmoid(margin).mean()),
        float(((1 - torch.sigmoid(margin)) ** 2).mean()), float(sum(gaps)) / max(len(margins), 1), longer_wins,
    )  # fmt: skip


def evaluate(reward: ScalarReward, preferences: Sequence[Preference], max_length: int = 0) -> Quality:
    """How well a reward model predicts preferences; each answer is scored once."""
    rows = [encode(reward.tokenizer, p.prompt, answer, max_length) for p in preferences for answer in p.answers]
    scores = iter(reward.score_ids(rows))
    margins = []
    for preference in preferences:
        mine = [next(scores) for _ in preference.answers]
        margins += [mine[better] - mine[worse] for better, worse in preference.pairs]
    return quality(margins, length_accuracy(preferences))


def train(
    config: RewardModelConfig,
    folder: Path,
    preferences: Sequence[Preference] | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train on the configured (or the given) preferences and write a plain Hugging Face folder.

    Beside the model lie `metrics.jsonl` (a row per optimizer step) and `reward_model.json` (options, and the quality on
    held-out prompts, which is returned). Equal options and preferences give equal weights. Raises ValueError for
    options or data that cannot work and for a folder that holds a model already.
    """
    check(config)
    if (folder / "config.json").exists():
        raise ValueError(f"{folder} holds a model already; give another folder")
    learnt, held_out = split(load(config) if preferences is None else preferences, config.held_out)
    if not learnt or (config.held_out and not held_out):
        raise ValueError(
            f"{len(learnt)} prompts to train on and {len(held_out)} held out: change held_out or give more"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model, tokenizer = _load(config.model, config.dtype, config.trust_remote_code, new_head=True)
    reward, began = ScalarReward(model, tokenizer), time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for row in _steps(config, reward, learnt):
            file.write(json.dumps(row) + "\n")
            if say:
                say(f"step {row['step']} of {row['steps']}   loss {row['loss']:.4f}   accuracy {row['accuracy']:.3f}")
    found = {"train_prompts": len(learnt), "held_out_prompts": len(held_out), "seconds": time.perf_counter() - began}
    if held_out:
        found.update(asdict(evaluate(reward, held_out, config.max_length)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report = {"options": asdict(config), "held_out": found}
    (folder / REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return found


def check(config: RewardModelConfig) -> None:
    """Raises ValueError, naming the option, for a value that cannot be."""
    least = {"epochs": 1, "batch_prompts": 1, "micro_batch_size": 0, "max_length": 2, "task_pairs": 1, "seed": 0}
    least |= {"weight_decay": 0, "max_grad_norm": 0}
    for name, low in least.items():
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) >= low):
            raise ValueError(f"{name} is {getattr(config, name)} and must be at least {low}")
    if not (math.isfinite(config.lr) and config.lr > 0):
        raise ValueError(f"lr is {config.lr} and must be above 0")
    if not 0 <= config.held_out < 1:
        raise ValueError(f"held_out is {config.held_out} and must be at least 0 and below 1")
    if not 0 <= config.final_lr_share <= 1:
        raise ValueError(f"final_lr_share is {config.final_lr_share} and must be from 0 to 1")


def _steps(config: RewardModelConfig, reward: ScalarReward, learnt: Sequence[Preference]) -> Any:
    """Train, and yield a row of metrics per optimizer step."""
    model = reward.model
    rows = [[encode(reward.tokenizer, p.prompt, answer, config.max_length) for answer in p.answers] for p in learnt]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    per_epoch = math.ceil(len(learnt) / config.batch_prompts)
    steps = config.epochs * per_epoch
    for epoch in range(config.epochs):
        order = permutation(len(learnt), config.seed, epoch, "reward model")
        for number in range(per_epoch):
            step = epoch * per_epoch + number
            chosen = order[number * config.batch_prompts : (number + 1) * config.batch_prompts]
            optimizer.zero_grad()
            loss, margins = 0.0, list[float]()
            for part in micro_batches([len(rows[index]) for index in chosen], config.micro_batch_size):
                mine = [chosen[place] for place in part]
                share, found = _backward(reward, [rows[i] for i in mine], [learnt[i].pairs for i in mine], len(chosen))
                loss, margins = loss + share, margins + found
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm or math.inf))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise RuntimeError(f"step {step + 1}: the loss is {loss} and its gradient's norm {norm}")
            low = config.final_lr_share
            rate = config.lr * (low + (1 - low) * (1 + math.cos(math.pi * step / steps)) / 2)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            seen = quality(margins, math.nan)
            yield {
                "step": step + 1, "steps": steps, "epoch": epoch, "loss": loss, "accuracy": seen.accuracy,
                "margin": seen.margin, "brier": seen.brier, "ece": seen.ece, "grad_norm": norm, "lr": rate,
            }  # fmt: skip


def micro_batches(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Prompts in order, cut into parts of at most `limit` answers (0: one part); a prompt is never cut."""
    if not limit:
        return [list(range(len(sizes)))]
    parts: list[list[int]] = []
    filled = limit
    for index, size in enumerate(sizes):
        if filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(index)
        filled += size
    return parts


def _backward(
    reward: ScalarReward,
    rows: Sequence[Sequence[tuple[int, ...]]],
    pairs: Sequence[Sequence[tuple[int, int]]],
    prompts: int,
) -> tuple[float, list[float]]:
    """A part's share of the step's loss, its gradient added to the parameters', and its margins."""
    ids, attention = pad([row for mine in rows for row in mine], _pad_id(reward.tokenizer))
    scores = read_scores(reward.model, ids.to(reward.model.device), attention.to(reward.model.device))
    starts = [sum(map(len, rows[:index])) for index in range(len(rows))]
    placed = [[(start + w, start + x) for w, x in mine] for start, mine in zip(starts, pairs, strict=True)]
    loss = bradley_terry_loss(scores, placed) * (len(rows) / prompts)
    loss.backward()
    held = scores.detach()
    return float(loss.detach()), [float(held[w] - held[x]) for mine in placed for w, x in mine]
