"""Claims as they were when the first cell that bears on them started: what was said before anything was seen.

The record stands twice, in `study.json` and among the storage's attributes. An entry is
`{"claim", "seeds", "at", "added", "late_seeds"}`: the claim as declared, the seeds that were to decide it, when the
first cell of either arm started, whether the claim was declared only after that, and the seeds that were added when
results were there to be looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Entry = dict[str, Any]

ATTRIBUTE = "frozen"
"""Name of the record in `study.json` and in the storage."""


def started(
    record: Sequence[Entry], claims: Sequence[Mapping[str, Any]], seeds: Sequence[int], arm: str
) -> list[Entry]:
    """The record after a cell of `arm` has started: the claims on that arm are now fixed."""
    known = {entry["claim"]["name"] for entry in record}
    fixed = [claim for claim in claims if arm in (claim["arm"], claim["than"]) and claim["name"] not in known]
    return [*record, *(_entry(claim, seeds, added=False) for claim in fixed)]


def declared(
    record: Sequence[Entry],
    claims: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    begun: Collection[str],
    seen: Mapping[str, Collection[int]],
) -> list[Entry]:
    """The record after a study was declared (again), with the claims and seeds that came too late.

    `begun` are the arms of which a cell has started, `seen` gives an arm's seeds whose cells are finished, so that
    their results may have been looked at.
    """
    out = []
    for entry in record:
        sides = [set(seen.get(entry["claim"][side], ())) for side in ("arm", "than") if entry["claim"][side] in seen]
        new = set(seeds) - {*entry["seeds"], *entry["late_seeds"]}
        key = "late_seeds" if sides and set.intersection(*sides) else "seeds"
        out.append({**entry, key: sorted({*entry[key], *new})})
    known = {entry["claim"]["name"] for entry in record}
    late = [claim for claim in claims if claim["name"] not in known and {claim["arm"], claim["than"]} & {*begun}]
    return [*out, *(_entry(claim, seeds, added=True) for claim in late)]


def _entry(claim: Mapping[str, Any], seeds: Sequence[int], *, added: bool) -> Entry:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"claim": dict(claim), "seeds": sorted(seeds), "at": at, "added": added, "late_seeds": []}


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """In what a claim differs from what it was, in words; empty if in nothing."""
    return ", ".join(f"{key} {was[key]!r} -> {now[key]!r}" for key in was if was[key] != now.get(key))


def reasons(entry: Entry, claim: Mapping[str, Any] | None, seeds: Collection[int]) -> list[str]:
    """Why a claim, as it now stands (None: it was taken away), is exploratory: what came after its first cell."""
    out = [f"added after its first cell had started ({entry['at']})"] if entry["added"] else []
    if claim is None:
        out.append(f"removed after it was fixed at {entry['at']}")
    else:
        found = changes(entry["claim"], claim)
        out += [f"changed after it was fixed at {entry['at']}: {found}"] if found else []
    if late := sorted(set(entry["late_seeds"]) & set(seeds)):
        out.append(f"decided with seeds {', '.join(map(str, late))}, added when results were known")
    return out
