"""What a search is: for each arm ranges of options, equally many trials and equal training, scored on validation.

Declared in the study's file and run by `suite tune` (docs/tuning.md). The winner of each arm is run again under the
study's own seeds, which the search never saw, and only those runs are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from suite.config import RunConfig, apply, fingerprint, flatten

if TYPE_CHECKING:
    from suite.study import Study

FILE = "search.json"
"""Where a search is recorded, in the study's folder."""

_DIGITS = 4


@dataclass(frozen=True)
class Float:
    """The numbers from `low` to `high`, drawn evenly."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _check_ends(self)

    @property
    def values(self) -> tuple[float, float]:
        """The two ends."""
        return float(self.low), float(self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def rounded(self, value: Any) -> Any:
        """The value to four significant digits, within the range: what is printed is what runs."""
        return min(max(float(f"{value:.{_DIGITS}g}"), float(self.low)), float(self.high))


@dataclass(frozen=True)
class LogFloat(Float):
    """The numbers from `low` to `high`, both above 0, drawn evenly on a logarithmic scale."""

    def __post_init__(self) -> None:
        _check_ends(self)
        if not self.low > 0:
            raise ValueError(f"LogFloat({self.low!r}, {self.high!r}): a logarithmic range must start above 0")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, log"


@dataclass(frozen=True)
class Int:
    """The whole numbers from `low` to `high`, both included, drawn evenly."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_ends(self)
        if type(self.low) is not int or type(self.high) is not int:
            raise ValueError(f"Int({self.low!r}, {self.high!r}): both ends must be whole numbers")

    @property
    def values(self) -> tuple[int, int]:
        """The two ends."""
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.low} to {self.high}, whole"

    def rounded(self, value: Any) -> Any:
        """The value itself."""
        return int(value)


@dataclass(frozen=True)
class OneOf:
    """One of a few values: texts, numbers, or true and false."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if isinstance(self.values, str) or len(self.values) < 2 or len(set(self.values)) < len(self.values):
            raise ValueError(f"OneOf({self.values!r}): needs at least two values, each once")
        if not all(isinstance(value, bool | int | float | str) for value in self.values):
            raise ValueError(f"OneOf({self.values!r}): values must be texts, numbers, or true and false")

    def __str__(self) -> str:
        return "one of " + ", ".join(map(str, self.values))

    def rounded(self, value: Any) -> Any:
        """The value itself."""
        return value


Range = Float | LogFloat | Int | OneOf


def _check_ends(given: Float | Int) -> None:
    name = type(given).__name__
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (given.low, given.high))
    if not numbers or not (math.isfinite(given.low) and math.isfinite(given.high) and given.low < given.high):
        raise ValueError(
            f"{name}({given.low!r}, {given.high!r}): both ends must be finite numbers, the first the smaller"
        )


@dataclass(frozen=True)
class Search:
    """A search of its own for each arm. Raises ValueError for what no search can be."""

    ranges: Mapping[str, Mapping[str, Range]]
    """Arm -> option -> range. Every arm of the study has some."""
    trials: int
    """Trials of each arm, the same number for all."""
    seeds: tuple[int, ...]
    """Seeds under which each trial is run; its score is the mean over them. None of them may be the study's."""
    sampler: Literal["tpe", "gp"] = "tpe"
    """Optuna's tree-structured Parzen estimator or its Gaussian process."""
    pruner: Literal["wilcoxon"] | None = None
    """`wilcoxon`: after each seed, a trial whose answers to the validation problems are worse than the best earlier
    trial's (signed-rank test, paired by seed and problem) is given up."""
    batch: int = 2
    """Trials of an arm that are proposed together. They know the scores of earlier batches only, so a search gives the
    same trials on any number of workers."""
    startup: int = 4
    """Scored trials of an arm up to which parameters are drawn at random."""
    metric: str = "eval/validation/accuracy"
    """The score, at a run's last step: `eval/validation/accuracy` or `eval/validation/avg@K`."""
    key: int = 0
    """Another key, other proposals."""

    def __post_init__(self) -> None:
        for name, least in (("trials", 1), ("batch", 1), ("startup", 1), ("key", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"search: {name} is {value!r} and must be a whole number from {least} on")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"search: seeds are {self.seeds!r}; name at least one, each once")
        if self.sampler not in ("tpe", "gp"):
            raise ValueError(f"search: sampler is {self.sampler!r} and must be 'tpe' or 'gp'")
        if self.pruner not in (None, "wilcoxon"):
            raise ValueError(f"search: pruner is {self.pruner!r} and must be 'wilcoxon' or None")
        if self.pruner and len(self.seeds) < 2:
            raise ValueError(
                "search: pruner 'wilcoxon' acts between a trial's seeds, and there is one; add seeds or take None"
            )
        if self.metric != "eval/validation/accuracy" and not self.metric.startswith("eval/validation/avg@"):
            raise ValueError(
                f"search: metric is {self.metric!r}; a search is scored on validation problems, "
                "eval/validation/accuracy or eval/validation/avg@K"
            )

    def check(self, study: Study) -> None:
        """Raises ValueError unless the search fits the study: its arms, options, budgets and seeds."""
        where = f"study {study.name!r}, search"
        for name in self.ranges:
            study.arm(name)
        for arm in study.arms:
            if not self.ranges.get(arm.name):
                raise ValueError(f"{where}: arm {arm.name!r} has no ranges; every arm gets its own search")
            for option, values in self.ranges[arm.name].items():
                _check_option(f"{where}, arm {arm.name!r}", study.config(arm.name), option, values)
            logged = f"eval/validation/avg@{study.config(arm.name).eval.num_samples}"
            if self.metric not in ("eval/validation/accuracy", logged):
                raise ValueError(f"{where}: metric is {self.metric!r}, and arm {arm.name!r} measures {logged}")
        both = sorted(set(self.seeds) & set(study.seeds))
        if both:
            raise ValueError(
                f"{where}: seeds {', '.join(map(str, both))} are also the study's; winners must be run under seeds "
                "that chose nothing"
            )
        budgets = {arm.name: _budget(study.config(arm.name)) for arm in study.arms}
        first = budgets[study.control.name]
        for name, budget in budgets.items():
            for option, value in budget.items():
                if value != first[option]:
                    raise ValueError(
                        f"{where}: {option} is {value} in arm {name!r} and {first[option]} in {study.control.name!r}; "
                        "every arm must get the same training budget"
                    )


