"""Samples, grades and scores the groups of a training step, and chooses among them if it needs fewer.

Dynamic sampling is DAPO's (arXiv:2503.14476, eq. 11 and section 3.2): a group of equal rewards has no advantages, so
further prompts are sampled until enough groups have unequal rewards. Departures: the condition is unequal rewards, so
that it works without labels (the paper's is neither all right nor all wrong); the number of batches is bounded, and
groups of equal rewards then fill the step, because minibatches have a fixed size. Further prompts are drawn only for
this step: a later step may draw them again.

Prompts are a function of (seed, step), so that arms with the same seed draw the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..data import GradedGroup, Group, Prompt
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..ground.streams import generator
from ..interfaces import Distribution, Reward
from .batch import collate
from .control_rewards import control_rewards
from .grading import grade
from .scoring import Scores, score
from .state import Clock, Run
from .weight_sync import Probe, probe


def sample_groups(run: Run, prompts: Sequence[Prompt], step: int, clock: Clock) -> tuple[Drawn, Probe | None]:
    """The groups of a step, graded and scored, and the engine's own scores of a few completions before the update.

    Dynamic sampling adds batches of prompts until enough groups have unequal rewards or the budget is spent. The engine
    sleeps before the last grading, because rewards may need the device.
    """
    spec = run.spec
    budget, count = spec.dynamic_sampling, spec.prompts_per_step
    drawn = Drawn()
    before: Probe | None = None
    for attempt in range(budget):
        chosen = step_prompts(prompts, spec.seed, step, count)
        if attempt:
            chosen = further_prompts(prompts, spec.seed, step, attempt, count, [g.prompt.id for g in drawn.groups])
        sampled = partial(ranks.shared, chosen, together=spec.engine.processes)
        with mixed_precision(resolve_device(spec.device), spec.autocast), run.learner.older_weights():
            groups = sampled(partial(_generate, run, step))
            greedy = sampled(partial(_generate_greedy, run, step)) if spec.algorithm.needs_greedy else []
        is_last = attempt == budget - 1
        if is_last:
            before = _rest(run, groups)
        clock.lap("generate")
        graded = graded_groups(run, groups)
        instead = _instead(run, prompts, groups, graded, step)
        drawn = ranks.same(partial(drawn.with_batch, spec.rewards, groups, graded, instead))
        if greedy:
            graded = graded_groups(run, greedy)
            instead = _instead(run, prompts, greedy, graded, step, first=spec.algorithm.group_size)
            drawn = ranks.same(partial(drawn.with_greedy, spec.rewards, greedy, graded, instead))
        clock.lap("grade")
        if drawn.num_kept >= count or len(drawn.groups) >= len(prompts):
            if not is_last:
                before = _rest(run, drawn.groups)
                clock.lap("generate")
            break
    return drawn if budget == 1 else drawn.with_metrics(count), before


def _generate(run: Run, step: int, prompts: Sequence[Prompt]) -> list[Group]:
    spec = run.spec
    return run.engine.generate(
        prompts, spec.algorithm.group_size, spec.sampling_with_limit(), seed=spec.seed, step=step
    )


def _generate_greedy(run: Run, step: int, prompts: Sequence[Prompt]) -> list[Group]:
    """Groups of one greedy completion, under the same limits as the step's other completions."""
    spec = run.spec
    sampling = spec.sampling_with_limit().model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})
    return run.engine.generate(prompts, 1, sampling, seed=spec.seed, step=step)


def _instead(
    run: Run,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    step: int,
    first: int = 0,
) -> list[list[float]] | None:
    """The control's rewards, which replace the run's; None without such a control."""
    if run.spec.control in (None, "frozen"):
        return None
    pairs = list(zip(groups, graded, strict=True))
    return ranks.shared(
        pairs, lambda part: control_rewards(run.spec, prompts, [g for g, _ in part], [g for _, g in part], step, first)
    )


def graded_groups(run: Run, groups: Sequence[Group]) -> list[GradedGroup]:
    """The groups as the run's rewards see them, with the token means that the rewards need.

    The learner computes these means, with any engine: from the policy that sampled (up to the engine's rounding), or
    from the newest policy if older weights sampled.
    """
    spec = run.spec
    graded = ranks.shared(groups, lambda part: grade(spec.task, part, spec.max_tokens))
    rewards = spec.rewards.values()
    wanted: list[Distribution] = [reward.distribution for reward in rewards if reward.distribution is not None]
    if not wanted or not groups:
        return graded
    unpaid = [[0.0] * len(group.rollouts) for group in groups]
    batch = collate(groups, unpaid).to(resolve_device(spec.device))
    means = {
        name: run.learner.token_means(batch, name).view(len(groups), -1).tolist() for name in dict.fromkeys(wanted)
    }
    return [
        replace(group, token_means={name: tuple(rows[p]) for name, rows in means.items()})
        for p, group in enumerate(graded)
    ]


