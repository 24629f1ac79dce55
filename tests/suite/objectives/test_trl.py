"""The same tensors through TRL's trainers and ours: losses, gradients, advantages and the adaptive coefficient agree.

TRL's methods run as they are, on trainers that hold nothing but the attributes they look at.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from objective_cases import (
    ENTROPY,
    LEARNER,
    LOGPROBS,
    REF,
    SAMPLER,
    make_batch,
    make_config,
    make_rollout,
    step,
    tensor,
)

from suite.batch import Batch
from suite.config import RunConfig
from suite.objectives import IMPORTANCE_SAMPLING_MODES, build

trl = pytest.importorskip("trl", reason="trl is not installed: pip install -e .[dev]")
pytestmark = pytest.mark.slow

MASK = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
MASK_BT = torch.tensor(MASK)
ROWS = len(MASK)
BETA, BUDGET = 0.3, 9
LOSS_TYPES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def hollow(kind: type, **attributes: Any) -> Any:
    """A trainer of TRL's that was never built: its own methods, and these attributes."""
    trainer = object.__new__(kind)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True, gather=lambda x: x,
        gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
    )  # fmt: skip
    logs = {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": defaultdict(list)}
    metrics: Any = defaultdict(lambda: defaultdict(list))
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    common = {
        "accelerator": accelerator, "model": model, "_metrics": metrics, "aux_loss_enabled": False, "beta": 0.0,
        "use_vllm": False, "current_gradient_accumulation_steps": 1, "mask_truncated_completions": False,
        "pad_to_multiple_of": None, "_tokenizer": SimpleNamespace(pad_token_id=0), "environments": None,
        "environment_factories": None, "tools": None, "ref_model": object(), "num_generations": 3, "num_iterations": 1,
        "reward_weights": torch.ones(1), "reward_func_names": ["r"],
        "multi_objective_aggregation": "sum_then_normalize",
        "_pending_extra_logs": {}, "_pending_metrics": {}, "_logs": logs,
        "log_multimodal": False, "reward_clip_range": None, "epsilon_low": 0.1, "epsilon_high": 0.4,
        "state": SimpleNamespace(num_input_tokens_seen=0),
    }  # fmt: skip
    for name, value in {**common, **attributes}.items():
        setattr(trainer, name, value)
    return trainer


def grpo(loss_type: str, logprobs: torch.Tensor, entropy: torch.Tensor, **attributes: Any) -> Any:
    """TRL's GRPO trainer, whose model gives these log-probs and entropies."""
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= attributes.pop("args", {})
    default = {
        "args": SimpleNamespace(**arguments), "loss_type": loss_type, "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "importance_sampling_level": "token", "max_completion_length": BUDGET,
        "vllm_importance_sampling_correction": False, "_entropy_bonus_enabled": False, "entropy_coef": 0.0,
        "use_adaptive_entropy": False,
        "_get_per_token_logps_and_entropies": lambda *a, **k: (logprobs, entropy, None),
    }  # fmt: skip
    return hollow(trl.GRPOTrainer, **{**default, **attributes})


def trl_inputs(advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones((ROWS, 2), dtype=torch.long)
    return {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": torch.ones_like(MASK_BT), "completion_mask": MASK_BT,
        "advantages": advantages, "old_per_token_logps": tensor(LEARNER[:ROWS]),
        "ref_per_token_logps": tensor(REF[:ROWS]), "num_items_in_batch": MASK_BT.sum(),
    }  # fmt: skip


def ours(config: RunConfig, rewards: list[float], **changes: Any) -> tuple[Any, Batch]:
    batch = make_batch(
        MASK, sampler_logprobs_BT=tensor(LEARNER[:ROWS]), learner_logprobs_BT=tensor(LEARNER[:ROWS]),
        ref_logprobs_BT=tensor(REF[:ROWS]), rewards_B=tensor(rewards), group_B=torch.tensor([0, 0, 0, 1, 1, 1]),
    )  # fmt: skip
    objective, batch = build(config), replace(batch, **changes)
    objective.prepare(batch)
    return objective, batch


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.05])
def test_grpo_losses_and_gradients(loss_type: str, beta: float, entropy_coef: float) -> None:
    config = make_config(
        loss_agg_mode=LOSS_TYPES[loss_type], kl="loss" if beta else "none", kl_coef=beta, entropy_coef=entropy_coef
    )
    objective, batch = ours(config, [1.0, 0.0, 0.5, 0.25, -0.75, 2.0])
    loss, of_logprobs, of_entropy, sums, _ = step(objective, batch, LOGPROBS[:ROWS], ENTROPY[:ROWS])
    leaves = [tensor(values[:ROWS]).requires_grad_() for values in (LOGPROBS, ENTROPY)]
    trainer = grpo(loss_type, *leaves, beta=beta, entropy_coef=entropy_coef, _entropy_bonus_enabled=entropy_coef > 0)
    assert batch.advantages_BT is not None
    theirs = trainer._compute_loss(None, trl_inputs(batch.advantages_BT[:, 0].double()))
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-5, rel=1e-6)
    for got, leaf in zip((of_logprobs, of_entropy), leaves):
        expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    logged = trainer._metrics["train"]
    for name in ("low", "high"):
        assert sums[f"loss/clip_frac_{name}"] == pytest.approx(logged[f"clip_ratio/{name}_mean"][0], abs=1e-6)
        assert sums[f"loss/clip_frac_{name}"] > 0


