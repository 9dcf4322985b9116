"""Small named fakes that several tests share, and what they look at in a run's folder."""

import contextlib
import json

import torch
from cohort.harness.data import Batch, GradedGroup, SampleRow
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_tokenizer
from cohort.harness.run.loop import train
from safetensors.torch import load_file


def tiny_codec():
    return TextCodec(tiny_tokenizer())


def graded_group(classes, correct=None, **changes):
    """A graded group of one-token completions with these equivalence classes; any field may be given."""
    n = len(classes)
    given = {
        "prompt_id": "p", "prompt": "p?", "completions": ("",) * n, "num_tokens": (1,) * n, "max_tokens": 8,
        "truncated": (False,) * n, "answers": tuple(None if c is None else str(c) for c in classes),
        "classes": tuple(classes), "format_scores": tuple(float(c is not None) for c in classes),
        "correct": None if correct is None else tuple(correct), "run_on": (False,) * n,
    }  # fmt: skip
    return GradedGroup(**{**given, **changes})


def batch_of(mask, rewards, group_size: int, **tensors):
    """Rows of tokens 0 with this completion mask and these rewards."""
    mask = torch.as_tensor(mask, dtype=torch.bool)
    named = {
        "tokens_BT": torch.zeros(mask.shape, dtype=torch.int64), "lengths_B": torch.full((len(mask),), mask.shape[1]),
        "sampler_logprobs_BT": torch.zeros(mask.shape), "rewards_B": torch.tensor(rewards, dtype=torch.float32),
        **tensors,
    }  # fmt: skip
    return Batch(completion_mask_BT=mask, group_size=group_size, **named)


def small_batch(rewards):
    """12 rows, prompts of 2 tokens and completions of 0 to 5; the policy has moved a little since it sampled them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 7, 2, 4, 6, 7, 3, 5, 7, 4, 6, 3])
    column = torch.arange(7)
    mask = (column < lengths[:, None]) & (column >= 2)
    noise = [torch.randn(12, 7, generator=generator) * mask for _ in range(4)]
    return batch_of(
        mask, rewards, 4, tokens_BT=torch.randint(3, 100, (12, 7), generator=generator) * (column < lengths[:, None]),
        lengths_B=lengths, sampler_logprobs_BT=-noise[0].abs(), old_logprobs_BT=-noise[0].abs(),
        ref_logprobs_BT=-noise[1].abs(), values_BT=0.1 * noise[2], collision_BT=(-2 * noise[0].abs()).exp() * mask,
        held_BT=torch.zeros_like(mask), teacher_logprobs_BT=-noise[3].abs(),
        greedy_rewards_B=torch.tensor(rewards[1::4], dtype=torch.float32).repeat_interleave(4),
    )  # fmt: skip


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

    def about(self, inputs=None, prompt="", sizes=None):
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


def changed(policy, change):
    """The policy, whose parameters are now what `change` makes of each."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(change(parameter))
    return policy


def rollout_rows(directory, step):
    """What a run has kept of its rollouts of a step."""
    lines = (directory / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def final_weights(directory):
    return load_file(sorted((directory / "checkpoints").glob("step-*"))[-1] / "policy" / "model.safetensors")


def assert_same_weights(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
