"""The warm start learns its demonstrations and is computed once for all who want the same one."""

import pytest
import torch

from harness.engines.transformers import TransformersEngine
from harness.policy.tiny import tiny_model, tiny_tokenizer
from harness.spec.run import ColdStart, parse_run
from harness.training.cold_start import cold_start_key, fit_demonstrations, start_policy
from harness.types import Demonstration, InvalidRun, Prompt, Sampling


def make_spec(**cold_start):
    raw = {"task": "arithmetic", "algorithm": "grpo", "cold_start": {"steps": 3, **cold_start}}
    return parse_run(raw, "test")


def test_the_policy_learns_to_repeat_its_demonstrations():
    demonstrations = [Demonstration(f"{a}+1=", f"#### {a + 1}") for a in range(1, 9)]
    policy, tokenizer = tiny_model(0), tiny_tokenizer()
    fit_demonstrations(policy, tokenizer, demonstrations, ColdStart(steps=120), device=torch.device("cpu"))
    engine = TransformersEngine(TransformersEngine.Settings(), policy, tokenizer)
    prompts = [Prompt(d.prompt, d.prompt, "") for d in demonstrations]
    groups = engine.generate(prompts, 1, Sampling(temperature=0, max_tokens=10), seed=0, step=0)
    assert [g.rollouts[0].text for g in groups] == [d.completion for d in demonstrations]
    assert all(g.rollouts[0].finish_reason == "stop" for g in groups)


def test_a_second_run_takes_the_cached_policy(tmp_path):
    seen = []
    first, _ = start_policy(make_spec(), tmp_path, lambda done, total: seen.append((done, total)))
    second, _ = start_policy(make_spec(), tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not list(tmp_path.rglob(".partial*"))


def test_the_key_changes_with_everything_that_the_result_depends_on():
    base = cold_start_key(make_spec())
    assert base == cold_start_key(make_spec())
    assert base != cold_start_key(make_spec(seed=1))
    assert base != cold_start_key(make_spec(steps=4))
    spec = make_spec()
    other_task = spec.model_copy(update={"task": spec.task.model_copy(update={"max_operands": 4})})
    assert base != cold_start_key(other_task)


def test_the_key_is_shared_by_arms_that_differ_in_the_algorithm_and_the_seed():
    spec = make_spec()
    assert cold_start_key(spec) == cold_start_key(spec.model_copy(update={"seed": 5, "rollouts_per_step": 64}))


def test_without_steps_the_model_is_taken_as_it_is(tmp_path):
    policy, _ = start_policy(make_spec(steps=0), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), tiny_model(0).parameters(), strict=True))
    assert list(tmp_path.iterdir()) == []


def test_a_diverging_cold_start_is_invalid():
    demonstrations = [Demonstration("1+1=", "#### 2")]
    with pytest.raises(InvalidRun, match=r"cold_start\.learning_rate"):
        fit_demonstrations(
            tiny_model(0), tiny_tokenizer(), demonstrations, ColdStart(steps=9, learning_rate=1e30),
            device=torch.device("cpu"),
        )  # fmt: skip
