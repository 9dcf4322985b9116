"""Trains several runs' adapters on one frozen model, in one process and with one engine: runs take turns and sample
together.

Each run is the training loop in its own thread. One thread works at a time, in the order of the runs, so that no other
code must be thread-safe and a repetition does the same in the same order. A run that wants samples waits until all
other runs want some too or have ended. Then the call of the run that is least far, and all calls with equal sampling
settings, become one batch. A run ends, diverges or resumes by itself. Its samples differ from those of the run alone
only by floating-point rounding.

The thread that asks for the results gives the turns and makes all calls of the engine: vLLM waits for the CUDA stream
of the thread that calls it, so that calls from several could read tokens before they exist.
"""

import contextvars
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from .. import plugins
from ..data import Call, Group, Prompt, Sampling
from ..devices.device import give_back_freed_memory, mixed_precision, resolve_device, use_one_heap
from ..interfaces import RolloutEngine
from ..policy.lora import policies_on
from ..policy.text import TextCodec
from ..settings.run import RunSpec
from .build import Models, engine_settings, placed
from .cold_start import start_policy

T = TypeVar("T")


class Together:
    """Runs `works`, each with the models that it gets here; they belong to `specs`, which agree in all shared
    settings."""

    def __init__(self, specs: Sequence[RunSpec], works: Sequence[Callable[[Models], Any]]):
        self.specs, self._works = specs, works
        self.versions = [0] * len(specs)  # of each run's weights: the number of training steps
        self.policies: Sequence[nn.Module] = ()  # until the first run asks for its own
        self.engine: RolloutEngine
        self.codec: TextCodec
        self._turns = [threading.Semaphore(0) for _ in specs]
        # By the run whose turn it is: its calls, and None at its end.
        self._said: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: dict[int, tuple[Call, Sampling]] = {}
        self._found: dict[int, list[Group] | Exception] = {}
        self._ends: dict[int, Any] = {}
        self._seconds, self._since = [0.0] * len(specs), time.perf_counter()

    def results(self) -> list[Any]:
        """The results of the works, in order; raises the first error, if any, when all have ended."""
        use_one_heap()
        for seat in range(len(self.specs)):
            work = partial(contextvars.copy_context().run, self._work, seat)
            threading.Thread(target=work, daemon=True).start()
        while len(self._ends) < len(self.specs):
            idle = self._ends.keys() | self._waiting.keys()
            if len(idle) == len(self.specs):
                self._sample()
                continue
            give_back_freed_memory()  # otherwise the next run would allocate more beside it
            self._since = time.perf_counter()
            self._turns[next(seat for seat in range(len(self.specs)) if seat not in idle)].release()
            while (call := self._said.get()) is not None:
                call()
        if self.policies:
            self.engine.close()
        for end in self._ends.values():
            if isinstance(end, BaseException):
                raise end
        return [self._ends[seat] for seat in range(len(self.specs))]

    def now(self, seat: int) -> float:
        """Seconds of work for the run whose turn it is: its own turns, and its share (by tokens) of common batches."""
        return self._seconds[seat] + time.perf_counter() - self._since

    def sample(self, seat: int, call: Call, sampling: Sampling) -> list[Group]:
        """The groups of a call, sampled with those of the other runs."""
        self._waiting[seat] = (call, sampling)
        self._end_turn(seat)
        self._turns[seat].acquire()
        found = self._found.pop(seat)
        if isinstance(found, Exception):
            raise found
        return found

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """The result of `work(*args)`, which calls the engine, in the thread of `results`."""
        answer: Future[T] = Future()

        def answered() -> None:
            try:
                answer.set_result(work(*args))
            except Exception as error:
                answer.set_exception(error)

        self._said.put(answered)
        return answer.result()

    def _work(self, seat: int) -> None:
        self._turns[seat].acquire()
        try:
            end = self._works[seat](_Seat(self, seat))
        except BaseException as error:
            end = error
        self._ends[seat] = end
        self._end_turn(seat)

    def _end_turn(self, seat: int) -> None:
        self._seconds[seat] = self.now(seat)
        self._said.put(None)

    def _sample(self) -> None:
        """Sample for the run that is least far (evaluations before steps) and for all runs with the same sampling
        settings."""
        since = time.perf_counter()
        first = min(self._waiting, key=lambda seat: (self.versions[seat], self._waiting[seat][1].temperature, seat))
        sampling, spec = self._waiting[first][1], self.specs[first]
        seats = [seat for seat, (_, asked) in sorted(self._waiting.items()) if asked == sampling]
        calls = [self._waiting.pop(seat)[0] for seat in seats]
        tokens = [1] * len(seats)
        try:
            with mixed_precision(resolve_device(spec.device), spec.autocast):  # as each run has it in its own thread
                found: Sequence[list[Group] | Exception] = (each := self.engine.generate_each(calls, sampling))
            tokens = [1 + sum(len(r.token_ids) for group in groups for r in group.rollouts) for groups in each]
        except Exception as error:
            found = [error] * len(seats)
        self._found = dict(zip(seats, found, strict=True))  # all that were found before are taken
        elapsed = time.perf_counter() - since
        for seat, count in zip(seats, tokens, strict=True):
            self._seconds[seat] += elapsed * count / sum(tokens)


class _Seat(Models):
    """The models of one of the runs."""

    is_alone = False

    def __init__(self, together: Together, seat: int):
        self._together, self._seat = together, seat
        self.now = partial(together.now, seat)

    def policy(
        self, spec: RunSpec, cache: Path, on_progress: Callable[[str, int, int], None]
    ) -> tuple[nn.Module, TextCodec]:
        common = self._together
        if not common.policies:
            base, common.codec = start_policy(spec, cache, on_progress)
            base = placed(base, spec)
            policies = policies_on(base, [(s.lora, s.seed) for s in common.specs if s.lora is not None])
            engine_class = cast(type[RolloutEngine], plugins.load("engine", spec.engine.name))
            settings = engine_settings(spec, common.codec)
            common.engine = common.call(engine_class.on_base, settings, base, common.codec, policies)
            common.policies = policies
        return common.policies[self._seat], common.codec

    def engine(self, spec: RunSpec, policy: nn.Module, codec: TextCodec) -> RolloutEngine:
        return _SeatEngine(self._together, self._seat)


class _SeatEngine(RolloutEngine):
    """The common engine as one of the runs sees it; it sleeps or closes only with the last run."""

    def __init__(self, together: Together, seat: int):
        self._together, self._seat, self._engine = together, seat, together.engine
        self.exact_logprobs, self.precision = self._engine.exact_logprobs, self._engine.precision  # pyright: ignore
        self.verifies_weights = self._engine.verifies_weights
        self.samples_policy, self.plans_batches = self._engine.samples_policy, self._engine.plans_batches  # pyright: ignore

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        return self._together.sample(self._seat, Call(prompts, group_size, seed, step, self._seat), sampling)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._together.versions[self._seat] = version
        self._together.call(self._engine.load_adapter, self._seat)

    def score(self, rows: Sequence[tuple[Sequence[int], int]], policy: int = 0) -> list[list[float]] | None:
        return self._together.call(self._engine.score, rows, self._seat)
