"""Reads the attempts at every (arm, seed) of a study from the trials of its Optuna study."""

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from .plan import Key

RETRY_BELOW = "retry_failed_below"  # attribute of the Optuna study: failed attempts with lower numbers are repeated
STOPPED = "stopped"  # attribute too: labels of arms that were asked to stop


class Attempts:
    """The attempts at each (arm, seed), in order, and the arms that are `held`, at one look at the Optuna study."""

    def __init__(self, trials: Sequence[FrozenTrial] = (), attributes: Mapping[str, Any] = {}) -> None:
        self.size, self._retry_below = len(trials), attributes.get(RETRY_BELOW, 0)
        self.held = frozenset(attributes.get(STOPPED, ()))
        self.by_key: dict[Key, list[FrozenTrial]] = {}
        for trial in trials:
            if "arm" in trial.user_attrs:
                self.by_key.setdefault((trial.user_attrs["arm"], trial.user_attrs["seed"]), []).append(trial)

    def last(self, key: Key) -> FrozenTrial | None:
        return self.by_key[key][-1] if key in self.by_key else None

    def state(self, key: Key) -> str:
        """waiting, running, complete, pruned, invalid, failed, lost or stopped, by the last attempt."""
        last = self.last(key)
        if last is None:
            return "waiting"
        state = _state(last)
        return "waiting" if state == "failed" and last.number < self._retry_below else state

    def end(self, key: Key) -> Mapping[str, Any]:
        """The end of the last attempt: state, reason, summary and (if complete) values; empty before its end, and for a
        trial that waits."""
        last = self.last(key)
        return {} if last is None or self.state(key) == "waiting" else last.user_attrs.get("result", {})

    def step(self, key: Key) -> int:
        """The step that the last attempt had reached when it ended; 0 before."""
        return int(self.end(key).get("summary", {}).get("step", 0))

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
