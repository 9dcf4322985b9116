"""Runs one training step, from prompts to new weights."""

import time
from collections.abc import Callable, Mapping, Sequence

from ..data import Batch, Prompt
from ..devices import ranks
from ..devices.device import resolve_device
from .gates import GateState
from .rollout import Drawn, collate, generate, grade_rollouts, rest, reward_metrics, score_rollouts
from .state import Run
from .sync import check_sync


class Clock:
    """Seconds of the phases of a step, by the run's own clock."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.start = self.last = now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = self.now()
        self.seconds[phase], self.last = self.seconds.get(phase, 0.0) + now - self.last, now

    def metrics(self) -> dict[str, float]:
        return {**{f"seconds/{k}": v for k, v in self.seconds.items()}, "seconds/step": self.last - self.start}


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], Drawn]:
    """The metrics of one step, from prompts to new weights, and everything that it has sampled."""
    spec, engine, learner, clock = run.spec, run.engine, run.learner, Clock(run.models.now)
    is_exact, unparsable = run.sampler_is_exact, _num_unparsable(run)
    drawn = Drawn()
    while not drawn.is_enough(spec, len(prompts)):  # more than one batch with dynamic sampling
        groups = generate(run, prompts, step, drawn)
        clock.lap("generate")
        graded = [grade_rollouts(run, part) for part in groups]
        scores = [
            score_rollouts(run, prompts, part, graded[place], step, first=place * spec.algorithm.group_size)
            for place, part in enumerate(groups)
        ]
        drawn = drawn.and_more(groups, graded, scores)
        clock.lap("grade")
    if drawn.num_batches < spec.dynamic_sampling:
        rest(run, drawn.groups)
        clock.lap("generate")
    chosen = drawn.trained_on(spec.prompts_per_step)
    batch = collate(chosen.groups, chosen.scores, run.codec.tokenizer, chosen.greedy_rewards)
    batch = batch.to(resolve_device(spec.device))
    scheduled = learner.begin_step(step)
    batch = learner.annotate(batch, sampler_is_exact=is_exact)
    batch = learner.algorithm.advantages(batch)
    batch, corrected = learner.correct(batch, sampler_is_exact=is_exact)
    clock.lap("annotate")
    updated = learner.update(batch, step)
    clock.lap("update")
    engine.load_weights(learner.weights(), step + 1)
    synced = {} if run.probe is None else {"mismatch/after_sync": check_sync(engine, learner.policy, run.probe)}
    clock.lap("sync")
    metrics = merged(
        updated,
        scheduled,
        corrected,
        synced,
        reward_metrics(spec.rewards, drawn.graded, drawn.scores),
        drawn.metrics(spec),
        group_metrics(batch, run.gates),
        {} if unparsable is None else {"grading/unparsable": (_num_unparsable(run) or 0) - unparsable},
        clock.metrics(),
    )
    return metrics, drawn


def group_metrics(batch: Batch, state: GateState) -> dict[str, float]:
    """Shares of the batch's groups: `train/zero_advantage_groups` have no advantage on any token; `train/stuck_groups`
    are those among them whose reward is not the best that the run has seen.

    A group in which every completion earns the best reward is solved, not stuck: a run whose groups are all solved (or,
    with votes, unanimous) has nothing left to learn. As long as all rewards of a run are equal, none counts as best.
    """
    assert batch.advantages_BT is not None
    rewards_PG = batch.rewards_PG
    lowest, highest = float(rewards_PG.min()), float(rewards_PG.max())
    state.lowest_reward = lowest if state.lowest_reward is None else min(lowest, state.lowest_reward)
    state.highest_reward = highest if state.highest_reward is None else max(highest, state.highest_reward)
    zero_P = (batch.advantages_BT.view(len(rewards_PG), -1) == 0).all(dim=1)
    best_P = (rewards_PG == state.highest_reward).all(dim=1) & (state.highest_reward > state.lowest_reward)
    return {
        "train/zero_advantage_groups": float(zero_P.float().mean()),
        "train/stuck_groups": float((zero_P & ~best_P).float().mean()),
    }


def merged(*parts: Mapping[str, float]) -> dict[str, float]:
    """The metrics of all parts. ValueError if two parts have the same metric, because one would be lost."""
    found: dict[str, float] = {}
    for part in parts:
        if both := found.keys() & part.keys():
            raise ValueError(f"a metric must have one source, '{min(both)}' has two; rename the reward that reports it")
        found |= part
    return found


def _num_unparsable(run: Run) -> int | None:
    """The number of comparisons without a verdict so far, over all ranks."""
    counted = ranks.shared(range(ranks.world_size()), lambda _: [run.spec.task.num_unparsable()])
    return None if None in counted else sum(filter(None, counted))
