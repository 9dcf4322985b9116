"""How fast answers are graded: numeric on one core, symbolic with one and with two processes, side by side.

    python tests/benchmarks/grading.py [--rows 10000] [--math data/math500/test.jsonl]

Numeric completions are made up; symbolic ones are distinct unsimplified spellings of the answers in a MATH file, or
else of the project's own corpus, so that no verdict comes from a cache. Prints rows per second and writes
`results/grading.json` beside.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from cohort.tasks import _symbolic
from cohort.tasks.gsm8k import GSM8K
from cohort.tasks.math import Math

HERE = Path(__file__).parent
SPELLINGS = ("#### {0}", "#### {0}.", "so she pays #### ${0:,}", "#### **{0}**", r"thus \boxed{{{0}}}", "#### {0}.00")


def numeric(rows: int) -> dict[str, float]:
    """Seconds of processor time to extract and compare `rows` distinct numeric completions, on one core."""
    task = GSM8K()
    pairs = [(SPELLINGS[i % len(SPELLINGS)].format(i), str(i)) for i in range(rows)]
    start = time.process_time()
    right = sum((answer := task.extract(text)) is not None and task.equivalent(answer, gold) for text, gold in pairs)
    seconds = time.process_time() - start
    assert right == rows, f"{rows - right} of {rows} graded wrong"
    return {"rows": rows, "cpu_seconds": seconds, "rows_per_second": rows / seconds}


def symbolic(golds: list[str], rows: int, processes: int, offset: int) -> dict[str, float]:
    """Seconds to compare `rows` distinct spellings of symbolic answers, `processes` at a time, start-up left out."""
    task = Math()
    task.use_processes(processes)
    variants = product(range(offset, offset + rows // len(golds) + 1), golds)
    pairs = [(f"0+{gold}+{k}-{k}", gold) for k, gold in variants][:rows]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda i: task.equivalent(rf"x+{i}+0", f"{i}+x"), range(2 * processes)))
        before = sum(_symbolic.checker().counts.values())
        start = time.perf_counter()
        right = sum(pool.map(lambda pair: task.equivalent(*pair), pairs))
        seconds = time.perf_counter() - start
    asked = sum(_symbolic.checker().counts.values()) - before
    return {
        "rows": rows,
        "compared_by_algebra": asked,
        "equal": right,
        "seconds": seconds,
        "rows_per_second": rows / seconds,
    }


def golds_of(file: Path | None) -> list[str]:
    """The distinct answers of a MATH file, or of the project's own corpus of equivalent answers."""
    if file is not None:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return list(dict.fromkeys(str(row["answer"]) for row in rows))
    cases: Any = yaml.safe_load((HERE.parent / "golden/math_equivalence.yaml").read_text(encoding="utf-8"))
    return list(dict.fromkeys(str(case["gold"]) for case in cases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--math", type=Path, help="JSON Lines with an 'answer' per row")
    options = parser.parse_args()
    golds = golds_of(options.math)
    results: dict[str, Any] = {"numeric, one core": numeric(options.rows)}
    for processes in (1, 2):
        name = f"symbolic, {processes} process{'es' if processes > 1 else ''}"
        results[name] = symbolic(golds, options.rows, processes, offset=2 + 10**6 * processes)
    for name, figures in results.items():
        print(name, ", ".join(f"{key} {value:,.1f}" for key, value in figures.items()), sep=": ")
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "grading.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
