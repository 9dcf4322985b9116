"""Small named fakes that several tests share."""

from harness.types import SampleRow


class MemoryLog:
    """A RunLogger that keeps everything in lists."""

    def __init__(self):
        self.events: list[tuple[int, dict[str, float]]] = []
        self.rows: list[SampleRow] = []
        self.phases: list[tuple[str, int, int]] = []
        self.resumed_at: list[int] = []
        self.fractions: dict[str, float] = {}

    def resume(self, step):
        self.resumed_at.append(step)
        self.events = [(s, values) for s, values in self.events if s <= step]

    def progress(self, phase, done, total):
        self.phases.append((phase, done, total))

    def metrics(self, step, values):
        self.events.append((step, dict(values)))

    def samples(self, rows):
        self.rows += rows

    def per_problem(self, fractions):
        self.fractions = dict(fractions)

    def history(self, name):
        return [(step, values[name]) for step, values in self.events if name in values]

    def without_clocks(self):
        """Everything logged except what depends on the wall clock or the machine's memory."""
        clocks = ("seconds/", "throughput/", "memory/")
        return [(s, {k: v for k, v in values.items() if not k.startswith(clocks)}) for s, values in self.events]
