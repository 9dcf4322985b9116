"""Which problems each prompt sampler draws, by numbers worked out by hand. Dynamic sampling: what is replaced, what it
costs, that it ends, and that its prompts have keys."""

from concurrent.futures import Future
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import factories
import pytest
import torch
from cohort.harness.data import Prompt, PromptDraw
from cohort.harness.devices import ranks
from cohort.harness.run import rollout
from cohort.harness.run.build import prepare
from cohort.harness.run.loop import charge_step
from cohort.harness.run.rollout import Clock, Rollouts, drawn_prompts, earned, generate, sample
from cohort.harness.run.step import train_step
from cohort.harness.samplers.success_band import SuccessBand
from cohort.harness.samplers.uniform import Uniform
from factories import FEW
from fakes import MemoryLog


def make_spec(max_batches, algorithm="grpo", **changes):
    task = {"name": "arithmetic", "min_operands": 3, "max_operands": 3, "num_train": 60}
    fixed = {**FEW, "task": task, "algorithm": {"name": algorithm, "group_size": 2}, "engine": "scripted",
             "sampling": {}, "dynamic_sampling": max_batches, "gates": {"mismatch_kl": None}}  # fmt: skip
    return factories.make_spec(**{**fixed, **changes})


def scripted_run(tmp_path, max_batches, mixed, **changes):
    """A run whose engine answers right and wrong in turn where `mixed(place of the prompt)`, else always wrong."""
    spec = make_spec(max_batches, **changes)
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    prompts = spec.task.prompts("train")
    place = {prompt.id: i for i, prompt in enumerate(prompts)}
    answers = {prompt.id: prompt.gold for prompt in prompts}

    def script(prompt, sample):
        right = mixed(place[prompt.id]) and sample == 0
        return f"#### {answers[prompt.id]}" if right else "#### none"

    run.engine.script = script  # pyright: ignore
    return run, prompts, place


def test_groups_of_equal_rewards_are_replaced_and_all_that_was_sampled_is_charged(tmp_path):
    run, prompts, place = scripted_run(tmp_path, 8, lambda i: i % 3 == 0)
    calls, engine, sampled = [], run.engine, run.engine.generate
    engine.generate = lambda *given, **named: calls.append("generate") or sampled(*given, **named)  # pyright: ignore
    engine.sleep = lambda: calls.append("sleep")
    run.note_peak = lambda: calls.append("peak") or 0  # pyright: ignore
    metrics, drawn = train_step(run, prompts, 0)
    assert calls == [*drawn.num_batches * ["generate"], "sleep", "peak", "peak"]  # before and after the learner's part
    assert all(p.grad is None for p in run.learner.policy.parameters()), "the next step samples in their memory"
    costs = charge_step(run, drawn.lengths(4), 1.0)
    assert drawn.num_batches > 1
    assert len(drawn.groups) == 4 * drawn.num_batches
    assert len({g.prompt.id for g in drawn.groups}) == len(drawn.groups)  # no prompt is asked twice in a step
    chosen = drawn.trained_on(4)
    assert [place[g.prompt.id] % 3 for g in chosen.groups] == [0] * 4
    assert chosen.totals == [[1.0, 0.0]] * 4
    assert [g.prompt_id for g in chosen.graded] == [g.prompt.id for g in chosen.groups]
    first_mixed = [g.prompt.id for g in drawn.groups if place[g.prompt.id] % 3 == 0][:4]
    assert [g.prompt.id for g in chosen.groups] == first_mixed
    assert metrics["sampling/batches"] == drawn.num_batches
    assert (metrics["sampling/kept_groups"], metrics["sampling/filled_groups"]) == (4, 0)
    assert costs["train/rollouts"] == run.totals.rollouts == 8 * drawn.num_batches
    tokens = sum(len(r.token_ids) for g in drawn.groups for r in g.rollouts)
    assert costs["train/generated_tokens"] == run.totals.generated_tokens == tokens
    share = sum(place[g.prompt.id] % 3 > 0 for g in drawn.groups) / len(drawn.groups)
    assert metrics["train/zero_variance_groups"] == pytest.approx(share, abs=1e-6)  # of all that was sampled
    assert metrics["train/zero_advantage_groups"] == 0  # of what was trained on
    assert metrics["train/accuracy"] == pytest.approx((1 - share) / 2, abs=1e-6)


