"""The drill, shortened: `make drill` is the whole of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.drill.compare import differences
from tests.drill.disturb import disturb
from tests.drill.study import write
from tests.suite.postgres import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]
KILLS = 4


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study's file; beside it the folder `alone`, in which nothing disturbed it."""
    folder = tmp_path_factory.mktemp("drill")
    path = write(folder, range(1))
    disturb(path, folder / "alone", workers=1, kills=0)
    return path


def test_kills_change_nothing(study: Path) -> None:
    folder = study.with_name("default")
    tally = disturb(study, folder, workers=2, kills=KILLS, seed=1)
    assert tally.kills.total() == KILLS
    assert differences(folder, study.with_name("alone")) == []


def test_kills_change_nothing_while_the_server_of_the_storage_goes_and_comes_back(study: Path) -> None:
    folder = study.with_name("server")
    with running(study.parent / "postgres") as server:
        tally = disturb(study, folder, workers=2, kills=KILLS, seed=2, server=server)
        assert (tally.kills.total(), tally.outages) == (KILLS, 2)
        assert differences(folder, study.with_name("alone"), server.url()) == []
