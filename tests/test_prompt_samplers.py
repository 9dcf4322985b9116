"""Which problems each prompt sampler draws, by numbers worked out by hand; what they read, and who may."""

from cohort.harness.data import Prompt, PromptDraw
from cohort.harness.run.rollout import drawn_prompts
from cohort.harness.samplers.success_band import SuccessBand
from cohort.harness.samplers.uniform import Uniform

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


def test_the_band_keeps_what_lies_in_it_or_was_never_drawn_and_a_share_is_drawn_from_all():
    rates = {str(i): rate for i, rate in enumerate([0.0, 0.19, 0.2, 0.5, 0.8, 0.81, 1.0, *[1.0] * 11])}
    inside = {2, 3, 4, 18, 19}  # 18 and 19 were never drawn
    mixed = [ids(SuccessBand(), a_draw(4, step=step, rates=rates)) for step in range(400)]
    assert all(len({*found}) == 4 and {*found[1:]} <= inside for found in mixed)
    first = [found[0] for found in mixed]  # a quarter of the four
    assert {*first} == {*range(20)} and 1 / 7 < sum(i in inside for i in first) / 400 < 2 / 5  # 5 of 20: a quarter
    assert {*ids(SuccessBand(), a_draw(8, rates=rates))} > inside  # filled
