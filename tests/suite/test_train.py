"""The loop: when it syncs, what a rollout carries, what resume changes (nothing), what it does with a broken loss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from fakes import POLICY_GRADIENT, small, trained
from safetensors.torch import load_file

from suite.checkpoint import restore, tensors_hash
from suite.config import RunConfig, apply, fingerprint
from suite.judges import JUDGES
from suite.metric_list_sync import SYNC
from suite.metrics import METRICS, describe, describe_table
from suite.parts import assemble
from suite.policy import Policy
from suite.registry import Entry
from suite.reward_model import ScalarReward
from suite.rewards import SHAPINGS
from suite.rollout.in_process import InProcessSampler
from suite.run import Interrupted, NonFiniteLoss
from suite.validate import validate


def rollouts(folder: Path) -> pd.DataFrame:
    """All stored rollouts with their batch number."""
    files = sorted((folder / "rollouts").glob("batch-*.parquet"))
    return pd.concat([pd.read_parquet(f).assign(batch=int(f.stem.split("-")[1])) for f in files], ignore_index=True)


class Spy:
    """Counts loads of the generator and keeps the hash of its weights whenever it samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[int] = []
        self.hashes: list[tuple[int, str]] = []
        sampler = InProcessSampler
        load, generate = sampler.load, sampler.generate

        def spy_load(this: InProcessSampler, weights: dict[str, torch.Tensor], version: int) -> None:
            self.loads.append(version)
            load(this, weights, version)

        def spy_generate(this: InProcessSampler, requests: list, sampling: object) -> list:
            if requests and "rollout" in requests[0].key:
                self.hashes.append((this.version, tensors_hash(this.model.state_dict())))
            return generate(this, requests, sampling)  # type: ignore[arg-type]

        monkeypatch.setattr(sampler, "load", spy_load)
        monkeypatch.setattr(sampler, "generate", spy_generate)