def test_a_step_whose_budget_is_spent_is_filled_and_says_so(tmp_path):
    run, prompts, place = scripted_run(tmp_path, 3, lambda i: i == 0, rollouts_per_step=40)  # 20 prompts a batch, of 60
    metrics, drawn = train_step(run, prompts, 0)
    assert metrics["sampling/batches"] == 3
    assert (metrics["sampling/kept_groups"], metrics["sampling/filled_groups"]) == (1, 19)
    assert sum(len(g.rollouts) for g in drawn.groups) == 3 * 40
    assert 0 in [place[g.prompt.id] for g in drawn.trained_on(20).groups]


@pytest.mark.parametrize(("most", "seconds"), [(1, (1, 0)), (2, (1 + 3, 2 + 4)), (3, (1 + 3 + 5, 2 + 4 + 6))])
def test_each_batch_of_a_step_is_drawn_and_graded_in_turn_on_a_clock_of_their_phases(most, seconds, tmp_path):
    run, prompts, _ = scripted_run(tmp_path, most, lambda i: False)
    times = accumulate(count())  # the n-th lap takes n seconds
    clock = Clock(lambda: next(times))
    drawn = sample(run, prompts, 0, clock)
    assert (drawn.num_batches, len(drawn.graded)) == (most, 4 * most if most > 1 else 0)
    expected = {"seconds/generate": seconds[0], "seconds/grade": seconds[1], "seconds/step": sum(seconds)}
    assert clock.metrics == {name: value for name, value in expected.items() if value}


def test_a_batch_without_groups_earns_nothing():
    grading: Any = Future()
    grading.set_result([])
    run: Any = SimpleNamespace(spec=make_spec(2, rewards={"token_entropy": 1.0}))
    assert earned(run, [], Rollouts(num_batches=1, grading=grading), 0) == Rollouts(num_batches=1)


def test_sampling_ends_when_the_task_has_no_more_prompts(tmp_path):
    run, prompts, _ = scripted_run(tmp_path, 50, lambda i: False)
    metrics, _ = train_step(run, prompts, 0)
    assert metrics["sampling/batches"] == 60 / 4
    assert metrics["sampling/filled_groups"] == 4
    assert "grading/unparsable" not in metrics  # each comparison of this task has a verdict


def test_a_step_with_enough_unequal_groups_samples_one_batch_as_without_dynamic_sampling(tmp_path):
    steps = []
    for name, budget in (("off", 1), ("on", 2)):
        run, prompts, _ = scripted_run(tmp_path / name, budget, lambda i: True)
        metrics, drawn = train_step(run, prompts, 0)
        steps.append((drawn.groups, drawn.totals))
        assert ("sampling/batches" in metrics) == (budget > 1)
    assert steps[0] == steps[1]


def test_a_greedy_answer_of_each_prompt_is_rewarded_charged_and_not_trained_on(tmp_path):
    # sample 0 is the only one of the greedy group: right for every third prompt
    run, prompts, place = scripted_run(tmp_path, 8, lambda i: i % 3 == 0, algorithm="remax")
    asked = []
    generate = run.engine.generate

    def listening(prompts, group_size, sampling, **keys):
        asked.append((len(prompts), group_size, sampling.temperature, sampling.max_tokens))
        return generate(prompts, group_size, sampling, **keys)

    run.engine.generate = listening  # pyright: ignore
    metrics, drawn = train_step(run, prompts, 0)
    costs = charge_step(run, drawn.lengths(4), 1.0)
    limit = run.spec.max_tokens
    assert asked == [(4, 2, 1.0, limit), (4, 1, 0.0, limit)] * drawn.num_batches
    assert drawn.num_batches > 1
    assert drawn.greedy and [g.prompt for g in drawn.greedy.groups] == [g.prompt for g in drawn.groups]
    assert drawn.greedy.totals == [[float(place[g.prompt.id] % 3 == 0)] for g in drawn.groups]
    chosen = drawn.trained_on(4)
    assert chosen.greedy and chosen.greedy.totals == [[1.0]] * 4
    assert [g.prompt for g in chosen.greedy.groups] == [g.prompt for g in chosen.groups]
    every = [r for g in (*drawn.groups, *drawn.greedy.groups) for r in g.rollouts]
    assert costs["train/rollouts"] == run.totals.rollouts == 12 * drawn.num_batches == len(every)
    assert costs["train/generated_tokens"] == sum(len(r.token_ids) for r in every)
    assert metrics["reward/greedy"] == pytest.approx(sum(map(sum, drawn.greedy.totals)) / len(drawn.groups))
    assert metrics["train/accuracy"] == pytest.approx(metrics["reward/greedy"] / 2)  # of the samples alone


