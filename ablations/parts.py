"""An algorithm taken apart: what its parts give when they are added one by one, and when one is left out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from suite.config import RunConfig, apply, flatten
from suite.registry import unknown
from suite.study import Arm


@dataclass(frozen=True, slots=True)
class Part:
    """Options that make up one idea of an algorithm."""

    name: str
    label: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Ablation:
    """The whole algorithm, the plain one that it grew from, and the parts that lie between them.

    A part is present where its options are as in `full` and absent where they are as in `plain`; what belongs to no
    part is as in `full` in every arm. Arms are relative to `base`, which has no part.
    """

    full: RunConfig
    plain: RunConfig
    parts: tuple[Part, ...]
    plain_label: str = "plain"
    full_label: str = "full"

    @property
    def base(self) -> RunConfig:
        """The algorithm without any of the parts. ValueError if a part names an option that does not exist."""
        plain = flatten(self.plain)
        options = [option for part in self.parts for option in part.options]
        for option in options:
            if option not in plain:
                raise unknown("option", option, plain)
        return apply(self.full, {option: plain[option] for option in options})

    def _with(self, parts: Iterable[Part]) -> dict[str, Any]:
        full = flatten(self.full)
        return {option: full[option] for part in parts for option in part.options}

    def cumulative(self) -> tuple[Arm, ...]:
        """`plain`, then `plus_PART` with this part and all before it; the last, with all parts, is called `full`."""
        arms = [Arm("plain", {}, self.plain_label)]
        for count, part in enumerate(self.parts, 1):
            last = count == len(self.parts)
            label = self.full_label if last else f"+ {part.label}"
            arms.append(Arm("full" if last else f"plus_{part.name}", self._with(self.parts[:count]), label))
        return tuple(arms)

    def leave_one_out(self) -> tuple[Arm, ...]:
        """`no_PART` with all parts but this one."""
        return tuple(
            Arm(f"no_{part.name}", self._with(other for other in self.parts if other is not part), f"w/o {part.label}")
            for part in self.parts
        )

    def both(self) -> tuple[Arm, ...]:
        """Both tables; the last part is left out once only, in the arm before `full`."""
        return self.cumulative() + self.leave_one_out()[:-1]

    def without(self, part: str) -> str:
        """The arm of `both` that has all parts but this one."""
        last = self.parts[-1].name == part
        return f"plus_{self.parts[-2].name}" if last else f"no_{part}"