def scored(trainer: Any, rewards: list[float], lengths: list[int], sampler: Any = None) -> dict[str, Any]:
    """What TRL makes of rollouts of these lengths with these rewards and, of an engine, these log-probs."""
    completions = [[1] * length for length in lengths]
    prompts = [[1]] * len(lengths)
    found = [prompts, completions, None, completions, sampler, {}, None, None]
    trainer._generate = lambda given: found if isinstance(trainer, trl.GRPOTrainer) else [*found[:2], completions]
    trainer._calculate_rewards = lambda *given: tensor(rewards)[:, None]
    return trainer._generate_and_score_completions([{"prompt": "p"}] * len(lengths))


def generated(trainer: Any, rewards: list[float], lengths: list[int]) -> torch.Tensor:
    """TRL's advantages of rollouts of these lengths with these rewards."""
    return scored(trainer, rewards, lengths)["advantages"]


def per_row(config: RunConfig, rewards: list[float], mask: Any = MASK_BT, **changes: Any) -> torch.Tensor:
    """Our advantages, one per rollout, and 0 for one that is not selected."""
    groups = [
        [make_rollout(r, i, f"p{g}") for i, r in enumerate(rewards[3 * g : 3 * g + 3])]
        for g in range(len(rewards) // 3)
    ]
    objective = build(config)
    kept = objective.select(groups, (0,)).rollouts
    rows = [i for i, rollout in enumerate(r for group in groups for r in group) if any(rollout is k for k in kept)]
    batch = make_batch(
        MASK, mask_BT=mask.bool(), learner_logprobs_BT=tensor(LEARNER[:ROWS]), ref_logprobs_BT=tensor(REF[:ROWS]),
        rewards_B=tensor(rewards), group_B=torch.tensor([0, 0, 0, 1, 1, 1]),
    )  # fmt: skip
    batch = replace(batch, **changes).take(rows)
    objective.prepare(batch)
    assert batch.advantages_BT is not None
    out = torch.zeros(ROWS, dtype=torch.float64)
    out[rows] = batch.advantages_BT[:, 0].double()
    return out


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("abstains", [False, True])
def test_grpo_advantages(scale: str, abstains: bool) -> None:
    rewards = [1.0, 0.0, math.nan if abstains else 0.5, 0.25, -0.75, 2.0]
    logprobs = tensor(LEARNER[:ROWS])
    trainer = grpo("grpo", logprobs, logprobs, scale_rewards=scale, args=ARGUMENTS)
    got = per_row(make_config(scale_rewards=scale, advantage_eps=1e-4), rewards)
    torch.testing.assert_close(got, generated(trainer, rewards, [5, 3, 1, 2, 4, 2]), rtol=0, atol=1e-5)


ARGUMENTS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing_kwargs": None,
}  # fmt: skip


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("mode", [name for name in IMPORTANCE_SAMPLING_MODES if name != "none"])
@pytest.mark.parametrize("low", [0.0, 0.4])
def test_grpo_with_a_correction_for_the_engine(loss_type: str, mode: str, low: float) -> None:
    """TRL's own weights of the engine's log-probs, its loss with them (KL included), and its gradient."""
    rewards, lengths, high = [1.0, 0.0, 0.5, 0.25, -0.75, 2.0], [sum(row) for row in MASK], 1.4
    bounds = {"importance_sampling_clip_min": low, "importance_sampling_clip_max": high}
    options = {"kl": "loss", "kl_coef": BETA, "loss_agg_mode": LOSS_TYPES[loss_type]}
    config = make_config(importance_sampling_mode=mode, advantage_eps=1e-4, **bounds, **options)
    objective, batch = ours(config, rewards, sampler_logprobs_BT=tensor(SAMPLER[:ROWS]))
    loss, gradient, _, sums, _ = step(objective, batch, LOGPROBS[:ROWS], ENTROPY[:ROWS])

    leaf, learner, reference = tensor(LOGPROBS[:ROWS]).requires_grad_(), tensor(LEARNER[:ROWS]), object()
    trainer = grpo(
        loss_type, leaf, tensor(ENTROPY[:ROWS]), beta=BETA, scale_rewards="group", args=ARGUMENTS, use_vllm=True,
        ref_model=reference, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=high, vllm_importance_sampling_clip_min=low or None,
        _get_per_token_logps_and_entropies=lambda model, *a, **k: (
            tensor(REF[:ROWS]) if model is reference else learner, None, None
        ),
    )  # fmt: skip
    inputs = scored(trainer, rewards, lengths, [row[:n] for row, n in zip(SAMPLER, lengths)])
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (leaf, tensor(ENTROPY[:ROWS]), None)
    theirs = trainer._compute_loss(None, inputs | {"num_items_in_batch": MASK_BT.sum()})
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-5, rel=1e-6)
    assert leaf.grad is not None
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-6)
    logged = trainer._metrics["train"]["sampling/importance_sampling_ratio/mean"][0]
    assert sums["mismatch/weight_mean"] == pytest.approx(logged, abs=1e-6)
    assert 0 < sums["mismatch/touched_frac"] < 1


