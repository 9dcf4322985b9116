"""Reads the attempts at every (arm, seed) of a study from the trials of its Optuna study."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from .plan import Key


class Attempts:
    """The attempts at each (arm, seed), kept between reads: an update reads only new trials and those that were
    running."""

    def __init__(self) -> None:
        self.size = 0  # trials seen
        self.by_key: dict[Key, list[FrozenTrial]] = {}  # in the order of the attempts
        self._places: dict[int, tuple[Key, int]] = {}  # unfinished attempts: number -> key, position in its list
        self._retry_below = 0

    def update(self, trials: Sequence[FrozenTrial], retry_below: int) -> None:
        """Take in all trials of the Optuna study, in order; failures with a number below `retry_below` count as
        waiting."""
        self._retry_below = retry_below
        for number, (key, position) in list(self._places.items()):
            self.by_key[key][position] = trials[number]
            if trials[number].state.is_finished():
                del self._places[number]
        for trial in itertools.islice(trials, self.size, None):
            if "arm" not in trial.user_attrs:
                continue
            key = (trial.user_attrs["arm"], trial.user_attrs["seed"])
            tried = self.by_key.setdefault(key, [])
            tried.append(trial)
            if not trial.state.is_finished():
                self._places[trial.number] = (key, len(tried) - 1)
        self.size = len(trials)

    def last(self, key: Key) -> FrozenTrial | None:
        return self.by_key[key][-1] if key in self.by_key else None

    def state(self, key: Key) -> str:
        """waiting, running, complete, pruned, invalid, failed, lost, stopped or paused, by the last attempt."""
        last = self.last(key)
        if last is None:
            return "waiting"
        state = _state(last)
        return "waiting" if state == "failed" and last.number < self._retry_below else state

    def end(self, key: Key) -> Mapping[str, Any]:
        """The end of the last attempt: state, reason, summary and (if complete) values; empty before its end."""
        last = self.last(key)
        return {} if last is None else last.user_attrs.get("result", {})

    def step(self, key: Key) -> int:
        """The step that the last attempt had reached when it ended; 0 before."""
        return int(self.end(key).get("summary", {}).get("step", 0))

    def running(self) -> dict[Key, int]:
        """The number of the running attempt at each trial that has one."""
        keys = (key for key, _ in self._places.values() if self.state(key) == "running")
        return {key: self.by_key[key][-1].number for key in keys}

    def num_stuck(self, key: Key, step: int) -> int:
        """Number of attempts in a row that lost their worker without progress: the last one, which reached `step`, and
        those before it that had reached that step too."""
        count = 1
        for trial in reversed(self.by_key[key][:-1]):
            reached = trial.user_attrs.get("result", {}).get("summary", {}).get("step", 0)
            if _state(trial) != "lost" or reached < step:
                break
            count += 1
        return count


def _state(trial: FrozenTrial) -> str:
    """waiting, running, complete, pruned, or the attribute `result` of a FAIL."""
    failed = trial.state == TrialState.FAIL
    return trial.user_attrs.get("result", {}).get("state", "lost") if failed else trial.state.name.lower()
