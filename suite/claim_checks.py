"""Whether a study's claims can be decided: found out before any work."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import get_args, get_type_hints

from suite.config import RunConfig
from suite.metrics import describe, is_share
from suite.study import SEED_MODEL, Claim, Study

_AT_START = ("eval/", "policy/")
"""What a run also logs before its first step, as a claim against the seed model needs."""


def check_claims(study: Study) -> None:
    """Raises ValueError for a metric of the study or a claim that the arms' runs do not log, near names suggested, or
    a smallest effect that does not fit the metric's unit."""
    for arm in study.arms:
        _check_metric(f"study {study.name!r}: metric", study.metric, arm.name, study.config(arm.name))
    for claim in study.claims:
        where = f"study {study.name!r}: claim {claim.name!r}: metric"
        for side in {claim.arm, claim.than} - {SEED_MODEL}:
            _check_metric(where, claim.metric, side, study.config(side))
        if SEED_MODEL in (claim.arm, claim.than) and not claim.metric.startswith(_AT_START):
            raise ValueError(f"{where} {claim.metric!r} is not measured before the first step, as the seed model's is")
        if is_share(claim.metric) and claim.smallest_effect >= 1:
            raise ValueError(
                f"study {study.name!r}: claim {claim.name!r}: smallest_effect is {claim.smallest_effect:g}, which is "
                f"{100 * claim.smallest_effect:g} points of {claim.metric}, a share from 0 to 1; "
                f"{claim.smallest_effect:g} points are {claim.smallest_effect / 100:g}"
            )


def check_shape(study: Study) -> None:
    """Raises ValueError for arms, seeds or claims that are no tuples of such, and for claims of unknown kinds."""
    from suite.study import Arm

    wanted = {"arms": (study.arms, Arm, "arms"), "seeds": (study.seeds, int, "whole numbers")}
    for field, (value, kind, words) in (wanted | {"claims": (study.claims, Claim, "claims")}).items():
        if not isinstance(value, tuple | list) or any(type(item) is not kind for item in value):
            shown = value if isinstance(value, int | float | str) else type(value).__name__
            raise ValueError(
                f"study {study.name!r}: {field} is {shown!r} and must be a tuple of {words}; "
                "a tuple of one ends in a comma: (x,)"
            )
    for claim in study.claims:
        _check_claim(study, claim)


def _check_claim(study: Study, claim: Claim) -> None:
    where = f"study {study.name!r}: claim {claim.name!r}"
    kinds = get_args(get_type_hints(Claim)["kind"])
    if claim.kind not in kinds:
        near = get_close_matches(str(claim.kind), kinds, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{where}: kind is {claim.kind!r} and must be {' or '.join(map(repr, kinds))}{hint}")
    for field in ("name", "arm", "than", "metric"):
        if not isinstance(getattr(claim, field), str):
            raise ValueError(f"{where}: {field} is {getattr(claim, field)!r} and must be a string")


def _check_metric(where: str, metric: str, arm: str, config: RunConfig) -> None:
    known = evaluated(config)
    found = re.fullmatch(r"eval/(.+)/([^/]+)", metric)
    if not found:
        try:
            describe(metric)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return
    benchmark = found[1].rpartition("-")
    if metric in known or (_foreign(config, benchmark[0]) and benchmark[2] in ("validation", "test")):
        return
    near = get_close_matches(metric, known, n=3, cutoff=0.6)
    hint = f"near names: {', '.join(near)}" if near else f"it logs {', '.join(sorted(known))}"
    raise ValueError(f"{where} {metric!r} is not logged by the runs of arm {arm!r}; {hint}")


def _foreign(config: RunConfig, part: str) -> bool:
    """Whether a task (a part of a mixture, or the run's own) is none of the project's: it may measure what it likes."""
    from suite.tasks import TASKS

    name = part or config.task.name
    return name not in TASKS or not TASKS[name].__module__.startswith("suite.tasks")


def evaluated(config: RunConfig) -> set[str]:
    """The names of all that a run's evaluations log, but for what a plugin's task measures beside its reward."""
    from suite.tasks import is_scored, mixture, replies

    k, mixed = config.eval.num_samples, config.task.name == mixture.NAME
    tasks = list(mixture.proportions(config)) if mixed else [config.task.name]
    found: set[str] = set()
    for task in tasks:
        scored = is_scored(task)
        names = {"truncated_frac", "mean_tokens"}
        names |= {"reward", "scored_frac"} if scored else {"accuracy", "no_answer_frac"}
        names |= {"hidden_reward"} if task == replies.NAME else set()
        names |= {f"reward@{k}" if scored else f"avg@{k}"} if k else set()
        names |= {f"pass@{k}"} if k > 1 and not scored else set()
        names |= {f"best_of@{k}"} if k > 1 and (config.eval.reward_model or scored) else set()
        for split in ("validation", "test"):
            found |= {f"eval/{f'{task}-' if mixed else ''}{split}/{name}" for name in names}
    return found
