"""What rollouts are worth: answers, their equivalence classes and correctness. The only reader of `Prompt.gold`.

Both use the task's own equality, never that of strings. Answers are compared with one representative of each class, so
G completions of a prompt cost one extraction each, one comparison with gold per class, and those between the classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.interfaces import Task
from harness.types import GradedGroup, Group, SampleRow, Split


def grade(task: Task, groups: Sequence[Group]) -> list[GradedGroup]:
    """One graded group per group, in order, with correctness; an unanswered completion has no class and is wrong."""
    return [_grade_group(task, group) for group in groups]


def sample_rows(
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    rewards: Sequence[Sequence[float]] | None,
    *,
    step: int,
    split: Split,
    limit: int,
) -> list[SampleRow]:
    """At most `limit` rollouts for a reader: the first one of each prompt, then the second ones, and so on.

    `graded` carries correctness; `rewards` is None where none were assigned (an evaluation).
    """
    assert len(graded) == len(groups)
    assert rewards is None or len(rewards) == len(groups)
    deepest = max((len(group.rollouts) for group in groups), default=0)
    places = [(p, i) for i in range(deepest) for p, group in enumerate(groups) if i < len(group.rollouts)]
    return [
        _sample_row(groups[p], graded[p], i, None if rewards is None else rewards[p][i], step, split)
        for p, i in places[:limit]
    ]


def _grade_group(task: Task, group: Group) -> GradedGroup:
    answers = tuple(task.extract(rollout.text) for rollout in group.rollouts)
    classes, representatives = _classes(task, answers)
    gold = group.prompt.gold
    is_gold = [answer == gold or task.equivalent(answer, gold) for answer in representatives]
    return GradedGroup(
        prompt_id=group.prompt.id,
        completions=tuple(rollout.text for rollout in group.rollouts),
        num_tokens=tuple(len(rollout.token_ids) for rollout in group.rollouts),
        truncated=tuple(rollout.finish_reason == "length" for rollout in group.rollouts),
        answers=answers,
        classes=classes,
        correct=tuple(number is not None and is_gold[number] for number in classes),
    )


def _classes(task: Task, answers: Sequence[str | None]) -> tuple[tuple[int | None, ...], list[str]]:
    """The class of each answer, numbered by first appearance, and the first answer of each class.

    An answer joins the first class whose representative it equals; equal strings are never compared.
    """
    representatives: list[str] = []
    class_of: dict[str, int] = {}
    for answer in answers:
        if answer is None or answer in class_of:
            continue
        equal = (number for number, first in enumerate(representatives) if task.equivalent(answer, first))
        class_of[answer] = next(equal, len(representatives))
        if class_of[answer] == len(representatives):
            representatives.append(answer)
    return tuple(None if answer is None else class_of[answer] for answer in answers), representatives


def _sample_row(
    group: Group, graded: GradedGroup, index: int, reward: float | None, step: int, split: Split
) -> SampleRow:
    assert graded.correct is not None, "sample_rows needs correctness"
    rollout = group.rollouts[index]
    return SampleRow(
        step=step,
        split=split,
        prompt_id=group.prompt.id,
        prompt=group.prompt.text,
        completion=rollout.text,
        gold=group.prompt.gold,
        answer=graded.answers[index],
        correct=graded.correct[index],
        reward=reward,
        num_tokens=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
    )
