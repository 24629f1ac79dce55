"""Windows: what is generated ahead is what would have been generated step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest
from fakes import POLICY_GRADIENT, rollouts, small, trained

from suite.protocols import Completion, Request, Sampling
from suite.rollout.in_process import InProcessSampler
from suite.rollout.window import window
from suite.run import Interrupted

LOGPROBS = ("sampler_logprobs",)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The sizes of the batches of each window that was generated in one call."""
    found: list[list[int]] = []
    plain = InProcessSampler.window

    def spy(
        this: InProcessSampler, batches: Sequence[Sequence[Request]], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        found.append([len(batch) for batch in batches])
        return plain(this, batches, sampling)

    monkeypatch.setattr(InProcessSampler, "window", spy)
    return found


def test_a_window_ends_where_the_weights_change_the_memory_or_the_run_ends() -> None:
    config = small(rollout__sync_period=3, train__steps=8)
    assert [window(config, batch, 100) for batch in (0, 1, 3, 6)] == [range(3), range(1, 3), range(3, 6), range(6, 8)]
    assert window(config, 3, 2) == range(3, 5)
    assert window(small(rollout__sync_period=1), 2, 100) == range(2, 3)
    offline = {"rollout__sync_period": "inf", "train__steps": 8}
    assert window(small(**offline), 2, 100) == range(2, 8)
    assert window(small(**offline, rollout__source="fixed", rollout__fixed_batches=3), 0, 100) == range(3)
    two = small(**POLICY_GRADIENT, objective__num_minibatches=2, rollout__sync_period=4, train__steps=8)
    assert window(two, 0, 100) == range(2)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"rollout__sync_period": 4}, [[32] * 4, [32] * 2]),
        ({"rollout__sync_period": "inf", "rollout__window_rollouts": 70}, [[32, 32]] * 3),
        ({**POLICY_GRADIENT, "objective__advantage": "remax", "rollout__sync_period": 3}, [[32] * 3, [8] * 3] * 2),
        ({"rollout__sync_period": 3, "rollout__dynamic_sampling": True}, [[32] * 3] * 2),
        ({"rollout__sync_period": "inf", "rollout__source": "fixed", "rollout__fixed_batches": 2}, [[32] * 2]),
    ],
    ids=["dpo", "bounded", "remax", "dynamic", "fixed"],
)
def test_windowed_and_step_by_step_give_the_same_rollouts_to_the_bit(
    options: dict[str, object], sizes: list[list[int]], tmp_path: Path, calls: list[list[int]]
) -> None:
    plain, _ = trained(small(**options | {"rollout__window_rollouts": 1}), tmp_path / "plain")
    assert not calls
    ahead, _ = trained(small(**{"rollout__window_rollouts": 1000} | options), tmp_path / "ahead")
    assert calls == sizes
    pd.testing.assert_frame_equal(rollouts(tmp_path / "ahead", LOGPROBS), rollouts(tmp_path / "plain", LOGPROBS))
    assert ahead.weights == plain.weights


def test_a_run_stopped_inside_a_window_goes_on_with_the_same_rollouts(tmp_path: Path, calls: list[list[int]]) -> None:
    config = small(rollout__sync_period=4, rollout__window_rollouts=1000)
    whole, _ = trained(config, tmp_path / "whole")
    polls = iter([False, True])
    with pytest.raises(Interrupted):
        trained(config, tmp_path / "cut", stop=lambda: next(polls))
    resumed, _ = trained(config, tmp_path / "cut")
    assert calls == [[32] * 4, [32] * 2, [32] * 4, [32] * 2, [32] * 2]  # the third is what was left of its window
    pd.testing.assert_frame_equal(rollouts(tmp_path / "cut", LOGPROBS), rollouts(tmp_path / "whole", LOGPROBS))
    assert resumed.weights == whole.weights
