"""Reward models: what is read where, the Bradley-Terry loss, its measures, and a model that learns."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from suite.preferences import Preference
from suite.reward_config import RewardModelConfig
from suite.reward_model import (
    ScalarReward,
    bradley_terry_loss,
    check,
    encode,
    evaluate,
    micro_batches,
    pad,
    quality,
    read_scores,
    train,
)

WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "<cls>", "user", "assistant", *"abcdefghij"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def tokenizer(**special: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=core, **{k: v for k, v in special.items() if v})


def llama(kind: Any = LlamaForSequenceClassification, **changes: Any) -> Any:
    torch.manual_seed(3)
    options = {
        "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    labels = {} if kind is LlamaForCausalLM else {"num_labels": 1}
    return kind(LlamaConfig(**(options | labels | changes))).eval()


def gpt2() -> Any:
    torch.manual_seed(3)
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=len(WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=1, pad_token_id=2)
    ).eval()


ROWS = [(1, 7, 8, 2), (1, 9, 2), (1, 7, 7, 12, 9, 10, 2), (1, 7, 2, 2)]


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad_id", [0, 2], ids=["pad", "pad is eos"])
def test_the_score_is_read_at_the_last_token_under_either_padding(build: Any, side: str, pad_id: int) -> None:
    model = build()
    with torch.no_grad():
        alone = [float(model.score(model.base_model(torch.tensor([row])).last_hidden_state[0, -1])) for row in ROWS]
        found = read_scores(model, *pad(ROWS, pad_id, side))
    assert found.tolist() == pytest.approx(alone, abs=1e-6)
    assert len({round(value, 4) for value in alone}) == len(ROWS)


def test_a_closing_eos_is_read_where_it_also_pads() -> None:
    # the library's own reading takes the last token that is not padding, which is the one before the EOS
    model = llama(pad_token_id=2)
    ids, attention = pad(ROWS, 2)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=attention).logits[:, 0]
        ours = read_scores(model, ids, attention)
        cut = read_scores(model, *pad([row[:-1] for row in ROWS[:3]], 2))
    assert torch.allclose(theirs[:3], cut, atol=1e-6)
    assert not torch.allclose(theirs, ours, atol=1e-3)


def test_padding_wider_with_anything_changes_no_score() -> None:
    model = llama()
    ids, attention = pad([*ROWS, (1,) * 20], 0)
    with torch.no_grad():
        clean = read_scores(model, ids, attention)[:4]
        dirty = read_scores(model, torch.where(attention.bool(), ids, 11), attention)[:4]
    assert torch.equal(clean, dirty)
    assert torch.allclose(clean, read_scores(model, *pad(ROWS, 0)), atol=1e-6)


def test_an_encoder_reads_where_it_was_trained_to() -> None:
    torch.manual_seed(3)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_labels=1,
        )
    ).eval()  # fmt: skip
    ids, attention = pad(ROWS, 0)
    with torch.no_grad():
        alone = [float(model(torch.tensor([row])).logits) for row in ROWS]
        assert read_scores(model, ids, attention).tolist() == pytest.approx(alone, abs=1e-6)


def test_what_is_scored() -> None:
    words = tokenizer()
    assert words.convert_ids_to_tokens(encode(words, "a b", "c")) == ["<bos>", "a", "b", "c", "<eos>"]
    assert words.convert_ids_to_tokens(encode(words, "a b", "c", 3)) == ["<bos>", "a", "b"]
    words.chat_template = CHAT
    turns = ["<bos>", "user", "a", "b", "<eos>", "assistant", "c", "<eos>"]
    assert words.convert_ids_to_tokens(encode(words, "a b", "c")) == turns
    words = tokenizer(cls_token="<cls>")
    words.chat_template = CHAT
    assert words.convert_ids_to_tokens(encode(words, "a b", "c")) == [*turns, "<cls>"]


def test_scores_come_in_order_whatever_the_batches() -> None:
    reward = ScalarReward(llama(), tokenizer())
    answers = ["c", "c d e f g", "", "d", "i j a"]
    whole = reward.score(["a b"] * 5, answers)
    reward.batch_size = 2
    assert reward.score(["a b"] * 5, answers) == pytest.approx(whole, abs=1e-6)
    assert [reward.score(["a b"], [answer])[0] for answer in answers] == pytest.approx(whole, abs=1e-6)


def saved(folder: Path, model: Any, words: Any = None) -> str:
    model.save_pretrained(folder)
    (words or tokenizer()).save_pretrained(folder)
    return str(folder)


def test_a_saved_model_scores_the_same(tmp_path: Path) -> None:
    model = llama()
    asked = (["a", "b"], ["c d", "e"])
    assert ScalarReward.load(saved(tmp_path, model)).score(*asked) == ScalarReward(model, tokenizer()).score(*asked)


def test_more_than_one_label_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 3 labels \(score.weight\); a scalar reward has one"):
        ScalarReward.load(saved(tmp_path, llama(num_labels=3)))


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no reward model: its weights lack score.weight; train one with"):
        ScalarReward.load(saved(tmp_path, llama(LlamaForCausalLM)))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        ScalarReward.load(str(tmp_path / "none"))


def test_a_head_of_another_name_and_a_cls_token_are_read(tmp_path: Path) -> None:
    """The kind of Athene-RM: `v_head` on a Llama, read at the CLS token that closes the conversation."""
    from safetensors.torch import load_file, save_file

    words = tokenizer(cls_token="<cls>")
    words.chat_template = CHAT
    model = llama()
    saved(tmp_path, model, words)
    weights = load_file(tmp_path / "model.safetensors")
    weights["v_head.weight"] = weights.pop("score.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    options = json.loads((tmp_path / "config.json").read_text())
    for name in ("num_labels", "id2label", "label2id"):
        options.pop(name, None)
    options["architectures"] = ["CustomAutoModelForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(options))
    (score,) = ScalarReward.load(str(tmp_path)).score(["a b"], ["c"])
    ids = words.convert_tokens_to_ids(["<bos>", "user", "a", "b", "<eos>", "assistant", "c", "<eos>", "<cls>"])
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
    assert score == pytest.approx(float(model.score(hidden[0, -1])), abs=1e-6)


SCORES = [0.4, -1.3, 2.2, 0.9, -0.6, 1.7]
PAIRS = [[(0, 1)], [(2, 3), (2, 4), (3, 4)], [(1, 5)]]


def test_the_loss_is_the_mean_over_prompts_of_the_mean_over_their_pairs() -> None:
    def plain(scores: list[float]) -> float:
        of_prompt = [[math.log(1 + math.exp(scores[x] - scores[w])) for w, x in mine] for mine in PAIRS]
        return sum(sum(mine) / len(mine) for mine in of_prompt) / len(PAIRS)

    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = bradley_terry_loss(scores, PAIRS)
    loss.backward()
    assert float(loss) == pytest.approx(plain(SCORES), rel=1e-12)
    for i in range(len(SCORES)):
        up, down = ([s + d * (j == i) for j, s in enumerate(SCORES)] for d in (1e-6, -1e-6))
        assert scores.grad is not None
        assert float(scores.grad[i]) == pytest.approx((plain(up) - plain(down)) / 2e-6, abs=1e-8)
    assert float(bradley_terry_loss(torch.zeros(2), [])) == 0.0


def test_the_loss_worked_by_hand() -> None:
    # three answers scored log 3, 0, 0: P = 3/4, 3/4, 1/2, so (2 log(4/3) + log 2) / 3
    scores = torch.tensor([math.log(3), 0.0, 0.0])
    expected = (2 * math.log(4 / 3) + math.log(2)) / 3
    assert float(bradley_terry_loss(scores, [[(0, 1), (0, 2), (1, 2)]])) == pytest.approx(expected, rel=1e-6)
    assert float(bradley_terry_loss(torch.tensor([500.0, -500.0]), [[(1, 0)]])) == pytest.approx(1000.0)


def test_measures_worked_by_hand() -> None:
    # P of .75, .75, .25 and .5: right are two and a half of four
    margins = [math.log(3), math.log(3), -math.log(3), 0.0]
    found = quality(margins, 0.3)
    assert (found.pairs, found.length_accuracy) == (4, 0.3)
    assert found.accuracy == pytest.approx(2.5 / 4)
    assert found.margin == pytest.approx(math.log(3) / 4)
    assert found.loss == pytest.approx((2 * math.log(4 / 3) + math.log(4) + math.log(2)) / 4)
    assert found.brier == pytest.approx((2 / 16 + 9 / 16 + 1 / 4) / 4)
    # bin of .75: right 2 of 3 at a confidence of .75; bin of .5: right half at a confidence of .5
    assert found.ece == pytest.approx((3 * (0.75 - 2 / 3) + 0) / 4)
    assert quality([50.0] * 4, 0.5).ece == pytest.approx(0.0, abs=1e-12)
    assert quality([-50.0] * 4, 0.5).ece == pytest.approx(1.0)
    assert quality([0.0] * 4, 0.5).brier == 0.25


def test_evaluation_counts_every_pair_of_every_prompt() -> None:
    reward = ScalarReward(llama(), tokenizer())
    preferences = [Preference.ranked("a", ["b", "c d", "e"]), Preference.ranked("b", ["a a", "c"])]
    found = evaluate(reward, preferences)
    scores = {(p.prompt, a): reward.score([p.prompt], [a])[0] for p in preferences for a in p.answers}
    margins = [scores[p.prompt, p.answers[w]] - scores[p.prompt, p.answers[x]] for p in preferences for w, x in p.pairs]
    assert found.pairs == 4
    assert found.margin == pytest.approx(sum(margins) / 4, abs=1e-6)
    assert found.accuracy == sum(m > 0 for m in margins) / 4
    assert found.length_accuracy == pytest.approx((0 + 0.5 + 1 + 1) / 4)


def test_parts_hold_whole_prompts() -> None:
    assert micro_batches([2, 3, 2, 5, 1], 0) == [[0, 1, 2, 3, 4]]
    assert micro_batches([2, 3, 2, 5, 1], 5) == [[0, 1], [2], [3], [4]]
    assert micro_batches([4, 2], 2) == [[0], [1]]


def vowels(count: int, seed: int = 0) -> list[Preference]:
    """Answers of four letters, ranked by how many are `a`: learnable, and all of one length."""
    rng, out = random.Random(seed), []
    for number in range(count):
        answers = {" ".join(rng.choice("abcd") for _ in range(4)) for _ in range(5)}
        kept = {answer.count("a"): answer for answer in sorted(answers)}
        if len(kept) > 1:
            prompt = " ".join("abcdefghij"[int(d)] for d in f"{number:04d}")
            out.append(Preference.ranked(prompt, [kept[k] for k in sorted(kept, reverse=True)]))
    return out


def options(folder: Path, **changes: Any) -> RewardModelConfig:
    defaults: dict[str, Any] = {"model": str(folder), "lr": 3e-3, "batch_prompts": 16, "held_out": 0.25, "epochs": 2}
    return RewardModelConfig(**(defaults | changes))


def test_learns_what_it_is_shown_and_writes_a_plain_folder(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", llama(LlamaForCausalLM))
    preferences = vowels(400)
    found = train(options(tmp_path / "base", epochs=3), tmp_path / "rm", preferences)
    assert found["accuracy"] > 0.95
    assert found["length_accuracy"] == 0.5
    assert found["brier"] < 0.1
    assert found["train_prompts"] + found["held_out_prompts"] == len(preferences)
    report = json.loads((tmp_path / "rm" / "reward_model.json").read_text())
    assert report["held_out"] == found
    assert report["options"]["model"] == base
    steps = [json.loads(line) for line in (tmp_path / "rm" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(1, steps[0]["steps"] + 1))
    assert steps[0]["lr"] == pytest.approx(3e-3)
    assert steps[-1]["lr"] == pytest.approx(3e-4, rel=0.05)
    high, low = ScalarReward.load(str(tmp_path / "rm")).score(["e f", "e f"], ["a a a b", "b c d b"])
    assert high > low
    with pytest.raises(ValueError, match="holds a model already"):
        train(options(tmp_path / "base"), tmp_path / "rm", preferences)


def test_equal_options_give_equal_weights_and_micro_batches_change_none(tmp_path: Path) -> None:
    saved(tmp_path / "base", llama(LlamaForCausalLM))
    preferences = vowels(80)
    made = []
    for number, changes in enumerate([{}, {}, {"micro_batch_size": 7}, {"seed": 1}]):
        train(options(tmp_path / "base", epochs=1, **changes), tmp_path / str(number), preferences)
        made.append(ScalarReward.load(str(tmp_path / str(number))).score(["a"] * 2, ["b c", "a a"]))
    assert made[0] == made[1]
    assert made[2] == pytest.approx(made[0], abs=1e-4)
    assert abs(made[3][0] - made[0][0]) > 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, "lr is 0.0 and must be above 0"),
        ({"epochs": 0}, "epochs is 0 and must be at least 1"),
        ({"held_out": 1.0}, "held_out is 1.0"),
        ({"final_lr_share": 1.5}, "final_lr_share is 1.5"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan"),
    ],
)
def test_options_out_of_range(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(RewardModelConfig(**changes))
