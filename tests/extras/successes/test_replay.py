"""Replay: what is kept, what an update adds, and that a killed run has kept the same."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import test_killed_in_steps
import torch
from cohort.harness.data import Group, Prompt, Rollout, Score
from cohort.harness.extras.successes.algorithms.dr_grpo_replay import DrGRPOReplay
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner
from cohort.harness.run.rollout import Rollouts, replayed
from cohort.harness.study.estimates import passes
from factories import make_spec
from fakes import tiny_codec
from test_learner import make_batch

REPLAY = {"name": "dr_grpo_replay", "group_size": 2, "replay_capacity": 2}


def test_distinct_successes_that_ended_are_kept_until_the_bank_is_full():
    ended = [Rollout("", (i, 1), (-1.0, -1.0), "length" if i == 6 else "stop") for i in (3, 4, 3, 5, 6, 7)]
    algorithm = DrGRPOReplay(replay_capacity=3)
    assert algorithm.kept([], ended, [1, 0, 1, 1, 1, 1]) == [[3, 1], [5, 1], [7, 1]]
    assert algorithm.kept([[9, 1], [5, 1]], ended, [1, 0, 1, 1, 1, 1]) == [[9, 1], [5, 1], [3, 1]]
    assert algorithm.kept([], ended, [0.9] * 6) == []
    assert DrGRPOReplay(group_size=4, replay_coefficient=0.2).replay_weight == pytest.approx(0.2 * 3 / 16)


def test_an_update_adds_the_weighted_mean_log_prob_of_the_kept_completions():
    spec = make_spec(REPLAY, rollouts_per_step=8, **{"optimizer.tokens_per_microbatch": 24})
    learner, codec = Learner(spec, tiny_model(0).double()), tiny_codec()
    prompts = [Prompt(name, f"{name}=", "") for name in ("1+1", "2+3", "4+5", "6-1", "7-2", "8-3")]
    kept = {"2+3": [[20, 1], [20, 21, 22, 1]], "7-2": [[23, 24, 1]], "8-3": [[25, 1]]}
    run: Any = SimpleNamespace(spec=spec, learner=learner, codec=codec, kept={})
    assert replayed(run, prompts, Rollouts(), 2) is None and learner.replayed == []
    run.kept |= kept
    found = replayed(run, prompts, Rollouts(), 2)
    assert found is not None and run.kept == kept
    assert learner.replayed == [(4, [2]), (4, [2, 4]), (4, [3])]  # from place 2 * 4 of three banks on: 2, 0, 1
    assert torch.equal(found.sampler_logprobs_BT, torch.zeros(4, 8)) and found.tokens_BT.shape == (4, 8)
    assert found.loss_weight_BT is not None and float(found.loss_weight_BT.sum()) == pytest.approx(0.1 * 1 / 4)
    batch = spec.algorithm.advantages(learner.annotate(make_batch(learner.policy)))
    gradients = []
    for own in (None, found):
        learner.replays, learner.optimizers = own, {}
        learner.policy.zero_grad()
        (minibatch,) = learner._minibatches(batch, 0, 0)
        metrics = learner._optimizer_step(minibatch, first=True)
        gradients.append(torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None]))
    loss = torch.zeros((), dtype=torch.float64)
    for name, completions in kept.items():
        for ids in completions:
            start = codec.encode(f"{name}=")
            logprobs = learner.policy(torch.tensor([[*start, *ids]])).logits.log_softmax(-1)[0, len(start) - 1 : -1]
            loss = loss - 0.1 * 1 / 4 / 3 / len(completions) * logprobs.gather(1, torch.tensor(ids)[:, None]).mean()
    learner.policy.zero_grad()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])
    assert metrics["replay/loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert (gradients[1] - gradients[0] - expected).norm() <= 1e-6 * expected.norm()
    rollouts = tuple(Rollout("", (i, 1), (-1.0, -1.0), "stop") for i in (30, 31))
    scores = [Score(totals, None, None, {}) for totals in ([0.0, 1.0], [0.0, 0.0])]
    drawn = Rollouts([Group(prompt, (5,), rollouts) for prompt in prompts[:4:2]], scores=scores)
    replayed(run, prompts, drawn, 1)
    assert run.kept == {**kept, "1+1": [[31, 1]]}
    assert learner.replayed == [(4, [2]), (4, [2, 4]), (4, [3]), (4, [2])]  # from place 1 * 4 of four banks on


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.attack("SIGKILL in a step of a run, or at a write of one")
def test_a_run_that_is_killed_in_its_steps_has_kept_and_learns_the_same(tmp_path, monkeypatch, record_property):
    """The other file's test, which compares records and weights; every completion that ends is a success."""
    replay = {"algorithm": {**REPLAY, "success_reward": -9.0}, "cold_start": {"steps": 60}}
    monkeypatch.setitem(test_killed_in_steps.KINDS, "replay", {**test_killed_in_steps.RUN, **replay})
    test_killed_in_steps.test_a_run_that_is_killed_in_its_steps_ends_as_an_undisturbed_one(
        "replay", tmp_path, monkeypatch, record_property
    )
    last = [max((tmp_path / part / "trials/one/checkpoints").glob("step-*")) for part in ("quiet", "killed")]
    quiet, killed = (json.loads((folder / "state.json").read_text())["progress"]["kept"] for folder in last)
    assert quiet == killed != {}


def test_the_time_that_is_estimated_covers_the_rows_of_half_full_banks():
    few = {"rollouts_per_step": 8, "steps": 3, "optimizer.num_minibatches": 2}
    plain, own = (make_spec(own, **few) for own in ({"name": "dr_grpo", "group_size": 2}, REPLAY))
    limit = own.max_tokens
    assert passes(own, None, {"prompt_tokens": 5}) - passes(plain, None, {"prompt_tokens": 5}) == (
        3 * 3 * 2 * 4 * 1 * (limit + 5)  # steps, learning, minibatches, prompts, kept
    )
    assert passes(make_spec({**REPLAY, "replay_coefficient": 0.0}, **few)) == passes(plain)
