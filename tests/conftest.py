"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data: SUITE_TEST_DATA, else ../shared/data; skips, saying so, where there is none."""
    folder = Path(os.environ.get("SUITE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "math").is_dir():
        pytest.skip(f"no real data: {folder} has no folder 'math' (set SUITE_TEST_DATA)")
    return folder
