"""Counter-based sampling noise: the uniform behind a token is a hash of the token's place, nothing else.

Rows therefore do not change with the batch that they are in, a resumed run repeats itself, and arms of a study that
share a seed share their noise (common random numbers). Mixing function: splitmix64 (Steele, Lea and Flood 2014).
"""

import hashlib

import numpy as np


def uniforms(seed: int, step: int, prompt_ids: list[str], group_size: int, num_positions: int) -> np.ndarray:
    """float64 in [0, 1), shape [P * G, num_positions], keyed by (seed, step, prompt id, sample, position)."""
    prompts = np.array([_hash(prompt_id) for prompt_id in prompt_ids], dtype=np.uint64)
    with np.errstate(over="ignore"):
        run = _mix(_mix(np.uint64(seed) + _GAMMA) + np.uint64(step))
        rows = _mix(_mix(run + prompts)[:, None] + np.arange(group_size, dtype=np.uint64)).reshape(-1)
        bits = _mix(rows[:, None] + _GAMMA * np.arange(1, num_positions + 1, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    x = np.asarray(x, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
