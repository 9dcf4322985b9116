"""Self-distillation: which completion is read first, and that the teacher is the policy after it."""

from typing import Any

import pytest
import torch
from cohort.harness.checks.memory import estimate
from cohort.harness.checks.preflight import check_length
from cohort.harness.data import Group, Prompt, Rollout
from cohort.harness.devices import ranks
from cohort.harness.extras.successes.algorithms.sdpo import SDPO
from cohort.harness.policy import model
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner
from cohort.harness.run.rollout import collate, taught
from cohort.harness.study.estimates import passes
from factories import make_spec
from fakes import batch_of


def test_a_completion_is_read_after_the_first_other_success_of_its_group():
    rewards = [0.5, 1.0, 0.0, 2.0, *[0.0, 1.0, 0.5, 0.0], *[0.9] * 4]
    batch = batch_of([[1]] * 12, rewards, 4)
    assert SDPO().shown(batch).tolist() == [[1, 3, 1, 1], [1, -1, 1, 1], [-1] * 4]
    assert SDPO(success_reward=0.5).shown(batch)[1].tolist() == [1, 2, 1, 1]


def test_the_teacher_is_the_policy_after_a_success_with_its_prompt(monkeypatch):
    learner = Learner(make_spec({"name": "sdpo", "group_size": 3}, rollouts_per_step=6), tiny_model(0))
    texts = {(5, 6, 7): [(10, 11, 1), (12, 1), (13, 14, 15, 1)], (8, 9): [(20, 1), (21, 22), (23,)]}
    groups = [
        Group(Prompt("p", "", ""), prompt, tuple(Rollout("", ids, (-1.0,) * len(ids), "stop") for ids in completions))
        for prompt, completions in texts.items()
    ]
    batch = collate(groups).replace(rewards_B=torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    rows, read = [], learner.logprobs
    learner.logprobs = lambda model, batch: rows.append(len(batch)) or read(model, batch)
    found = taught(learner, batch, groups).teacher_logprobs_BT
    expected = torch.zeros_like(found)
    for row, prompt, own, shown in ((0, (5, 6, 7), 0, 1), (1, (5, 6, 7), 1, 2), (2, (5, 6, 7), 2, 1), (4, (8, 9), 1, 0),
                                    (5, (8, 9), 2, 0)):  # fmt: skip
        ids = texts[prompt][own]
        context = [*prompt, *texts[prompt][shown], *prompt]
        with torch.no_grad():
            logits = learner.policy(torch.tensor([[*context, *ids]])).logits.log_softmax(-1)[0, len(context) - 1 : -1]
        expected[row, len(prompt) : len(prompt) + len(ids)] = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.allclose(found, expected, atol=1e-5, rtol=0) and not found[3].any() and rows == [5]
    # the second group's prompt stands twice around two tokens; the first's contexts are 3 + 2 + 3 and 3 + 4 + 3 long
    assert learner.lessons == [(8, [3, 4]), (10, [2]), (6, [2, 1])]
    assert not taught(learner, batch.replace(rewards_B=torch.zeros(6)), groups).teacher_logprobs_BT.any()
    assert learner.lessons == []
    monkeypatch.setattr(ranks, "world_size", lambda: 8)  # each of which reads some
    learner.logprobs = lambda model, batch: rows.append(len(batch)) or torch.zeros(batch.tokens_BT.shape)
    taught(learner, batch, groups)
    assert rows == [5, 10]


def test_rows_of_twice_the_length_are_estimated_and_must_fit(monkeypatch):
    plain, own = (
        make_spec({"name": name, "group_size": 4}, **{"sampling.max_tokens": 40}) for name in ("cispo", "sdpo")
    )
    assert passes(own) > passes(plain)
    recompute: Any = {"optimizer.tokens_per_microbatch": 64, "gradient_checkpointing": True}
    small = (make_spec({"name": name, "group_size": 4}, **recompute) for name in ("cispo", "sdpo"))
    sizes = [estimate(spec, model.model_config("tiny"), 500)["activations"] for spec in small]
    assert sizes[1] > sizes[0]
    monkeypatch.setattr(model, "length_limit", lambda config: 64)  # 8 + 40 tokens fit, once
    check_length(plain)
    with pytest.raises(ValueError, match=r"must fit into 'tiny's context limit of 64 tokens, got .* 40, twice; lower"):
        check_length(own)
