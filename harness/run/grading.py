"""Grades and rewards rollouts: answers, their equivalence classes, correctness, rewards. The only reader of
`Prompt.gold`.

A reward that does not see gold gets a group without correctness, so that label leakage fails loudly. Rows of
completions for files and readers are made here too, because they state gold.

A control arm asks whether an effect needs the reward at all, and differs in nothing else: random rewards alone have
raised accuracy (Shao et al. 2025, arXiv:2506.10947), and any reward teaches a policy to exploit a grader that accepts
too much. `random` is a fair coin for each completion, keyed by (seed, step, prompt, sample) like the noise of its
sampling; `format_only` the task's format score; `inverted` 1 for a wrong answer; `shuffled_gold` correctness by the
gold answer of another problem. The first two see no correctness. `frozen` pays the run's own rewards to a policy that
stands still (see the learner).
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np

from ..base.streams import generator
from ..data import GradedGroup, Group, InvalidRun, Prompt, Rollout, SampleRow, Score, Split, as_graded
from ..interfaces import Reward, StepReward, Task
from ..settings.run import RunSpec

GROUP_OVERRUNS = 2  # comparisons of a group that may reach their time limit (slow ones count in part); then no more
# are made
OVERRUNS = 8  # the same for groups graded together, in a step or an evaluation; after that, each group has one
MOST_PAID = 1e12  # by a reward, also times its weight, so that sums of squares stay finite in float32

_thread = ThreadPoolExecutor(1, "grading")  # one for all runs of the process: a thread that compares has its own child


def begin_grading(task: Task, groups: Sequence[Group], max_tokens: int) -> Future[list[GradedGroup]]:
    """A future of `grade`: a thread grades while the device works. Nothing else may use the task meanwhile."""
    return _thread.submit(grade, task, groups, max_tokens)


def grade(task: Task, groups: Sequence[Group], max_tokens: int) -> list[GradedGroup]:
    """One graded group per group, in order, with correctness; an unanswered completion has no class and is wrong.

    `max_tokens` is the limit under which the completions were sampled. Classes and correctness use the task's own
    equality, and one representative of each class. An answer must also count as one (`Task.is_answered`): a restatement
    of the question is wrong although it equals gold, and has no class, so that restatements cannot win a vote.
    """
    graded: list[GradedGroup] = []
    left: float = OVERRUNS
    for group in groups:
        allowed = max(1, min(GROUP_OVERRUNS, left))
        task.allow_overruns(allowed)
        read = [as_graded(group.prompt.text, rollout.text) for rollout in group.rollouts]
        answers = tuple(map(task.extract, read))
        representatives: list[str] = []  # the first answer of each class, numbered by first appearance
        classes: dict[str, int] = {}
        for answer in answers:
            if answer is not None and answer not in classes:
                equal = (number for number, first in enumerate(representatives) if task.equivalent(answer, first))
                classes[answer] = next(equal, len(representatives))
                if classes[answer] == len(representatives):
                    representatives.append(answer)
        question, gold = group.prompt.text, group.prompt.gold
        is_gold = [answer == gold or task.equivalent(answer, gold) for answer in representatives]
        formats = tuple(map(task.format_score, read))
        if odd := [v for v in is_gold if v not in (True, False)] + [f for f in formats if not 0 <= f <= 1]:
            told = "equivalent must return a bool and format_score a number from 0 to 1"
            raise InvalidRun(f"{type(task).__name__}.{told}, got {odd[0]!r:.40} for problem '{group.prompt.id}'")
        correct: dict[str | None, bool] = {None: False}
        votes: dict[str | None, int | None] = {None: None}
        scores: dict[str | None, float] = {None: 0.0}
        for answer, number in classes.items():
            correct[answer] = is_gold[number] and (answer == gold or task.is_answered(answer, question, gold))
            votes[answer] = number if task.is_answered(answer, question, None) else None
            if task.partial_credit:
                scores[answer] = task.score(answer, gold)
        texts = tuple(rollout.text for rollout in group.rollouts)
        marked = GradedGroup(
            prompt_id=group.prompt.id, prompt=question, completions=texts, max_tokens=max_tokens, answers=answers,
            num_tokens=tuple(len(rollout.token_ids) for rollout in group.rollouts),
            truncated=tuple(rollout.finish_reason == "length" for rollout in group.rollouts),
            classes=tuple(votes[answer] for answer in answers),
            format_scores=formats,
            correct=tuple(correct[answer] for answer in answers),
            scores=tuple(scores[answer] for answer in answers) if task.partial_credit else None,
            lenient=tuple(
                task.ends_in(text, gold) if answer is None else correct[answer]
                for answer, text in zip(answers, read, strict=True)
            ),
            marked=tuple(
                correct[answer] and task.marked(text) is not None for answer, text in zip(answers, read, strict=True)
            ),
            run_on=tuple(task.own_part(text) != text for text in read),
        )  # fmt: skip
        graded.append(marked)
        left -= allowed - task.allow_overruns(None)
    return graded


def control_rewards(
    spec: RunSpec,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    step: int,
    first: int,
) -> list[list[float]]:
    """[P][G] rewards of the control in training step `step`; arguments as in `rollout.earned`. The seed decides how
    gold answers are shuffled over the split (`prompts`); one may equal the prompt's own."""
    if spec.control == "random":
        drawn = [(generator("random reward", spec.seed, step, g.prompt_id), len(g.completions)) for g in graded]
        coins = [random.integers(2, size=first + count) for random, count in drawn]
        return [row[first:].astype(float).tolist() for row in coins]
    if spec.control == "format_only":
        return [list(group.blind().format_scores) for group in graded]
    if spec.control == "shuffled_gold":
        order = generator("shuffled gold", spec.seed).permutation(len(prompts))
        other = {prompts[i].id: prompts[j].gold for i, j in zip(order, np.roll(order, 1), strict=True)}
        changed = [replace(g, prompt=replace(g.prompt, gold=other[g.prompt.id])) for g in groups]
        graded = begin_grading(spec.task, changed, spec.max_tokens).result()
    assert all(group.correct is not None for group in graded)
    return [[float(right != (spec.control == "inverted")) for right in group.correct or ()] for group in graded]


