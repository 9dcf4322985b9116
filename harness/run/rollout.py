"""Samples, grades and rewards the completions of a training step, and lays them out as the learner's batch.

Prompts are a function of (seed, step), so that arms with the same seed draw the same prompts. Dynamic sampling is
DAPO's (arXiv:2503.14476, eq. 11 and section 3.2): a group of equal rewards has no advantages, so further prompts are
sampled until enough groups have unequal rewards. Departures: the condition is unequal rewards, so that it works without
labels (the paper's is neither all right nor all wrong); the number of batches is bounded, and groups of equal rewards
then fill the step, because minibatches have a fixed size. Further prompts are drawn only for this step: a later step
may draw them again.

A reward that does not see gold gets a group without correctness, so that label leakage fails loudly. The last token of
a completion earns outcome rewards; the token that ends a step earns those of a `StepReward`.

A control arm asks whether an effect needs the reward at all, and differs in nothing else: random rewards alone have
raised accuracy (Shao et al. 2025, arXiv:2506.10947), and any reward teaches a policy to exploit a grader that accepts
too much. `random` is a fair coin for each completion, keyed by (seed, step, prompt, sample) like the noise of its
sampling; `format_only` the task's format score; `inverted` 1 for a wrong answer; `shuffled_gold` correctness by the
gold answer of another problem. The first two see no correctness. `frozen` pays the run's own rewards to a policy that
stands still (see the learner).
"""

from __future__ import annotations

import bisect
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..data import Batch, GradedGroup, Group, Prompt, Rollout, Sampling, Score
from ..devices import ranks
from ..devices.device import mixed_precision, resolve_device
from ..ground.streams import generator
from ..ground.tensors import pad_right
from ..interfaces import Distribution, Reward, StepReward
from ..rewards.majority_vote import majority_correct
from ..spec.run import RunSpec
from .grading import grade, grade_by_other_gold
from .state import Run
from .sync import probe


@dataclass(frozen=True)
class Drawn:
    """All groups that a step has sampled so far, in order, with their grades and rewards."""

    groups: tuple[Group, ...] = ()
    graded: tuple[GradedGroup, ...] = ()
    scores: tuple[Score, ...] = ()
    greedy: tuple[Group, ...] = ()  # of one completion for each of `groups`, if the algorithm needs them
    greedy_rewards: tuple[float, ...] = ()
    num_batches: int = 0

    def is_enough(self, spec: RunSpec, num_prompts: int) -> bool:
        """Whether enough groups have unequal rewards, the budget is spent, or every prompt has been drawn."""
        spent = self.num_batches >= spec.dynamic_sampling or len(self.groups) >= num_prompts
        return self.num_batches > 0 and (spent or self.num_kept >= spec.prompts_per_step)

    def and_more(
        self,
        groups: Sequence[Sequence[Group]],
        graded: Sequence[Sequence[GradedGroup]],
        scores: Sequence[Sequence[Score]],
    ) -> Drawn:
        """These and one more batch: its groups, and after them its greedy completions if there are any."""
        greedy = groups[1] if len(groups) > 1 else ()
        earned = [score.totals[0] for score in scores[1]] if len(groups) > 1 else ()
        return Drawn(
            (*self.groups, *groups[0]),
            (*self.graded, *graded[0]),
            (*self.scores, *scores[0]),
            (*self.greedy, *greedy),
            (*self.greedy_rewards, *earned),
            self.num_batches + 1,
        )

    @property
    def totals(self) -> list[list[float]]:
        """[P][G]: the reward of each completion."""
        return [score.totals for score in self.scores]

    @property
    def num_kept(self) -> int:
        """Groups whose rewards are not all equal."""
        return sum(not _equal(row) for row in self.totals)

    def trained_on(self, count: int) -> Drawn:
        """The `count` groups of the batch, in order: first those with unequal rewards, then others as needed."""
        if len(self.groups) == count:
            return self
        index = sorted(range(len(self.groups)), key=lambda p: (_equal(self.scores[p].totals), p))[:count]
        index.sort()
        return Drawn(
            tuple(self.groups[p] for p in index),
            tuple(self.graded[p] for p in index),
            tuple(self.scores[p] for p in index),
            tuple(self.greedy[p] for p in index if self.greedy),
            tuple(self.greedy_rewards[p] for p in index if self.greedy),
        )

    def metrics(self, spec: RunSpec) -> dict[str, float]:
        """Of everything sampled: `rollout_metrics`, those of the rewards and, with dynamic sampling, its counts:
        `sampling/batches`, `sampling/kept_groups` (unequal rewards), `sampling/filled_groups` (equal, to fill the
        step)."""
        metrics = rollout_metrics(self.graded, self.totals)
        if self.greedy:
            metrics["reward/greedy"] = float(np.mean(self.greedy_rewards))
        if spec.dynamic_sampling > 1:
            kept = min(self.num_kept, spec.prompts_per_step)
            counts = {"batches": self.num_batches, "kept_groups": kept, "filled_groups": spec.prompts_per_step - kept}
            metrics |= {f"sampling/{name}": float(value) for name, value in counts.items()}
        return metrics


