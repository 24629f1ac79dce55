"""A run's final model as a plain Hugging Face folder, for another arm to start from or for anybody to load."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import transformers

from suite import checkpoint
from suite.config import from_json
from suite.policy import Policy


def export(folder: Path) -> None:
    """Make the model folder of a finished run from the run's last checkpoint; one that is there stays.

    `folder` lies in the run's folder; it is whole or absent at any moment, so that runs may ask for it side by side.
    Raises ValueError, naming the run, if that checkpoint is gone.
    """
    if folder.is_dir():
        return
    config = from_json(json.loads((folder.parent / "config.json").read_text(encoding="utf-8"))["run"])
    found = checkpoint.latest(folder.parent / "checkpoints")
    if found is None or found.step != config.train.steps:
        raise ValueError(f"{folder.parent} holds neither its final model nor its last checkpoint; run it again")
    policy = Policy.load(config.model)
    policy.model.load_state_dict(found.tensors["policy"])
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    transformers.utils.logging.disable_progress_bar()
    policy.model.save_pretrained(partial)
    policy.tokenizer.save_pretrained(partial)
    try:
        partial.rename(folder)
    except OSError:
        # another run was faster
        if not folder.is_dir():
            raise
        shutil.rmtree(partial)
