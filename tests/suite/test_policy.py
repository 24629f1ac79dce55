"""Log-probs of a row are the row's alone; padding, BOS and EOS are where they belong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from suite.batch import Batch, collate, pad
from suite.config import ModelConfig
from suite.grading import Verdict
from suite.policy import Policy, token_logprobs
from suite.protocols import Completion, Prompt, Rollout, Selected
from suite.seed_model import tokenizer
from suite.starts import resolve_path
from suite.tasks.encoding import encode_completion, encode_prompt

PROMPTS = [(1, 5, 6, 7, 8), (1, 9), (1, 4, 4)]
COMPLETIONS = [(3, 4, 2), (10, 11, 12, 13, 2), (7,)]


def random_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":  # absolute positions: wrong position ids show
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=20, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
        ).eval()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )
    ).eval()  # fmt: skip


def batch_of(prompts: list[tuple[int, ...]], completions: list[tuple[int, ...]], pad_id: int = 0) -> Batch:
    ids, attention, mask = pad(prompts, completions, pad_id)
    rows = torch.zeros(len(prompts))
    return Batch(ids, attention, mask, torch.zeros(mask.shape), rows, rows, rows, [[i] for i in range(len(prompts))])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_plain_softmax_of_the_row_alone(kind: str, temperature: float) -> None:
    model = random_model(kind)
    with torch.no_grad():
        together, entropy = token_logprobs(model, batch_of(PROMPTS, COMPLETIONS), temperature=temperature, entropy=True)
    assert entropy is not None
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0].double()
        for t, token in enumerate(completion):
            scores = logits[len(prompt) + t - 1]
            by_hand = float(scores[token] / temperature - (scores / temperature).logsumexp(0))
            assert float(together[row, t]) == pytest.approx(by_hand, abs=2e-6)
            p = scores.softmax(0)  # entropy is of temperature 1, whatever the sampling temperature
            assert float(entropy[row, t]) == pytest.approx(-float((p * p.log()).sum()), abs=5e-6)
        assert together[row, len(completion) :].eq(0).all()
        assert entropy[row, len(completion) :].eq(0).all()


def test_padding_carries_no_gradient_even_where_it_is_nan() -> None:
    class Broken(torch.nn.Module):
        """Gives NaN logits wherever there is padding."""

        def __init__(self, model: PreTrainedModel) -> None:
            super().__init__()
            self.inner = model

        def forward(self, attention_mask: torch.Tensor, **kwargs: object) -> object:
            out = self.inner(attention_mask=attention_mask, **kwargs)
            keep = attention_mask[:, -out.logits.shape[1] :, None].bool()
            out.logits = torch.where(keep, out.logits, torch.nan)
            return out

    gradients = []
    for wrap in (lambda m: m, Broken):
        model = random_model("llama")
        logprobs, entropy = token_logprobs(wrap(model), batch_of(PROMPTS, COMPLETIONS), temperature=1.0, entropy=True)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for clean, broken in zip(*gradients, strict=True):
        assert clean.isfinite().all()
        assert torch.allclose(clean, broken, atol=1e-6)


def test_the_closing_eos_is_trained_where_padding_is_the_eos() -> None:
    prompt = Prompt("p", "", "")
    rollouts = [
        Rollout(
            prompt, PROMPTS[i], Completion(ids, (-0.5,) * len(ids), "stop", 0), "", Verdict("right", "1", None), 1, i
        )
        for i, ids in enumerate(COMPLETIONS)
    ]
    batch = collate(Selected(rollouts, [[0], [1], [2]]), pad_id=2, group_of=[0, 0, 0])
    assert batch.mask_BT.sum(1).tolist() == [3, 5, 1]
    assert batch.completion_ids_BT[batch.mask_BT].tolist() == [3, 4, 2, 10, 11, 12, 13, 2, 7]  # as sampled
    assert batch.sampler_logprobs_BT[batch.mask_BT].tolist() == [-0.5] * 9
    assert batch.attention_mask_BL.sum(1).tolist() == [8, 7, 4]


def test_exactly_one_bos() -> None:
    words = tokenizer()
    bos = words.bos_token_id
    assert encode_prompt(words, "1+2=", chat=False).count(bos) == 1
    assert encode_prompt(words, "<bos>1+2=", chat=False).count(bos) == 1
    with pytest.raises(ValueError, match="no chat template"):
        encode_prompt(words, "1+2=", chat=True)
    prints_bos, without = tokenizer(), tokenizer()
    prints_bos.chat_template = "<bos>{% for m in messages %}{{ m['content'] }}={% endfor %}"
    without.chat_template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    plain = encode_prompt(words, "1+2=", chat=False)
    assert encode_prompt(prints_bos, "1+2", chat=True) == encode_prompt(without, "1+2", chat=True) == plain
    twice = tokenizer()
    twice.chat_template = "<bos><bos>{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="2 BOS"):
        encode_prompt(twice, "1+2", chat=True)


def test_a_given_completion_is_closed_by_one_eos() -> None:
    words = tokenizer()
    ids = encode_completion(words, "\\boxed{12}")
    assert ids[-1] == words.eos_token_id
    assert ids.count(words.eos_token_id) == 1
    assert len(ids) == 5


def test_the_tokenizer_and_model_of_a_seed_are_a_plain_folder() -> None:
    policy = Policy.load(ModelConfig())
    assert sum(p.numel() for p in policy.model.parameters()) <= 500_000
    assert not policy.model.config.tie_word_embeddings
    words = policy.tokenizer
    text = "12+7=91;\\boxed{19}"
    ids = words.encode(text, add_special_tokens=False)
    assert len(ids) == len("12+7=91;") + 4
    assert words.decode(ids) == text
    assert policy.stop_ids == (words.eos_token_id,)


def test_mean_entropy_of_a_uniform_model_is_log_vocabulary() -> None:
    policy = Policy.load(ModelConfig())
    size = policy.model.config.vocab_size
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    try:
        with torch.no_grad():
            policy.model.lm_head.weight.zero_()
        entropy, tokens = policy.mean_entropy([(1, 4), (1, 5, 6)], [(7, 2), (8, 9, 2)])
    finally:
        policy.model.load_state_dict(weights)
    assert tokens == 5
    assert entropy == pytest.approx(math.log(size), abs=1e-5)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weights"):
        resolve_path(str(tmp_path))
    with pytest.raises(ValueError, match="there is no folder"):
        resolve_path(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="did you mean 'addition'"):
        resolve_path("seed:additon")
