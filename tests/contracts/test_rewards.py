"""What every reward must keep; rewards are found by name, so that a new one is tested without a word here."""

import pytest
from cohort.harness import plugins
from fakes import graded_group
from taint import assert_never_sees_gold

NEEDS_A_MODEL = {"reward_model"}  # tested with one in tests/test_reward_model.py
REWARDS = [name for name in plugins.names("reward") if name not in NEEDS_A_MODEL]


@pytest.fixture(params=REWARDS)
def reward(request):
    return plugins.load("reward", request.param)()


def test_a_reward_that_claims_not_to_see_gold_never_does(reward):
    if reward.sees_gold:
        pytest.skip("says that it sees gold")
    assert_never_sees_gold(reward)


def test_a_reward_that_sees_gold_fails_loudly_without_it(reward):
    if not reward.sees_gold:
        pytest.skip("does not see gold")
    with pytest.raises(AssertionError):
        reward.score(graded_group([0, 1, None, 0]))
