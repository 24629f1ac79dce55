"""What a study is: a base run, arms, seeds, and claims written down beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from suite.config import FROM_ARM, ModelConfig, RunConfig, apply, differences, fingerprint
from suite.registry import unknown
from suite.search import Search
from suite.starts import pinned

SEED_MODEL = "seed model"
"""Stands in a claim for the model before training: each run's own evaluation at step 0."""


@dataclass(frozen=True)
class Arm:
    """One alternative: a name and the options that it changes in the base."""

    name: str
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    label: str = ""
    """Shown in tables and figures; the name if empty."""

    @property
    def title(self) -> str:
        return self.label or self.name


@dataclass(frozen=True)
class Axis:
    """A question and its alternatives. The first arm is the control and changes nothing."""

    name: str
    question: str
    arms: tuple[Arm, ...]
    sources: tuple[str, ...] = ()
    needs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Options that the base must have for the axis to make sense, such as `objective.name`."""

    def __post_init__(self) -> None:
        if not self.arms or self.arms[0].overrides:
            raise ValueError(f"axis {self.name!r}: the first arm is the control and must change nothing")


@dataclass(frozen=True)
class Claim:
    """A statement decided by the study's runs. Effects are in the metric's unit (a share: 0.03 = 3 points)."""

    name: str
    kind: Literal["better", "different", "equivalent"]
    arm: str
    than: str
    """The other arm, or SEED_MODEL."""
    smallest_effect: float
    """The smallest difference of interest; for `equivalent` the margin."""
    metric: str = "eval/test/accuracy"

    def __post_init__(self) -> None:
        effect = self.smallest_effect
        if not isinstance(effect, int | float) or not effect > 0:
            raise ValueError(f"claim {self.name!r}: smallest_effect is {effect!r} and must be a number above 0")


@dataclass(frozen=True)
class Cell:
    """One arm under one seed: the unit of work."""

    arm: str
    seed: int
    config: RunConfig
    fingerprint: str
    starts_from: str = ""
    """Fingerprint of the cell whose final model it starts from; empty if it starts from none."""

    @property
    def name(self) -> str:
        return cell_name(self.arm, self.seed, self.fingerprint)


def cell_name(arm: str, seed: int, fingerprint: str) -> str:
    """The name of a cell, and of its folder."""
    return f"{arm}-seed{seed}-{fingerprint[:8]}"


@dataclass(frozen=True)
class Study:
    """A base run, the arms to compare (the first is the control), the seeds, and the claims."""

    name: str
    question: str
    base: RunConfig
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    claims: tuple[Claim, ...] = ()
    metric: str = "eval/test/accuracy"
    """The metric of the table, taken at the last step."""
    search: Search | None = None
    """How each arm's options are searched before the arms are compared: see `suite tune`."""

    @property
    def control(self) -> Arm:
        return self.arms[0]

    def arm(self, name: str) -> Arm:
        """The arm called `name`; ValueError with near names if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise unknown("arm", name, [arm.name for arm in self.arms], f"study {self.name!r}")

    def config(self, arm: str, seed: int | None = None) -> RunConfig:
        """The resolved configuration of an arm (under a seed).

        With a seed it names the weights that it starts from, as far as they are known. That of an arm which starts
        from another one holds the other's fingerprint, and so changes with it. Raises ValueError if it starts, through
        others or not, from itself.
        """
        overrides = dict(self.arm(arm).overrides)
        config = apply(self.base, overrides if seed is None else {**overrides, "seed": seed})
        config = config if seed is None else pinned(config)
        for parent in self.lineage(arm)[:1]:
            config = apply(config, {"model.parent": fingerprint(self.config(parent, seed))})
        return config

    def models(self) -> list[ModelConfig]:
        """What its cells start from, cell by cell."""
        return [self.config(arm.name, seed).model for seed in self.seeds for arm in self.arms]

    def lineage(self, arm: str) -> list[str]:
        """The arms that an arm starts from, the nearest first; ValueError for an unknown one and for a circle."""
        chain = [arm]
        while (path := apply(self.base, dict(self.arm(chain[-1]).overrides)).model.path).startswith(FROM_ARM):
            parent = path.removeprefix(FROM_ARM)
            if parent in chain:
                circle = " from ".join(map(repr, [*chain[chain.index(parent) :], parent]))
                raise ValueError(f"study {self.name!r}: arm {circle}: no arm can start from itself")
            self.arm(parent)
            chain.append(parent)
        return chain[1:]

    def cells(self) -> list[Cell]:
        """Every arm under every seed, seed by seed, so that an interrupted study holds whole comparisons.

        Raises ValueError if the study cannot be what it says: see `check`.
        """
        self.check()
        needed = {parent for arm in self.arms for parent in self.lineage(arm.name)[:1]}
        out = []
        for seed in self.seeds:
            for arm in self.arms:
                config = self.config(arm.name, seed)
                if arm.name in needed:
                    config = apply(config, {"train.export_model": True})
                out.append(Cell(arm.name, seed, config, fingerprint(config), config.model.parent))
        return out

    def differs(self, arm: str) -> dict[str, tuple[Any, Any]]:
        """What an arm changes against the control: option -> (control's value, arm's value)."""
        return differences(self.config(arm), self.config(self.control.name))

    def check(self) -> None:
        """Raises ValueError for arms, seeds or claims of a wrong type, repeated names or seeds, arms of one
        configuration, or claims on unknown arms."""
        from suite.claim_checks import check_shape

        check_shape(self)
        if not self.arms:
            raise ValueError(f"study {self.name!r} has no arms")
        if not self.seeds:
            raise ValueError(f"study {self.name!r} has no seeds")
        named = {"seed": self.seeds, "arm": [arm.name for arm in self.arms], "claim": [c.name for c in self.claims]}
        for kind, names in named.items():
            repeated = sorted({str(name) for name in names if list(names).count(name) > 1})
            if repeated:
                raise ValueError(f"study {self.name!r} names {kind} {', '.join(repeated)} more than once")
        seen: dict[str, str] = {}
        for arm in self.arms:
            key = fingerprint(self.config(arm.name))
            if key in seen:
                raise ValueError(
                    f"study {self.name!r}: arms {seen[key]!r} and {arm.name!r} resolve to the same configuration; "
                    "drop one or change an option"
                )
            seen[key] = arm.name
        for claim in self.claims:
            if claim.arm == claim.than:
                raise ValueError(f"study {self.name!r}: claim {claim.name!r} compares {claim.arm!r} with itself")
            for side in (claim.arm, claim.than):
                if side != SEED_MODEL:
                    self.arm(side)
        if self.search is not None and any(self.lineage(arm.name) for arm in self.arms):
            raise ValueError(f"study {self.name!r}: a search tunes every arm alone, so none can start from another one")
        if self.search is not None:
            self.search.check(self)