def _equal(rewards: Sequence[float]) -> bool:
    return all(value == rewards[0] for value in rewards)


def generate(run: Run, prompts: Sequence[Prompt], step: int, drawn: Drawn) -> list[list[Group]]:
    """One more batch of a step's groups; then, if the algorithm needs them, groups of one greedy completion for the
    same prompts, under the same limits.

    The engine sleeps after the last batch of the budget, because rewards may need the device.
    """
    spec, count = run.spec, run.spec.prompts_per_step
    if not drawn.groups:
        chosen = step_prompts(prompts, spec.seed, step, count)
    else:
        ids = [group.prompt.id for group in drawn.groups]
        chosen = further_prompts(prompts, spec.seed, step, drawn.num_batches, count, ids)

    def sampled(group_size: int, sampling: Sampling) -> list[Group]:
        def work(part: Sequence[Prompt]) -> list[Group]:
            return run.engine.generate(part, group_size, sampling, seed=spec.seed, step=step)

        return ranks.shared(chosen, work, spec.engine.processes)

    sampling = spec.sampling_with_limit()
    with mixed_precision(resolve_device(spec.device), spec.autocast), run.learner.older_weights():
        groups = [sampled(spec.algorithm.group_size, sampling)]
        if spec.algorithm.needs_greedy:
            likeliest = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0})
            groups.append(sampled(1, likeliest))
    if drawn.num_batches + 1 == spec.dynamic_sampling:
        rest(run, groups[0])
    return groups


def rest(run: Run, groups: Sequence[Group]) -> None:
    """Get the engine's scores that the check of its next weights needs, then let it sleep."""
    run.probe = probe(run.engine, run.learner.policy, groups, run.probe)
    run.engine.sleep()


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


def grade_rollouts(run: Run, groups: Sequence[Group]) -> list[GradedGroup]:
    """The groups as the run's rewards see them, with the token means that the rewards need.

    The learner computes these means, with any engine: from the policy that sampled (up to the engine's rounding), or
    from the newest policy if older weights sampled.
    """
    spec = run.spec
    graded = ranks.shared(groups, lambda part: grade(spec.task, part, spec.max_tokens))
    found: list[Distribution] = [r.distribution for r in spec.rewards.values() if r.distribution is not None]
    wanted = dict.fromkeys(found)
    if not wanted or not groups:
        return graded
    batch = collate(groups).to(resolve_device(spec.device))
    means = {name: run.learner.token_means(batch, name).view(len(groups), -1).tolist() for name in wanted}
    return [
        replace(group, token_means={name: tuple(rows[p]) for name, rows in means.items()})
        for p, group in enumerate(graded)
    ]


def score_rollouts(
    run: Run, prompts: Sequence[Prompt], groups: Sequence[Group], graded: Sequence[GradedGroup], step: int, first: int
) -> list[Score]:
    """The groups' rewards, or in a control arm those of the control; `prompts` is the whole split, `first` the number
    of a group's first sample among all of its prompt."""
    spec, instead = run.spec, None
    if spec.control not in (None, "frozen"):
        pairs = list(zip(groups, graded, strict=True))
        instead = ranks.shared(
            pairs, lambda part: control_rewards(spec, prompts, [g for g, _ in part], [g for _, g in part], step, first)
        )
    return ranks.same(lambda: score(spec.rewards, graded, instead))


def control_rewards(
    spec: RunSpec,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    step: int,
    first: int = 0,
) -> list[list[float]]:
    """[P][G] rewards of the control in training step `step`; arguments as in `score_rollouts`."""
    if spec.control == "random":
        drawn = [(generator("random reward", spec.seed, step, g.prompt_id), len(g.completions)) for g in graded]
        coins = [random.integers(2, size=first + count) for random, count in drawn]
        return [row[first:].astype(float).tolist() for row in coins]
    if spec.control == "format_only":
        return [list(group.blind().format_scores) for group in graded]
    if spec.control == "shuffled_gold":
        graded = grade_by_other_gold(spec.task, groups, prompts, spec.seed, spec.max_tokens)
    paid: list[list[float]] = []
    for group in graded:
        assert group.correct is not None
        paid.append([float(right != (spec.control == "inverted")) for right in group.correct])
    return paid


