"""The order of all that a run logs, with the counts and times of a clock that gains a second whenever it is read."""

import itertools
from functools import partial

import pytest
from cohort.harness.run.loop import train
from cohort.harness.settings.run import parse_run
from fakes import MemoryLog, StopAfter

SPEC = parse_run(
    {"task": "arithmetic", "algorithm": {"name": "ppo", "group_size": 2, "kl_beta": 0.1}, "steps": 5,
     "rollouts_per_step": 4, "sampling": {"max_tokens": 4}, "overlong": "mask", "critic": {"warmup_steps": 1},
     "evaluation": {"every": 2, "num_prompts": 2, "num_test_prompts": 3, "num_samples": 1, "test_at_start": True,
                    "test_last": 2, "tests": ["arithmetic"]},
     "checkpoints": {"every": 4, "rollouts_every": 3}, "gates": {"answered": None, "stuck_groups": None}},
    "trace",
)  # fmt: skip
COUNTED = ("seconds/step", "seconds/total", "train/rollouts", "train/optimizer_steps")


class Trace(MemoryLog):
    """A log that also keeps its calls in order, as text."""

    def __init__(self):
        super().__init__()
        self.calls = []
        for name in ("about", "resume", "sync", "progress", "samples", "per_problem", "kept", "metrics"):
            setattr(self, name, partial(self.noted, name, getattr(self, name)))

    def noted(self, name, call, *args, **named):
        self.calls.append(f"{name} {told(name, *args, **named)}".strip())
        return call(*args, **named)


def told(name, *args, **named):
    if name == "metrics":
        step, values = args
        groups = sorted({key.partition("/")[0] for key in values})
        return f"{step} {' '.join(groups)} {' '.join(f'{values[key]:g}' for key in COUNTED if key in values)}".strip()
    if name == "samples":
        return len(args[0])
    if name == "per_problem":
        return f"{len(args[0])} {named.get('area', args[1] if len(args) > 1 else 'test')}"
    if name == "about":
        return " ".join(named)
    if name in ("progress", "resume"):
        return " ".join(map(str, args[: 3 if name == "progress" else 1]))
    return args[1] if name == "kept" else ""


UNTIL_IT_STOPS = """
about inputs
about prompt
resume -1
metrics 0 memory mismatch
progress validation 0 2
progress validation 2 2
kept completions/validation-000000.jsonl
metrics 0 flops validation
samples 2
progress test 0 3
progress test 3 3
kept completions/start-000000.jsonl
metrics 0 flops start
per_problem 3 start
progress test 0 3
progress test 3 3
kept completions/start_arithmetic-000000.jsonl
metrics 0 flops start_arithmetic
per_problem 3 start_arithmetic
metrics 1 completion critic flops kl memory mismatch policy reward seconds throughput train 6 11 4 1
kept rollouts/step-000001.jsonl
progress train 1 5
metrics 2 completion critic flops kl memory mismatch policy reward seconds throughput train 6 19 8 2
progress train 2 5
samples 4
progress validation 0 2
progress validation 2 2
kept completions/validation-000002.jsonl
metrics 2 flops validation
samples 2
metrics 3 completion critic flops kl memory mismatch policy reward seconds throughput train 6 28 12 3
progress train 3 5
sync
"""
TO_THE_END = """
about inputs
about prompt
resume 3
metrics 4 completion critic flops kl memory mismatch policy reward seconds throughput train 6 36 16 4
kept rollouts/step-000004.jsonl
progress train 4 5
samples 4
progress validation 0 2
progress validation 2 2
kept completions/validation-000004.jsonl
metrics 4 flops validation
samples 2
progress test 0 3
progress test 3 3
kept completions/test-000004.jsonl
metrics 4 flops test
per_problem 3 test
samples 3
sync
metrics 5 completion critic flops kl memory mismatch policy reward seconds throughput train 6 46 20 5
progress train 5 5
samples 4
progress validation 0 2
progress validation 2 2
kept completions/validation-000005.jsonl
metrics 5 flops validation
samples 2
sync
progress test 0 3
progress test 3 3
kept completions/test-000005.jsonl
metrics 5 flops test
per_problem 3 test
samples 3
progress test 0 3
progress test 3 3
kept completions/test_arithmetic-000005.jsonl
metrics 5 flops test_arithmetic
per_problem 3 test_arithmetic
"""


@pytest.mark.slow
def test_a_run_logs_all_in_this_order_and_a_stop_changes_none_of_it(tmp_path, cache):
    log, now = Trace(), itertools.count().__next__
    for should_stop, state, expected, costs in (
        (StopAfter(3), "stopped", UNTIL_IT_STOPS, {"rollouts": 12, "optimizer_steps": 3, "seconds": 28}),
        (lambda: False, "complete", TO_THE_END, {"rollouts": 20, "optimizer_steps": 5, "seconds": 49}),
    ):
        result = train(SPEC, tmp_path, log, cache=cache, now=now, should_stop=should_stop)
        assert "\n".join(log.calls) == expected.strip() and result.state == state
        assert {name: result.summary[name] for name in costs} == costs
        log.calls.clear()
