"""The report of a synthetic study: its numbers, and the text of the files in one format."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from synthetic import Synthetic

from reports.build import build
from reports.load import StudyData


def report_of(
    study: Synthetic, *formats: str, source: StudyData | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """report.json as read back, and every text file written, by name; `changes` go into study.json."""
    with tempfile.TemporaryDirectory() as name:
        folder = study.write(Path(name) / study.name, **changes)
        data = source if source is not None else study.data()
        out = build(folder, formats={"json", *formats}, source=data).folder
        files = {path.name: path.read_text(encoding="utf-8") for path in out.iterdir() if path.is_file()}
        return json.loads(files["report.json"]), files
