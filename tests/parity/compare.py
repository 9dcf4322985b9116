"""Compares value and gradient of every objective with verl, TRL and remax-rl, live, and fails where a difference is
unexplained.

`python tests/parity/compare.py [verl|trl|remax ...]` prints the table; the README beside says how to read it.
"""

import importlib
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from _table import evaluate, markdown  # noqa: E402

LIBRARIES = {"verl": "verl", "trl": "trl", "remax": "remax-rl"}  # and what the package is called


def main(libraries: list[str]) -> int:
    torch.set_num_threads(1)
    held = True
    for library in libraries or LIBRARIES:
        if library not in LIBRARIES:
            raise SystemExit(f"unknown library '{library}'; choose from {', '.join(LIBRARIES)}")
        results = [evaluate(row) for row in importlib.import_module(f"_{library}").rows()]
        held &= all(result.holds for result in results)
        print(f"\n## {library} {version(LIBRARIES[library])}, torch {version('torch')}\n")
        print(markdown(results), flush=True)
        for result in results:
            if not result.holds:
                print(f"{result.verdict}: {result.row.objective}, {result.row.function}")
    print("Every row is equal or explained." if held else "Some rows differ, see above.")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
