"""What a run starts from: where the weights are, and which they are, since that is part of the run's identity."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from suite.config import FROM_ARM, FROM_SEED, ModelConfig, RunConfig, apply
from suite.source import contents_hash

SEED_OF_RUN = "{seed}"
"""Stands in `model.path` for the run's own seed, so that every replicate starts from weights of its own."""

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_READ = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
"""The files of a model folder that loaders read."""

_asked: dict[tuple[str, str], str] = {}
"""(hub id, revision) -> commit, as the hub said in this process."""


def resolve_path(path: str, option: str = "model.path", revision: str = "") -> str:
    """The folder that loaders read: of `seed:NAME` (trained if need be), of a hub id's `revision` (a commit, downloaded
    if need be), or the given one.

    Raises ValueError, naming the option and the folder, if it has no configuration or no safetensors weights.
    """
    if path.startswith(FROM_SEED):
        from suite import seed_model

        return str(seed_model.ensure(path.removeprefix(FROM_SEED)))
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{option}: the folder {path} has no config.json; give a Hugging Face model folder")
        if not any((folder / name).is_file() for name in WEIGHT_FILES):
            raise ValueError(f"{option}: the folder {path} has no weights (looked for {' and '.join(WEIGHT_FILES)})")
    elif path.startswith((".", "/", "~")):
        raise ValueError(f"{option}: there is no folder {path}")
    elif _COMMIT.fullmatch(revision):
        from huggingface_hub import snapshot_download

        return str(snapshot_download(path, revision=revision, allow_patterns=list(_READ)))
    return path


def on_hub(path: str) -> bool:
    """Whether a `model.path` is a hub id."""
    return not path.startswith((FROM_SEED, FROM_ARM, ".", "/", "~")) and not Path(path).is_dir()


def folder_of(model: ModelConfig) -> str:
    """The folder of a run's starting weights, checked to be those of `model.weights` if that says which.

    Raises ValueError if they are others than the run was declared with.
    """
    if model.folder:
        return resolve_path(model.folder)
    path = resolve_path(model.path, revision=model.weights)
    found = weights(model)
    if model.weights and found != model.weights:
        raise ValueError(
            f"model.path: the weights of {model.path!r} are {found or 'unknown'} here, and this run was declared with "
            f"{model.weights}; put those back, or declare it anew"
        )
    return path


def weights(model: ModelConfig) -> str:
    """Which weights a model has, as far as that is known here and now, without network or training; else empty.

    For a seed model the hash of its file, for a folder one of its files' contents (both 16 hex digits of SHA-256), for
    a hub id its commit. Empty too for `arm:NAME`: the parent's identity stands for its weights.
    """
    path = model.path
    if path.startswith(FROM_ARM) or SEED_OF_RUN in path:
        return ""
    if path.startswith(FROM_SEED):
        from suite import seed_model

        return seed_model.weights(path.removeprefix(FROM_SEED))
    if Path(path).is_dir():
        return folder_hash(Path(path))
    return _commit(path, model.revision) if on_hub(path) else ""


def folder_hash(folder: Path) -> str:
    """16 hex digits of SHA-256 over the names and contents of the files that a model's loaders read."""
    files = {file for pattern in _READ for file in folder.glob(pattern) if file.is_file()}
    return contents_hash(files, f"{folder}/")


def _commit(path: str, revision: str) -> str:
    """The commit that a hub id's revision names: itself, as the hub said, or as the local cache has it."""
    if _COMMIT.fullmatch(revision):
        return revision
    if (path, revision) in _asked:
        return _asked[path, revision]
    from huggingface_hub.constants import HF_HUB_CACHE

    known = Path(HF_HUB_CACHE) / f"models--{path.replace('/', '--')}" / "refs" / (revision or "main")
    return known.read_text(encoding="utf-8").strip() if known.is_file() else ""


def pinned(config: RunConfig) -> RunConfig:
    """The configuration with the seed in its `model.path`, and `model.weights` as far as they are known: see `weights`.

    Weights that are given stay.
    """
    config = apply(config, {"model.path": config.model.path.replace(SEED_OF_RUN, str(config.seed))})
    return config if config.model.weights else apply(config, {"model.weights": weights(config.model)})


def prepare(models: Iterable[ModelConfig], say: Callable[..., None] | None = None) -> None:
    """Make the weights of models known: train seed models that are not there yet, ask the hub for commits.

    Raises ValueError for a hub id that neither the hub nor the local cache has.
    """
    from suite import seed_model

    for model in dict.fromkeys(models):
        path = model.path
        if SEED_OF_RUN in path:
            continue
        if path.startswith(FROM_SEED):
            name = path.removeprefix(FROM_SEED)
            if not seed_model.weights(name):
                seed_model.train(name, partial(say, f"{path}:") if say else None)
        elif on_hub(path):
            _ask(path, model.revision)


def _ask(path: str, revision: str) -> None:
    from httpx import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if (path, revision) in _asked or _COMMIT.fullmatch(revision):
        return
    try:
        if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        _asked[path, revision] = str(HfApi().model_info(path, revision=revision or None, timeout=30).sha)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, HTTPError, OSError) as error:
        if known := _commit(path, revision):
            _asked[path, revision] = known
            return
        at = f" at revision {revision!r}" if revision else ""
        why = str(error).splitlines()[0]
        raise ValueError(f"model.path: {path!r}{at} is neither on the hub nor in the local cache: {why}") from error
