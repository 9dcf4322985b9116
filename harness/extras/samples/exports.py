"""Samples as files that other viewers open: a log of inspect (`.eval`), or lm-eval's rows of samples (`.jsonl`).

The forms are inspect's `EvalLog`, version 2, in its zip file, and a row of `samples_TASK_DATE.jsonl` as lm-eval 0.4
writes it.
"""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...base.files import write_text

_TEXTS = ("prompt", "gold", "completion", "answer", "correct", "reward")  # the others describe a sample


def export(rows: Iterator[Mapping[str, Any]], study: str, out: Path) -> int:
    """Write the samples, and return their number. ValueError for a file of another kind, before anything is read."""
    if out.suffix not in (".eval", ".jsonl"):
        raise ValueError(f"`out` must end in .html (two arms), .eval (inspect) or .jsonl (lm-eval), got '{out}'")
    found = list(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        write_text(out, _lm_eval(found), sync=False)
        return len(found)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as log:
        for name, part in _inspect(found, study):
            log.writestr(name, json.dumps(part))
    partial.replace(out)  # so that a kill leaves no half of a log
    return len(found)


def _inspect(rows: list[Mapping[str, Any]], study: str) -> Iterator[tuple[str, Any]]:
    """(name, JSON) of each member of a log whose samples are told apart by run, step and problem; an epoch is a
    completion of a problem."""
    model, samples, counts = "cohort", [], dict[str, int]()
    for row in rows:
        name = " ".join(str(row[key]) for key in ("problem", "arm", "seed", "area", "step"))
        counts[name] = counts.get(name, 0) + 1
        asked, said = {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}
        choice = {"message": said, "stop_reason": "max_tokens" if row["cut"] else "stop"}
        verdict = {"value": "C" if row["correct"] else "I", "answer": row["answer"]}
        one = {"id": name, "epoch": counts[name], "input": row["prompt"], "target": row["gold"],
               "scores": {"correct": verdict}, "metadata": _described(row) | {"reward": row["reward"]}}  # fmt: skip
        samples.append(one | {"completed": True})
        output = {"model": model, "choices": [choice]}
        yield f"samples/{len(samples)}.json", one | {"messages": [asked, said], "output": output}
    accuracy = sum(row["correct"] for row in rows) / max(len(rows), 1)
    metrics = {"accuracy": {"name": "accuracy", "value": accuracy}}
    scores = [{"name": "correct", "scorer": "correct", "metrics": metrics}]
    counted = {"total_samples": len(rows), "completed_samples": len(rows), "scores": scores}
    config, created = {"epochs": max(counts.values(), default=1)}, datetime.now(UTC).isoformat(timespec="seconds")
    told = {"created": created, "task": study, "dataset": {"name": study}, "model": model, "config": config}
    yield "summaries.json", samples
    yield "header.json", {"version": 2, "status": "success", "eval": told, "results": counted}


def _lm_eval(rows: list[Mapping[str, Any]]) -> str:
    """A row for each completion, with a document of its own that says whose it is."""
    lines = (
        {
            "doc_id": number, "doc": {"question": row["prompt"], "answer": row["gold"], **_described(row)},
            "target": row["gold"], "arguments": {"gen_args_0": {"arg_0": row["prompt"], "arg_1": {}}},
            "resps": [[row["completion"]]], "filtered_resps": [row["answer"] or "[invalid]"], "filter": "cohort",
            "metrics": ["exact_match"], "exact_match": float(row["correct"]),
        }
        for number, row in enumerate(rows)
    )  # fmt: skip
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _described(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _TEXTS}
