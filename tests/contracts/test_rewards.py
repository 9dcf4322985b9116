"""What every reward must keep; rewards are found by name, so that a new one is tested without a word here."""

import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.interfaces import StepReward

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import hostile
from fakes import graded_group
from taint import assert_never_sees_gold

NEEDS_A_MODEL = {"reward_model"}  # tested with one in tests/test_reward_model.py
REWARDS = [name for name in plugins.names("reward") if name not in NEEDS_A_MODEL]
TEXTS = ("<think>2+2=4</think><answer>4</answer>", "2+2=5 so #### 5", "", "2+2=4;4*3=12#### 12")

MEANS = {"entropy": (0.1, 0.4, 0.2, 0.3), "uniform_kl": (3.0, 1.0, 2.0, 0.5)}


@pytest.fixture(params=REWARDS)
def reward(request):
    return plugins.load("reward", request.param)()


def group(correct=(True, False, False, True), texts=TEXTS):
    n = len(texts)
    return graded_group(
        [0, 1, None, 0] * (n // 4),
        correct * (n // 4),
        completions=tuple(texts),
        num_tokens=(3, 5, 8, 6) * (n // 4),
        truncated=(False, False, True, False) * (n // 4),
        format_scores=(1.0, 0.5, 0.0, 1.0) * (n // 4),
        reasoning_chars=(5, 9, 0, 700) * (n // 4),
        token_means={name: values * (n // 4) for name, values in MEANS.items()},
    )


def test_a_reward_depends_on_gold_only_where_it_says_so(reward):
    other = (False, True, True, False)
    if reward.sees_gold:
        with pytest.raises(AssertionError):
            reward.score(group().blind())
        assert reward.score(group()) != reward.score(group(other))
    else:
        assert reward.score(group().blind()) == reward.score(group()) == reward.score(group(other))


def test_a_reward_that_claims_not_to_see_gold_never_does(reward):
    if reward.sees_gold:
        pytest.skip("says that it sees gold")
    assert_never_sees_gold(reward)


def test_a_reward_does_not_depend_on_the_order_of_the_completions(reward):
    given, order = group(), (2, 0, 3, 1)
    rows = {f.name: row for f in fields(given) if isinstance(row := getattr(given, f.name), tuple)}
    turned, means = ({name: tuple(row[i] for i in order) for name, row in part.items()} for part in (rows, MEANS))
    scores = reward.score(given)
    assert reward.score(replace(given, **turned, token_means=means)) == [scores[i] for i in order]


def test_metrics_have_an_area_and_a_quantity(reward):
    metrics = reward.metrics(group(), reward.score(group()))
    assert all(name.count("/") == 1 for name in metrics)
    assert all(isinstance(value, float | int) for value in metrics.values())


def test_settings_round_trip_and_say_what_they_mean(reward):
    assert type(reward).model_validate_json(reward.model_dump_json()) == reward
    assert all(field.description for field in type(reward).model_fields.values())


@pytest.mark.attack("Hostile text in a completion")
def test_no_completion_makes_a_reward_raise(reward, record_property):
    texts = hostile.COMPLETIONS[: len(hostile.COMPLETIONS) // 4 * 4]
    record_property("tried", len(texts))
    scores = reward.score(group(texts=texts))
    assert len(scores) == len(texts)
    assert all(math.isfinite(value) for value in scores)


def test_steps_lie_inside_their_completion_in_order(reward):
    if not isinstance(reward, StepReward):
        pytest.skip("rewards whole completions")
    for text, steps in zip(TEXTS, reward.steps(group()), strict=True):
        ends = [end for end, _ in steps]
        assert ends == sorted(ends)
        assert all(0 < end <= len(text) for end in ends)