def score(
    rewards: Mapping[str, Reward], graded: Sequence[GradedGroup], instead: Sequence[list[float]] | None = None
) -> list[Score]:
    """The rewards of each group; `graded` carries correctness.

    In a control arm the completions earn `instead` [P][G], and the rewards are only measured.
    """
    outcome = {n: r.weight for n, r in rewards.items() if r.weight and not isinstance(r, StepReward)}
    dense = [r for r in rewards.values() if r.weight and isinstance(r, StepReward)]
    scores: list[Score] = []
    for p, group in enumerate(graded):
        blind = group.blind()
        parts = {n: _scored(n, reward, group if reward.sees_gold else blind) for n, reward in rewards.items()}
        if instead is not None:
            scores.append(Score(list(instead[p]), list(instead[p]), None, parts))
            continue
        count = range(len(group.completions))
        outcomes = totals = [sum(weight * parts[name][i] for name, weight in outcome.items()) for i in count]
        steps: list[list[tuple[int, float]]] | None = [[] for _ in count] if dense else None
        if steps is not None:
            for reward in dense:
                for own, row in zip(steps, reward.steps(group if reward.sees_gold else blind), strict=True):
                    own += [(character, reward.weight * value) for character, value in row]
            totals = [t + sum(value for _, value in row) for t, row in zip(outcomes, steps, strict=True)]
        scores.append(Score(totals, outcomes if outcome else None, steps, parts))
    return scores


def _scored(name: str, reward: Reward, group: GradedGroup) -> list[float]:
    """A reward's values for a group; ValueError, which names the reward, unless there is one for each completion."""
    values, count = reward.score(group), len(group.completions)
    if len(values) != count or any(value is None for value in values):
        place, got = inspect.getfile(type(reward)), f"{len(values)}" if len(values) != count else "None among them"
        raise ValueError(
            f"reward '{name}' must return a number for each of the {count} completions, got {got}; "
            f"correct {type(reward).__name__}.score in {place}"
        )
    return values


def reward_metrics(
    rewards: Mapping[str, Reward], graded: Sequence[GradedGroup], scores: Sequence[Score]
) -> dict[str, float]:
    """`reward/<name>` (mean before the weight) and the rewards' own metrics."""
    found = {f"reward/{name}": float(np.mean([v for score in scores for v in score.parts[name]])) for name in rewards}
    collected: dict[str, list[float]] = defaultdict(list)
    for name, reward in rewards.items():
        for group, own in zip(graded, scores, strict=True):
            for key, value in reward.metrics(group, own.parts[name]).items():
                collected[key].append(value)
    known = {key: [v for v in values if not np.isnan(v)] for key, values in collected.items()}
    return found | {key: float(np.mean(values)) if values else float("nan") for key, values in known.items()}


def collate(
    groups: Sequence[Group],
    scores: Sequence[Score] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    greedy: Sequence[float] = (),
) -> Batch:
    """The rows of all groups, right-padded to the longest; without scores all rewards are 0.

    The tokenizer finds the tokens that earned rewards of steps; `greedy` holds the reward [P] of each prompt's greedy
    completion, if one is drawn.
    """
    rows = [(g.prompt_token_ids, r) for g in groups for r in g.rollouts]
    tokens = pad_right([prompt + r.token_ids for prompt, r in rows], torch.int64)
    totals = [value for score in scores or () for value in score.totals] or [0.0] * len(rows)
    step_rewards = step_ends = None
    if scores and scores[0].steps is not None:
        assert tokenizer is not None
        step_rewards, step_ends = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ((prompt, _), values) in enumerate(zip(rows, events(groups, scores, tokenizer), strict=True)):
            for token, value in values.items():
                step_rewards[row, len(prompt) + token] = value
                step_ends[row, len(prompt) + token] = True
    return Batch(
        step_rewards_BT=step_rewards,
        step_ends_BT=step_ends,
        tokens_BT=tokens,
        completion_mask_BT=pad_right([[0] * len(p) + [1] * len(r.token_ids) for p, r in rows], torch.bool),
        lengths_B=torch.tensor([len(p) + len(r.token_ids) for p, r in rows]),
        sampler_logprobs_BT=pad_right([[0.0] * len(p) + list(r.logprobs) for p, r in rows], torch.float32),
        rewards_B=torch.tensor(totals, dtype=torch.float32),
        group_size=len(groups[0].rollouts),
        greedy_rewards_B=torch.tensor(greedy).repeat_interleave(len(groups[0].rollouts)) if greedy else None,
    )


def events(
    groups: Sequence[Group], scores: Sequence[Score], tokenizer: PreTrainedTokenizerBase
) -> list[dict[int, float]]:
    """For each of the P * G rows, whose steps are rewarded, {completion token: reward earned there}."""
    rows: list[dict[int, float]] = []
    for group, score in zip(groups, scores, strict=True):
        for i, rollout in enumerate(group.rollouts):
            earned: dict[int, float] = defaultdict(float)
            assert score.steps is not None
            for character, value in score.steps[i]:
                earned[token_at(rollout, character, tokenizer)] += value
            if score.outcomes is not None:
                earned[len(rollout.token_ids) - 1] += score.outcomes[i]
            rows.append(dict(earned))
    return rows


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
