"""What an objective says it reads is what it reads: recorded, option by option, while it works."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from objective_cases import ENTROPY, LOGPROBS, make_batch, make_config, make_rollout, step

from suite.config import ObjectiveConfig, RunConfig
from suite.objectives import (
    ADVANTAGES,
    AGGREGATIONS,
    IMPORTANCE_SAMPLING_MODES,
    KL_ESTIMATORS,
    OBJECTIVES,
    PAIR_RULES,
    TRUST_REGIONS,
    build,
    objective_reads,
)

NAMES = frozenset(item.name for item in dataclasses.fields(ObjectiveConfig))
SEEN: set[str] = set()
LOOP = {"objective.num_minibatches", "objective.num_epochs"}
"""Read by the training loop for every objective."""


class Recording(ObjectiveConfig):
    """Notes the name of every option that is looked at."""

    def __getattribute__(self, name: str) -> Any:
        if name in NAMES:
            SEEN.add(f"objective.{name}")
        return super().__getattribute__(name)


def touched(config: RunConfig) -> set[str]:
    """The objective's options that building and using it looks at."""
    recorder = Recording(**dataclasses.asdict(config.objective))
    SEEN.clear()
    objective = build(dataclasses.replace(config, objective=recorder), completion_budget=9)
    greedy = make_rollout(0.5)
    group = [
        dataclasses.replace(make_rollout(1.0, 0), greedy=greedy),
        dataclasses.replace(make_rollout(0.0, 1), greedy=greedy),
    ]
    objective.select([group], (0,))
    batch = make_batch(units=[[0, 1], [2, 4], [5, 6]] if config.objective.name == "dpo" else [[i] for i in range(7)])
    batch.targets["sign"] = torch.tensor([1.0, -1.0, 1.0, 0.0, -1.0, 1.0, -1.0])
    objective.prepare(batch)
    step(objective, batch, LOGPROBS, ENTROPY)
    return set(SEEN)


def configurations() -> list[dict[str, Any]]:
    entropy = {"entropy_coef": [0.0, 0.1], "entropy_target": [0.0, 0.5]}
    families: list[dict[str, list[Any]]] = [
        {"name": ["dpo"], "pair_rule": list(PAIR_RULES), **entropy},
        {"name": ["dpo"], "nll_coef": [0.0, 1.0], "grpo_coef": [0.0, 0.01], **entropy},
        {"name": ["sft"], "sft_rows": ["correct", "best"], **entropy},
        {
            "name": ["policy_gradient"],
            "advantage": list(ADVANTAGES),
            "scale_rewards": ["group", "batch", "none"],
            "whiten_advantages": [False, True],
            "kl": ["none", "reward", "loss"],
        },
        {"name": ["policy_gradient"], "advantage": ["gae"], "length_adaptive_alpha": [0.0, 1.5]},
        {"name": ["policy_gradient"], "importance_sampling_mode": list(IMPORTANCE_SAMPLING_MODES)},
        {"name": ["dpo"], "grpo_coef": [0.0, 0.01], "importance_sampling_mode": ["sequence_mask"]},
        {
            "name": ["policy_gradient"],
            "trust_region": list(TRUST_REGIONS),
            "loss_agg_mode": list(AGGREGATIONS),
            "positive_nll_coef": [0.0, 0.1],
            "kl": ["none", "loss"],
            **entropy,
        },
    ]
    return [dict(zip(slots, values)) for slots in families for values in itertools.product(*slots.values())]


def test_every_family_is_covered() -> None:
    assert {c["name"] for c in configurations()} == set(OBJECTIVES), "add the new family's slots to configurations()"


@pytest.mark.parametrize("options", configurations(), ids=lambda o: "-".join(map(str, o.values())))
def test_reads_exactly_what_it_looks_at(options: dict[str, Any]) -> None:
    config = make_config(**options)
    declared = {name for name in objective_reads(config) if name.startswith("objective.")}
    assert touched(config) | LOOP == declared


def test_worked_by_hand() -> None:
    assert objective_reads(make_config(name="dpo")) == LOOP | {
        "objective.name",
        "objective.beta",
        "objective.label_smoothing",
        "objective.nll_coef",
        "objective.grpo_coef",
        "objective.pair_rule",
        "objective.entropy_coef",
        "objective.entropy_target",
        "rollout.reference_sync",
    }
    plain = make_config(trust_region="none", scale_rewards="none", loss_agg_mode="seq-mean-token-sum-norm")
    assert objective_reads(plain) == LOOP | {
        "objective.name",
        "objective.advantage",
        "objective.scale_rewards",
        "objective.whiten_advantages",
        "objective.positive_nll_coef",
        "objective.trust_region",
        "objective.loss_agg_mode",
        "objective.ratio_reference",
        "objective.importance_sampling_mode",
        "objective.kl",
        "objective.entropy_coef",
        "objective.entropy_target",
        "rollout.max_completion_length",
    }


@pytest.mark.parametrize("place", ["reward", "loss"])
def test_the_reference_is_read_where_there_is_a_kl(place: str) -> None:
    extra = objective_reads(make_config(kl=place)) - objective_reads(make_config(kl="none"))
    assert extra == {"objective.kl_coef", "objective.kl_estimator", "rollout.reference_sync"}


def test_only_preference_losses_read_which_sequences_the_entropy_covers() -> None:
    assert "objective.entropy_over" in objective_reads(make_config(name="dpo", entropy_coef=0.1))
    assert "objective.entropy_over" not in objective_reads(make_config(entropy_coef=0.1))


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("name", "policy_gradiant", "objective"),
        ("advantage", "groups", "advantage estimator"),
        ("trust_region", "clib", "trust region"),
        ("loss_agg_mode", "token_mean", "loss aggregation mode"),
        ("importance_sampling_mode", "token_truncated", "importance sampling mode"),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(option: str, value: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {kind} '{value}'; did you mean '"):
        build(make_config(**{option: value}))


def test_registries_hold_what_the_configuration_documents() -> None:
    assert (list(OBJECTIVES), list(ADVANTAGES), list(TRUST_REGIONS)) == (
        ["dpo", "policy_gradient", "sft"],
        ["gae", "group", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "rloo_token"],
        ["clip", "kl_penalty", "none"],
    )
    assert list(KL_ESTIMATORS) == ["k1", "k2", "k3", "k3+"]
    assert list(IMPORTANCE_SAMPLING_MODES) == [
        "none", "sequence_mask", "sequence_truncate", "token_mask", "token_truncate",
    ]  # fmt: skip