@pytest.mark.parametrize("period", [1, 3, 5, "inf"])
def test_loads_are_ceil_n_over_s_and_rollouts_carry_their_version(
    period: int | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    config = small(rollout__sync_period=period, train__steps=7)
    _, tracker = trained(config, tmp_path)
    s = 7 if period == "inf" else period
    versions = [step // s * s for step in range(7)]
    assert tracker.column("sync/loads")[-1] == math.ceil(7 / s)
    assert spy.loads == sorted(set(versions) - {0})  # the initial load is the copy of the seed model
    assert tracker.column("sync/version") == versions
    assert tracker.column("sync/staleness") == [step - version for step, version in enumerate(versions)]
    stored = rollouts(tmp_path)
    assert stored.groupby("batch")["version"].unique().map(list).tolist() == [[v] for v in versions]
    # between loads not a bit changes; a load changes the weights
    assert len(set(spy.hashes)) == len(set(versions)) == len({digest for _, digest in spy.hashes})


def test_with_several_updates_per_batch_the_period_counts_optimizer_steps(tmp_path: Path) -> None:
    config = small(**POLICY_GRADIENT, objective__num_minibatches=2, rollout__sync_period=4, train__steps=8)
    _, tracker = trained(config, tmp_path)
    assert tracker.column("sync/version") == [0, 0, 4, 4]
    assert sorted(tracker.rows) == list(range(9))


@pytest.mark.parametrize(
    "options",
    [
        {"rollout__sync_period": 2, "rollout__reference_sync": "with_generator"},
        {**POLICY_GRADIENT, "objective__num_minibatches": 2, "rollout__sync_period": 4, "train__steps": 12},
        {"rollout__sync_period": "inf", "rollout__source": "fixed", "rollout__fixed_batches": 2},
        {
            "objective__name": "policy_gradient",
            "objective__advantage": "reinforce",
            "objective__baseline_decay": 0.5,
            "objective__trust_region": "kl_penalty",
            "objective__kl_penalty_target": 1e-3,
            "objective__entropy_target": 5.0,
            "objective__num_minibatches": 2,
            "rollout__sync_period": 2,
            "train__steps": 12,
        },
        {**POLICY_GRADIENT, "objective__advantage": "remax", "objective__kl": "reward"},
    ],
    ids=["dpo", "grpo", "fixed", "adaptive", "remax"],
)
def test_a_run_stopped_and_resumed_is_the_uninterrupted_run(options: dict[str, object], tmp_path: Path) -> None:
    config = small(**options)
    whole, tracker = trained(config, tmp_path / "whole")
    polls = iter([False, False, True])
    with pytest.raises(Interrupted, match="stopped after step"):
        trained(config, tmp_path / "cut", stop=lambda: next(polls))
    resumed, second = trained(config, tmp_path / "cut")
    assert resumed.weights == whole.weights
    assert second.rows  # the resumed part logs what the uninterrupted run logged, timings aside
    for step, row in second.rows.items():
        mine = {k: v for k, v in row.items() if not k.startswith("time/")}
        theirs = {k: v for k, v in tracker.rows[step].items() if not k.startswith("time/")}
        assert mine == theirs
    assert min(second.rows) > 2
    columns = ["batch", "uid", "sample", "version", "completion", "reward"]
    pd.testing.assert_frame_equal(rollouts(tmp_path / "cut")[columns], rollouts(tmp_path / "whole")[columns])


def test_resume_keeps_the_reference_and_refuses_another_configuration(tmp_path: Path) -> None:
    config = small(train__steps=4)
    trained(config, tmp_path)
    start = restore(tmp_path / "checkpoints", fingerprint(config))
    assert start is not None
    parts = assemble(config, start)
    assert parts.reference is not None
    seed_weights = Policy.load(config.model).model.state_dict()
    assert tensors_hash(parts.reference.state_dict()) == tensors_hash(seed_weights)
    assert tensors_hash(parts.policy.model.state_dict()) != tensors_hash(seed_weights)
    with pytest.raises(ValueError, match="is of configuration"):
        restore(tmp_path / "checkpoints", fingerprint(small(train__steps=5)))


def test_the_reference_follows_the_generator_only_when_asked(tmp_path: Path) -> None:
    _, fixed = trained(small(rollout__sync_period=2), tmp_path / "fixed")
    _, synced = trained(small(rollout__sync_period=2, rollout__reference_sync="with_generator"), tmp_path / "synced")
    assert fixed.column("kl/ref")[0] == synced.column("kl/ref")[0] == 0
    assert fixed.column("kl/ref")[2] > 0  # the learner has moved away from the seed model
    assert synced.column("kl/ref")[2] == synced.column("kl/ref")[4] == 0  # the reference has just been synced


def test_equal_seeds_mean_equal_prompts_in_every_arm(tmp_path: Path) -> None:
    arms = [{}, POLICY_GRADIENT, {"rollout__sync_period": "inf"}]
    prompts = []
    for index, options in enumerate(arms):
        trained(small(train__steps=3, **options), tmp_path / str(index))
        prompts.append(rollouts(tmp_path / str(index))[["batch", "uid"]].drop_duplicates().values.tolist())
    assert prompts[0] == prompts[1] == prompts[2]
    trained(small(train__steps=3, seed=1), tmp_path / "other")
    assert rollouts(tmp_path / "other")[["batch", "uid"]].drop_duplicates().values.tolist() != prompts[0]


def test_sampler_and_learner_agree_when_synced_and_drift_apart_when_stale(tmp_path: Path) -> None:
    _, online = trained(small(**POLICY_GRADIENT), tmp_path / "online")
    _, stale = trained(small(**POLICY_GRADIENT, rollout__sync_period="inf"), tmp_path / "stale")
    assert max(map(abs, online.column("kl/sampler"))) < 1e-5
    assert stale.column("kl/sampler")[-1] > 1e-4


def test_the_ratio_is_one_to_the_last_bit_at_the_first_update_only(tmp_path: Path) -> None:
    options = {**POLICY_GRADIENT, "optim__micro_batch_size": 5}
    _, once = trained(small(**options), tmp_path / "once")
    assert set(once.column("loss/ratio_max")) == {1.0}
    assert set(once.column("loss/clip_frac")) == {0.0}
    twice = small(**options, objective__num_epochs=2, rollout__sync_period=2, optim__lr=3e-3)
    _, twice_log = trained(twice, tmp_path / "twice")
    assert twice_log.column("loss/ratio_max")[::2] == [1.0] * 3
    assert min(twice_log.column("loss/ratio_max")[1::2]) > 1.0
    assert max(twice_log.column("loss/clip_frac")) > 0
    # measured against the generator, staleness shows from the first update on
    _, stale = trained(small(**options, rollout__sync_period=3), tmp_path / "stale")
    assert stale.column("loss/ratio_max")[1] > 1.0


@pytest.mark.parametrize("options", [{}, POLICY_GRADIENT], ids=["dpo", "grpo"])
def test_micro_batches_change_no_result_beyond_rounding(options: dict[str, object], tmp_path: Path) -> None:
    ends = []
    for size in (0, 2, 6):
        config = small(**options, train__steps=3, optim__micro_batch_size=size)
        trained(config, tmp_path / str(size))
        found = restore(tmp_path / str(size) / "checkpoints", fingerprint(config))
        assert found is not None
        ends.append(found.tensors["policy"])
    seed_weights = Policy.load(RunConfig().model).model.state_dict()
    moved = max(float((ends[0][name] - seed_weights[name]).abs().max()) for name in seed_weights)
    for other in ends[1:]:
        gap = max(float((ends[0][name] - other[name]).abs().max()) for name in other)
        assert gap < moved / 50


def test_the_three_offline_kinds(tmp_path: Path) -> None:
    offline = {"rollout__sync_period": "inf", "train__steps": 4}
    _, fresh = trained(small(**offline), tmp_path / "fresh")
    _, fixed = trained(small(**offline, rollout__source="fixed", rollout__fixed_batches=2), tmp_path / "fixed")
    _, given = trained(small(**offline, rollout__source="external"), tmp_path / "given")

    frames = {name: rollouts(tmp_path / name) for name in ("fresh", "fixed", "given")}
    of_batch = {name: [list(part["completion"]) for _, part in f.groupby("batch")] for name, f in frames.items()}
    assert len(set(map(tuple, of_batch["fresh"]))) == 4
    assert of_batch["fixed"][:2] == of_batch["fresh"][:2] == of_batch["fixed"][2:]
    assert fixed.column("cost/generated_tokens")[1:] == [fixed.column("cost/generated_tokens")[1]] * 3
    assert fresh.column("cost/generated_tokens")[1] == fixed.column("cost/generated_tokens")[1]
    assert set(frames["given"]["version"]) == {-1}
    assert given.column("cost/generated_tokens") == [0] * 4
    assert given.column("dpo/pairs") == [8] * 4
    pairs = frames["given"]
    assert (pairs["reward"] == (pairs["completion"].str[::-1] == pairs["gold"])).all()


@SHAPINGS.register("test_inf_at_third_batch")
def inf_at_third_batch(groups: list, reward: object) -> None:
    """Breaks the reward of the third batch."""
    inf_at_third_batch.calls = getattr(inf_at_third_batch, "calls", 0) + 1  # type: ignore[attr-defined]
    if inf_at_third_batch.calls == 3:  # type: ignore[attr-defined]
        groups[0][0].reward = math.inf


def test_a_nan_loss_stops_the_run_with_its_step_and_keeps_the_batch(tmp_path: Path) -> None:
    config = small(**POLICY_GRADIENT, reward__shaping="test_inf_at_third_batch")
    with pytest.raises(NonFiniteLoss, match="step 3: the loss is nan"):
        trained(config, tmp_path)
    failure = json.loads((tmp_path / "failure" / "failure.json").read_text())
    assert failure["step"] == 3
    assert "nan" in failure["error"]
    kept = load_file(tmp_path / "failure" / "batch.safetensors")
    assert bool(kept["advantages_BT"].isnan().any())
    assert len(pd.read_parquet(tmp_path / "failure" / "rollouts.parquet")) == 32


def test_without_a_pair_the_step_counts_and_the_weights_stay(tmp_path: Path) -> None:
    @SHAPINGS.register("test_all_equal")
    def all_equal(groups: list, reward: object) -> None:
        for group in groups:
            for rollout in group:
                rollout.reward = 1.0

    config = small(reward__shaping="test_all_equal", optim__weight_decay=0.1, train__steps=3)
    outcome, tracker = trained(config, tmp_path)
    assert tracker.column("dpo/pairs") == [0, 0, 0]
    assert tracker.column("dpo/skipped_groups") == [8, 8, 8]
    assert outcome.weights == tensors_hash(Policy.load(config.model).model.state_dict())


@pytest.mark.parametrize("options", [{}, POLICY_GRADIENT], ids=["dpo", "grpo"])
def test_twenty_steps_learn(options: dict[str, object], tmp_path: Path) -> None:
    """Gained: .074 to .106 over three seeds, equal to three digits under three instruction sets."""
    config = apply(
        small(**options, train__steps=20, eval__validation_problems=500, eval__num_samples=0),
        {"rollout.num_prompts": 32, "rollout.num_generations": 8},
    )
    _, tracker = trained(config, tmp_path)
    accuracy = [tracker.rows[step]["eval/validation/accuracy"] for step in (0, 20)]
    assert accuracy[1] - accuracy[0] > 0.03, accuracy


EVERY_METRIC: dict[str, dict[str, object]] = {
    "dpo": {"objective__nll_coef": 0.1, "eval__num_samples": 2, "eval__reward_model": "org/reward"},
    "judge": {"objective__pair_rule": "judge", "judge__name": "test_first"},
    "sft": {"objective__name": "sft"},
    "grpo": {**POLICY_GRADIENT, "objective__entropy_coef": 0.001, "objective__entropy_target": 0.3,
             "objective__importance_sampling_mode": "sequence_mask"},
    "reinforce": {
        "objective__name": "policy_gradient", "objective__advantage": "reinforce", "objective__positive_nll_coef": 0.1,
        "objective__trust_region": "kl_penalty", "objective__num_epochs": 2, "train__steps": 2,
        "rollout__sync_period": 2,
    },
    "ppo": {"objective__name": "policy_gradient", "objective__advantage": "gae", "critic__init": "policy",
            "critic__pretrain_steps": 1, "train__steps": 2},
    "mixture": {"task__name": "mixture", "task__mixture": "addition=1,sums=1", "rollout__dynamic_sampling": True},
    "replies": {**POLICY_GRADIENT, "task__name": "replies", "task__reward_model": "org/reward"},
}  # fmt: skip
"""Runs of a step or two which together log everything that is documented."""


def test_every_metric_of_the_documentation_is_logged_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lengths:
        def score(self, prompts: list[str], completions: list[str]) -> list[float]:
            return [float(len(text)) for text in completions]

    monkeypatch.setattr(ScalarReward, "load", lambda path: Lengths())
    first = Entry("test_first", lambda asked, _: ["first"] * len(asked), frozenset())
    monkeypatch.setitem(JUDGES._entries, "test_first", first)
    names: set[str] = set()
    for number, options in EVERY_METRIC.items():
        config = small(**{"train__steps": 1, **options})
        validate(config)
        _, tracker = trained(config, tmp_path / number)
        names |= {name for row in tracker.rows.values() for name in row}
        if number == "grpo":
            assert {name for _, name in tracker.tables} == {"eval/test/problems"}
            columns = tracker.tables[1, "eval/test/problems"][0]
            assert columns == [column for column, _ in describe_table("eval/test/problems").columns]
    vllm_alone = {metric.name for metric in SYNC}
    assert {describe(name).name for name in names} | vllm_alone == set(METRICS)
