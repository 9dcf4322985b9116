"""Which problems each prompt sampler draws, by numbers worked out by hand; what they read, and who may."""

import pytest
from cohort.harness.checks.preflight import check_runs
from cohort.harness.data import Prompt, PromptDraw
from cohort.harness.run.rollout import drawn_prompts
from cohort.harness.samplers.easy_to_hard import EasyToHard
from cohort.harness.samplers.replay import Replay
from cohort.harness.samplers.success_band import SuccessBand
from cohort.harness.samplers.uniform import Uniform
from factories import make_spec

PROMPTS = [Prompt(str(i), "x" * (20 - i), "", (("level", f"Level {i // 5 + 1}"),)) for i in range(20)]


def a_draw(count=4, seed=0, step=0, batch=0, progress=0.0, rates=None):
    return PromptDraw(count, seed, step, batch, progress, rates or {})


def ids(sampler, draw, before=()):
    return [int(prompt.id) for prompt in drawn_prompts(sampler, PROMPTS, draw, before)]


def test_uniform_uses_every_prompt_once_per_pass_and_further_prompts_are_new_and_keyed_by_seed_step_and_batch():
    stream = [i for step in range(10) for i in ids(Uniform(), a_draw(4, step=step))]
    assert sorted(stream[:20]) == sorted(stream[20:]) == list(range(20)) and stream[:20] != stream[20:]
    small = [i for step in range(6) for i in ids(Uniform(), a_draw(2, 3, step))]
    large = [i for step in range(2) for i in ids(Uniform(), a_draw(6, 3, step))]
    assert small == large
    drawn = {str(i) for i in range(8)}
    first = ids(Uniform(), a_draw(step=3, batch=1), drawn)
    assert len(first) == 4 and not {*map(str, first)} & drawn
    others = [ids(Uniform(), a_draw(seed=s, step=t, batch=b), drawn) for s, t, b in ((1, 3, 1), (0, 4, 1), (0, 3, 2))]
    assert all(other != first for other in others)
    assert len(ids(Uniform(), a_draw(40, step=3, batch=1), drawn)) == 12  # no more are left


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


def test_the_band_keeps_what_lies_in_it_or_was_never_drawn_and_a_share_is_drawn_from_all():
    rates = {str(i): rate for i, rate in enumerate([0.0, 0.19, 0.2, 0.5, 0.8, 0.81, 1.0, *[1.0] * 11])}
    inside = {2, 3, 4, 18, 19}  # 18 and 19 were never drawn
    mixed = [ids(SuccessBand(), a_draw(4, step=step, rates=rates)) for step in range(400)]
    assert all(len({*found}) == 4 and {*found[1:]} <= inside for found in mixed)
    first = [found[0] for found in mixed]  # a quarter of the four
    assert {*first} == {*range(20)} and 1 / 7 < sum(i in inside for i in first) / 400 < 2 / 5  # 5 of 20: a quarter
    assert {*ids(SuccessBand(), a_draw(8, rates=rates))} > inside  # filled


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
