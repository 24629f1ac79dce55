"""What a study declared before it ran, as the sweep wrote it down in `study.json`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.frozen import ATTRIBUTE, reasons
from suite.study import Claim

if TYPE_CHECKING:
    from reports.load import StudyData


@dataclass(frozen=True)
class DeclaredArm:
    """One arm as declared: what it changes against the control, and why it cannot differ, if it cannot."""

    name: str
    label: str
    differs: Mapping[str, tuple[Any, Any]]
    inert: str | None = None


@dataclass(frozen=True)
class DeclaredCell:
    """One arm under one seed, with the sweep's word on where it stands."""

    arm: str
    seed: int
    name: str
    fingerprint: str
    status: str
    error: str | None = None


@dataclass(frozen=True)
class Declaration:
    """A study's declaration. `found` is False where it had to be inferred from the runs."""

    name: str
    question: str
    metric: str
    control: str
    arms: tuple[DeclaredArm, ...]
    seeds: tuple[int, ...]
    claims: tuple[Claim, ...] = ()
    cells: tuple[DeclaredCell, ...] = ()
    commit: str = ""
    dirty: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    exploratory: Mapping[str, str] = field(default_factory=dict)
    """Claim -> why it is exploratory: what was said of it only after the first cell of its arms had started."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Claim -> when it was fixed: when the first cell of its arms started."""
    records_claims: bool = False
    """Whether the study's record says when claims were fixed; older ones do not."""
    found: bool = True

    @property
    def target(self) -> list[str]:
        """What `suite run` needs: the study's name or its file, the axes varied around it, the folder of its search."""
        words = shlex.split(self.command)
        if words[1:2] not in (["run"], ["tune"]) or len(words) < 3 or words[2].startswith("-"):
            return [self.name]
        given = [words[i : i + 2] for i, word in enumerate(words) if word in ("--axis", "--tuned", "--folder")]
        if words[1] == "tune":
            place = next((value for word, value in given if word == "--folder"), f"runs/{self.name}")
            given = [["--tuned", place]]
        return [words[2], *(word for pair in given for word in pair if pair[0] != "--folder")]

    def reproduce(self, arm: str, seed: int) -> str:
        """The command that runs one cell again, in a folder of its own: a finished cell is never run twice in one."""
        chosen = ["--arm", arm, "--seeds", str(seed), "--folder", f"runs/{self.name}-again"]
        return shlex.join(["suite", "run", *self.target, *chosen])


def declaration(folder: Path, data: StudyData) -> Declaration:
    """The declaration in `folder`/study.json; inferred from the runs, and marked so, where there is no such file.

    Raises ValueError, naming the file and the key, for a file that is no declaration.
    """
    path = folder / "study.json"
    if not path.is_file():
        return _inferred(folder.name, data)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _parsed(raw)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path} has no key {error}; it is not a study's declaration") from error


def known_commit(commit: object) -> str | None:
    """A recorded commit; None where the code was run from no repository."""
    return commit if isinstance(commit, str) and commit not in ("", "unknown") else None


def _parsed(raw: Mapping[str, Any]) -> Declaration:
    arms = tuple(
        DeclaredArm(arm["name"], arm.get("label") or arm["name"], _pairs(arm.get("differs")), arm.get("inert"))
        for arm in raw["arms"]
    )
    cells = tuple(
        DeclaredCell(
            cell["arm"],
            int(cell["seed"]),
            cell.get("name", ""),
            cell.get("declared") or cell.get("fingerprint") or "",
            cell.get("status", "waiting"),
            cell.get("error"),
        )
        for cell in raw.get("cells", ())
    )
    fixed = {entry["claim"]["name"]: entry for entry in raw.get(ATTRIBUTE, ())}
    mine = {claim["name"]: claim for claim in raw.get("claims", ())}
    # one that was taken away is shown as it was
    claims = mine | {name: entry["claim"] for name, entry in fixed.items() if name not in mine}
    exploratory = {}
    for name, entry in fixed.items():
        if found := reasons(entry, mine.get(name), raw["seeds"]):
            exploratory[name] = "; ".join(found)
    begun = {cell.arm for cell in cells if cell.status != "waiting"}
    for name, claim in mine.items() if ATTRIBUTE in raw else ():
        if name not in fixed and begun & {claim["arm"], claim["than"]}:
            exploratory[name] = "no record of it before its first cell started"
    return Declaration(
        name=raw["name"],
        question=raw.get("question", ""),
        metric=raw["metric"],
        control=raw["control"],
        arms=arms,
        seeds=tuple(int(seed) for seed in raw["seeds"]),
        claims=tuple(Claim(**claim) for claim in claims.values()),
        cells=cells,
        commit=known_commit(raw.get("commit")) or "",
        dirty=bool(raw.get("dirty")),
        versions=raw.get("versions") or {},
        command=raw.get("command") or "",
        exploratory=exploratory,
        fixed={name: entry["at"] for name, entry in fixed.items()},
        records_claims=ATTRIBUTE in raw,
    )


def _inferred(name: str, data: StudyData) -> Declaration:
    runs = data.runs
    names = [str(arm) for arm in dict.fromkeys(runs["arm"])] if len(runs) else []
    configs = {str(row["arm"]): row["config"] for row in runs.to_dict("records")}
    # the control is the arm that changes nothing; without one, the first
    control = next((arm for arm in names if not (configs[arm] or {}).get("differs")), names[0] if names else "")
    names.sort(key=lambda arm: arm != control)
    arms = []
    for arm in names:
        config = configs[arm] or {}
        arms.append(DeclaredArm(arm, config.get("label") or arm, _pairs(config.get("differs"))))
    seeds = tuple(sorted({int(seed) for seed in runs["seed"]})) if len(runs) else ()
    return Declaration(name, "", "eval/test/accuracy", control, tuple(arms), seeds, found=False)


def _pairs(differs: Mapping[str, Iterable[Any]] | None) -> dict[str, tuple[Any, Any]]:
    return {name: (control, arm) for name, (control, arm) in (differs or {}).items()}