@pytest.mark.parametrize("beta", [0.0, BETA])
@pytest.mark.parametrize("abstains", [False, True])
def test_rloo_advantages_with_kl_in_the_reward(beta: float, abstains: bool) -> None:
    rewards = [1.0, 0.0, math.nan if abstains else 0.5, 0.25, -0.75, 2.0]
    config = make_config(advantage="rloo", kl="reward" if beta else "none", kl_coef=beta)
    trainer = rloo(beta=beta, normalize_advantages=False)
    got = per_row(config, rewards)
    torch.testing.assert_close(got, generated(trainer, rewards, [sum(row) for row in MASK]), rtol=0, atol=1e-5)


def test_rloo_advantages_whitened_over_the_batch() -> None:
    # TRL whitens over rollouts, we over tokens: with one token each the two are one
    rewards, one = [1.0, 0.0, 0.5, 0.25, -0.75, 2.0], torch.tensor([[1, 0, 0, 0, 0]] * ROWS)
    config = make_config(advantage="rloo", whiten_advantages=True, advantage_eps=1e-4)
    got = per_row(config, rewards, one)
    torch.testing.assert_close(got, generated(rloo(normalize_advantages=True), rewards, [1] * ROWS), rtol=0, atol=1e-5)


def rloo(logprobs: torch.Tensor | None = None, **attributes: Any) -> Any:
    """TRL's RLOO trainer: the policy has the learner's log-probs unless others are given, the reference its own."""
    policy = tensor(LEARNER[:ROWS]) if logprobs is None else logprobs
    reference = object()

    def forward(model: Any, *given: Any, **named: Any) -> Any:
        return (tensor(REF[:ROWS]) if model is reference else policy), tensor(ENTROPY[:ROWS]), None

    return hollow(
        trl.RLOOTrainer, args=SimpleNamespace(**ARGUMENTS), ref_model=reference,
        _get_per_token_logps_and_entropies=forward, **attributes,
    )  # fmt: skip


def test_rloo_gradient_where_the_ratio_is_1() -> None:
    config = make_config(advantage="rloo", loss_agg_mode="seq-mean-token-sum")
    objective, batch = ours(config, [1.0, 0.0, 0.5, 0.25, -0.75, 2.0])
    _, got, *_ = step(objective, replace(batch, learner_logprobs_BT=None), LOGPROBS[:ROWS], ENTROPY[:ROWS])
    leaf = tensor(LOGPROBS[:ROWS]).requires_grad_()
    assert batch.advantages_BT is not None
    inputs = trl_inputs(batch.advantages_BT[:, 0].double()) | {"old_logps": (leaf.detach() * MASK_BT).sum(1)}
    rloo(leaf)._compute_loss(None, inputs).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(got, leaf.grad, rtol=1e-6, atol=1e-7)