def score(
    rewards: Mapping[str, Reward],
    graded: Sequence[GradedGroup],
    instead: Sequence[list[float]] | None = None,
    step: int = 0,
) -> list[Score]:
    """The rewards of each group in a training step; `graded` has correctness. InvalidRun for a value that is no finite
    number. In a control arm completions earn `instead` [P][G], and the rewards are only measured."""
    outcome = {n: r.weight for n, r in rewards.items() if r.weight and not isinstance(r, StepReward)}
    dense = {n: r for n, r in rewards.items() if isinstance(r, StepReward)}
    is_dense = any(r.weight for r in dense.values())
    scores: list[Score] = []
    for p, group in enumerate(graded):
        seen = {n: group if reward.sees_gold else group.blind() for n, reward in rewards.items()}
        found = {n: _steps(n, reward, seen[n], step) for n, reward in dense.items()}
        parts = {n: _numbers(n, r, group, step, r.score(seen[n]), len(group.completions)) for n, r in rewards.items()}
        if instead is not None:
            scores.append(Score(list(instead[p]), list(instead[p]), None, parts))
            continue
        count = range(len(group.completions))
        outcomes = totals = [sum(weight * parts[name][i] for name, weight in outcome.items()) for i in count]
        steps: list[list[tuple[int, float]]] | None = [[] for _ in count] if is_dense else None
        if steps is not None:
            for name, weight in ((n, r.weight) for n, r in dense.items() if r.weight):
                for own, row in zip(steps, found[name], strict=True):
                    own += [(character, weight * value) for character, value in row]
            totals = [t + sum(value for _, value in row) for t, row in zip(outcomes, steps, strict=True)]
        paid = [(reward.weight, parts[name]) for name, reward in rewards.items() if reward.weight]
        scores.append(Score(totals, outcomes if outcome else None, steps, parts, paid))
    return scores


def _numbers(name: str, reward: Reward, group: GradedGroup, step: int, values: Any, count: int | None) -> list[float]:
    """A reward's values for a group; InvalidRun unless they are a list of `count` (None: any) finite numbers."""
    most = MOST_PAID / max(1.0, abs(reward.weight))
    if not isinstance(values, list | tuple) or count not in (None, len(values)):
        wrong = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)
    elif not (bad := [v for v in values if not isinstance(v, int | float) or not abs(v) <= most]):
        return list(values)
    else:
        wrong = "a number of too many digits" if isinstance(bad[0], int) else repr(bad[0])
    raise InvalidRun(
        f"reward '{name}' must give a list with one finite Python number (at most {most:g}) for each of the "
        f"{len(group.completions)} completions, and pairs (character, number) for steps, got {wrong:.60} for problem "
        f"{group.prompt_id} in step {step}; correct {type(reward).__name__} in {inspect.getfile(type(reward))}"
    )


