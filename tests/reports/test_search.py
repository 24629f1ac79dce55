"""The search in the report: every trial as what it is, and the winner's score set against its fresh runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from synthetic import Synthetic
from test_build import Page

from reports.build import build, lookup
from reports.declared import declaration
from reports.search import best_of
from reports.tables import show

SEEDS = (0, 1, 2, 3, 4)


def trial(number: int, state: str, score: float | None, **more: Any) -> dict[str, Any]:
    found = {
        "number": number,
        "state": state,
        "score": score,
        "scores": [] if score is None else [{"seed": 7, "value": score - 0.01}, {"seed": 8, "value": score + 0.01}],
        "params": {"optim.lr": 10.0 ** -(number + 3), "objective.beta": 0.1 * (number + 1)},
        "tokens": 1000.0 * (number + 1),
        "seconds": 10.0 + number,
        "reason": "",
        "code": "commit c0ffee00",
        "repeats": None,
    }
    return found | more


def record(**changes: Any) -> dict[str, Any]:
    """A search over two arms of the synthetic study: a winner, a diverged, a pruned, a failed and a repeated trial."""
    study = Synthetic()
    cells = {(c["arm"], c["seed"]): c["fingerprint"] for c in study.declaration()["cells"]}
    trials = {
        "offline": [
            trial(0, "complete", 0.55),
            trial(1, "diverged", 0.21, reason="not finite: NonFiniteLoss: step 3: nan (step 2)"),
            trial(2, "complete", 0.66),
            trial(3, "pruned", None, scores=[{"seed": 7, "value": 0.99}], reason="worse than trial 2"),
        ],
        "online": [
            trial(0, "failed", None, reason="error: RuntimeError: <b>boom</b> (step 4)", tokens=123.0),
            trial(1, "complete", 0.7),
            trial(2, "complete", 0.6),
            trial(3, "complete", 0.7, repeats="online-t01", tokens=0.0, seconds=0.0, code="commit 12345678"),
        ],
    }
    arms = [
        {
            "name": name,
            "label": study.labels[name],
            "ranges": {"optim.lr": "1e-06 to 0.01, log", "objective.beta": "0.1 to 1, log"},
            "trials": trials[name],
            "importance": {"optim.lr": 0.8, "objective.beta": 0.2} if name == "online" else None,
            "winner": {"offline": 2, "online": 1}[name],
            "params": trials[name][{"offline": 2, "online": 1}[name]]["params"],
            "fingerprint": "",
            "cells": {str(seed): cells[name, seed] for seed in SEEDS},
        }
        for name in ("offline", "online")
    ]
    tree = {
        "study": "mini_sync",
        "trials": 4,
        "sampler": "tpe",
        "pruner": "wilcoxon",
        "batch": 2,
        "startup": 2,
        "key": 0,
    }
    tree |= {"metric": "eval/validation/accuracy", "seeds": [7, 8], "min_importance": 20, "prune_p": 0.1, "steps": 20}
    return {**tree, "done": True, "arms": arms, **changes}


def report(folder: Path, tree: dict[str, Any] | None) -> tuple[dict[str, Any], Path]:
    study = Synthetic(arms=("offline", "online"), claims=[])
    place = study.write(folder / "study")
    if tree is not None:
        (place / "search.json").write_text(json.dumps(tree))
    out = build(place, source=study.data()).folder
    return json.loads((out / "report.json").read_text()), out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    return report(tmp_path_factory.mktemp("whole"), record())


def validation(arm: str) -> dict[int, float]:
    """The synthetic runs' last validation accuracies, read from their frames."""
    history = Synthetic().data().history
    rows = history[
        (history["arm"] == arm) & (history["metric"] == "eval/validation/accuracy") & (history["step"] == 20)
    ]
    return {int(row.seed): float(row.value) for row in rows.itertuples()}


def test_selection_is_the_winners_score_minus_its_fresh_runs_with_their_interval(
    whole: tuple[dict[str, Any], Path],
) -> None:
    for place, (arm, score) in enumerate((("offline", 0.66), ("online", 0.7))):
        found = whole[0]["search"]["arms"][place]["selection"]
        values = list(validation(arm).values())
        mean = sum(values) / 5
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / 4)
        half = stats.t.ppf(0.975, 4) * spread / math.sqrt(5)
        assert found["search"] == score
        assert found["fresh"]["mean"] == pytest.approx(mean, abs=1e-9)
        gap = found["difference"]
        assert (gap["mean"], gap["low"], gap["high"]) == pytest.approx(
            (score - mean, score - mean - half, score - mean + half), abs=1e-9
        )
        assert (gap["n"], gap["kind"]) == (5, "t")