_BUDGET = (
    *("train.steps", "rollout.num_prompts", "rollout.num_generations"),
    *("objective.num_minibatches", "objective.num_epochs"),
)
_HELD = ("seed", "eval.", "model.", "task.")


def _budget(config: RunConfig) -> dict[str, Any]:
    values = flatten(config)
    return {option: values[option] for option in _BUDGET[:3]} | {"updates per rollout batch": config.updates_per_batch}


def _check_option(where: str, config: RunConfig, option: str, values: Range) -> None:
    if not isinstance(values, Range):
        raise ValueError(f"{where}: {option} has {values!r}; write LogFloat, Float, Int or OneOf")
    try:
        for value in values.values:
            apply(config, {option: value})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if option in _BUDGET:
        raise ValueError(f"{where}: {option} would change the training budget, which is the same for all trials")
    if option.startswith(_HELD):
        raise ValueError(f"{where}: {option} decides what a trial starts from or how it is scored; it cannot be tuned")


def search_folder(folder: Path) -> Path:
    """Where the trials of the study in `folder` lie: beside it, so that no report takes them for the study's runs."""
    return folder.with_name(f"{folder.name}-tune")


def examine(study: Study) -> None:
    """Raises ValueError if an arm cannot run somewhere in its ranges, or if it does not read an option. Imports torch.

    Each range is tried at its ends (all values of a choice), the others at their first and at their last value.
    """
    from suite.config import identity
    from suite.inert import effective
    from suite.options import reads, who_reads
    from suite.validate import validate

    assert study.search is not None
    for arm in study.arms:
        where = f"study {study.name!r}, search, arm {arm.name!r}"
        ranges = study.search.ranges[arm.name]
        corners = [apply(study.config(arm.name), {o: r.values[end] for o, r in ranges.items()}) for end in (0, -1)]
        for option, values in ranges.items():
            if not any(option in reads(corner) for corner in corners):
                raise ValueError(f"{where}: nothing reads {option} here; {who_reads(corners[0], option)}")
            acts = False
            for corner in corners:
                tried = [apply(corner, {option: value}) for value in values.values]
                for config in tried:
                    try:
                        validate(config)
                    except ValueError as error:
                        raise ValueError(f"{where}: {error}") from None
                plain = [json.dumps(identity(effective(config)[0]), sort_keys=True) for config in tried]
                acts = acts or len(set(plain)) > 1
            if not acts:
                why = [reasons[option] for corner in corners if option in (reasons := effective(corner)[1])]
                raise ValueError(f"{where}: {option} changes nothing, {(why or ['its values give the same run'])[0]}")


def tuned(study: Study, params: Mapping[str, Mapping[str, Any]]) -> Study:
    """The study with each arm's options as its winner has them; an ordinary study, without a search."""
    arms = tuple(replace(arm, overrides={**arm.overrides, **params[arm.name]}) for arm in study.arms)
    return replace(study, arms=arms, search=None)


def winners(study: Study, folder: Path) -> Study:
    """The study whose arms are the winners of the search recorded in `folder`.

    Raises ValueError if there is no finished search of this study, or if it was one of other arms.
    """
    path = folder / FILE
    hint = f"`suite tune {study.name}` runs it"
    if not path.is_file():
        raise ValueError(f"study {study.name!r} declares a search and {folder} holds none; {hint}")
    tree = json.loads(path.read_text(encoding="utf-8"))
    if tree["study"] != study.name or [arm["name"] for arm in tree["arms"]] != [arm.name for arm in study.arms]:
        raise ValueError(f"{path} is of another study or other arms than {study.name!r}; name another folder")
    if not tree["done"]:
        raise ValueError(f"the search of study {study.name!r} is not finished; {hint}")
    without = [arm["name"] for arm in tree["arms"] if arm["winner"] is None]
    if without:
        raise ValueError(
            f"the search of study {study.name!r} has no winner for {', '.join(without)}: no trial ran to its end; "
            "add trials, or change the ranges in another folder"
        )
    found = tuned(study, {arm["name"]: arm["params"] for arm in tree["arms"]})
    for arm in tree["arms"]:
        if fingerprint(found.config(arm["name"])) != arm["fingerprint"]:
            raise ValueError(f"arm {arm['name']!r} of study {study.name!r} has changed since its search; {hint} anew")
    return found


def words(params: Mapping[str, Any], options: Sequence[str] = ()) -> str:
    """Parameters in a line: `optim.lr 3e-05, objective.beta 0.2`."""
    return ", ".join(f"{name} {params[name]:g}" if isinstance(params[name], float) else f"{name} {params[name]}"
                     for name in options or params)  # fmt: skip