def test_dpo_loss_and_gradient() -> None:
    # TRL's batch holds all chosen, then all rejected answers; a row of theirs has the prompt's last token in front
    chosen, rejected = [0, 1, 4], [2, 3, 5]
    order = chosen + rejected
    leaf = tensor(LOGPROBS)[order].requires_grad_()
    mask = MASK_BT[order]
    front = torch.zeros((ROWS, 1), dtype=torch.long)
    outputs = SimpleNamespace(
        log_probs=leaf * mask, entropy=torch.zeros(ROWS, 5), mean_logits=torch.zeros(ROWS, 5),
        is_top1=torch.zeros(ROWS, 5, dtype=torch.bool),
    )  # fmt: skip
    trainer = hollow(
        trl.DPOTrainer, beta=BETA, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
        loss_types=["sigmoid"], loss_weights=[1.0], use_weighting=False, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    ref = (tensor(REF)[order] * mask).sum(1)
    inputs = {
        "input_ids": torch.ones((ROWS, 6), dtype=torch.long), "attention_mask": torch.ones((ROWS, 6), dtype=torch.long),
        "completion_mask": torch.cat([front, mask], 1), "ref_chosen_logps": ref[:3], "ref_rejected_logps": ref[3:],
    }  # fmt: skip
    theirs = trainer._compute_loss(lambda **given: outputs, inputs, False)
    theirs.backward()
    batch = make_batch(
        MASK, units=[[c, r] for c, r in zip(chosen, rejected)], ref_logprobs_BT=tensor(REF[:ROWS]),
        targets={"sign": tensor([1.0 if i in chosen else -1.0 for i in range(ROWS)])},
    )  # fmt: skip
    loss, got, _, sums, _ = step(build(make_config(name="dpo", beta=BETA)), batch, LOGPROBS[:ROWS], ENTROPY[:ROWS])
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    assert leaf.grad is not None
    torch.testing.assert_close(got[order], leaf.grad, rtol=1e-6, atol=1e-7)
    logged = trainer._metrics["train"]
    assert sums["dpo/margin"] == pytest.approx(logged["rewards/margins"][0], abs=1e-5)
    assert sums["dpo/accuracy"] == pytest.approx(logged["rewards/accuracies"][0], abs=1e-6)


def test_the_adaptive_entropy_coefficient_step_by_step() -> None:
    options = {"entropy_target": 1.0, "entropy_coef_delta": 0.02, "entropy_coef_max": 0.05}
    objective, batch = ours(make_config(entropy_coef=0.01, **options), [1.0, 0.0, 0.5, 0.25, -0.75, 2.0])
    trainer = grpo(
        "grpo", tensor(LOGPROBS[:ROWS]), tensor(ENTROPY[:ROWS]), entropy_coef=0.01, use_adaptive_entropy=True,
        _entropy_bonus_enabled=True, _last_world_entropy=math.inf, _entropy_window_stats=None,
        args={**options, "entropy_coef_min": 0.0},
    )  # fmt: skip
    assert batch.advantages_BT is not None
    inputs = trl_inputs(batch.advantages_BT[:, 0].double())
    applied = []
    for level in (0.5, 0.6, 0.4, 2.0, 3.0, 2.5, 2.0, 0.5, 0.9):
        entropy = [[level + 0.01 * t for t in range(5)]] * ROWS
        loss, _, gradient, sums, maxima = step(objective, batch, LOGPROBS[:ROWS], entropy, size=2)
        trainer._get_per_token_logps_and_entropies = lambda *a, e=entropy, **k: (
            tensor(LOGPROBS[:ROWS]),
            tensor(e),
            None,
        )
        assert loss == pytest.approx(float(trainer._compute_loss(None, inputs)), abs=1e-9)
        applied.append(-float(gradient.sum()))
        assert maxima["loss/entropy_coef"] == pytest.approx(applied[-1], abs=1e-12)
        objective.observe(sums)
    # by hand: 0 at first; then .01 + .02, capped at .05; above the target nothing; then what is left, and up again
    assert applied == pytest.approx([0, 0.03, 0.05, 0.05, 0, 0, 0, 0, 0.02], abs=1e-12)
