"""The configuration of one run: a frozen tree of dataclasses, shown option by option on the command line.

Defaults are the miniature's. An option's docstring gives its unit and its source. `fingerprint()` is
the identity of a run; `apply()` lays overrides over a configuration; what clashes or has no effect is
found in `suite.validate`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from suite.foreign_names import hint
from suite.registry import unknown
from suite.sections import (
    FROM_ARM,
    FROM_SEED,
    CriticConfig,
    EvalConfig,
    JudgeConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SyncPeriod,
    TaskConfig,
    TrainConfig,
)

__all__ = [
    "FROM_ARM",
    "FROM_SEED",
    "CriticConfig",
    "EvalConfig",
    "JudgeConfig",
    "LearnerConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncPeriod",
    "TaskConfig",
    "TrainConfig",
    "apply",
    "check_types",
    "differences",
    "fingerprint",
    "flatten",
    "from_json",
    "identity",
    "to_json",
]


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every option by its dotted name, in the order of declaration."""
    out: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, name = getattr(config, item.name), f"{prefix}{item.name}"
        out.update(flatten(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value})
    return out


@functools.cache
def _leaf_fields(cls: Any, prefix: str = "") -> tuple[tuple[str, dataclasses.Field[Any], Any], ...]:
    hints, out = typing.get_type_hints(cls), list[tuple[str, dataclasses.Field[Any], Any]]()
    for item in dataclasses.fields(cls):
        kind, name = hints[item.name], f"{prefix}{item.name}"
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            out += _leaf_fields(kind, f"{name}.")
        else:
            out.append((name, item, kind))
    return tuple(out)


def _matches(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind))
    if origin in (types.UnionType, typing.Union):
        return any(_matches(value, part) for part in typing.get_args(kind))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _kind_words(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind_words(part) for part in typing.get_args(kind))
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(kind, str(kind))


def check_types(config: RunConfig) -> None:
    """Raises ValueError, naming option, value and what would be right, if an option has the wrong type."""
    values = flatten(config)
    for name, _, kind in _leaf_fields(type(config)):  # type: ignore[arg-type]  # a class is hashable
        if not _matches(values[name], kind):
            raise ValueError(f"{name} is {values[name]!r} and must be {_kind_words(kind)}")


def apply(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """A copy with the dotted options replaced; a section's name takes a whole section.

    Sections are laid down before single options. Raises ValueError for an unknown option (near names
    are suggested) or a value of the wrong type.
    """
    sections = {item.name for item in dataclasses.fields(config)} - {"seed"}
    for name in sorted(overrides, key=lambda key: "." in key):
        value = overrides[name]
        if name not in flatten(config) and name not in sections:
            known = unknown("option", name, flatten(config))
            raise ValueError(f"{known}; {words}") if (words := hint(name)) else known
        head, _, tail = name.partition(".")
        if head in sections and not tail and type(value) is not type(getattr(config, head)):
            raise ValueError(f"{head} takes a {type(getattr(config, head)).__name__}, not {value!r}")
        new = dataclasses.replace(getattr(config, head), **{tail: value}) if tail else value
        config = dataclasses.replace(config, **{head: new})
    check_types(config)
    return config


def differences(config: RunConfig, control: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Options in which two configurations differ: name -> (control's value, config's value).

    Left out are the seed and what the harness fills in.
    """
    mine, theirs = flatten(config), flatten(control)
    return {
        name: (theirs[name], mine[name])
        for name, item, _ in _leaf_fields(type(config))  # type: ignore[arg-type]  # a class is hashable
        if mine[name] != theirs[name] and name != "seed" and not item.metadata.get("filled_in")
    }


def identity(config: RunConfig) -> dict[str, Any]:
    """The options that make up the identity: those that differ from their defaults, execution options and seed aside.

    Numbers are normalised (1 and 1.0 are one value of a float option), so that equal configurations hash equally.
    """
    values, defaults = flatten(config), flatten(type(config)())
    out = {}
    for name, item, kind in _leaf_fields(type(config)):  # type: ignore[arg-type]  # a class is hashable
        value = float(values[name]) if kind is float else values[name]
        if item.metadata.get("identity", True) and name != "seed" and value != defaults[name]:
            out[name] = value
    return out


def fingerprint(config: RunConfig) -> str:
    """The identity of a run: 16 hex digits of SHA-256 over its non-default options and its seed.

    Values that equal their defaults do not enter, so that adding an option orphans no finished run;
    options that only say how a run is carried out do not enter either.
    """
    text = json.dumps({"options": identity(config), "seed": config.seed}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(config: RunConfig) -> dict[str, Any]:
    """The whole tree as nested plain values."""
    return dataclasses.asdict(config)


def from_json(tree: Mapping[str, Any]) -> RunConfig:
    """The configuration that `to_json` wrote; unknown keys and wrong types raise ValueError."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update({f"{key}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {key: value})
    return apply(RunConfig(), flat)
