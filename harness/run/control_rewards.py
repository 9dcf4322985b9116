"""Decides the rewards of a control arm, whose run differs in nothing else.

A control asks whether an effect needs the reward at all: random rewards alone have raised accuracy (Shao et al. 2025,
arXiv:2506.10947), and any reward teaches a policy to exploit a grader that accepts too much. `random` is a fair coin
for each completion, keyed by (seed, step, prompt, sample) like the noise of its sampling; `format_only` the task's
format score; `inverted` 1 for a wrong answer; `shuffled_gold` correctness by the gold answer of another problem. The
first two see no correctness. `frozen` pays the run's own rewards to a policy that stands still (see the learner).
"""

from collections.abc import Sequence

from ..data import GradedGroup, Group, Prompt
from ..ground.streams import generator
from ..spec.run import RunSpec
from .grading import grade_by_other_gold


def control_rewards(
    spec: RunSpec,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    graded: Sequence[GradedGroup],
    step: int,
    first: int = 0,
) -> list[list[float]]:
    """[P][G] rewards of the control in training step `step`; `prompts` is the whole split, `first` the number of a
    group's first sample."""
    if spec.control == "random":
        return [_coins(spec.seed, step, group, first) for group in graded]
    if spec.control == "format_only":
        return [list(group.blind().format_scores) for group in graded]
    if spec.control == "inverted":
        return [[1.0 - value for value in _correct(group)] for group in graded]
    assert spec.control == "shuffled_gold"
    other = grade_by_other_gold(spec.task, groups, prompts, spec.seed, spec.max_tokens)
    return [_correct(group) for group in other]


def _coins(seed: int, step: int, group: GradedGroup, first: int) -> list[float]:
    coins = generator("random reward", seed, step, group.prompt_id).integers(2, size=first + len(group.completions))
    return coins[first:].astype(float).tolist()


def _correct(group: GradedGroup) -> list[float]:
    assert group.correct is not None
    return [float(value) for value in group.correct]
