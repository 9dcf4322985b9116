"""One training step in a straight line, from prompts to new weights; then what it measured."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..data import Batch, GradedGroup, Prompt
from ..devices import ranks
from ..settings.run import RunSpec
from .build import Run
from .grading import reward_metrics
from .guards.gates import GateState
from .guards.sync import check_sync
from .learner import correct_mismatch
from .rollout import Clock, Rollouts, annotated, earned, note_pass_rates, replayed, rewarded, sample, taught


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], Rollouts]:
    """The metrics of one step, from prompts to new weights, and all its rollouts."""
    spec, engine, learner = run.spec, run.engine, run.learner
    unparsable, clock = _unparsable(run), Clock(run.now)
    drawn = sample(run, prompts, step, clock)
    batch, scheduled = annotated(run, drawn.trained_on(spec.prompts_per_step).groups, step)
    clock.lap("annotate")
    drawn = earned(run, prompts, drawn, step)  # a thread has graded them meanwhile
    note_pass_rates(run, drawn.graded)
    clock.lap("grade")
    trained = drawn.trained_on(spec.prompts_per_step)
    batch = taught(learner, rewarded(batch, trained, run.codec.tokenizer), trained.groups)
    batch = learner.algorithm.credited(batch)
    batch, corrected = correct_mismatch(batch, spec.mismatch) if learner.corrects else (batch, {})
    clock.lap("annotate")
    learner.replays = replayed(run, prompts, drawn, step)
    updated = learner.update(batch, step)
    for optimizer in learner.optimizers.values():
        optimizer.zero_grad()  # the next step is sampled in their memory
    run.totals.learner_peak_bytes = max(run.totals.learner_peak_bytes, run.note_peak())
    clock.lap("update")
    engine.load_weights(learner.weights(), step + 1)
    before = run.spot_check
    synced = {} if before is None else {"mismatch/after_sync": check_sync(engine, learner.policy, before)}
    clock.lap("sync")
    metrics = merged(
        updated, scheduled, corrected, synced, reward_metrics(spec.rewards, drawn.graded, drawn.scores),
        rollout_metrics(drawn.graded, drawn.totals), sampling_metrics(spec, drawn), group_metrics(batch, run.gates),
        {name: count - unparsable[name] for name, count in _unparsable(run).items()},
        clock.metrics, {"memory/learner_peak_bytes": run.totals.learner_peak_bytes},
    )  # fmt: skip
    return metrics, drawn


def rollout_metrics(graded: Sequence[GradedGroup], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics of the sampled completions, for the reader and not for the algorithm: some need gold. rewards [P][G]."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    scores = [score for group in graded for score in group.scores or ()]
    return {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std()) if rewards_PG.numel() > 1 else 0.0,
        "train/accuracy": float(np.mean([c for g in graded for c in g.correct or ()])),
        **({"train/score": float(np.mean(scores))} if scores else {}),
        "train/answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "train/lenient_accuracy": float(np.mean([c for g in graded for c in g.lenient or ()] or np.nan)),
        "train/marked_accuracy": float(np.mean([c for g in graded for c in g.marked or ()] or np.nan)),
        "train/majority_accuracy": float(np.mean([g.majority_correct for g in graded])),
        "train/zero_variance_groups": float((rewards_PG == rewards_PG[:, :1]).all(dim=1).float().mean()),
        "completion/length": float(np.mean([n for g in graded for n in g.num_tokens])),
        "completion/truncated": float(np.mean([t for g in graded for t in g.truncated])),
        "completion/run_on": float(np.mean([went for g in graded for went in g.run_on or ()] or np.nan)),
    }


def sampling_metrics(spec: RunSpec, drawn: Rollouts) -> dict[str, float]:
    """`reward/greedy`, where there are greedy completions; with dynamic sampling its counts: `sampling/batches`,
    `sampling/kept_groups` (unequal rewards), `sampling/filled_groups` (equal, to fill the step)."""
    metrics = {"reward/greedy": float(np.mean(drawn.greedy.totals))} if drawn.greedy else {}
    if spec.dynamic_sampling > 1:
        kept = min(drawn.num_kept, spec.prompts_per_step)
        counts = {"batches": drawn.num_batches, "kept_groups": kept, "filled_groups": spec.prompts_per_step - kept}
        metrics |= {f"sampling/{name}": float(value) for name, value in counts.items()}
    return metrics


def group_metrics(batch: Batch, state: GateState) -> dict[str, float]:
    """Shares of the batch's groups: `train/zero_advantage_groups` have no advantage on any token, and
    `train/stuck_groups` have none although their reward is not the best that the run has seen.

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


def _unparsable(run: Run) -> dict[str, int]:
    """The number of comparisons without a verdict so far, over all ranks; empty if every comparison has one."""
    counted = ranks.of_all(run.spec.task.num_unparsable())
    return {} if None in counted else {"grading/unparsable": sum(filter(None, counted))}
