"""Accuracy, pass@k and maj@k, with a scripted engine whose answers are known."""

import pytest

from harness.engines.scripted import ScriptedEngine
from harness.evaluate import evaluate, majority_correct, metric_names, sample_metrics
from harness.model import tiny_model, tiny_tokenizer
from harness.spec import Evaluation, parse_run
from harness.types import GradedGroup


def graded(classes, correct):
    n = len(classes)
    return GradedGroup("p", ("",) * n, (3,) * n, (False,) * n, tuple(map(str, classes)), tuple(classes), tuple(correct))


def test_majority_counts_ties_by_their_chance_and_ignores_missing_answers():
    assert majority_correct(graded([0, 0, 1], [False, False, True])) == 0
    assert majority_correct(graded([0, 1], [True, False])) == 0.5
    assert majority_correct(graded([None, None, 1], [False, False, True])) == 1
    assert majority_correct(graded([None, None], [False, False])) == 0


def test_sample_metrics_of_a_known_outcome():
    groups = [graded([0, 0, 1, 2], [True, True, False, False]), graded([0, 0, 0, 1], [False, False, False, True])]
    metrics = sample_metrics(groups)
    assert metrics["accuracy"] == 3 / 8
    assert metrics["pass_at_4"] == 1.0
    assert metrics["maj_at_4"] == 0.5
    assert metrics["num_tokens"] == 3


def test_evaluation_asks_for_greedy_and_samples_and_counts_per_problem():
    task = parse_run({"task": "arithmetic", "algorithm": "grpo"}, "test").task
    engine = ScriptedEngine(ScriptedEngine.Settings(), tiny_model(0), tiny_tokenizer())
    gold = {p.id: p.gold for p in task.prompts("validation")}
    # sample 0 is right, the others are wrong: greedy 1, mean 1/4, pass@4 1, majority 0
    engine.script = lambda prompt, sample: f"#### {gold[prompt.id] if sample == 0 else 1000}"
    settings = Evaluation(num_prompts=10, num_samples=4)
    result = evaluate(task, engine, "validation", settings, max_tokens=40, seed=0, step=0)
    assert result.metrics["greedy_accuracy"] == 1
    assert result.metrics["accuracy"] == pytest.approx(0.25)
    assert result.metrics["pass_at_4"] == 1
    assert result.metrics["maj_at_4"] == 0
    assert result.metrics["num_prompts"] == 10
    assert set(result.correct_counts.values()) == {1}
    assert len(result.samples) > 0
    assert list(result.metrics) == metric_names(settings)
