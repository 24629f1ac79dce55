"""The searches of a study's arms: what was proposed, what came of it, and what is proposed next.

Each arm has an Optuna study of its own, `STUDY-tune/ARM`, beside the cells of the trials in one storage. A trial is
written whole, as RUNNING, before it is run, and ends once: COMPLETE with its score, PRUNED or FAIL without one. What
is proposed is a function of the study's name, the search's key, the arm, the trial's number and the results of earlier
batches: not of workers, timing or interruptions.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import MappingProxyType
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import WilcoxonPruner
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from suite.config import apply, fingerprint
from suite.provenance import code_name, provenance
from suite.randomness import generator
from suite.search import Int, LogFloat, OneOf, Range, Search
from suite.storage import Store
from suite.study import Arm, Study

PRUNE_P = 0.1
"""One-sided p value of the signed-rank test below which a trial is given up (Optuna's default)."""
MIN_IMPORTANCE = 20
"""Scored trials below which no importance is given: five must lie in the best quarter (PED-ANOVA, Optuna's advice)."""
DIVERGED = 0.0
"""The score of a run whose loss was no number: what it would have scored is unknown, and leaving it out would flatter
its arm."""

Outcomes = Mapping[int, Mapping[str, float]]
"""Search seed -> problem -> what the run earned on it, 0 to 1."""


@dataclass(frozen=True)
class Trial:
    """One trial of an arm: parameters, and what came of it."""

    arm: str
    number: int
    params: Mapping[str, Any]
    cell: str
    """The arm of the trials' cells: its own, or an earlier trial's of the same configuration."""
    state: str = "running"
    """`running`, `complete`, `diverged` (on at least one seed), `pruned` or `failed`."""
    score: float | None = None
    """Mean over the search's seeds; None unless complete or diverged."""
    scores: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Search seed -> score, of the seeds that were run; of a pruned trial censored, and in no mean."""
    diverged: tuple[int, ...] = ()
    tokens: float = 0.0
    """Tokens generated for training."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or was pruned, or what else should be known."""
    code: str = ""
    """The code that ended it, as in `commit 1a2b3c4d`."""

    @property
    def name(self) -> str:
        return trial_arm(self.arm, self.number)

    @property
    def repeats(self) -> bool:
        """Whether its configuration had been run before, so that nothing was run for it."""
        return self.cell != self.name


def trial_arm(arm: str, number: int) -> str:
    """The name of a trial among the arms of the search's cells."""
    return f"{arm}-t{number:02d}"


class Book:
    """The searches of all arms. `open` it; every change happens under the storage's lock and may be repeated."""

    def __init__(self, store: Store, study: Study, inner: Mapping[str, optuna.Study]) -> None:
        assert study.search is not None
        self.store, self.study, self.search, self._inner = store, study, study.search, inner

    @classmethod
    def open(cls, store: Store, study: Study) -> Book:
        """The searches in a storage, begun if they are not there.

        Raises ValueError if one was begun with another definition: only `trials` may grow.
        """
        inner = {}
        with store.lock():
            for arm in study.arms:
                name = f"{study.name}-tune/{arm.name}"
                one = optuna.create_study(
                    study_name=name, storage=store.optuna, direction="maximize", load_if_exists=True
                )
                wanted, found = _identity(study, arm), one.user_attrs.get("search")
                if found is None:
                    one.set_user_attr("search", wanted)
                elif found != wanted:
                    changed = [key for key in wanted if found.get(key) != wanted[key]]
                    raise ValueError(
                        f"the search of arm {arm.name!r} was begun with another {' and another '.join(changed)}; "
                        "undo the change, or take another folder"
                    )
                inner[arm.name] = one
        return cls(store, study, inner)

    def trials(self, arm: str | None = None) -> list[Trial]:
        """All trials, or those of one arm, by number and arm."""
        names = [one.name for one in self.study.arms if arm in (None, one.name)]
        found = [_trial(name, trial) for name in names for trial in self._frozen(name)]
        return sorted(found, key=lambda trial: trial.number)

    def propose(self) -> list[Trial]:
        """The trials that are to be run now: the rest of a batch, else a new batch of each arm; none at the end."""

        def action() -> None:
            with self.store.lock():
                current = {arm.name: self._frozen(arm.name) for arm in self.study.arms}
                ended = [sum(trial.state.is_finished() for trial in trials) for trials in current.values()]
                batch = min(ended) // self.search.batch
                for arm, trials in current.items():
                    for number in range(len(trials), min((batch + 1) * self.search.batch, self.search.trials)):
                        self._add(arm, number)

        self.store.call(action)
        return [trial for trial in self.trials() if trial.state == "running"]

    def end(self, trial: Trial) -> None:
        """Writes down what came of a trial; one that has ended already stays as it is."""
        states = {"complete": TrialState.COMPLETE, "diverged": TrialState.COMPLETE}
        state = states.get(trial.state) or {"pruned": TrialState.PRUNED, "failed": TrialState.FAIL}[trial.state]
        assert (trial.score is not None) == (state == TrialState.COMPLETE)
        result = {
            "state": trial.state,
            "scores": {str(seed): score for seed, score in trial.scores.items()},
            "diverged": list(trial.diverged),
            "tokens": trial.tokens,
            "seconds": trial.seconds,
            "reason": trial.reason,
            "code": code_name(provenance()),
        }

        def action() -> None:
            with self.store.lock():
                frozen = self._frozen(trial.arm)[trial.number]
                if frozen.state.is_finished():
                    return
                storage, key = self.store.optuna, frozen._trial_id
                storage.set_trial_user_attr(key, "result", result)
                # The running mean over seeds: what the dashboard shows, and how a sampler ranks a pruned trial.
                for place in range(len(trial.scores)):
                    storage.set_trial_intermediate_value(key, place, fmean(list(trial.scores.values())[: place + 1]))
                storage.set_trial_state_values(key, state, None if trial.score is None else [trial.score])

        self.store.call(action)

    def best(self, arm: str, before: int | None = None) -> Trial | None:
        """The complete trial of the highest score, the earliest of equals; `before`: among trials of lower number."""
        able = [t for t in self.trials(arm) if t.state == "complete" and (before is None or t.number < before)]
        return max(able, key=lambda trial: (trial.score, -trial.number), default=None)

    def rival(self, trial: Trial) -> Trial | None:
        """The trial that `trial` is compared with before its next seed: the best of earlier batches."""
        return self.best(trial.arm, trial.number // self.search.batch * self.search.batch)

    def importance(self, arm: str) -> dict[str, float] | None:
        """Option -> share of the importance, largest first, by PED-ANOVA over scored trials; None if they are few."""
        scored = [trial for trial in self._frozen(arm) if trial.state == TrialState.COMPLETE]
        if len(scored) < MIN_IMPORTANCE or len(self.search.ranges[arm]) < 2:
            return None
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.25)
        return optuna.importance.get_param_importances(_mirror(scored), evaluator=evaluator)

    def cells(self) -> Study:
        """The study of the trials' runs: an arm per configuration that was proposed, under the search's seeds."""
        arms = {}
        for trial in self.trials():
            if not trial.repeats:
                overrides, title = _overrides(self.study, trial.arm, trial.params), self.study.arm(trial.arm).title
                arms[trial.name] = Arm(trial.name, overrides, f"{title}, trial {trial.number}")
        question = f"Search of {', '.join(arm.title for arm in self.study.arms)}"
        name = f"{self.study.name}-tune"
        return Study(
            name, question, self.study.base, tuple(arms.values()), self.search.seeds, metric=self.search.metric
        )

    def _frozen(self, arm: str) -> list[FrozenTrial]:
        return self.store.call(lambda: self._inner[arm].get_trials(deepcopy=False))

    def _add(self, arm: str, number: int) -> None:
        batch = number // self.search.batch * self.search.batch
        spaces = {option: _space(values) for option, values in self.search.ranges[arm].items()}
        earlier = self._frozen(arm)
        # A trial of the same batch counts as running even if, after more trials were declared, it has ended.
        before = earlier[:batch] + [_running(trial.params, trial.distributions) for trial in earlier[batch:number]]
        mirror = _mirror(before, _sampler(self.search, self.study.name, arm, number))
        drawn = mirror.ask(spaces).params
        params = {option: values.rounded(drawn[option]) for option, values in self.search.ranges[arm].items()}
        identity = fingerprint(apply(self.study.base, _overrides(self.study, arm, params)))
        every = [trial.user_attrs for name in self._inner for trial in self._frozen(name)]
        known = {attrs["fingerprint"]: attrs["cell"] for attrs in every}
        attrs = {"fingerprint": identity, "cell": known.get(identity, trial_arm(arm, number))}
        self._inner[arm].add_trial(_running(params, spaces, attrs))


def prune(rival: Outcomes, trial: Outcomes) -> bool:
    """Whether a trial's outcomes so far are worse than its rival's on the same seeds and problems (WilcoxonPruner).

    A run without outcomes has diverged and earned nothing on any problem.
    """

    def flat(outcomes: Outcomes, seeds: Sequence[int]) -> dict[int, float]:
        values = [outcomes.get(seed, {}).get(problem, DIVERGED) for seed in seeds for problem in problems[seed]]
        return dict(enumerate(values))

    problems = {seed: sorted({*rival.get(seed, {}), *trial.get(seed, {})}) for seed in {**trial, **rival}}
    seeds = [*trial, *(seed for seed in rival if seed not in trial)]
    best = flat(rival, seeds)
    mirror = _mirror([create_trial(value=fmean(best.values()), intermediate_values=best)] if best else [])
    candidate = create_trial(state=TrialState.RUNNING, intermediate_values=flat(trial, list(trial)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return WilcoxonPruner(p_threshold=PRUNE_P).prune(mirror, candidate)


def _overrides(study: Study, arm: str, params: Mapping[str, Any]) -> dict[str, Any]:
    # No option turns the test problems off; one of them says nothing, so no test score can guide a search.
    return {**study.arm(arm).overrides, **params, "eval.test_problems": 1}


def _identity(study: Study, arm: Arm) -> dict[str, Any]:
    search = study.search
    assert search is not None
    kept = {name: getattr(search, name) for name in ("sampler", "pruner", "batch", "startup", "metric", "key")}
    ranges = {option: repr(values) for option, values in search.ranges[arm.name].items()}
    configuration = fingerprint(study.config(arm.name))
    return {"configuration": configuration, "ranges": ranges, "seeds": list(search.seeds), **kept}


def _space(values: Range) -> BaseDistribution:
    if isinstance(values, OneOf):
        return CategoricalDistribution(values.values)
    if isinstance(values, Int):
        return IntDistribution(values.low, values.high)
    return FloatDistribution(float(values.low), float(values.high), log=isinstance(values, LogFloat))


def _sampler(search: Search, study: str, arm: str, number: int) -> BaseSampler:
    """A sampler of its own for each proposal, so that none depends on draws made before an interruption."""
    seed = int(generator("search", study, search.key, arm, number).integers(2**32))
    if search.sampler == "gp":
        return GPSampler(seed=seed, n_startup_trials=search.startup, warn_independent_sampling=False)
    return TPESampler(seed=seed, n_startup_trials=search.startup)


def _mirror(trials: Sequence[FrozenTrial], sampler: BaseSampler | None = None) -> optuna.Study:
    """The trials in memory: a sampler or an evaluator sees these and no others, and writes nothing."""
    mirror = optuna.create_study(direction="maximize", sampler=sampler)
    mirror.add_trials(trials)
    return mirror


def _running(
    params: Mapping[str, Any], spaces: Mapping[str, BaseDistribution], attrs: dict[str, Any] | None = None
) -> FrozenTrial:
    return create_trial(
        state=TrialState.RUNNING, params=dict(params), distributions=dict(spaces), user_attrs=attrs or {}
    )


def _trial(arm: str, trial: FrozenTrial) -> Trial:
    attrs, ended = trial.user_attrs, trial.state.is_finished()
    result = attrs["result"] if ended else {}
    score = trial.value if trial.state == TrialState.COMPLETE else None
    assert score is None or math.isfinite(score)
    return Trial(
        arm,
        trial.number,
        dict(trial.params),
        attrs["cell"],
        result.get("state", "running"),
        score,
        {int(seed): value for seed, value in result.get("scores", {}).items()},
        tuple(result.get("diverged", ())),
        result.get("tokens", 0.0),
        result.get("seconds", 0.0),
        result.get("reason", ""),
        result.get("code", ""),
    )


def as_json(trial: Trial) -> dict[str, Any]:
    """A trial as `search.json` holds it."""
    return {
        "number": trial.number,
        "state": trial.state,
        "score": trial.score,
        "scores": [{"seed": seed, "value": value} for seed, value in trial.scores.items()],
        "params": json.loads(json.dumps(dict(trial.params))),
        "tokens": trial.tokens,
        "seconds": trial.seconds,
        "reason": trial.reason,
        "code": trial.code,
        "repeats": trial.cell if trial.repeats else None,
    }
