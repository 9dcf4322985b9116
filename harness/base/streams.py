"""Named streams of random numbers: draws for one purpose never share their numbers with draws for another.

The cold start alone draws without a name, from its seed as it is.
"""

import hashlib

import numpy as np


def generator(stream: str, *key: int | str) -> np.random.Generator:
    """A generator whose numbers depend on the stream's name and its key alone.

    Both go through a hash, because numpy's own sequences of integers coincide where they differ in trailing zeros.
    """
    words = ":".join([stream, *map(str, key)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(words.encode()).digest()[:16]))