def _rest(run: Run, groups: Sequence[Group]) -> Probe | None:
    """Get the engine's scores that the check of its next weights needs, then let it sleep."""
    run.probe = probe(run.engine, run.learner.policy, groups, run.probe)
    run.engine.sleep()
    return run.probe


def step_prompts(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a training step: consecutive parts of an endless stream that is reshuffled on every pass."""
    result: list[Prompt] = []
    while len(result) < count:
        epoch, offset = divmod(step * count + len(result), len(prompts))
        order = generator("prompts", seed, epoch).permutation(len(prompts))
        result += [prompts[i] for i in order[offset : offset + count - len(result)]]
    return result


def further_prompts(
    prompts: Sequence[Prompt], seed: int, step: int, attempt: int, count: int, drawn: Sequence[str]
) -> list[Prompt]:
    """At most `count` prompts whose ids are not among `drawn`, in an order keyed by (seed, step, attempt).

    A prompt drawn twice in a step would get the same completions again, because its id decides the noise.
    """
    order, before = generator("further prompts", seed, step, attempt).permutation(len(prompts)), set(drawn)
    return [prompts[i] for i in order if prompts[i].id not in before][:count]


@dataclass(frozen=True)
class Drawn:
    """All groups that a step has sampled so far, in order, with their grades and rewards."""

    groups: tuple[Group, ...] = ()
    graded: tuple[GradedGroup, ...] = ()
    scores: Scores = field(default_factory=lambda: Scores([], None, None, {}, {}))
    num_batches: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    greedy: tuple[Group, ...] = ()  # of one completion for each of `groups`, if the algorithm needs them
    greedy_rewards: tuple[float, ...] = ()

    def with_batch(
        self,
        rewards: Mapping[str, Reward],
        groups: Sequence[Group],
        graded: Sequence[GradedGroup],
        instead: Sequence[list[float]] | None = None,
    ) -> Drawn:
        """These and one more batch of groups, paid by `rewards` or by a control (`instead`)."""
        scores, all_graded = score(rewards, graded, instead), (*self.graded, *graded)
        if self.groups:
            scores = self.scores.then(rewards, scores, all_graded)
        return replace(
            self, groups=(*self.groups, *groups), graded=all_graded, scores=scores, num_batches=self.num_batches + 1
        )

    def with_greedy(
        self,
        rewards: Mapping[str, Reward],
        groups: Sequence[Group],
        graded: Sequence[GradedGroup],
        instead: Sequence[list[float]] | None = None,
    ) -> Drawn:
        """These and the greedy completions of the batch added last, each paid alone by `rewards` or by a control
        (`instead`)."""
        earned = [total for (total,) in score(rewards, graded, instead).totals]
        return replace(self, greedy=(*self.greedy, *groups), greedy_rewards=(*self.greedy_rewards, *earned))

    def with_metrics(self, count: int) -> Drawn:
        """These with the metrics of dynamic sampling for a step of `count` groups: `sampling/batches`,
        `sampling/kept_groups` (unequal rewards) and `sampling/filled_groups` (equal rewards, to fill the step)."""
        kept = min(self.num_kept, count)
        counts = {"batches": self.num_batches, "kept_groups": kept, "filled_groups": count - kept}
        return replace(self, metrics={f"sampling/{name}": float(value) for name, value in counts.items()})

    @property
    def num_kept(self) -> int:
        """Groups whose rewards are not all equal."""
        return sum(not _equal(row) for row in self.scores.totals)

    def trained_on(self, count: int) -> Drawn:
        """The `count` groups of the batch, in order: first those with unequal rewards, then others as needed."""
        if len(self.groups) == count:
            return self
        index = sorted(range(len(self.groups)), key=lambda p: (_equal(self.scores.totals[p]), p))[:count]
        index.sort()
        return replace(
            self,
            groups=tuple(self.groups[p] for p in index),
            graded=tuple(self.graded[p] for p in index),
            scores=self.scores.pick(index),
            greedy=tuple(self.greedy[p] for p in index if self.greedy),
            greedy_rewards=tuple(self.greedy_rewards[p] for p in index if self.greedy),
        )


def _equal(rewards: Sequence[float]) -> bool:
    return all(value == rewards[0] for value in rewards)
