"""Which problems the samplers of curricula draw, by numbers worked out by hand."""

import pytest
from cohort.harness.checks.preflight import check_runs
from cohort.harness.extras.curricula.samplers.easy_to_hard import EasyToHard
from cohort.harness.extras.curricula.samplers.replay import Replay
from cohort.harness.samplers.uniform import Uniform
from factories import make_spec
from test_draw import a_draw, ids


@pytest.mark.parametrize(("difficulty", "easiest"), [("level", range(5)), ("length", range(15, 20))])
def test_easy_to_hard_draws_from_a_share_that_grows_by_its_root(difficulty, easiest):
    sampler = EasyToHard(difficulty=difficulty)
    order = [*range(20)] if difficulty == "level" else [*reversed(range(20))]  # a later prompt is shorter
    # c = sqrt(0.01 + 0.99 t / T): of 20 prompts 2 at first, but a step of 4 is full; at t / T = 0.25 of 0.5:
    # sqrt(0.505) = 0.7106, 15; then all
    for progress, most in ((0.0, 4), (0.25, 15), (0.5, 20), (0.9, 20)):
        found = {i for step in range(60) for i in ids(sampler, a_draw(step=step, progress=progress))}
        assert found == {*order[:most]}
    assert {i for step in range(60) for i in ids(sampler, a_draw(5, step=step))} == {*easiest}  # a step is full
    assert ids(sampler, a_draw(batch=1), {str(i) for i in order[:4]}) == order[4:8]  # easy ones are used up


def test_a_share_of_a_step_is_replayed_in_proportion_to_one_minus_the_pass_rate():
    rates = {"3": 0.0, "4": 0.75, "5": 1.0, "6": 0.5}
    draws = [a_draw(4, step=step, rates=rates) for step in range(600)]
    found = [ids(Replay(share=0.25), draw) for draw in draws]
    replayed = [one[0] for one in found]
    # weights 1, 1/4, 0, 1/2 of 7/4
    for i, share in ((3, 4 / 7), (4, 1 / 7), (5, 0), (6, 2 / 7)):
        assert replayed.count(i) / 600 == pytest.approx(share, abs=0.06)
    for draw, one in zip(draws, found, strict=True):  # the rest is what `uniform` draws
        assert one[1:] == [i for i in ids(Uniform(), draw) if i != one[0]][:3]
    assert {*ids(Replay(share=1), draws[0])} > {3, 4, 6}  # those that there are
    assert ids(Replay(), a_draw()) == ids(Uniform(), a_draw())


def test_a_difficulty_that_the_task_does_not_tell_is_refused_before_a_model_loads(tmp_path):
    spec = make_spec(sampler={"name": "easy_to_hard", "difficulty": "level"})
    with pytest.raises(ValueError, match=r"a number in every training problem, got 'level'.*\{'operands': '\d'\}"):
        check_runs([spec], tmp_path)
    check_runs([make_spec(sampler={"name": "easy_to_hard", "difficulty": "operands"})], tmp_path)
