"""Accuracy, pass@k and maj@k, with a scripted engine whose answers are known."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from cohort.harness.base.files import sha256
from cohort.harness.data import EvaluationResult, Prompt, Sampling
from cohort.harness.devices import ranks
from cohort.harness.engines.scripted import ScriptedEngine
from cohort.harness.policy import flops
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import read_trial
from cohort.harness.run import evaluate, loop
from cohort.harness.run.build import Run
from cohort.harness.run.evaluate import evaluate_run, evaluation_metrics, metric_names, pass_at_k, problem_score
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import logged_evaluation
from cohort.harness.settings.run import EvaluationSettings
from cohort.reports.statistics import wilson_interval
from cohort.tasks.arithmetic import Arithmetic
from factories import make_spec
from fakes import MemoryLog, graded_group, tiny_codec


def graded(classes, correct):
    return graded_group(classes, correct, num_tokens=(3,) * len(classes))


def test_sample_metrics_of_a_known_outcome():
    groups = [graded([0, 0, 1, 2], [True, True, False, False]), graded([0, 0, 0, 1], [False, False, False, True])]
    groups[1] = replace(groups[1], answers=("1", None, "1", "2"), truncated=(False, True, True, True))
    metrics = evaluate.sample_metrics([problem_score(group, graded([0], [False])) for group in groups])
    assert metrics["accuracy"] == 3 / 8
    assert (metrics["answered"], metrics["truncated"]) == (7 / 8, 3 / 8)
    # pass@2 from 4 samples with c right: 1 - C(4 - c, 2) / 6, so 5/6 for c = 2 and 1/2 for c = 1
    assert metrics["pass_at_2"] == pytest.approx((5 / 6 + 1 / 2) / 2, abs=1e-12)
    assert metrics["format"] == 1.0
    assert metrics["pass_at_4"] == 1.0
    powers = [name for name in metric_names(EvaluationSettings(num_samples=9)) if name.startswith("pass")]
    assert powers == ["pass_at_2", "pass_at_4", "pass_at_8", "pass_at_9"]
    assert metrics["maj_at_4"] == 0.5
    assert metrics["num_tokens"] == 3


def scripted(cls=ScriptedEngine):
    return cls(cls.Settings(), tiny_model(0), tiny_codec())


def test_evaluation_asks_for_greedy_and_samples_and_counts_per_problem():
    spec = make_spec(evaluation={"num_prompts": 10, "num_samples": 4}, sampling={"max_tokens": 40})
    engine = scripted()
    gold = {p.id: p.gold for p in spec.task.prompts("validation")}
    # sample 0 is right, the others are wrong: greedy 1, mean 1/4, pass@4 1, majority 0
    engine.script = lambda prompt, sample: f"#### {gold[prompt.id] if sample == 0 else 1000}"
    result = evaluate_run(spec, engine, "validation", step=0, num_shown=14)
    wanted = {"greedy_accuracy": 1, "accuracy": 0.25, "pass_at_4": 1, "maj_at_4": 0, "num_prompts": 10}
    assert {name: result.metrics[name] for name in wanted} == pytest.approx(wanted)
    assert set(result.correct_counts.values()) == {1}
    assert result.families == {}
    first = [prompt.id for prompt in spec.task.prompts("validation")[:10]]
    shown = [(row.prompt_id, row.correct) for row in result.samples]  # the first of all 10, the second of 4
    assert shown == [*((name, True) for name in first), *((name, False) for name in first[:4])]
    assert list(result.metrics) == metric_names(spec.evaluation)


class NotingEngine(ScriptedEngine):
    """Notes the size, the seed and the settings of each call."""

    calls: ClassVar[list[tuple[int, int, Sampling]]] = []

    def generate(self, prompts, group_size, sampling, *, seed, step):
        self.calls.append((group_size, seed, sampling))
        return super().generate(prompts, group_size, sampling, seed=seed, step=step)


def test_many_samples_are_drawn_in_calls_with_a_seed_of_their_own(monkeypatch):
    few = {"num_prompts": 2, "num_samples": 130, "temperature": 0.7}
    spec = make_spec(seed=3, evaluation=few, sampling={"max_tokens": 8, "stop": ["Q:"]})
    sampling, best = (Sampling(temperature=t, max_tokens=8, stop=("Q:",)) for t in (0.7, 0.0))
    engine = scripted(NotingEngine)
    for plans, sizes in ((False, [64, 64, 2]), (True, [130])):
        monkeypatch.setattr(NotingEngine, "plans_batches", plans)
        engine.calls.clear()
        assert evaluate_run(spec, engine, "validation", step=0).metrics["num_samples"] == 130
        *drawn, greedy = engine.calls
        assert [size for size, _, _ in drawn] == sizes and all(how == sampling for _, _, how in drawn)
        seeds = [seed for _, seed, _ in drawn]
        assert seeds[0] == 3 and len({*seeds}) == len(sizes) and min(seeds[1:], default=2**40) > 2**32  # none repeats
        assert greedy == (1, 3, best)


class OfFamilies(Arithmetic):
    """Sums with a family by their first digit."""

    def prompts(self, split):
        return [replace(one, family=one.text[0]) for one in super().prompts(split)]


def test_the_family_of_a_problem_goes_from_its_task_to_the_record_and_its_completions(tmp_path):
    few = {"num_test_prompts": 10, "num_samples": 1}
    spec, engine = make_spec(task=OfFamilies(), evaluation=few, sampling={"max_tokens": 8}), scripted()
    engine.script = lambda prompt, sample: "#### 1"
    wanted = {prompt.id: prompt.family for prompt in spec.task.prompts("test")[:10]}
    assert len(set(wanted.values())) > 2
    tags = {"cohort.trial": "run", "cohort.arm": "a", "cohort.seed": "0", "cohort.factors": "{}"}
    with RunLog(tmp_path, tmp_path / "run", spec, experiment="e", run_name="run", tags=tags) as log:
        run = Run(spec, engine, Learner(spec, tiny_model(0)), log, tmp_path / "run", tiny_codec())
        result = logged_evaluation(run, "test", 3)
    kept = tmp_path / "run" / evaluate.completions_file("test", 3)
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert result.families == evaluate.evaluate_again(spec.task, rows, "test").families == wanted
    trial = read_trial(tmp_path / "run")
    assert trial is not None and trial.families == wanted and trial.per_problem.keys() == wanted.keys()


def test_an_evaluation_is_logged_by_its_area_and_kept_by_the_first_rank_alone(tmp_path, monkeypatch):
    few = {"num_prompts": 2, "num_test_prompts": 2, "num_samples": 2}
    spec, engine = make_spec(evaluation=few), scripted()
    gold = {p.id: p.gold for split in ("validation", "test") for p in spec.task.prompts(split)}  # pyright: ignore
    engine.script = lambda prompt, sample: f"#### {gold[prompt.id] if sample == 0 else 1000}"
    for rank, split, area in ((0, "test", "start"), (0, "validation", ""), (1, "test", "")):
        monkeypatch.setattr(loop, "ranks", SimpleNamespace(**{**vars(ranks), "rank": lambda rank=rank: rank}))
        log, kept, name = MemoryLog(), tmp_path / evaluate.completions_file(area or split, 5), area or split
        kept.parent.mkdir(exist_ok=True)
        kept.write_text("of an attempt that was killed\n")
        run = Run(spec, engine, Learner(spec, tiny_model(0)), log, tmp_path, tiny_codec())  # pyright: ignore
        result = logged_evaluation(run, split, 5, area)  # pyright: ignore
        assert log.files == ({f"completions/{name}-000005.jsonl": sha256(kept)} if rank == 0 else {})
        assert len(kept.read_text().splitlines()) == (2 if rank == 0 else 1)
        assert run.costs is not None and len(result.drawn) == 4
        cost = flops.sampled(run.costs, result.drawn)
        assert log.events == [(5, evaluation_metrics(result, name) | {"flops/evaluation": cost})]
        assert log.phases == [(split, 0, 2), (split, 2, 2)]
        fractions = dict.fromkeys([prompt.id for prompt in spec.task.prompts("test")[:2]], 0.5)
        assert log.start_fractions | log.fractions == (fractions if split == "test" else {})
        assert log.rows == (result.samples if not area else [])


def test_pass_at_k_is_unbiased():
    # enumerate every draw of 2 out of 5 samples, 2 of which are right: 1 - C(3, 2) / C(5, 2) = 7/10
    draws = list(itertools.combinations([1, 1, 0, 0, 0], 2))
    assert pass_at_k(5, 2, 2) == pytest.approx(np.mean([max(draw) for draw in draws]), abs=1e-12)
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4, abs=1e-12)
    assert (pass_at_k(5, 0, 3), pass_at_k(5, 2, 3), pass_at_k(4, 4, 4)) == (0.0, 0.9, 1.0)


def test_accuracy_is_broken_down_by_the_tags_of_the_problems():
    prompts = [Prompt("a", "a", "1", (("level", "1"),)), Prompt("b", "b", "1", (("level", "2"), ("kind", "x")))]
    sampled = [graded([0, 0, 1, 2], [True, True, False, False]), graded([0] * 4, [True] * 4)]
    greedy = [graded([0], [False]), graded([0], [True])]
    scores = [problem_score(*both) for both in zip(sampled, greedy, strict=True)]
    assert evaluate.breakdown(prompts, scores) == {
        "kind": {"x": {"accuracy": 1.0, "greedy_accuracy": 1.0, "num_prompts": 1.0}},
        "level": {
            "1": {"accuracy": 0.5, "greedy_accuracy": 0.0, "num_prompts": 1.0},
            "2": {"accuracy": 1.0, "greedy_accuracy": 1.0, "num_prompts": 1.0},
        },
    }
    result = EvaluationResult("test", {"accuracy": 0.75}, {}, [], evaluate.breakdown(prompts, scores))
    logged = {"test/accuracy": 0.75, "test/accuracy_kind_x": 1.0}
    assert evaluation_metrics(result, "test") == logged | {"test/accuracy_level_1": 0.5, "test/accuracy_level_2": 1.0}


def test_wilson_intervals_match_the_textbook():
    # p = 0.5, n = 10, z = 1.96: centre 0.5, half-width 1.96 * sqrt(0.025 + 0.009604) / 1.38416 = 0.2634
    assert wilson_interval(0.5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    assert wilson_interval(0.0, 10) == pytest.approx((0.0, 3.841459 / 13.841459), abs=1e-6)
    assert wilson_interval(1.0, 10) == pytest.approx((10 / 13.841459, 1.0), abs=1e-6)
    assert all(wilson_interval(0.0, count)[0] >= 0 and wilson_interval(1.0, count)[1] <= 1 for count in range(1, 99))
