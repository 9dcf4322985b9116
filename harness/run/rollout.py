"""Samples and grades what one step learns from, and lays it out as a batch.

Prompts are a function of (seed, step) and, with some samplers, of the pass rates so far, so that arms with the same
seed draw the same prompts. Dynamic sampling is DAPO's (arXiv:2503.14476, eq. 11 and section 3.2): a group of equal
rewards has no advantages, so further prompts are sampled until enough groups have unequal rewards. Departures: the
condition is unequal rewards, so that it works without labels (the paper's is neither all right nor all wrong); the
number of batches is bounded, and groups of equal rewards then fill the step, because minibatches have a fixed size.
Further prompts are drawn only for this step: a later step may draw them again.
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..base.tensors import pad_right
from ..data import Batch, GradedGroup, Group, Prompt, PromptDraw, Rollout, Sampling, Score
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..devices.sharding import is_spread, local
from ..interfaces import Distribution, Sampler
from ..policy.flops import Lengths, lengths
from .build import Run
from .grading import begin_grading, control_rewards, score
from .guards.sync import spot_check
from .learner import Learner


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


@dataclass(frozen=True)
class Rollouts:
    """Groups that a step has sampled, in order. `earned` adds their grades and rewards; before that, a thread is
    `grading` this rank's part. `greedy` has one completion for each of the same prompts, if the algorithm needs it.
    """

    groups: list[Group] = field(default_factory=list)
    graded: list[GradedGroup] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    greedy: "Rollouts | None" = None
    num_batches: int = 0
    grading: Future[list[GradedGroup]] | None = None

    @property
    def totals(self) -> list[list[float]]:
        """[P][G]: the reward of each completion."""
        return [score.totals for score in self.scores]

    @property
    def num_kept(self) -> int:
        """Groups whose rewards are not all equal."""
        return sum(len(set(rewards)) > 1 for rewards in self.totals)

    def plus(self, more: "Rollouts") -> "Rollouts":
        """These and `more`, with all their rewards."""
        greedy = self.greedy.plus(more.greedy) if self.greedy and more.greedy else more.greedy
        graded, scores = self.graded + more.graded, self.scores + more.scores
        return Rollouts(self.groups + more.groups, graded, scores, greedy, self.num_batches + more.num_batches)

    def at(self, places: Sequence[int]) -> "Rollouts":
        """The rollouts of the groups at these places."""
        graded, scores = [self.graded[p] for p in places], [self.scores[p] for p in places]
        return Rollouts([self.groups[p] for p in places], graded, scores, self.greedy and self.greedy.at(places))

    def trained_on(self, count: int) -> "Rollouts":
        """The `count` groups of the batch: first those with unequal rewards, then others; all, if no more are there."""
        if len(self.groups) <= count:
            return self
        totals = self.totals
        return self.at(sorted(sorted(range(len(totals)), key=lambda p: len(set(totals[p])) == 1)[:count]))

    def lengths(self, count: int) -> list[Lengths]:
        """The lengths of all samples, of the `count` groups of the batch, and of the greedy completions."""
        greedy = self.greedy.groups if self.greedy else []
        return [lengths(groups) for groups in (self.groups, self.trained_on(count).groups, greedy)]


def sample(run: Run, prompts: Sequence[Prompt], step: int, clock: Clock) -> Rollouts:
    """All rollouts of a step: one batch of groups, which a thread still grades; or, with dynamic sampling, graded
    batches until enough groups have unequal rewards, the budget is spent, or every prompt has been drawn. Then the
    engine sleeps."""
    spec, drawn = run.spec, Rollouts()
    while drawn.num_kept < spec.prompts_per_step and len(drawn.groups) < len(prompts):
        batch = generate(run, prompts, step, drawn)
        is_last = drawn.num_batches + 1 == spec.dynamic_sampling
        if is_last:  # rewards may need the device
            _rest(run, batch.groups)
        clock.lap("generate")
        if spec.dynamic_sampling == 1:  # all groups are trained on, whatever they earn
            return batch
        drawn = drawn.plus(earned(run, prompts, batch, step))
        clock.lap("grade")
        if is_last:
            return drawn
    _rest(run, drawn.groups)
    clock.lap("generate")
    return drawn


def generate(run: Run, prompts: Sequence[Prompt], step: int, drawn: Rollouts) -> Rollouts:
    """One more batch of a step's groups, whose grading begins, with greedy completions if the algorithm needs them."""
    spec, count, learner = run.spec, run.spec.prompts_per_step, run.learner
    draw = PromptDraw(count, spec.seed, step, drawn.num_batches, (step - run.stage.start) / spec.steps, run.pass_rates)
    chosen = drawn_prompts(spec.sampler, prompts, draw, {group.prompt.id for group in drawn.groups})

    def sampled(group_size: int, sampling: Sampling) -> list[Group]:
        draw = partial(run.engine.sample, group_size=group_size, sampling=sampling, seed=spec.seed, step=step)
        return ranks.shared(chosen, draw, spec.engine.processes)

    def graded(groups: list[Group]) -> Future[list[GradedGroup]]:
        return begin_grading(spec.task, ranks.own_part(groups), run.max_tokens)

    sampling, greedy = spec.sampling.model_copy(update={"max_tokens": run.max_tokens}), None
    older = learner.older[0] if learner.older else {}
    if older and ranks.world_size() > 1:
        run.writer.copied.wait()  # a checkpoint may still copy the newest weights
    with mixed_precision(resolve_device(spec.device), spec.autocast), older_weights(learner.policy, older):
        groups = sampled(spec.algorithm.group_size, sampling)
        if spec.algorithm.needs_greedy:
            greedy = sampled(1, sampling.model_copy(update={"temperature": 0.0}))
    batch = Rollouts(groups, num_batches=1, grading=graded(groups))
    return replace(batch, greedy=Rollouts(greedy, grading=graded(greedy))) if greedy else batch


