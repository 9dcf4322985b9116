"""Writes the problems of `real_sums`: sums below 100 of two numbers from 10 to 59, in the form of GSM8K's rows.

`python -m cohort.studies.sums FOLDER` writes train.jsonl and test.jsonl. The hash of a pair decides its part, so that
a sum and its reversal are in the same one.
"""

import hashlib
import json
import sys
from pathlib import Path


def is_test(a: int, b: int) -> bool:
    """Whether a fifth of the pairs, in either order, has this one."""
    return int(hashlib.sha256(f"{min(a, b)}+{max(a, b)}".encode()).hexdigest(), 16) % 5 == 0


def write(folder: Path) -> None:
    """Both files, the same bytes on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(a, b) for a in range(10, 60) for b in range(10, 60) if a + b < 100]
    for part in ("train", "test"):
        rows = [
            json.dumps({"question": f"{a} + {b} =", "answer": f"{a + b}\n#### {a + b}"})
            for a, b in pairs
            if is_test(a, b) == (part == "test")
        ]
        (folder / f"{part}.jsonl").write_text("\n".join(rows) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