def _steps(name: str, reward: StepReward, group: GradedGroup, step: int) -> list[list[tuple[int, float]]]:
    """The steps that a reward found in each completion; InvalidRun if they are not lists of (character, number)."""
    rows = found = cast(Any, reward.steps(group))
    if not isinstance(rows, list | tuple) or len(rows) != len(group.completions):
        _numbers(name, reward, group, step, rows, len(group.completions))
    for row in rows:
        for pair in row if isinstance(row, list | tuple) else [row]:
            _numbers(name, reward, group, step, pair, 2)
            if not isinstance(pair[0], int) or pair[0] < 0:
                _numbers(name, reward, group, step, repr(pair), None)
    return found


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


def problem_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Problems as shown to a reader: id, prompt, gold answer, tags."""
    return [{"id": p.id, "prompt": p.text, "gold": p.gold, "tags": dict(p.tags)} for p in prompts]


def completion_row(group: Group, greedy: Group) -> dict[str, Any]:
    """A problem with its samples and its greedy completion, as `groups_of` reads it."""
    prompt = group.prompt
    row: dict[str, Any] = {"id": prompt.id, "prompt": prompt.text, "gold": prompt.gold, "tags": prompt.tags}
    row["family"] = prompt.family
    for name, one in (("samples", group), ("greedy", greedy)):
        row[name] = [(rollout.text, len(rollout.token_ids), rollout.finish_reason) for rollout in one.rollouts]
    return row


def groups_of(row: Mapping[str, Any]) -> tuple[Group, Group]:
    """Samples and greedy completion that `completion_row` wrote, without their token ids; ValueError, KeyError or
    TypeError for a row that it did not write."""
    tags = tuple((str(tag), str(value)) for tag, value in row["tags"])
    prompt = Prompt(str(row["id"]), str(row["prompt"]), str(row["gold"]), tags, str(row.get("family", "")))
    samples, greedy = (Group(prompt, (), tuple(_read(*one) for one in row[name])) for name in ("samples", "greedy"))
    return samples, greedy


def group_of(rows: Sequence[Mapping[str, Any]]) -> Group:
    """The group whose rollouts `sample_rows` wrote; errors as in `groups_of`."""
    prompt = Prompt(str(rows[0]["prompt_id"]), str(rows[0]["prompt"]), str(rows[0]["gold"]))
    return Group(prompt, (), tuple(_read(row["completion"], row["num_tokens"], row["finish_reason"]) for row in rows))


def _read(text: Any, length: Any, end: Any) -> Rollout:
    token_ids: Any = range(int(length))  # takes no memory, whatever length the file states
    return Rollout(str(text), token_ids, (), end)


def sample_rows(
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    scores: Sequence[Score] | None = None,
    *,
    step: int,
    split: Split,
    limit: int | None = None,
) -> list[SampleRow]:
    """Every rollout, group by group. With a `limit`, at most that many for a reader: the first of each prompt, then the
    second, and so on. `graded` carries correctness; `scores` is None in an evaluation."""
    assert len(graded) == len(groups) == len(groups if scores is None else scores)
    places = [(p, i) for p, group in enumerate(groups) for i in range(len(group.rollouts))]
    if limit is not None:
        places = sorted(places, key=lambda place: place[1])[:limit]
    rows = []
    for p, i in places:
        prompt, rollout, correct = groups[p].prompt, groups[p].rollouts[i], graded[p].correct
        assert correct is not None, "sample_rows needs correctness"
        row = SampleRow(
            step=step, split=split, prompt_id=prompt.id, prompt=prompt.text, completion=rollout.text,
            gold=prompt.gold, answer=graded[p].answers[i], correct=correct[i],
            reward=None if scores is None else scores[p].totals[i],
            num_tokens=len(rollout.token_ids), finish_reason=rollout.finish_reason,
            rewards={} if scores is None else {name: values[i] for name, values in scores[p].parts.items()},
        )  # fmt: skip
        rows.append(row)
    return rows