@contextmanager
def older_weights(policy: nn.Module, older: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside the context the policy has these older weights; a checkpoint may copy its own meanwhile. What is sharded
    is copied, because its gathering reads a storage that it knows: nothing else may read it meanwhile."""

    def put(weights: Mapping[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            if is_spread(value):
                local(parameters[name].data).copy_(local(value))
            else:
                parameters[name].data = value

    parameters = dict(policy.named_parameters())
    own = {name: parameters[name].data for name in older}
    own = {name: value.clone() if is_spread(value) else value for name, value in own.items()}
    put(older)
    try:
        yield
    finally:
        put(own)


def drawn_prompts(sampler: Sampler, prompts: Sequence[Prompt], draw: PromptDraw, seen: Collection[str]) -> list[Prompt]:
    """The prompts of a batch, without those whose ids are among `seen`, which would get the same completions again.
    The first batch of a step is full, if need be by repetition."""
    chosen = (prompts[i] for i in sampler.order(prompts, draw) if prompts[i].id not in seen)
    return list(islice(chosen if draw.batch else cycle(chosen), draw.count))


def _rest(run: Run, groups: Sequence[Group]) -> None:
    """Note the scores of an engine with weights of its own, for the check of its next ones, then let it sleep."""
    if not run.engine.exact_logprobs:
        run.spot_check = spot_check(run.engine, run.learner.policy, groups, run.spot_check)
    run.engine.sleep()


def earned(run: Run, prompts: Sequence[Prompt], drawn: Rollouts, step: int, first: int = 0) -> Rollouts:
    """The rollouts with their grades, for which it waits, and their rewards, or a control's. `prompts` is the whole
    split, `first` the number of a group's first sample among all of its prompt. The learner computes token means that
    rewards need, under the policy that sampled (up to the engine's rounding), or the newest if older weights sampled.
    """
    spec, groups, grading = run.spec, drawn.groups, drawn.grading
    if grading is None:
        return drawn
    wanted: list[Distribution] = [r.distribution for r in spec.rewards.values() if r.distribution is not None]
    means: dict[Distribution, list[list[float]]] = {}
    if wanted and groups:
        batch = collate(groups).to(resolve_device(spec.device))
        means = {name: run.learner.token_means(batch, name).view(len(groups), -1).tolist() for name in wanted}
    both = enumerate(ranks.shared(groups, lambda _: grading.result()))
    graded = [replace(group, token_means={name: tuple(rows[p]) for name, rows in means.items()}) for p, group in both]

    def scored() -> list[Score]:
        is_controlled = spec.control not in (None, "frozen")
        instead = control_rewards(spec, prompts, groups, graded, step, first) if is_controlled else None
        return score(spec.rewards, graded, instead, step + 1)

    scores, greedy = ranks.same(scored), drawn.greedy
    greedy = greedy and earned(run, prompts, greedy, step, first=spec.algorithm.group_size)
    return Rollouts(groups, graded, scores, greedy, drawn.num_batches)


def note_pass_rates(run: Run, graded: Sequence[GradedGroup]) -> None:
    """Keep the running share of right answers of each prompt, for a prompt sampler that sees it."""
    for group in graded if run.spec.sampler.sees_gold else ():
        rate = float(np.mean(group.correct or ()))
        run.pass_rates[group.prompt_id] = (run.pass_rates.get(group.prompt_id, rate) + rate) / 2


def annotated(run: Run, groups: Sequence[Group], step: int) -> tuple[Batch, dict[str, float]]:
    """(batch, metrics): the groups as a batch, annotated by the learner and still without rewards; the rates and KL
    weight that the learner sets for the step. The learner's own peak of memory begins here: the engine sleeps."""
    run.note_peak()
    batch = collate(groups).to(resolve_device(run.spec.device))
    run.writer.copied.wait()  # nothing below may change weights or moments before
    scheduled = run.learner.begin_step(step)
    return run.learner.annotate(batch), scheduled


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


def rewarded(batch: Batch, drawn: Rollouts, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """The batch of the rollouts' groups with their rewards: a rewarded step at the token that ends it, which the
    tokenizer finds, and the outcome then at the completion's last token."""
    rows, scores = [(g.prompt_token_ids, r) for g in drawn.groups for r in g.rollouts], drawn.scores
    greedy = [total for totals in drawn.greedy.totals for total in totals] if drawn.greedy else []
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


@torch.no_grad()
def taught(learner: Learner, batch: Batch, groups: Sequence[Group]) -> Batch:
    """The rewarded batch of the groups with `teacher_logprobs_BT`, if the objective reads them: of a completion as the
    policy reads it after the prompt, the completion that `shown` names, and the prompt again."""
    if not learner.spec.algorithm.needs_teacher:
        return batch
    shown_PG, read = learner.spec.algorithm.shown(batch).cpu(), defaultdict[tuple[int, int], list[int]](list)
    for p, i in (shown_PG >= 0).nonzero().tolist():
        read[p, int(shown_PG[p, i])].append(i)
    longer: list[Group] = []
    for (p, first), places in read.items():
        prompt, rollouts = groups[p].prompt_token_ids, groups[p].rollouts
        own = tuple(rollouts[i] for i in places)
        longer.append(Group(groups[p].prompt, prompt + rollouts[first].token_ids + prompt, own))
    learner.lessons, found_BT = lengths(longer), torch.zeros_like(batch.sampler_logprobs_BT)
    if rows := [p * batch.group_size + i for (p, _), places in read.items() for i in places]:
        every = collate(longer * -(-ranks.world_size() // len(rows))).to(found_BT.device)  # each rank reads some
        logprobs = learner.logprobs(learner.policy, every)[every.completion_mask_BT].to(found_BT)
        found_BT[rows] = found_BT[rows].masked_scatter(batch.completion_mask_BT[rows], logprobs)
    return batch.replace(teacher_logprobs_BT=found_BT)


def replayed(run: Run, prompts: Sequence[Prompt], drawn: Rollouts, step: int) -> Batch | None:
    """Keeps what the algorithm wants of a step; then all that is kept of as many prompts as a step draws, in turns. The
    weights are `replay_weight` times the mean over tokens, then a prompt's rows, then prompts. None if none is kept."""
    algorithm, kept, count = run.spec.algorithm, run.kept, run.spec.prompts_per_step
    if not algorithm.replay_weight:
        return None
    for group, rewards in zip(drawn.groups, drawn.totals, strict=True):
        if ids := algorithm.kept(kept.get(group.prompt.id, []), group.rollouts, rewards):
            kept[group.prompt.id] = ids
    groups, known = list[Group](), [prompt for prompt in prompts if prompt.id in kept]
    for i in range(min(count, len(known))):
        prompt = known[(step * count + i) % len(known)]
        rows = tuple(Rollout("", tuple(ids), (0.0,) * len(ids), "stop") for ids in kept[prompt.id])
        groups.append(Group(prompt, run.codec.encode(prompt.text), rows))
    run.learner.replayed = lengths(groups)
    if not groups:
        return None
    groups *= -(-ranks.world_size() // sum(len(group.rollouts) for group in groups))  # each rank reads some
    batch = collate(groups)
    mask, sizes = batch.completion_mask_BT, [[len(group.rollouts)] for group in groups for _ in group.rollouts]
    weight_BT = algorithm.replay_weight / len(groups) * mask / (mask.sum(dim=1, keepdim=True) * torch.tensor(sizes))
    return batch.replace(loss_weight_BT=weight_BT).to(resolve_device(run.spec.device))


def token_at(rollout: Rollout, character: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The first completion token at which the text has at least `character` characters."""
    ids = list(rollout.token_ids)
    return bisect.bisect_left(
        range(1, len(ids)), character, key=lambda n: len(tokenizer.decode(ids[:n], skip_special_tokens=True))
    )
