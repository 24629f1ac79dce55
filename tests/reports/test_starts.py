"""What the report says of the models that replicates started from."""

from pathlib import Path
from typing import Any

import pytest
from synthetic import Synthetic

from reports.build import build
from reports.declared import declaration
from reports.results import Results
from reports.starts import unequal, varied


def results(tmp_path: Path, model: dict[str, Any], study: Synthetic | None = None) -> Results:
    """The synthetic study with `{seed}` in the model's fields replaced by the run's seed."""
    study = study or Synthetic()
    data = study.data()
    for config in data.runs["config"]:
        config["run"]["model"] = {key: str(value).format(seed=config["seed"]) for key, value in model.items()}
    return Results(declaration(study.write(tmp_path), data), data)


@pytest.mark.parametrize(
    ("model", "words", "unit"),
    [
        ({"path": "seed:addition/{seed}", "weights": "w{seed}"}, "over 5 seed models, one training seed each",
         "seed models, one training seed each"),
        ({"path": "seed:addition", "weights": "abc"},
         "for this seed model (seed:addition, weights abc) only, over 5 training seeds", "training seeds"),
        ({"path": "org/model", "weights": ""},
         "for this starting model (org/model, weights not recorded) only, over 5 training seeds", "training seeds"),
        ({"path": "arm:other", "weights": ""}, "", "training seeds"),
    ],
)  # fmt: skip
def test_what_varied(tmp_path: Path, model: dict[str, Any], words: str, unit: str) -> None:
    found = varied(results(tmp_path, model))
    assert (found["words"], found["unit"]) == (words, unit)


def test_page_caption_and_terminal_say_it(tmp_path: Path) -> None:
    study = Synthetic()
    made = results(tmp_path, {"path": "seed:addition/{seed}", "weights": "w{seed}"}, study)
    report = build(tmp_path, tmp_path / "out", source=made.data)
    words = "over 5 seed models, one training seed each, 40"
    assert report.lines[0] == f"measured     {words} test problems"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "over 5 seed models, one training seed each" in page
    for name in ("table.tex", "report.md"):
        assert words in (tmp_path / "out" / name).read_text(), name


def test_arms_that_share_a_start_must_begin_alike(tmp_path: Path) -> None:
    def change(arm: str, seed: int, metric: str, step: int, value: float) -> float:
        return value + 0.2 * (arm == "grpo" and seed == 2 and step == 0)

    model = {"path": "seed:addition/{seed}", "weights": "w{seed}"}
    assert unequal(results(tmp_path, model)) == []
    (fact,) = unequal(results(tmp_path, model, Synthetic(change=change)))
    assert fact["what"] == "seed 2"
    assert "GRPO share the start seed:addition/2" in fact["why"]