def test_trials_are_counted_by_what_became_of_them_and_the_budget_by_what_was_used(
    whole: tuple[dict[str, Any], Path],
) -> None:
    offline, online = whole[0]["search"]["arms"]
    assert offline["counts"] == {"complete": 2, "diverged": 1, "pruned": 1, "failed": 0, "running": 0}
    assert online["counts"] == {"complete": 3, "diverged": 0, "pruned": 0, "failed": 1, "running": 0}
    assert (offline["started"], offline["tokens"], offline["seconds"]) == (4, 10000.0, 46.0)
    assert (online["tokens"], online["seconds"]) == (5123.0, 33.0)
    assert [t["winner"] for t in offline["trials"]] == [False, False, True, False]
    assert [t["winner"] for t in online["trials"]] == [False, True, False, False], "the first of equals"


def test_the_page_marks_every_number_and_shows_every_trial(whole: tuple[dict[str, Any], Path]) -> None:
    tree, out = whole
    text = (out / "index.html").read_text()
    page = Page(text)
    for path, form, shown in page.numbers:
        assert show(lookup(tree, path), form) == shown, path
    assert not [loose for loose in page.loose if re.search(r"\d", loose)]
    assert "#search" in page.links
    assert "search" in page.ids
    assert ("search/arms/0/trials/1/score", "percent", "21.0") in page.numbers
    assert "<b>boom</b>" not in text
    assert "censored" in text
    assert "too few trials to tell: 3 have a score, and it takes 20" in text
    assert ("search/arms/1/importance/0/share", "percent", "80.0") in page.numbers
    assert "--tuned" not in text
    plain = re.sub(r"<[^>]+>", "", text)
    for words in (
        "looks better than it is by about 1.0 standard deviations of a score",
        "A run whose loss was no number counts as a score of 0, and such a trial cannot win.",
        "Only the runs of the winners under other seeds (0, 1, 2, 3, 4) enter",
        "4 trials of 20 optimizer steps, each under search seeds 7, 8",
        "no test score was used",
        "Trials were ended by different code: commit 12345678, commit c0ffee00.",
        "the same configuration as online-t01, not run again",
    ):
        assert words in plain, words


def test_markdown_has_the_same_trials(whole: tuple[dict[str, Any], Path]) -> None:
    text = (whole[1] / "report.md").read_text()
    assert "## Search" in text
    assert (
        "| Offline DPO, s = ∞ | 3 | optim.lr 1e-06, objective.beta 0.4 | pruned | – | 99.0 | worse than trial 2 |"
        in text
    )
    assert "| Online DPO, s = 1 | 1 | optim.lr 0.0001, objective.beta 0.2 | winner | 70.0 | 69.0, 71.0 |  |" in text
    assert "&lt;b&gt;boom" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
    assert "## Search" in text.split("## What each arm changed")[1].split("## Cost")[0]


def test_runs_of_another_winner_are_not_set_against_the_score(tmp_path: Path) -> None:
    tree = record()
    tree["arms"][0]["cells"]["3"] = "f" * 16
    found = report(tmp_path, tree)[0]["search"]["arms"]
    assert found[0]["selection"]["difference"]["n"] == 0
    assert found[0]["selection"]["note"] == "the runs that are compared are not of this winner"
    assert found[1]["selection"]["difference"]["n"] == 5


def test_an_unfinished_search_and_none_at_all(tmp_path: Path) -> None:
    tree = record(done=False)
    for arm in tree["arms"]:
        arm |= {"winner": None, "params": None, "cells": {}, "fingerprint": None, "trials": arm["trials"][:1]}
    tree["arms"][0]["trials"] = []
    found, out = report(tmp_path / "a", tree)
    assert found["search"]["sentences"][-1] == "The search is not finished."
    assert found["search"]["arms"][1]["selection"]["note"] == "there is no winner yet"
    assert "The search is not finished." in (out / "index.html").read_text()
    found, out = report(tmp_path / "b", None)
    assert found["search"] is None
    assert 'id="search"' not in (out / "index.html").read_text()
    assert "## Search" not in (out / "report.md").read_text()


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"search\.json has no key 'arms'"):
        report(tmp_path / "a", {"study": "x"})


@pytest.mark.parametrize(
    ("count", "value"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (4, 1.0294), (8, 1.4236), (32, 2.0697)]
)
def test_best_of_equally_good_settings(count: int, value: float) -> None:
    """Expected maxima of standard normal samples: 1/sqrt(pi) for two, and the tables of Teichroew (1956)."""
    assert best_of(count) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize(
    ("command", "target"),
    [
        ("suite tune mini_tune", "mini_tune --tuned runs/mini_sync"),
        ("suite tune my/own.py --folder a/b", "my/own.py --tuned a/b"),
        ("suite run mini_tune --tuned runs/x", "mini_tune --tuned runs/x"),
        ("suite run mini_sync --axis kl", "mini_sync --axis kl"),
    ],
)
def test_a_cell_is_run_again_with_the_winners_of_the_search(tmp_path: Path, command: str, target: str) -> None:
    study = Synthetic()
    declared = declaration(study.write(tmp_path, command=command), study.data())
    wanted = f"suite run {target} --arm online --seeds 3 --folder runs/mini_sync-again"
    assert declared.reproduce("online", 3) == wanted
