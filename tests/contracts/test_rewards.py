"""What every reward must keep; rewards are found by name, so that a new one is tested without a word here."""

import sys
from pathlib import Path

import pytest
from cohort.harness import plugins
from cohort.harness.contracts import hostile
from cohort.harness.contracts import plugins as contract

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from taint import assert_never_sees_gold

NEEDS_A_MODEL = {"reward_model"}  # tested with one in tests/test_reward_model.py
RULES = [one for one in contract.of_kind("reward") if one.test is not contract.hostile_text_gets_a_number]
REWARDS = [name for name in plugins.names("reward") if name not in NEEDS_A_MODEL]


@pytest.fixture(params=REWARDS)
def reward(request):
    return plugins.load("reward", request.param)()


def test_a_reward_that_claims_not_to_see_gold_never_does(reward):
    if reward.sees_gold:
        pytest.skip("says that it sees gold")
    assert_never_sees_gold(reward)


@pytest.mark.parametrize("check", RULES, ids=lambda check: check.test.__name__)
def test_a_reward_keeps_the_contract(reward, check):
    check.test(reward)


def test_a_reward_that_sees_gold_fails_loudly_without_it(reward):
    if not reward.sees_gold:
        pytest.skip("does not see gold")
    with pytest.raises(AssertionError):
        reward.score(contract.reward_group().blind())


@pytest.mark.attack("Hostile text in a completion")
def test_hostile_completions_get_a_number(reward, record_property):
    record_property("tried", len(hostile.COMPLETIONS) // 4 * 4)
    contract.hostile_text_gets_a_number(reward)
