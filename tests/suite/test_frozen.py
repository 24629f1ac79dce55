"""Claims are fixed when the first cell of their arms starts; what comes later is exploratory, in the report too."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from sweeping import finish, study

from reports.declared import Declaration, _parsed
from suite.claim_checks import check_claims
from suite.commands.plan import check_arms
from suite.config import RunConfig, apply
from suite.lease import new_owner
from suite.study import SEED_MODEL, Arm, Claim, Study
from suite.sweep import Sweep


def parsed(folder: Path) -> Declaration:
    return _parsed(json.loads((folder / "study.json").read_text()))


def test_a_claim_is_fixed_with_a_time_when_its_first_cell_starts(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    assert (one.frozen(), parsed(tmp_path).exploratory) == ([], {})
    one.claim(new_owner())
    (entry,) = one.frozen()
    assert entry["claim"]["name"] == "better"
    assert entry["claim"]["smallest_effect"] == 0.03
    assert entry["at"].startswith("20")
    found = parsed(tmp_path)
    assert (found.fixed, found.exploratory, found.records_claims) == ({"better": entry["at"]}, {}, True)
    Sweep.open(study(), tmp_path)
    assert parsed(tmp_path).exploratory == {}


def test_edits_after_that_are_exploratory_and_an_undone_edit_is_none(tmp_path: Path) -> None:
    finish(Sweep.open(study(), tmp_path), 1)
    plain = study()
    edited = replace(plain, claims=(replace(plain.claims[0], smallest_effect=0.2, kind="different"),))
    Sweep.open(edited, tmp_path)
    why = parsed(tmp_path).exploratory["better"]
    assert "changed after it was fixed at" in why
    assert "kind 'better' -> 'different'" in why
    assert "smallest_effect 0.03 -> 0.2" in why
    Sweep.open(plain, tmp_path)
    assert parsed(tmp_path).exploratory == {}


def test_added_and_removed_claims_are_told(tmp_path: Path) -> None:
    plain = study()
    finish(Sweep.open(plain, tmp_path), 1)
    late, early = Claim("late", "better", "online", "k", 0.1), Claim("early", "better", "k", "offline", 0.1)
    Sweep.open(replace(plain, claims=(late, early)), tmp_path)
    found = parsed(tmp_path)
    assert {claim.name for claim in found.claims} == {"late", "early", "better"}
    assert found.exploratory["late"].startswith("added after its first cell had started")
    assert found.exploratory["better"].startswith("removed after it was fixed")
    assert "early" not in found.exploratory


def test_seeds_added_after_results_were_known_make_it_exploratory(tmp_path: Path) -> None:
    finish(Sweep.open(study(), tmp_path), 2)
    Sweep.open(study(seeds=(3, 5, 6)), tmp_path)
    assert parsed(tmp_path).exploratory == {}, "the offline arm has no result yet"
    finish(Sweep.open(study(seeds=(3, 5, 6)), tmp_path))
    Sweep.open(study(seeds=(3, 5, 6, 9)), tmp_path)
    assert parsed(tmp_path).exploratory == {"better": "decided with seeds 9, added when results were known"}
    Sweep.open(study(seeds=(3, 5, 6)), tmp_path)
    assert parsed(tmp_path).exploratory == {}


def test_a_claim_written_into_the_file_by_hand_has_no_record(tmp_path: Path) -> None:
    one = Sweep.open(study(), tmp_path)
    finish(one, 1)
    one.snapshot()
    tree = json.loads((tmp_path / "study.json").read_text())
    tree["claims"].append({**tree["claims"][0], "name": "mine"})
    (tmp_path / "study.json").write_text(json.dumps(tree))
    assert parsed(tmp_path).exploratory == {"mine": "no record of it before its first cell started"}


def test_a_record_of_earlier_versions_says_that_it_does_not_know(tmp_path: Path) -> None:
    finish(Sweep.open(study(), tmp_path), 1)
    tree = json.loads((tmp_path / "study.json").read_text())
    del tree["frozen"]
    found = _parsed(tree)
    assert (found.records_claims, found.exploratory) == (False, {})


ARMS = (Arm("a"), Arm("b", {"optim.lr": 1e-4}))


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (Claim("c", "better", "a", "b", 0.1), "is 'Claim' and must be a tuple of claims; a tuple of one ends in"),
        ((Claim("c", "bettr", "a", "b", 0.1),), "kind is 'bettr' and must be .* did you mean 'better'"),
        ((Claim("c", "better", "a", "b", 3),), "3 points are 0.03"),
        ((Claim("c", "better", "a", "b", 0.1, "eval/test/acuracy"),), "near names: eval/test/accuracy"),
        ((Claim("c", "better", "a", "b", 0.1, "eval/test/avg@32"),), "near names: eval/test/avg@4"),
        ((Claim("c", "better", "a", "b", 0.1, "eval/replies-test/accuracy"),), "is not logged by the runs of arm"),
        ((Claim("c", "better", "a", "b", 0.1, "polcy/entropy"),), "near names: policy/entropy"),
        ((Claim("c", "better", "a", SEED_MODEL, 0.1, "loss/total"),), "is not measured before the first step"),
        ((Claim("c", "better", "a", 3, 0.1),), "than is 3 and must be a string"),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_be_decided_is_refused_before_any_work(claims: object, words: str) -> None:
    base = apply(RunConfig(), {"eval.num_samples": 4})
    made = Study("s", "?", base, ARMS, (0,), claims)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        check_arms(made)


def test_seeds_that_are_no_tuple_and_effects_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match="seeds is 3 and must be a tuple of whole numbers"):
        Study("s", "?", RunConfig(), ARMS, 3).check()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"smallest_effect is '0\.1' and must be a number"):
        Claim("c", "better", "a", "b", "0.1")  # type: ignore[arg-type]


def test_what_is_logged_before_training_can_be_claimed_against_the_seed_model() -> None:
    claim = Claim("c", "better", "a", SEED_MODEL, 0.1, "policy/entropy")
    check_claims(Study("s", "?", RunConfig(), ARMS, (0,), (claim,)))
