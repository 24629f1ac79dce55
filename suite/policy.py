"""A causal language model as a policy: loading, and the log-probs and entropy of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import is_flash_attn_2_available

from suite import distributed
from suite.batch import Batch, pad
from suite.config import FROM_SEED, ModelConfig
from suite.starts import folder_of


def attention_kernel(config: ModelConfig) -> str | None:
    """The kernel to ask transformers for; None leaves the choice to it."""
    if config.attention != "auto":
        return config.attention
    if config.path.startswith(FROM_SEED):
        return "eager"
    # it computes in half precision alone
    flash = config.dtype == "bfloat16" and torch.cuda.is_available() and is_flash_attn_2_available()
    return "flash_attention_2" if flash else None


@dataclass
class Policy:
    """A model with its tokenizer and the ids that matter."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    stop_ids: tuple[int, ...]

    @classmethod
    def load(cls, config: ModelConfig) -> Policy:
        """From a hub id, a folder or `seed:NAME`; safetensors only; evaluation mode, so dropout never acts.

        Raises ValueError if the model cannot be found, is another than the run was declared with, or has no
        end-of-sequence token.
        """
        path = folder_of(config)
        transformers.utils.logging.disable_progress_bar()
        common = {"trust_remote_code": config.trust_remote_code}
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **common)
            model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention_kernel(config),
                use_safetensors=True,
                **common,
            )
        except (OSError, SafetensorError) as error:
            raise ValueError(f"model.path: cannot load {config.path!r}: {str(error).splitlines()[0]}") from error
        broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
        if broken:
            raise ValueError(f"model.path: weights of {config.path!r} are no numbers: {broken[0]}; take whole ones")
        ends = model.generation_config.eos_token_id if model.generation_config else None
        ends = ends if isinstance(ends, list) else [ends]
        stop_ids = tuple(sorted({i for i in (*ends, tokenizer.eos_token_id) if i is not None}))
        if not stop_ids:
            raise ValueError(f"model.path: {config.path!r} has no end-of-sequence token, so no completion would end")
        # padding is masked by position, so the EOS may serve as padding where a tokenizer has none
        pad_id = stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(model.eval().to(distributed.device()), tokenizer, pad_id, stop_ids)

    def logprobs(
        self, batch: Batch, *, temperature: float, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs (B, T), fp32, of the completion tokens at the sampling temperature; if asked for, full-vocabulary
        entropy (B, T), nats, at temperature 1. Masked positions are exactly 0 and carry no gradient.
        """
        return token_logprobs(self.model, batch, temperature=temperature, entropy=entropy)

    @torch.inference_mode()
    def mean_entropy(
        self, prompts: Sequence[tuple[int, ...]], completions: Sequence[tuple[int, ...]], rows: int = 256
    ) -> tuple[float, int]:
        """Mean full-vocabulary entropy (nats, temperature 1) over the completions' tokens, and their number."""
        total, count = 0.0, 0
        for start in range(0, len(completions), rows):
            padded = pad(prompts[start : start + rows], completions[start : start + rows], self.pad_id)
            ids, attention, mask = (part.to(self.model.device) for part in padded)
            logits = _completion_logits(self.model, ids, attention, mask.shape[1])
            total += float(_entropy(logits)[mask].double().sum())
            count += int(mask.sum())
        return total / count, count


def _completion_logits(
    model: PreTrainedModel, ids_BL: torch.Tensor, attention_BL: torch.Tensor, budget: int
) -> torch.Tensor:
    position = (attention_BL.cumsum(-1) - 1).clamp(min=0)
    out = model(input_ids=ids_BL, attention_mask=attention_BL, position_ids=position, logits_to_keep=budget + 1)
    return out.logits[:, :-1].float()


def _entropy(logits_BTV: torch.Tensor) -> torch.Tensor:
    logp = logits_BTV.log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)


def token_logprobs(
    model: PreTrainedModel, batch: Batch, *, temperature: float, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `Policy.logprobs`, for any model on the batch's tokens (the reference's log-probs among them)."""
    mask = batch.mask_BT
    logits = _completion_logits(model, batch.input_ids_BL, batch.attention_mask_BL, mask.shape[1])
    # masked before any logarithm, so that a NaN at padding reaches neither value nor gradient
    logits = logits.masked_fill(~mask.unsqueeze(-1), 0.0)
    chosen = (logits / temperature).log_softmax(-1).gather(-1, batch.completion_ids_BT.unsqueeze(-1)).squeeze(-1)
    logprobs = torch.where(mask, chosen, 0.0)
    return logprobs, torch.where(mask, _entropy(logits), 0.0) if entropy else None
