"""A published algorithm as a named bundle of options, each value with the place where it stands.

A preset has two layers. `slots` are the algorithm itself and hold at any scale: the miniature takes them as they are.
`published` are the settings of its authors' experiments (rates, batches, lengths), for studies at their scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from suite.config import ObjectiveConfig, RunConfig, apply, flatten
from suite.registry import unknown

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Value:
    """A value of an option and where it stands: section, equation, table, or file of the authors' code."""

    value: Any
    source: str
    ours: bool = False
    """Whether the source leaves it open; `source` then says why we took it."""

    @property
    def words(self) -> str:
        """The source, with what is ours named as such."""
        return f"ours: {self.source}" if self.ours else self.source


def ours(value: Any, why: str) -> Value:
    """A value that the sources leave open, and why it was taken."""
    return Value(value, why, ours=True)


@dataclass(frozen=True)
class Preset:
    """An algorithm: what it changes in its parent, option by option."""

    name: str
    title: str
    paper: str
    """Authors, year, arXiv number: what the places in the values refer to."""
    parent: str | None = None
    """The preset that this one changes; None = the defaults of the configuration."""
    without: tuple[str, ...] = ()
    """Options of its ancestors that it has no use for: they are back at their defaults."""
    slots: Mapping[str, Value] = field(default_factory=lambda: _NOTHING)
    published: Mapping[str, Value] = field(default_factory=lambda: _NOTHING)
    note: str = ""
    """What a reader must know to read the values right."""
    evaluates: bool = False
    """Whether it is a way to evaluate, which trains nothing by itself and goes with any algorithm."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A value and the preset of the chain that sets it."""

    value: Value
    preset: Preset


def chain(preset: Preset) -> list[Preset]:
    """The preset and its ancestors, the eldest first. Raises ValueError for an unknown parent or a circle."""
    from ablations.load import load_preset

    out = [preset]
    while out[0].parent:
        elder = load_preset(out[0].parent)
        if elder.name in {known.name for known in out}:
            raise ValueError(f"preset {preset.name!r} descends from itself")
        out.insert(0, elder)
    return out


def origins(preset: Preset, *, published: bool = False) -> dict[str, Origin]:
    """Every option that the preset or an ancestor sets, and who sets it.

    With `published`, each preset's published settings lie over its slots, so that a slot that scales with the task
    (VAPO's alpha) has its published value; what a descendant sets, in either layer, stands before its ancestors'.
    """
    out: dict[str, Origin] = {}
    for elder in chain(preset):
        for option in elder.without:
            out.pop(option, None)
        for layer in (elder.slots, elder.published) if published else (elder.slots,):
            out.update({option: Origin(value, elder) for option, value in layer.items()})
    return out


def overrides(preset: Preset, *, published: bool = False) -> dict[str, Any]:
    """The options of a preset as overrides of an arm or a base.

    A preset that sets an option of the objective replaces the whole section: nothing of another loss is left behind.
    """
    changes = {option: origin.value.value for option, origin in origins(preset, published=published).items()}
    if any(option.startswith("objective.") for option in changes):
        changes = {"objective": ObjectiveConfig(), **changes}
    return changes


def preset(*names: str, published: bool = False, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of presets by name, the later over the earlier; see `overrides`.

    `Arm("dapo", preset("dapo"))`, `apply(RunConfig(), preset("grpo", "best_of_n"))`. A section's name with a mapping
    changes single options of the result: `preset("grpo", objective={"num_minibatches": 4})`.
    """
    from ablations.load import load_preset

    out: dict[str, Any] = {}
    for name in names:
        changes = overrides(load_preset(name), published=published)
        if "objective" in changes:
            out = {option: value for option, value in out.items() if not option.startswith("objective.")}
        out.update(changes)
    for section, options in sections.items():
        out.update({f"{section}.{option}": value for option, value in options.items()})
    return out


def objective(name: str) -> ObjectiveConfig:
    """The whole `objective` section of a preset at any scale, for arms that replace the loss and nothing else."""
    changes = {option: value for option, value in preset(name).items() if option.startswith("objective.")}
    return apply(RunConfig(), changes).objective


def check(preset: Preset) -> None:
    """Raises ValueError if the preset sets an option that does not exist, or to a value of the wrong type."""
    known = flatten(RunConfig())
    for option in (*preset.slots, *preset.published):
        if option not in known:
            raise unknown("option", option, known, f"preset {preset.name!r}")
    inherited = origins(chain(preset)[-2], published=True) if preset.parent else {}
    for option in preset.without:
        if option not in inherited:
            raise ValueError(f"preset {preset.name!r} is without {option}, which none of its ancestors sets")
    for published in (False, True):
        try:
            apply(RunConfig(), overrides(preset, published=published))
        except ValueError as error:
            raise ValueError(f"preset {preset.name!r}: {error}") from error
