"""One training step in a straight line, from prompts to new weights.

Prompts are a function of (seed, step) and, with some samplers, of the pass rates so far, so that arms with the same
seed draw the same prompts. Dynamic sampling is
DAPO's (arXiv:2503.14476, eq. 11 and section 3.2): a group of equal rewards has no advantages, so further prompts are
sampled until enough groups have unequal rewards. Departures: the condition is unequal rewards, so that it works without
labels (the paper's is neither all right nor all wrong); the number of batches is bounded, and groups of equal rewards
then fill the step, because minibatches have a fixed size. Further prompts are drawn only for this step: a later step
may draw them again.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..base.tensors import pad_right
from ..data import Batch, GradedGroup, Group, Prompt, PromptDraw, Rollout, Sampling, Score
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..interfaces import Distribution, Sampler
from ..policy.flops import Lengths, lengths
from ..rewards.majority_vote import majority_correct
from ..settings.run import RunSpec
from .build import Run
from .grading import begin_grading, control_rewards, reward_metrics, score
from .guards.gates import GateState
from .guards.sync import check_sync, spot_check
from .learner import correct_mismatch

T = TypeVar("T")


def train_step(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[dict[str, float], "Drawn"]:
    """The metrics of one step, from prompts to new weights, and everything that it has sampled."""
    spec, engine, learner, clock = run.spec, run.engine, run.learner, Clock(run.models.now)
    unparsable, drawn, batch, scheduled = _unparsable(run), Drawn(), None, {}
    while not drawn.is_enough(spec, len(prompts)):  # more than one batch with dynamic sampling
        groups = generate(run, prompts, step, drawn)
        grading = [begin_grading(spec.task, ranks.own_part(part), spec.max_tokens) for part in groups]
        if drawn.num_batches + 1 == spec.dynamic_sampling:
            _rest(run, groups[0])
        clock.lap("generate")
        if spec.dynamic_sampling == 1:  # all groups are trained on, whatever they earn
            batch, scheduled = annotated(run, groups[0], step)
            clock.lap("annotate")
        graded = [grade_rollouts(run, *part) for part in zip(groups, grading, strict=True)]
        scores = [
            score_rollouts(spec, prompts, part, graded[place], step, first=place * spec.algorithm.group_size)
            for place, part in enumerate(groups)
        ]
        drawn.groups, drawn.graded = drawn.groups + groups[0], drawn.graded + graded[0]
        drawn.scores, drawn.num_batches = drawn.scores + scores[0], drawn.num_batches + 1
        for greedy, earned in zip(groups[1:], scores[1:], strict=True):
            drawn.greedy += greedy
            drawn.greedy_rewards += [score.totals[0] for score in earned]
        clock.lap("grade")
    for group in drawn.graded if spec.sampler.sees_gold else ():
        rate = float(np.mean(group.correct or ()))
        run.pass_rates[group.prompt_id] = (run.pass_rates.get(group.prompt_id, rate) + rate) / 2
    if drawn.num_batches < spec.dynamic_sampling:
        _rest(run, drawn.groups)
        clock.lap("generate")
    chosen = drawn.trained_on(spec.prompts_per_step)
    if batch is None:
        batch, scheduled = annotated(run, chosen.groups, step)
    batch = rewarded(batch, chosen.groups, chosen.scores, run.codec.tokenizer, chosen.greedy_rewards)
    batch = learner.algorithm.credited(batch)
    batch, corrected = correct_mismatch(batch, spec.mismatch) if learner.corrects else (batch, {})
    clock.lap("annotate")
    updated = learner.update(batch, step)
    clock.lap("update")
    engine.load_weights(learner.weights(), step + 1)
    before = run.spot_check
    synced = {} if before is None else {"mismatch/after_sync": check_sync(engine, learner.policy, before)}
    clock.lap("sync")
    metrics = merged(
        updated, scheduled, corrected, synced, reward_metrics(spec.rewards, drawn.graded, drawn.scores),
        rollout_metrics(drawn.graded, drawn.totals), drawn.metrics(spec), group_metrics(batch, run.gates),
        {name: count - unparsable[name] for name, count in _unparsable(run).items()},
        clock.metrics,
    )  # fmt: skip
    return metrics, drawn


class Clock:
    """Seconds of a step and its phases as metrics, by the run's own clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.last = now, now()
        self.metrics: dict[str, float] = defaultdict(float)

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to a phase and to the step."""
        seconds = (now := self.now()) - self.last
        self.metrics[f"seconds/{phase}"] += seconds
        self.metrics["seconds/step"] += seconds
        self.last = now


@dataclass
class Drawn:
    """All groups that a step has sampled so far, in order, with their grades and rewards."""

    groups: list[Group] = field(default_factory=list)
    graded: list[GradedGroup] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    greedy: list[Group] = field(default_factory=list)  # one completion for each of `groups`, if the algorithm needs it
    greedy_rewards: list[float] = field(default_factory=list)
    num_batches: int = 0

    def is_enough(self, spec: RunSpec, num_prompts: int) -> bool:
        """Whether enough groups have unequal rewards, the budget is spent, or every prompt has been drawn."""
        spent = self.num_batches >= spec.dynamic_sampling or len(self.groups) >= num_prompts
        return spent or self.num_kept >= spec.prompts_per_step

    @property
    def totals(self) -> list[list[float]]:
        """[P][G]: the reward of each completion."""
        return [score.totals for score in self.scores]

    @property
    def num_kept(self) -> int:
        """Groups whose rewards are not all equal."""
        return sum(len(set(rewards)) > 1 for rewards in self.totals)

    def trained_on(self, count: int) -> "Drawn":
        """The `count` groups of the batch, in order: first those with unequal rewards, then others as needed."""
        index = sorted(sorted(range(len(self.groups)), key=lambda p: len(set(self.totals[p])) == 1)[:count])

        def at(parts: Sequence[T]) -> list[T]:
            return [parts[p] for p in index if parts]

        return Drawn(at(self.groups), at(self.graded), at(self.scores), at(self.greedy), at(self.greedy_rewards))

    def lengths(self, count: int) -> list[Lengths]:
        """Those of all samples, of the `count` groups of the batch, and of the greedy completions."""
        return [lengths(groups) for groups in (self.groups, self.trained_on(count).groups, self.greedy)]

    def metrics(self, spec: RunSpec) -> dict[str, float]:
        """`reward/greedy`, where there are greedy completions; with dynamic sampling its counts: `sampling/batches`,
        `sampling/kept_groups` (unequal rewards), `sampling/filled_groups` (equal, to fill the step)."""
        metrics = {"reward/greedy": float(np.mean(self.greedy_rewards))} if self.greedy else {}
        if spec.dynamic_sampling > 1:
            kept = min(self.num_kept, spec.prompts_per_step)
            counts = {"batches": self.num_batches, "kept_groups": kept, "filled_groups": spec.prompts_per_step - kept}
            metrics |= {f"sampling/{name}": float(value) for name, value in counts.items()}
        return metrics


def generate(run: Run, prompts: Sequence[Prompt], step: int, drawn: Drawn) -> list[list[Group]]:
    """One more batch of a step's groups; then, if the algorithm needs them, groups of one greedy completion for the
    same prompts, under the same limits.
    """
    spec, count = run.spec, run.spec.prompts_per_step
    draw = PromptDraw(count, spec.seed, step, drawn.num_batches, (step - run.stage.start) / spec.steps, run.pass_rates)
    chosen = drawn_prompts(spec.sampler, prompts, draw, {group.prompt.id for group in drawn.groups})

    def sampled(group_size: int, sampling: Sampling) -> list[Group]:
        draw = partial(run.engine.sample, group_size=group_size, sampling=sampling, seed=spec.seed, step=step)
        return ranks.shared(chosen, draw, spec.engine.processes)

    sampling = spec.sampling_with_limit()
    with mixed_precision(resolve_device(spec.device), spec.autocast), run.learner.older_weights():
        groups = [sampled(spec.algorithm.group_size, sampling)]
        if spec.algorithm.needs_greedy:
            groups.append(sampled(1, sampling.model_copy(update={"temperature": 0.0})))
    return groups


def _rest(run: Run, groups: Sequence[Group]) -> None:
    """Get the scores that the check of the engine's next weights needs, if it has its own, then let it sleep, because
    learner and rewards may need the device."""
    if not run.engine.exact_logprobs:
        run.spot_check = spot_check(run.engine, run.learner.policy, groups, run.spot_check)
    run.engine.sleep()


def drawn_prompts(
    sampler: Sampler, prompts: Sequence[Prompt], draw: PromptDraw, before: Collection[str] = ()
) -> list[Prompt]:
    """The prompts of a batch, without those whose ids are among `before`: a prompt drawn twice in a step would get the
    same completions again, because its id decides the noise. The first batch of a step is full, if need be by
    repetition."""
    chosen = (prompts[i] for i in sampler.order(prompts, draw) if prompts[i].id not in before)
    return list(islice(chosen if draw.batch else cycle(chosen), draw.count))


def annotated(run: Run, groups: Sequence[Group], step: int) -> tuple[Batch, dict[str, float]]:
    """The batch of the groups, still without rewards, as the learner annotates it; what it sets for the step."""
    batch = collate(groups).to(resolve_device(run.spec.device))
    run.writer.copied.wait()  # nothing below may change weights or moments before
    scheduled = run.learner.begin_step(step)
    return run.learner.annotate(batch), scheduled


def grade_rollouts(run: Run, groups: Sequence[Group], grading: Future[list[GradedGroup]]) -> list[GradedGroup]:
    """The groups as the run's rewards see them, with the token means that the rewards need; `grading` is that of this
    rank's part.

    The learner computes these means, with any engine: from the policy that sampled (up to the engine's rounding), or
    from the newest policy if older weights sampled.
    """
    spec = run.spec
    wanted: list[Distribution] = [r.distribution for r in spec.rewards.values() if r.distribution is not None]
    means: dict[Distribution, list[list[float]]] = {}
    if wanted and groups:
        batch = collate(groups).to(resolve_device(spec.device))
        means = {name: run.learner.token_means(batch, name).view(len(groups), -1).tolist() for name in wanted}
    graded = ranks.shared(groups, lambda _: grading.result())
    return [
        replace(group, token_means={name: tuple(rows[p]) for name, rows in means.items()})
        for p, group in enumerate(graded)
    ]


def score_rollouts(
    spec: RunSpec,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    step: int,
    first: int,
) -> list[Score]:
    """The groups' rewards, or in a control arm those of the control; `prompts` is the whole split, `first` the number
    of a group's first sample among all of its prompt."""
    is_controlled = spec.control not in (None, "frozen")
    args = (spec, prompts, groups, graded, step, first)
    return ranks.same(lambda: score(spec.rewards, graded, control_rewards(*args) if is_controlled else None, step + 1))


def collate(groups: Sequence[Group]) -> Batch:
    """The rows of all groups, right-padded to the longest; all rewards are 0 until `rewarded`."""
    rows = [(g.prompt_token_ids, r) for g in groups for r in g.rollouts]
    return Batch(
        tokens_BT=pad_right([prompt + r.token_ids for prompt, r in rows], torch.int64),
        completion_mask_BT=pad_right([[False] * len(p) + [True] * len(r.token_ids) for p, r in rows], torch.bool),
        lengths_B=torch.tensor([len(p) + len(r.token_ids) for p, r in rows]),
        sampler_logprobs_BT=pad_right([[0.0] * len(p) + list(r.logprobs) for p, r in rows], torch.float32),
        truncated_B=torch.tensor([r.finish_reason == "length" for _, r in rows]),
        rewards_B=torch.zeros(len(rows)),
        group_size=len(groups[0].rollouts),
    )


def rewarded(
    batch: Batch,
    groups: Sequence[Group],
    scores: Sequence[Score],
    tokenizer: PreTrainedTokenizerBase,
    greedy: Sequence[float] = (),
) -> Batch:
    """The batch of the groups with their rewards.

    A rewarded step is paid at the token that ends it, which the tokenizer finds, and the outcome then at the
    completion's last token. `greedy` holds the reward [P] of each prompt's greedy completion, if one is drawn.
    """
    rows = [(g.prompt_token_ids, r) for g in groups for r in g.rollouts]
    step_rewards = step_ends = parts = weights = None
    if len(scores[0].paid) > 1:
        parts = torch.cat([torch.tensor([values for _, values in score.paid]).T for score in scores]).float()
        weights = torch.tensor([weight for weight, _ in scores[0].paid]).expand(len(rows), -1)
    if scores[0].steps is not None:
        shape = batch.tokens_BT.shape
        step_rewards, step_ends = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        paid = [(score, i) for score in scores for i in range(len(score.totals))]
        for row, ((prompt, rollout), (score, i)) in enumerate(zip(rows, paid, strict=True)):
            assert score.steps is not None
            earned: dict[int, float] = defaultdict(float)
            for character, value in score.steps[i]:
                earned[token_at(rollout, character, tokenizer)] += value
            if score.outcomes is not None:
                earned[len(rollout.token_ids) - 1] += score.outcomes[i]
            for token, value in earned.items():
                step_rewards[row, len(prompt) + token] = value
                step_ends[row, len(prompt) + token] = True
    return batch.replace(
        rewards_B=torch.tensor([value for score in scores for value in score.totals], dtype=torch.float32),
        reward_parts_BK=parts,
        reward_weights_BK=weights,
        greedy_rewards_B=torch.tensor(greedy).repeat_interleave(batch.group_size) if greedy else None,
        step_rewards_BT=step_rewards,
        step_ends_BT=step_ends,
    ).to(batch.tokens_BT.device)


def token_at(rollout: Rollout, character: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The first completion token at which the text has at least `character` characters."""
    ids = list(rollout.token_ids)
    return bisect.bisect_left(
        range(1, len(ids)), character, key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=True))
    )


def rollout_metrics(graded: Sequence[GradedGroup], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics of the sampled completions, including those that need gold: for the reader, not for the algorithm;
    rewards [P][G]."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    scores = [score for group in graded for score in group.scores or ()]
    return {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std()) if rewards_PG.numel() > 1 else 0.0,
        "train/accuracy": float(np.mean([c for g in graded for c in g.correct or ()])),
        **({"train/score": float(np.mean(scores))} if scores else {}),
        "train/answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "train/majority_accuracy": float(np.mean([majority_correct(g) for g in graded])),
        "train/zero_variance_groups": float((rewards_PG == rewards_PG[:, :1]).all(dim=1).float().mean()),
        "completion/length": float(np.mean([n for g in graded for n in g.num_tokens])),
        "completion/truncated": float(np.mean([t for g in graded for t in g.truncated])),
    }


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


def _unparsable(run: Run) -> dict[str, int]:
    """The number of comparisons without a verdict so far, over all ranks; empty if every comparison has one."""
    counted = ranks.of_all(run.spec.task.num_unparsable())
    return {} if None in counted else {"grading/unparsable": sum(filter(None, counted))}
