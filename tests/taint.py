"""Whether a reward that says that it does not see gold looks at it, by any way through Cohort."""

from dataclasses import replace

import pytest
from cohort.harness.data import GradedGroup, Group, Prompt, Rollout
from cohort.harness.interfaces import Reward
from cohort.harness.rewards.accuracy import Accuracy
from cohort.harness.run.grading import grade, reward_metrics, score
from cohort.tasks.arithmetic import Arithmetic

TEXTS = ("2+2=4#### 4", "2+2=5 so #### 5", "no answer", "4*3=12#### 12")


def graded_with(gold: str, problem: Prompt) -> GradedGroup:
    """The same four completions of a problem, graded by this gold answer."""
    rollouts = tuple(Rollout(text, (7, 8), (-0.5, -0.5), "stop") for text in TEXTS)
    graded = grade(Arithmetic(), [Group(replace(problem, gold=gold), (5,), rollouts)], max_tokens=8)[0]
    means = {"entropy": (0.1, 0.2, 0.3, 0.4), "uniform_kl": (3.0, 2.0, 1.0, 0.5), "collision": (0.9,) * 4}
    assert graded.correct is not None
    return replace(graded, token_means=means, scores=tuple(0.5 + c / 2 for c in graded.correct))


def assert_never_sees_gold(reward: Reward) -> None:
    """Its scores are equal whatever gold is, also after its metrics, which are for the reader, have seen gold; and it
    reads the gold of no problem."""
    assert not reward.sees_gold
    problem = Arithmetic().prompts("train")[0]
    worlds = [graded_with(gold, problem) for gold in (problem.gold, "4", "5", "12", "-1")]
    assert all(group.blind() == worlds[0].blind() for group in worlds)
    assert len({tuple(Accuracy().score(group)) for group in worlds}) == 4  # so that there is something to see
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompt, "gold", property(_reads_gold))
        scored = [reward.score(seen) for group in worlds for seen in (group.blind(), group)]
        for group in (world for world in worlds for _ in range(2)):
            found = score({"it": reward}, [group])
            scored.append(found[0].parts["it"])
            reward_metrics({"it": reward}, [group], found)
    assert all(values == scored[0] for values in scored), "its scores move with gold"


def _reads_gold(prompt: Prompt) -> str:
    raise AssertionError("it reads the gold answer of a problem")
