"""A model for tests of vLLM: tiny, and with heads of a size that its CPU kernels know."""

from __future__ import annotations

from pathlib import Path

import torch

from suite.seed_model import tokenizer


def make(folder: Path, *, tied: bool, head: int = 32, kv_heads: int = 1, scale: float = 3.0) -> Path:
    """An untrained Llama with two heads of a size that vLLM's kernels know, and the addition tokenizer; `scale` makes
    its log-probs differ from token to token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer("addition")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=2 * head, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=kv_heads,
            intermediate_size=96, max_position_embeddings=128, tie_word_embeddings=tied,
            bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
