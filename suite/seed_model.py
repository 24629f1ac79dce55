"""The embedded seed models: tiny Llamas that are right about two times in five, where reinforcement learning starts.

Those of the shipped studies are files of the project, so that a study starts from the same weights on every machine.
Others are trained by recipe when they are first needed, and kept in the user's cache folder. Replies are written as
the people of that task write them: what is to be learnt is which of them are liked.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import randomness, seed_training
from suite.registry import unknown
from suite.seed_training import SeedRecipe, tokenizer
from suite.tasks import arithmetic, replies

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PACKAGED", "RECIPES", "cache_root", "cached", "ensure", "recipe", "tokenizer", "weights"]

PACKAGED = Path(__file__).resolve().parent / "seed_models"
"""The folder of the models that come with the project."""

RECIPES = {
    "addition": SeedRecipe(("addition",), max_steps=1500),
    "sums": SeedRecipe(("sums",), max_steps=1500, batch_sizes=(64,)),
    "replies": SeedRecipe(("replies",), max_steps=400, batch_sizes=(64,), target=0.0),
    "mixed": SeedRecipe(("addition", "replies"), max_steps=1500, batch_sizes=(64, 64), head_start=300, check_every=4),
}


def recipe(name: str) -> SeedRecipe:
    """The recipe of the seed model called `name`: `addition`, or `addition/3` for the one of recipe seed 3.

    ValueError with near names if there is none.
    """
    kind, slash, seed = name.partition("/")
    if kind not in RECIPES:
        raise unknown("seed model", kind, RECIPES)
    if slash and not (seed.isascii() and seed.isdigit()):
        raise ValueError(f"seed model {name!r}: what follows the slash must be a whole number, as in {kind}/3")
    return replace(RECIPES[kind], seed=int(seed or 0))


def packaged(name: str) -> Path:
    """Where the project keeps the file of that seed model, if it comes with it."""
    return PACKAGED / f"{name.partition('/')[0]}-{recipe(name).seed}.safetensors"


def file_of(name: str) -> Path:
    """The file of a seed model: the project's own, or the place in the cache of one that is trained when needed."""
    own = packaged(name)
    return own if own.is_file() else cache_root() / f"seed-{own.stem}-{content_hash(name)}.safetensors"


def weights(name: str) -> str:
    """The identity of a seed model's weights, 16 hex digits of its file's SHA-256; empty if it is not trained yet."""
    file = file_of(name)
    return _hash(file, file.stat().st_mtime_ns) if file.is_file() else ""


@lru_cache(maxsize=256)
def _hash(file: Path, mtime_ns: int) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@cache
def content_hash(name: str) -> str:
    """Hash of all that decides a seed model's weights on one machine: the recipe, the code of tasks, training and
    sampling, torch's version."""
    import torch

    from suite.rollout import in_process

    parts = [json.dumps(asdict(recipe(name)), sort_keys=True), torch.__version__.split("+")[0]]
    parts += [inspect.getsource(module) for module in (seed_training, arithmetic, replies, randomness, in_process)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def cache_root() -> Path:
    """Where seed models are kept: SUITE_CACHE, else the user's cache folder."""
    from platformdirs import user_cache_path

    return Path(os.environ.get("SUITE_CACHE") or user_cache_path("rl-ablation-suite", appauthor=False))


def train(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The file of a seed model, trained first if it is not there; safe in parallel processes."""
    file = file_of(name)
    return file if file.is_file() else cached(file.name, lambda path: seed_training.train(recipe(name), path, say))


def ensure(name: str, say: Callable[[str], None] | None = None) -> Path:
    """The folder of a seed model, as Hugging Face's loaders read it; trained first if need be."""
    file = train(name, say)
    # the tasks decide the tokenizer, transformers the form of the folder
    form = hashlib.sha256((inspect.getsource(arithmetic) + inspect.getsource(replies)).encode()).hexdigest()[:8]
    return cached(f"seed-{packaged(name).stem}-{weights(name)}-{form}", lambda folder: _unpack(name, file, folder))


def _unpack(name: str, file: Path, folder: Path) -> None:
    plan = recipe(name)
    words = tokenizer(*plan.tasks)
    unpack(file, seed_training.new_model(plan, words), folder)
    words.save_pretrained(folder)


def unpack(file: Path, model: PreTrainedModel, folder: Path) -> None:
    """Fill a model from a file in half precision and write it, in single precision, as a Hugging Face folder."""
    import transformers
    from safetensors.torch import load_file

    model.load_state_dict({key: value.float() for key, value in load_file(file).items()})
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)


def about(name: str) -> dict[str, Any]:
    """What the file of a trained seed model says of itself: `recipe`, `steps`, `validation_accuracy`."""
    return seed_training.about(file_of(name))


def cached(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder `name` of the cache, made first if it is not there; whole or absent, safe in parallel
    processes."""
    from filelock import FileLock

    place = cache_root() / name
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            partial = place.with_name(f"{place.name}.partial")
            if partial.is_dir():
                shutil.rmtree(partial)
            make(partial)
            partial.rename(place)
    return place
