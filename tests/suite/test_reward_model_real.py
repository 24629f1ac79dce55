"""A small reward model on real preferences: AlpacaEval's annotations, held-out prompts, beside length alone."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from suite.preferences import Preference, length_accuracy, load, split
from suite.reward_config import RewardModelConfig
from suite.reward_model import train

_TOKEN = r"\n|\w+|[^\w\s]"


def words_of(preferences: list[Preference], size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of the most frequent words, signs and line ends of the training answers."""
    counts = Counter(t for p in preferences for a in p.answers for t in re.findall(_TOKEN, a.lower()))
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = [*special, *(word for word, _ in counts.most_common(size - len(special)))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), "removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def base(folder: Path, preferences: list[Preference], vocabulary: int, width: int) -> None:
    """An untrained language model of one layer."""
    words = words_of(preferences, vocabulary)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1,
            eos_token_id=2,
        )
    ).save_pretrained(folder)  # fmt: skip
    words.save_pretrained(folder)


def alpaca_options(data: Path, **changes: Any) -> RewardModelConfig:
    return RewardModelConfig(
        data=str(data / "alpaca_eval" / "FuseChat-Llama-3.1-8B-Instruct" / "annotations.json"),
        prompt_column="instruction", chosen_column="output_1", rejected_column="output_2",
        preference_column="preference", **changes,
    )  # fmt: skip


@pytest.mark.slow
def test_held_out_accuracy_against_length_alone(test_data: Path, tmp_path: Path) -> None:
    """Better than chance and calibrated, and on a par with length: 486 prompts do not carry a text model further.

    The longer answer is preferred in 0.607 of the 318 held-out pairs (standard error 0.027); this model with seeds 0 to
    4 is right in 0.610, 0.607, 0.579, 0.626 and 0.601. The bounds below are two standard errors.
    """
    options = alpaca_options(
        test_data, model=str(tmp_path / "base"), held_out=0.4, epochs=3, batch_prompts=16, lr=1e-3, weight_decay=0.1,
        max_length=384, micro_batch_size=32,
    )  # fmt: skip
    preferences = load(options)
    learnt, held_out = split(preferences, options.held_out)
    base(tmp_path / "base", learnt, 500, 16)
    found = train(options, tmp_path / "rm", preferences)
    assert (len(preferences), len(held_out), found["pairs"]) == (804, 318, 318)
    assert found["length_accuracy"] == length_accuracy(held_out) == pytest.approx(193 / 318)
    error = math.sqrt(0.25 / found["pairs"])
    assert found["accuracy"] > 0.5 + 2 * error
    assert found["accuracy"] > found["length_accuracy"] - 2 * error
    assert found["brier"] < 0.25
    assert found["loss"] < math.log(2)
