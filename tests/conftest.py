"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: a long one that is left for the end would run beside idle workers."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data: SUITE_TEST_DATA, else ../shared/data; skips, saying so, where there is none."""
    folder = Path(os.environ.get("SUITE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "math").is_dir():
        pytest.skip(f"no real data: {folder} has no folder 'math' (set SUITE_TEST_DATA)")
    return folder
