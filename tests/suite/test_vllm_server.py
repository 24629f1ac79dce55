"""A vLLM engine elsewhere: a real server on the CPU, which `suite serve` starts. The last test ends it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from fakes import POLICY_GRADIENT, rollouts, small, trained
from tiny_llama import make
from vllm_rig import REAL_ENGINE
from vllm_serving import end, serving

from suite.config import ModelConfig
from suite.policy import Policy
from suite.protocols import Request, Sampling
from suite.randomness import generator
from suite.rollout.fingerprints import expected, learner_fingerprint, wrapped
from suite.rollout.in_process import InProcessSampler
from suite.rollout.sync import FOLLOWING, score
from suite.rollout.vllm_engine import EngineDied
from suite.rollout.vllm_server import Server

pytestmark = REAL_ENGINE

FREE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A real server that has loaded its model, and its address."""
    with serving(model, tmp_path_factory.mktemp("server") / "log.txt", "--memory-share", "0.005") as found:
        yield found


@pytest.fixture
def server(process: tuple[subprocess.Popen[bytes], str]) -> Server:
    return Server.connect(process[1])


@pytest.fixture
def policy(model: Path) -> Policy:
    return Policy.load(ModelConfig(path=str(model)))


def prompts(policy: Policy, *texts: str) -> list[tuple[int, ...]]:
    bos = policy.tokenizer.bos_token_id
    return [(bos, *policy.tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def requests(policy: Policy, samples: int) -> list[tuple[tuple[int, ...], int]]:
    found = prompts(policy, "12+34=", "5+6=", "99+87=")
    return [(ids, int(generator(ids, sample).integers(2**62))) for ids in found for sample in range(samples)]


def compare(server: Server, policy: Policy) -> None:
    """Greedy completions, log-probs and checksums are those of the policy's weights."""
    greedy = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=12)
    options = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 12, "stop_token_ids": [*policy.stop_ids]}
    found = prompts(policy, "12+34=", "5+6=", "99+87=", "40+2=")
    (theirs,) = server.stream([[(ids, 0) for ids in found]], options)
    sampler = InProcessSampler(policy.model, pad_id=policy.pad_id, stop_ids=policy.stop_ids)
    mine = sampler.generate([Request(ids, (0, number)) for number, ids in enumerate(found)], greedy)
    assert [ids for ids, _ in theirs] == [completion.token_ids for completion in mine]
    for (_, logprobs), completion in zip(theirs, mine, strict=True):
        assert logprobs == pytest.approx(completion.logprobs, abs=1e-4)
    probes = [(ids * 20)[:80] for ids in found]
    scores, seen = score(policy.model, policy.model.state_dict(), probes), server.ask("probe", probes, FOLLOWING)
    assert [value for tokens, _ in seen for value in tokens] == pytest.approx(scores.tokens.tolist(), abs=2e-5)
    for (_, following), row in zip(seen, scores.following, strict=True):
        assert set(row.topk(FOLLOWING).indices.tolist()) <= set(following)
        assert len(following) <= FOLLOWING + 1
        assert list(following.values()) == pytest.approx([float(row[token]) for token in following], abs=2e-5)
    held, fused = server.ask("fingerprint")
    kinds = {kind for sums in held.values() for kind, _ in sums}
    sums = learner_fingerprint(policy.model.state_dict(), torch.float32, kinds)
    assert len(held) > 8
    for name, ((kind, value),) in held.items():
        want = expected(name, kind, sums, fused)
        assert want is not None
        assert value == wrapped(want)


def test_the_server_is_what_it_was_asked_to_be(server: Server, policy: Policy) -> None:
    assert (server.dtype, server.max_model_len, server.cpu, server.transfer) == ("float32", 128, True, "file")
    assert server.world_size == 1
    compare(server, policy)


