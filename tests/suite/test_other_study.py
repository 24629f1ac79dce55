"""A study's file that was edited after its runs: status and report say so."""

from pathlib import Path

import pytest
from sweeping import finish

from ablations.load import load_study
from suite import cli
from suite.sweep import Sweep

STUDY = """
from suite.config import RunConfig, apply
from suite.study import Arm, Claim, Study
STUDY = Study(
    name="edited", question="?", base=apply(RunConfig(), {"optim.lr": 1e-5}), seeds=(3, 5),
    arms=(Arm("a"), Arm("b", {"rollout.sync_period": 4})), claims=(Claim("c", "better", "a", "b", 0.03),),
)
"""


def test_status_and_report_name_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "edited.py"
    file.write_text(STUDY)
    finish(Sweep.open(load_study(str(file)), tmp_path / "runs" / "edited"))
    assert cli.main(["status", str(file)]) == 0
    assert "another one" not in capsys.readouterr().out
    for number, (old, new, words) in enumerate(
        (
            ("1e-5", "3e-5", "its arms a, b are defined otherwise than those that were run"),
            ("(3, 5)", "(3, 5, 7)", "its seeds and the recorded ones differ in 7"),
            ("0.03", "0.05", "its claim 'c' is another one: smallest_effect 0.03 -> 0.05"),
            ('"c"', '"d"', "its claim 'd' was never declared"),
            ('"c"', '"d"', "it lacks the recorded claim 'c'"),
        )
    ):
        file = tmp_path / f"edited_{number}.py"
        file.write_text(STUDY.replace(old, new))
        cli.main(["status", str(file)])
        assert words in capsys.readouterr().out
        cli.main(["report", str(file)])
        assert words in capsys.readouterr().out
        assert (
            words.replace("'", "&#39;").replace(">", "&gt;")
            in (tmp_path / "runs" / "edited" / "report" / "index.html").read_text()
        )