@pytest.mark.parametrize("sampler", ["uniform", "success_band"])
def test_running_pass_rates_of_all_that_was_drawn_are_kept_for_a_sampler_that_sees_gold_alone(sampler, tmp_path):
    right = {1}  # in the first step problem 1 is solved once of twice, then none
    run, prompts, place = scripted_run(tmp_path, 8, lambda i: i in right, sampler=sampler, **{"task.num_train": 4})
    for expected in (0.5, 0.25, 0.125):  # each the mean of the rate before and that of the group
        train_step(run, prompts, 0)
        found = {place[prompt_id]: rate for prompt_id, rate in run.pass_rates.items()}
        assert found == ({} if sampler == "uniform" else {0: 0, 1: expected, 2: 0, 3: 0})
        right.clear()


@pytest.mark.parametrize("world", [1, 2])
def test_a_draw_tells_how_far_the_stage_is_and_older_weights_sample(world, monkeypatch):
    """Of several processes, after a checkpoint has copied the newest ones."""
    told: list[Any] = []
    for name, answer in (("world_size", lambda: world), ("rank", lambda: 0), ("of_all", lambda value: [value])):
        monkeypatch.setattr(ranks, name, answer)
    monkeypatch.setattr(rollout, "is_spread", lambda value: world > 1)
    sampler = SimpleNamespace(order=lambda prompts, draw: told.append(draw) or range(9))
    spec = make_spec(1, steps=8).model_copy(update={"sampler": sampler})
    policy = torch.nn.Linear(1, 1)
    engine = SimpleNamespace(sample=lambda prompts, **_: told.append(policy.bias.item()) or [])
    learner = SimpleNamespace(policy=policy, older=[{"bias": torch.ones(1)}])
    own = {"spec": spec, "stage": SimpleNamespace(start=4), "engine": engine, "learner": learner}
    writer = SimpleNamespace(copied=SimpleNamespace(wait=lambda: told.append("copied")))
    run: Any = SimpleNamespace(**own, writer=writer, pass_rates={}, max_tokens=8)
    place = policy.bias.data_ptr()
    generate(run, [Prompt(str(i), "", "") for i in range(9)], 6, Rollouts(num_batches=3))
    draw = PromptDraw(4, 0, 6, 3, 0.25, {})  # (6 - 4) / 8 of the stage
    assert told == [draw, *["copied"] * (world - 1), 1.0]
    assert policy.bias.item() < 1 and policy.bias.data_ptr() == place


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
    three = SimpleNamespace(order=lambda prompts, draw: range(3))
    assert [ids(three, a_draw(5, batch=batch)) for batch in (0, 1)] == [[0, 1, 2, 0, 1], [0, 1, 2]]


def test_the_band_keeps_what_lies_in_it_or_was_never_drawn_and_a_share_is_drawn_from_all():
    rates = {str(i): rate for i, rate in enumerate([0.0, 0.19, 0.2, 0.5, 0.8, 0.81, 1.0, *[1.0] * 11])}
    inside = {2, 3, 4, 18, 19}  # 18 and 19 were never drawn
    mixed = [ids(SuccessBand(), a_draw(4, step=step, rates=rates)) for step in range(400)]
    assert all(len({*found}) == 4 and {*found[1:]} <= inside for found in mixed)
    first = [found[0] for found in mixed]  # a quarter of the four
    assert {*first} == {*range(20)} and 1 / 7 < sum(i in inside for i in first) / 400 < 2 / 5  # 5 of 20: a quarter
    assert {*ids(SuccessBand(), a_draw(8, rates=rates))} > inside  # filled