def test_a_request_is_answered_by_its_seed_whatever_is_beside_it(server: Server, policy: Policy) -> None:
    options, found = FREE | {"stop_token_ids": [*policy.stop_ids]}, requests(policy, 6)
    (together,) = server.stream([found], options)
    (reverse,) = server.stream([found[::-1]], options)
    assert [ids for ids, _ in reverse][::-1] == [ids for ids, _ in together]
    for one, (ids, _) in zip(found[:3], together, strict=False):
        ((alone,),) = server.stream([[one]], options)
        assert alone[0] == ids
    assert len({ids for ids, _ in together}) > 12
    (stop,) = policy.stop_ids
    (more,) = server.stream([requests(policy, 60)], options)
    assert all(stop not in ids[:-1] and (ids[-1] == stop or len(ids) == 6) for ids, _ in more)
    assert {ids[-1] == stop for ids, _ in more} == {True, False}
    assert all(len(ids) == len(logprobs) for ids, logprobs in more)


def test_changed_weights_arrive_bit_for_bit_and_the_first_ones_come_back(
    server: Server, policy: Policy, model: Path, tmp_path: Path
) -> None:
    first, noise = Policy.load(ModelConfig(path=str(model))), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    policy.model.save_pretrained(tmp_path)
    for request, right in ((["reload", str(tmp_path)], policy), (["reload_original"], first)):
        server.ask(*request)
        server.ask("derive")
        server.ask("forget")
        compare(server, right)


def test_a_generation_under_way_is_given_up_for_whatever_else_is_asked(server: Server, policy: Policy) -> None:
    options, found = FREE | {"stop_token_ids": [], "max_tokens": 100}, requests(policy, 100)
    stream = server.stream([found[:4], found], options)
    assert len(next(stream)) == 4
    server.ask("forget")  # which vLLM does only where no request is left
    with pytest.raises(RuntimeError, match="asked something else after 1 of 2 batches"):
        next(stream)
    (first,) = server.stream([found[:4]], options)
    assert [len(ids) for ids, _ in first] == [100] * 4


def test_a_run_samples_from_a_server_and_the_next_one_starts_from_its_checkpoint_again(
    process: tuple[subprocess.Popen[bytes], str], model: Path, tmp_path: Path
) -> None:
    """In windows as step by step; the weights that the first run leaves in the server are not the second one's."""
    options = {
        "model__path": str(model), "rollout__engine": "vllm_server", "rollout__server_url": process[1],
        "rollout__num_prompts": 4, "rollout__sync_period": 3, "reward__shaping": "soft_overlong",
        "reward__shaping_coef": 1.0, "optim__lr": 1e-3,
    }  # fmt: skip
    _, tracker = trained(small(**POLICY_GRADIENT | options), tmp_path / "window")
    trained(small(**POLICY_GRADIENT | options, rollout__window_rollouts=1), tmp_path / "steps")
    windowed, steps = rollouts(tmp_path / "window"), rollouts(tmp_path / "steps")
    pd.testing.assert_frame_equal(windowed, steps)
    assert windowed["version"].unique().tolist() == [0, 3]
    assert tracker.column("sync/loads")[-1] == 2
    assert max(tracker.column("sync/logprob_gap")) < 1e-4
    assert max(tracker.column("loss/grad_norm")) > 0
    wrong = small(**POLICY_GRADIENT | options, rollout__engine_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"computes in float32, and rollout\.engine_dtype asks for bfloat16"):
        trained(wrong, tmp_path / "wrong")


def test_a_request_that_the_server_refuses_is_said_in_its_words(server: Server) -> None:
    with pytest.raises(EngineDied, match=r"the vLLM server at .* failed: HTTP 400: .*maximum"):
        list(server.stream([[((3,) * 200, 0)]], FREE | {"stop_token_ids": []}))


def test_a_server_that_is_killed_in_mid_generation_is_dead(
    process: tuple[subprocess.Popen[bytes], str], server: Server, policy: Policy
) -> None:
    found = requests(policy, 2000)  # 600,000 tokens: no machine has generated them before the server is killed
    stream = server.stream([found[:4], found], FREE | {"stop_token_ids": [], "max_tokens": 100})
    next(stream)
    end(process[0])
    with pytest.raises(EngineDied, match=r"the vLLM server at http://127\.0\.0\.1:.* is gone: "):
        next(stream)
    with pytest.raises(ValueError, match="nobody answers"):
        Server.connect(process[1])
