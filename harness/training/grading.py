"""Grades rollouts: answers, their equivalence classes and correctness. The only reader of `Prompt.gold`.

Both use the task's own equality, never that of strings. Answers are compared with one representative of each class, so
G completions of a prompt cost one extraction each, one comparison with gold per class, and those between the classes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.interfaces import Task
from harness.types import GradedGroup, Group, Prompt, SampleRow, Split


def grade(task: Task, groups: Sequence[Group], max_tokens: int) -> list[GradedGroup]:
    """One graded group per group, in order, with correctness; an unanswered completion has no class and is wrong.

    `max_tokens` is the limit that the completions were sampled under.
    """
    return [_grade_group(task, group, max_tokens) for group in groups]


def problem_rows(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """Problems as they are shown to a reader: id, prompt, gold answer, tags."""
    return [{"id": p.id, "prompt": p.text, "gold": p.gold, "tags": dict(p.tags)} for p in prompts]


def sample_rows(
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    rewards: Sequence[Sequence[float]] | None = None,
    parts: Mapping[str, Sequence[Sequence[float]]] | None = None,
    *,
    step: int,
    split: Split,
    limit: int | None = None,
) -> list[SampleRow]:
    """Every rollout, group by group; with a `limit` so many at most, for a reader: the first one of each prompt, then
    the second ones, and so on.

    `graded` carries correctness; `rewards` is None where none were assigned (an evaluation); `parts` holds each reward
    by name, before its weight.
    """
    assert len(graded) == len(groups)
    assert rewards is None or len(rewards) == len(groups)
    places = [(p, i) for p, group in enumerate(groups) for i in range(len(group.rollouts))]
    if limit is not None:
        places = sorted(places, key=lambda place: (place[1], place[0]))[:limit]
    rows: list[SampleRow] = []
    for p, i in places:
        prompt, rollout, correct = groups[p].prompt, groups[p].rollouts[i], graded[p].correct
        assert correct is not None, "sample_rows needs correctness"
        rows.append(
            SampleRow(
                step=step,
                split=split,
                prompt_id=prompt.id,
                prompt=prompt.text,
                completion=rollout.text,
                gold=prompt.gold,
                answer=graded[p].answers[i],
                correct=correct[i],
                reward=None if rewards is None else rewards[p][i],
                num_tokens=len(rollout.token_ids),
                finish_reason=rollout.finish_reason,
                rewards={name: values[p][i] for name, values in (parts or {}).items()},
            )
        )
    return rows


def _grade_group(task: Task, group: Group, max_tokens: int) -> GradedGroup:
    answers = tuple(task.extract(rollout.text) for rollout in group.rollouts)
    classes, representatives = _classes(task, answers)
    gold = group.prompt.gold
    is_gold = [answer == gold or task.equivalent(answer, gold) for answer in representatives]
    return GradedGroup(
        prompt_id=group.prompt.id,
        prompt=group.prompt.text,
        completions=tuple(rollout.text for rollout in group.rollouts),
        num_tokens=tuple(len(rollout.token_ids) for rollout in group.rollouts),
        max_tokens=max_tokens,
        truncated=tuple(rollout.finish_reason == "length" for rollout in group.rollouts),
        answers=answers,
        classes=classes,
        format_scores=tuple(task.format_score(rollout.text) for rollout in group.rollouts),
        reasoning_chars=tuple(len(task.reasoning(rollout.text)) for rollout in group.rollouts),
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
