"""Trains the project's seed models anew: `make seed-models`, or `python -m suite.seed_models.make NAME ...` for some.

The weights differ between instruction sets, so that the new files are other models: every study's cells become new.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from suite import seed_model, seed_training
from suite.tasks import replies

SHIPPED = ("replies", "sums", *(f"addition/{n}" for n in range(15)), *(f"mixed/{n}" for n in range(5)))


def main(names: Sequence[str]) -> None:
    """Train the seed models of these names into the project; without names all, and the reward model of replies."""
    chosen = names or (*SHIPPED, "reward")
    for number, name in enumerate(chosen, 1):
        where = f"{number} of {len(chosen)}: {name}"
        print(where, flush=True)
        if name == "reward":
            _train_reward(replies.PACKAGED_REWARD)
        else:
            seed_training.train(seed_model.recipe(name), seed_model.packaged(name), partial(print, where, flush=True))


def _train_reward(file: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from suite import reward_model

    with tempfile.TemporaryDirectory() as scratch:
        folder, recipe = Path(scratch) / "model", replies.reward_recipe()
        held_out = reward_model.train(recipe, folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        seed_training.save(model, file, {"options": asdict(recipe), "held_out": held_out})


if __name__ == "__main__":
    main(sys.argv[1:])
