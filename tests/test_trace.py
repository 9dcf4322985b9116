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


def evaluated(area, step, rows):
    """What an evaluation logs: its progress, its completions, its numbers and, of a test, those of each problem."""
    phase = "validation" if area == "validation" else "test"
    of_problems = [] if area == "validation" else [f"per_problem {rows} {area}"]
    return [f"progress {phase} 0 {rows}", f"progress {phase} {rows} {rows}",
            f"kept completions/{area}-{step:06d}.jsonl", f"metrics {step} flops {area}", *of_problems]  # fmt: skip


def trained(step, seconds, *kept):
    """What a step logs: it takes 6 seconds of the so many since the start, 4 rollouts and an optimiser step."""
    areas = "completion critic flops kl memory mismatch policy reward seconds throughput train"
    files = [f"kept rollouts/step-{one:06d}.jsonl" for one in kept]
    return [f"metrics {step} {areas} 6 {seconds} {4 * step} {step}", *files, f"progress train {step} 5"]


UNTIL_IT_STOPS = [
    "about inputs", "about prompt sizes", "resume -1", "metrics 0 memory mismatch",
    *evaluated("validation", 0, 2), "samples 2", *evaluated("start", 0, 3), *evaluated("start_arithmetic", 0, 3),
    *trained(1, 11, 1), *trained(2, 19), "samples 4", *evaluated("validation", 2, 2), "samples 2",
    *trained(3, 28), "sync",
]  # fmt: skip
TO_THE_END = [
    "about inputs", "about prompt sizes", "resume 3",
    *trained(4, 36, 4), "samples 4", *evaluated("validation", 4, 2), "samples 2", *evaluated("test", 4, 3), "samples 3",
    "sync", *trained(5, 46), "samples 4", *evaluated("validation", 5, 2), "samples 2",
    "sync", *evaluated("test", 5, 3), "samples 3", *evaluated("test_arithmetic", 5, 3),
]  # fmt: skip


@pytest.mark.slow
def test_a_run_logs_all_in_this_order_and_a_stop_changes_none_of_it(tmp_path, cache):
    log, now = Trace(), itertools.count().__next__
    for should_stop, state, expected, costs in (
        (StopAfter(3), "stopped", UNTIL_IT_STOPS, {"rollouts": 12, "optimizer_steps": 3, "seconds": 28}),
        (lambda: False, "complete", TO_THE_END, {"rollouts": 20, "optimizer_steps": 5, "seconds": 49}),
    ):
        result = train(SPEC, tmp_path, log, cache=cache, now=now, should_stop=should_stop)
        assert (log.calls, result.state) == (expected, state)
        assert {name: result.summary[name] for name in costs} == costs
        log.calls.clear()
