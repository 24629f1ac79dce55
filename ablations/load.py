"""Axes, presets and studies by name, found in their folders, or by the path of a file anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ablations.axis import check_name
from ablations.preset import Preset
from suite.registry import import_file, unknown
from suite.study import Axis, Study

HERE = Path(__file__).resolve().parent
AXES, PRESETS, STUDIES = HERE / "axes", HERE / "presets", HERE / "studies"

T = TypeVar("T", Axis, Preset, Study)


def axes() -> dict[str, Path]:
    """The axes that come with the project: name -> file. The file's name is the axis' name."""
    return _files(AXES)


def presets() -> dict[str, Path]:
    """The presets that come with the project: name -> file."""
    return _files(PRESETS)


def studies() -> dict[str, Path]:
    """The studies that come with the project: name -> file."""
    return _files(STUDIES)


def axis_file(name: str) -> Path:
    """The file of an axis, by name or by path (with a slash or .py); ValueError with near names if there is none."""
    return _locate("axis", name, axes())


def study_file(name: str) -> Path:
    """The file of a study, by name or path; ValueError with near names if there is none."""
    return _locate("study", name, studies())


def load_axis(name: str) -> Axis:
    """The `AXIS` that a file defines, by name or path; ValueError if there is no such file or it defines none."""
    axis = _constant(axis_file(name), "AXIS", Axis)
    for arm in axis.arms:
        check_name(f"axis {axis.name!r}: arm", arm.name)
    return axis


def load_preset(name: str) -> Preset:
    """The `PRESET` that a file defines, by name or path; ValueError as `load_axis`."""
    preset = _constant(_locate("preset", name, presets()), "PRESET", Preset)
    check_name("preset", preset.name)
    return preset


def load_study(name: str) -> Study:
    """The `STUDY` that a file defines, by name or path; checked. Raises ValueError as `Study.check` does."""
    study = _constant(study_file(name), "STUDY", Study)
    check_name("study", study.name)
    for arm in study.arms:
        check_name(f"study {study.name!r}: arm", arm.name)
    study.check()
    return study


def _files(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}


def _locate(kind: str, name: str, known: dict[str, Path]) -> Path:
    if name.endswith(".py") or "/" in name or "\\" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no {kind} file {path}")
        return path.resolve()
    if name not in known:
        raise unknown(kind, name, known)
    return known[name]


def _constant(path: Path, name: str, kind: type[T]) -> T:
    value = getattr(import_file(path), name, None)
    if not isinstance(value, kind):
        raise ValueError(f"{path} must define {name} = {kind.__name__}(...)")
    if path.is_relative_to(HERE) and value.name != path.stem:
        raise ValueError(f"{path}: {name} is called {value.name!r} and must be called {path.stem!r}, as its file is")
    return value
