"""The in-process sampler: keyed noise, processed log-probs, lengths and ends."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from suite.batch import Batch, pad
from suite.config import ModelConfig
from suite.policy import Policy, token_logprobs
from suite.protocols import Completion, Request, Sampling
from suite.randomness import generator
from suite.rollout.in_process import InProcessSampler, draw, processed_logprobs

FREE = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=6)
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=6)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.load(ModelConfig())


@pytest.fixture(scope="module")
def sampler(policy: Policy) -> InProcessSampler:
    return InProcessSampler(policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids, chunk_size=16)


def requests(policy: Policy, texts: list[str], samples: int = 1) -> list[Request]:
    encode = policy.tokenizer.encode
    bos = policy.tokenizer.bos_token_id
    return [
        Request((bos, *encode(text, add_special_tokens=False)), (0, text, sample))
        for text in texts
        for sample in range(samples)
    ]


def recomputed(policy: Policy, asked: list[Request], completions: list[Completion], temperature: float) -> torch.Tensor:
    """The learner's log-probs of the sampled tokens."""
    ids, attention, mask = pad([r.prompt_ids for r in asked], [c.token_ids for c in completions], policy.pad_id)
    rows = torch.zeros(len(asked))
    batch = Batch(ids, attention, mask, rows, rows, rows, rows, [])
    with torch.no_grad():
        return token_logprobs(policy.model, batch, temperature=temperature)[0]


def test_a_rollout_does_not_depend_on_its_batch(policy: Policy, sampler: InProcessSampler) -> None:
    asked = requests(policy, ["12+34=", "5+6=", "99+87=", "40+41="], samples=6)
    together = sampler.generate(asked, FREE)
    backwards = sampler.generate(asked[::-1], FREE)[::-1]
    alone = [sampler.generate([request], FREE)[0] for request in asked]
    tokens = [c.token_ids for c in together]
    assert tokens == [c.token_ids for c in backwards] == [c.token_ids for c in alone]
    assert len(set(tokens[:6])) > 1  # samples of one prompt have noise of their own


def test_sampler_logprobs_are_the_learners_at_the_sampling_temperature(
    policy: Policy, sampler: InProcessSampler
) -> None:
    asked = requests(policy, ["12+34=", "5+6=", "99+87="], samples=4)
    for temperature in (1.0, 0.6):
        completions = sampler.generate(asked, Sampling(temperature, 1.0, 0, 6))
        mine = recomputed(policy, asked, completions, temperature)
        for row, completion in enumerate(completions):
            assert torch.allclose(mine[row, : len(completion.logprobs)], torch.tensor(completion.logprobs), atol=1e-5)
            assert len(completion.logprobs) == len(completion.token_ids)


def test_temperature_is_in_the_logprob() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    at = {t: float(processed_logprobs(logits, Sampling(t, 1.0, 0, 1))[0, 0]) for t in (0.6, 1.0)}
    assert at[0.6] == pytest.approx(-0.203, abs=5e-4)
    assert at[1.0] == pytest.approx(-0.408, abs=5e-4)


def test_truncation_renormalises_over_what_is_kept() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    logits = probabilities.log()
    kept = processed_logprobs(logits, Sampling(1.0, 0.8, 0, 1)).exp()[0]
    assert kept.tolist() == pytest.approx([0.625, 0.375, 0, 0])
    kept = processed_logprobs(logits, Sampling(1.0, 0.81, 0, 1)).exp()[0]
    assert kept.tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])
    kept = processed_logprobs(logits, Sampling(1.0, 0.1, 0, 1)).exp()[0]
    assert kept.tolist() == pytest.approx([1, 0, 0, 0])
    kept = processed_logprobs(logits, Sampling(1.0, 1.0, 3, 1)).exp()[0]
    assert kept.tolist() == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0])


def test_draws_follow_the_distribution_and_never_take_what_is_cut() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3, 0.0])
    uniform = torch.from_numpy(generator("test draws").random(20_000))
    tokens = draw(probabilities.log().expand(20_000, 5), uniform)
    counts = Counter(tokens.tolist())
    assert set(counts) == {0, 2, 3}
    assert chisquare([counts[0], counts[2], counts[3]], [2000, 12000, 6000]).pvalue > 0.001
    ends = draw(probabilities.log().expand(2, 5), torch.tensor([0.0, 1.0 - 1e-12], dtype=torch.float64))
    assert ends.tolist() == [0, 3]


def test_greedy_is_what_transformers_generates(policy: Policy, sampler: InProcessSampler) -> None:
    asked = requests(policy, ["12+34=", "58+77=", "10+10="])
    ours = sampler.generate(asked, GREEDY)
    for request, completion in zip(asked, ours, strict=True):
        ids = torch.tensor([request.prompt_ids])
        theirs = policy.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
        assert tuple(theirs[0, ids.shape[1] :].tolist()) == completion.token_ids


def test_the_end_token_belongs_to_the_completion_and_the_reason_is_true(
    policy: Policy, sampler: InProcessSampler
) -> None:
    asked = requests(policy, ["12+34="], samples=8)
    whole = sampler.generate(asked, FREE)
    cut = sampler.generate(asked, Sampling(1.0, 1.0, 0, 2))
    for full, short in zip(whole, cut, strict=True):
        assert (full.finish_reason == "stop") == (full.token_ids[-1] in policy.stop_ids)
        assert short.token_ids == full.token_ids[:2]  # noise is keyed by position: a budget only cuts
        assert short.finish_reason == ("stop" if short.token_ids[-1] in policy.stop_ids else "length")
    assert {c.finish_reason for c in cut} >= {"length"}


def test_load_copies_and_only_load_changes_the_weights(policy: Policy) -> None:
    learner = InProcessSampler(policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids)
    twin = learner.separate()
    asked = requests(policy, ["12+34=", "58+77="], samples=4)
    before = twin.generate(asked, FREE)
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.3)
        assert twin.generate(asked, FREE) == before
        twin.load(policy.model.state_dict(), 7)
        after = twin.generate(asked, FREE)
        assert {c.version for c in after} == {7}
        gap = max(abs(a - b) for x, y in zip(before, after, strict=True) for a, b in zip(x.logprobs, y.logprobs))
        assert gap > 0.01
        # equal weights give equal log-probs but for rounding, which depends on where tensors lie in memory
        assert math.isclose(after[0].logprobs[0], learner.generate(asked, FREE)[0].logprobs[0], abs_tol=1e-4)
    finally:
        policy.model.load_state_dict(weights)
