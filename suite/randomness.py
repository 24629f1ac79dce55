"""Keyed randomness: noise is a function of (run seed, step, purpose, prompt, sample, position), never of a stream.

A key is hashed to the key of a counter-based generator (Philox), so what is drawn for one rollout does not
depend on what was drawn before it or beside it.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

Key = tuple[int | str, ...]


def generator(*key: int | str) -> np.random.Generator:
    """A counter-based generator of its own for a key: equal keys give equal draws, on every machine."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)))


def permutation(count: int, *key: int | str) -> list[int]:
    """A keyed permutation of range(count)."""
    return [int(i) for i in generator(*key).permutation(count)]
