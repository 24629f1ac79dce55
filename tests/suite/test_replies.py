"""Replies: the hidden preference by hand, the pairs drawn from it, the reward model that approximates it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from fakes import POLICY_GRADIENT, small, trained

from suite import seed_model
from suite.config import RunConfig, apply
from suite.protocols import Task
from suite.randomness import generator
from suite.tasks import build, replies
from suite.tasks.replies import Errand, comparisons, errands, hidden_reward, parse, sample_reply

TEA = Errand("bring", "tea", "tom")


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("", -36 / 16),
        (" tea", 1.5 - 25 / 16),
        (" tom", 1.0 - 25 / 16),
        (" tea tea", 1.5 - 1),  # named once or twice is the same
        (" rice ann", -1),  # another thing and another person are just words
        (" certainly tom your tea is here", 0.5 + 1.0 + 1.5),
        (" please please please", 0.5 - 9 / 16),  # the same word is polite once
        (" please thanks sure gladly", 1.5 - 4 / 16),  # and three are enough
        (" no tea tom", 2.5 - 1 - 9 / 16),
        (" no no never", -3 - 9 / 16),
        (" tea tom please thanks sure" + " well" * 11, 1.5 + 1 + 1.5 - 100 / 16),
    ],
)
def test_the_hidden_preference_by_hand(reply: str, wanted: float) -> None:
    assert hidden_reward(TEA, reply) == pytest.approx(wanted)


def test_requests_are_split_and_read_back() -> None:
    splits = errands()
    assert {split: len(found) for split, found in splits.items()} == {"test": 2000, "validation": 500, "train": 2620}
    assert len({errand for found in splits.values() for errand in found}) == 5120
    assert TEA.text == "bring tea, tom:"
    assert all(parse(errand.text) == errand for found in splits.values() for errand in found[:50])


def test_every_word_is_one_token_and_text_comes_back() -> None:
    words = seed_model.tokenizer("replies")
    for errand in errands()["train"][:20]:
        reply = sample_reply(errand, generator("test", errand.text))
        ids = words.encode(errand.text + reply, add_special_tokens=False)
        assert words.unk_token_id not in ids
        assert len(ids) == 5 + len(reply.split())
        assert words.decode(ids) == errand.text + reply
    both = seed_model.tokenizer("addition", "replies")
    assert both.decode(both.encode("34+57=19", add_special_tokens=False)) == "34+57=19"
    # the arithmetic tasks keep their own small alphabet
    assert len(seed_model.tokenizer()) == 19
    assert len({*replies.VERBS, *replies.REPLY_WORDS}) == len(replies.VERBS) + len(replies.REPLY_WORDS)


def test_comparisons_are_keyed_and_as_noisy_as_the_preference_says() -> None:
    found = comparisons(1500)
    assert found[:20] == comparisons(20)
    assert all(c.chosen != c.rejected for c in found)
    margins = [hidden_reward(parse(c.prompt), c.chosen) - hidden_reward(parse(c.prompt), c.rejected) for c in found]
    agree = np.mean([(m > 0) + 0.5 * (m == 0) for m in margins])
    expected = np.mean([1 / (1 + math.exp(-abs(m))) for m in margins])
    assert agree == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 1500))
    train = {errand.text for errand in errands()["train"]}
    assert {c.prompt for c in found} <= train
    assert not {c.prompt for c in comparisons(50, "test")} & train


def test_the_reward_is_the_model_s_and_the_hidden_preference_only_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Model:
        def score(self, prompts: list[str], completions: list[str]) -> list[float]:
            return [float(len(text.split())) if "no" not in text else math.nan for text in completions]

    asked = []
    monkeypatch.setattr(replies.scored, "load", lambda path: asked.append(path) or Model())
    config = apply(RunConfig(), {"task.name": "replies", "task.reward_model": "org/reward"})
    task = build(config, seed_model.tokenizer("replies"))
    assert isinstance(task, Task)
    assert task.max_completion_length == 16
    prompts = task.held_out("test", 2)
    first = parse(prompts[0].text)
    verdicts = task.grade([prompts[0]] * 2, [f" {first.thing} please", " no"])
    assert asked == ["org/reward"]
    assert [verdict.outcome for verdict in verdicts] == ["scored", "abstained"]
    assert verdicts[0].reward == 2.0
    assert verdicts[0].measures == {"hidden_reward": pytest.approx(1.5 + 0.5 - 1)}
    assert task.draw(1, 2, 8) == task.draw(1, 2, 8) != task.draw(2, 2, 8)
    with pytest.raises(ValueError, match="has 500 validation problems, and 501 are asked for"):
        task.held_out("validation", 501)


@pytest.mark.slow
def test_the_embedded_reward_model_is_what_the_task_needs() -> None:
    found = json.loads((replies.embedded_reward_model() / "reward_model.json").read_text())["held_out"]
    assert found["accuracy"] > found["length_accuracy"] + 0.03
    assert found["accuracy"] > 0.6  # the noise of the comparisons allows 0.75


@pytest.mark.slow
def test_a_policy_trained_on_the_proxy_gains_by_it(tmp_path: Path) -> None:
    config = small(
        **POLICY_GRADIENT, model__path="seed:replies", task__name="replies", train__steps=20, eval__num_samples=1,
        rollout__num_prompts=16, rollout__num_generations=8, eval__validation_problems=200,
    )  # fmt: skip
    _, tracker = trained(config, tmp_path)
    before, after = tracker.rows[0], tracker.rows[20]
    assert after["eval/validation/reward@1"] > before["eval/validation/reward@1"] + 0.2
    for name in ("reward", "reward@1", "hidden_reward", "scored_frac"):
        assert f"eval/test/{name}" in after
    assert "eval/test/accuracy" not in after
    assert "measure/hidden_reward" in tracker.rows[1]
    assert "reward/mean" in tracker.rows[1]
