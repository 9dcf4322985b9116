"""Writes samples as a log of inspect and reads them with inspect's own reader; fails where one comes back otherwise.

`python tests/parity/logs.py` needs the package `inspect-ai`, whose viewer reads logs in the same way.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from cohort.harness.extras.samples.exports import export  # noqa: E402

RIGHT = {
    "arm": "grpo", "seed": 1, "area": "test", "step": 4, "problem": "p1", "prompt": "1+3=", "gold": "4",
    "completion": "<b>4</b> \u0664", "answer": "4", "correct": True, "cut": False, "reward": 1.0, "level": 3,
}  # fmt: skip
WRONG = {**RIGHT, "completion": "5", "answer": None, "correct": False, "cut": True, "reward": 0.0}

with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder) / "sizes.eval")
    export(iter([RIGHT, WRONG, {**WRONG, "problem": "p2"}]), "sizes", Path(file))
    log, summaries = read_eval_log(file), read_eval_log_sample_summaries(file)
assert log.status == "success" and log.results is not None and log.samples is not None
assert log.results.scores[0].metrics["accuracy"].value == 1 / 3
assert [one.output.completion for one in log.samples] == [RIGHT["completion"], "5", "5"]
assert [one.output.stop_reason for one in log.samples] == ["stop", "max_tokens", "max_tokens"]
assert [(one.scores or {})["correct"].value for one in log.samples] == ["C", "I", "I"]
assert [one.metadata["level"] for one in log.samples] == [3, 3, 3]
assert [(one.epoch, one.completed) for one in summaries] == [(1, True), (2, True), (1, True)]
print(f"inspect {version('inspect-ai')} reads {len(log.samples)} samples of a log as they were written")
