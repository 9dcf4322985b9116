"""Small named fakes that several tests share, and what they look at in a run's folder."""

import contextlib

import torch
from cohort.harness.contracts.plugins import batch_of, graded_group  # noqa: F401
from cohort.harness.data import SampleRow
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_tokenizer
from cohort.harness.run.loop import train
from safetensors.torch import load_file


def tiny_codec():
    return TextCodec(tiny_tokenizer())


class MemoryLog:
    """A RunLog that keeps everything in lists."""

    def __init__(self):
        self.events: list[tuple[int, dict[str, float]]] = []
        self.rows: list[SampleRow] = []
        self.phases: list[tuple[str, int, int]] = []
        self.resumed_at: list[int] = []
        self.fractions: dict[str, float] = {}
        self.start_fractions: dict[str, float] = {}
        self.read: dict[str, dict[str, str]] = {}
        self.first_prompt = ""
        self.files: dict[str, str] = {}

    def about(self, inputs=None, prompt=""):
        self.read, self.first_prompt = inputs or self.read, prompt or self.first_prompt

    def resume(self, step, threads=()):
        self.resumed_at.append(step)
        self.threads = [*threads]
        self.events = [(s, values) for s, values in self.events if s <= step]

    def sync(self):
        return len(self.events)

    def holds(self, step, num_events):
        return sum(s <= step for s, _ in self.events) >= num_events

    def progress(self, phase, done, total):
        self.phases.append((phase, done, total))

    def metrics(self, step, values):
        self.events.append((step, dict(values)))

    def samples(self, rows):
        self.rows += rows

    def per_problem(self, fractions, area="test", families=None):
        if area == "start":
            self.start_fractions = dict(fractions)
        else:
            self.fractions = dict(fractions)

    def kept(self, step, file, digest):
        self.files[file] = digest

    def history(self, name):
        return [(step, values[name]) for step, values in self.events if name in values]

    def without_clocks(self):
        """Everything logged except what depends on the wall clock or the machine's memory."""
        clocks = ("seconds/", "throughput/", "memory/")
        return [(s, {k: v for k, v in values.items() if not k.startswith(clocks)}) for s, values in self.events]


class StopAfter:
    """A should_stop that is true from the n-th time on that it is asked."""

    def __init__(self, n):
        self.n = n

    def __call__(self):
        self.n -= 1
        return self.n <= 0


class Killed:
    """A log whose process dies as it writes the metrics of a step."""

    class Death(BaseException):
        pass

    def __init__(self, log, step):
        self._log, self._step = log, step

    def __getattr__(self, name):
        return getattr(self._log, name)

    def metrics(self, step, values):
        if step == self._step:
            raise self.Death
        self._log.metrics(step, values)


def gone_on(spec, directory, cache, *ends):
    """The log of a run that ends early again and again, each time at one of `ends`, and then goes on to its own end: a
    number stops it when it has asked so often whether to stop, {"kill": step} kills it as it logs that step, and what
    stands at "then" is called after that."""
    log = MemoryLog()
    for end in ends:
        dies, stop = (end["kill"], lambda: False) if isinstance(end, dict) else (None, StopAfter(end))
        with contextlib.suppress(Killed.Death):
            assert train(spec, directory, Killed(log, dies), cache=cache, should_stop=stop).state == "stopped"
        if isinstance(end, dict):
            end.get("then", lambda: None)()
    assert train(spec, directory, log, cache=cache).state == "complete"
    return log


def check_same_run(one, other):
    """Two (folder, log) have the same values but clocks, the same files and the same weights, bit for bit."""
    assert one[1].without_clocks() == other[1].without_clocks()
    assert one[1].files == other[1].files
    assert_same_weights(final_weights(one[0]), final_weights(other[0]))


def final_weights(directory):
    return load_file(sorted((directory / "checkpoints").glob("step-*"))[-1] / "policy" / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
