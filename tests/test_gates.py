"""Gates end a run that measures nothing, at the step they name, whether or not it was interrupted; others go on."""

import factories
import pytest
import torch
from cohort.harness.base.words import first_look
from cohort.harness.data import InvalidRun
from cohort.harness.run.guards.gates import STEPS, GateState, check_gates
from cohort.harness.run.learner import weight_sample, weights_metric
from cohort.harness.run.loop import train
from cohort.harness.run.step import group_metrics
from cohort.harness.settings.run import Gates
from factories import FEW
from fakes import MemoryLog, StopAfter, batch_of

FINE = {"mismatch/kl": 0.0, "train/stuck_groups": 0.0, "train/answered": 0.8}


def run_gates(settings, *steps):
    """The step at which the gates end a run with these metrics, and why; (None, "") where they do not."""
    state = GateState()
    for step, changes in enumerate(steps, start=1):
        try:
            check_gates(settings, state, {**FINE, **changes}, step)
        except InvalidRun as invalid:
            return step, str(invalid)
    return None, ""


def make_spec(gates, **changes):
    """A run whose completions are all empty, with the engine's own log-probs: every reward is 0."""
    fixed = {**FEW, "engine": "scripted", "sampling": {"max_tokens": 4}, "steps": 8, "checkpoints": {"every": 100},
             "gates": {"mismatch_kl": None, **gates}}  # fmt: skip
    return factories.make_spec(**{**fixed, **changes})


STUCK, FEW_ANSWERS = {"train/stuck_groups": 1.0}, {"train/answered": 0.19}  # 0.25 x 0.8 at the start = 0.2
SAME, MOVED = {"policy/weights_changed": 0.0004}, {"policy/weights_changed": 0.001}
OFF = {"mismatch_kl": None, "stuck_groups": None, "weights_changed": None, "answered": None}
WORST = {"mismatch/kl": 9.0, "train/stuck_groups": 1.0, "policy/weights_changed": 0.0, "train/answered": 0.0}


@pytest.mark.parametrize(("settings", "steps", "end", "words"), [
    ({}, [STUCK, STUCK, {}, STUCK, STUCK], None, ""),  # a gate counts steps in a row only
    ({}, [STUCK, {}, STUCK, STUCK, STUCK, STUCK], 5,
     "train/stuck_groups was above 0.98 for 3 steps in a row (1 at step 5): all completions"),
    ({}, [{"train/stuck_groups": 0.98}] * 9, None, ""),  # the bound itself is allowed
    ({}, [{"mismatch/kl": 0.1}], None, ""),
    ({}, [{}, {"mismatch/kl": 0.35}], 2, "mismatch/kl was above 0.1 for a step (0.35 at step 2)"),
    ({}, [{"mismatch/kl": float("nan")}], 1, "mismatch/kl was above"),
    ({}, [{}, FEW_ANSWERS, {"train/answered": 0.2}, FEW_ANSWERS, FEW_ANSWERS], None, ""),
    ({}, [{}, *3 * [FEW_ANSWERS]], 4, "train/answered was below 0.2 for 3 steps in a row (0.19 at step 4)"),
    ({}, [{}, *3 * [FEW_ANSWERS]], 4, "(0.8 did at the start) (gates.answered)"),
    ({}, [{"train/answered": 0.0}] * 9, None, ""),  # it never answered, so there is no collapse
    ({}, [SAME, SAME, MOVED, SAME, SAME], None, ""),
    ({}, [SAME, {}, SAME, {}, SAME], 5, "policy/weights_changed"),  # without a gradient a step says nothing
    (OFF, [{}, *9 * [WORST]], None, ""),
])  # fmt: skip
def test_a_gate_ends_a_run_at_a_step_with_a_reason(settings, steps, end, words, monkeypatch):
    for name in ("stuck_groups", "answered", "weights_changed"):
        monkeypatch.setitem(STEPS, name, 3)
    step, reason = run_gates(Gates(**settings), *steps)
    assert step == end and words in reason


@pytest.mark.parametrize(("bad", "steps"), [(STUCK, 20), (SAME, 5), (FEW_ANSWERS, 20)])
def test_a_gate_waits_for_its_number_of_steps(bad, steps):
    assert run_gates(Gates(), {}, *(steps - 1) * [bad])[0] is None
    assert run_gates(Gates(), {}, *steps * [bad])[0] == 1 + steps


def test_groups_without_advantage_are_stuck_unless_they_earn_the_best_reward_of_the_run():
    def shares(state, rewards, advantages):
        mask, flat = [[1, 1]] * (2 * len(rewards)), [reward for group in rewards for reward in group]
        given = torch.tensor(advantages).view(-1, 1).repeat(1, 2)
        found = group_metrics(batch_of(mask, flat, 2, advantages_BT=given), state)
        return found["train/zero_advantage_groups"], found["train/stuck_groups"]

    state, zero = GateState(), [[0.0, 0], [0, 0]]
    # Of four groups one has advantages; of the others one earns 1, the best so far, and two earn 0.
    assert shares(state, [[0.0, 1], [1, 1], [0, 0], [0, 0]], [[-0.5, 0.5], [0, 0], *zero]) == (0.75, 0.5)
    assert shares(state, [[0.5, 0.5], [1, 1]], zero) == (1.0, 0.5)  # the run has seen 1
    assert shares(state, [[1.0, 0.5]], zero[:1]) == (1.0, 1.0)  # which not every completion earns here,
    assert shares(state, [[0.5, 0.5]], zero[:1]) == (1.0, 1.0)  # nor any here
    state = GateState()
    assert shares(state, zero, zero) == (1.0, 1.0)  # as long as all rewards are equal, none counts as best
    assert shares(state, [[0.0, 1]], [[-1.0, 1]]) == (0.0, 0.0)
    assert shares(state, zero, zero) == (1.0, 1.0)
    assert shares(state, [[1.0, 1], [1, 1]], zero) == (1.0, 0.0)  # solved
    assert shares(GateState(), [[0.0, 0]], [[0.2, -0.2]]) == (0.0, 0.0)  # PPO's advantages come from its critic


def test_the_share_of_changed_weights_is_counted_and_weights_of_every_column_of_a_large_matrix():
    model = torch.nn.Linear(10, 8)  # 80 weights and 8 biases
    before = weight_sample(model)
    with torch.no_grad():
        model.weight[0, :4] += 1e-6
        model.bias[2] = torch.nextafter(model.bias[2], torch.tensor(9.0))
    found = weights_metric(model, before, gradient_norm=1.0, rate=1e-4)
    assert found == {"policy/weights_changed": pytest.approx(5 / 88, abs=1e-12)}
    assert weights_metric(model, before, gradient_norm=1.0, rate=0.0) == {}
    assert weights_metric(model, before, gradient_norm=1e-9, rate=1e-4) == {}
    model.weight.requires_grad_(False)
    assert [len(part) for part in weight_sample(model)] == [8]  # frozen weights are not expected to change
    model = torch.nn.Linear(64, 4096, bias=False)
    (sample,) = weight_sample(model)  # every 65th of 262144: one column further each time
    assert len(sample) == 4033
    before = [sample]
    with torch.no_grad():
        model.weight[:, 3] += 1.0
    found = weights_metric(model, before, gradient_norm=1.0, rate=1.0)
    assert found["policy/weights_changed"] == pytest.approx(1 / 64, rel=0.02)


@pytest.mark.parametrize(("seen", "limit", "words"), [
    ((0.0, 0.42, 0.04, 0.1), 64, ["96% mark no answer (42% are right if the last number counts)"]),
    ((0.0, 0.0, 0.1, 0.9), 64, ["90% are cut", "sampling.max_tokens=128", "90% mark no answer"]),
    ((0.2, 0.2, 0.9, 0.6), None, ["60% are cut", "twice the sampling.max_tokens"]),
    ((0.0, 0.0, 1.0, 0.0), 64, ["all are wrong: take easier"]),
    ((1.0, 1.0, 1.0, 0.0), 64, ["all are right: take harder"]),
    ((0.4, 0.4, 0.8, 0.2), 64, []),
])  # fmt: skip
def test_a_weak_first_look_names_its_causes_and_their_settings(seen, limit, words):
    causes = first_look(dict(zip(("accuracy", "lenient_accuracy", "answered", "truncated"), seen, strict=True)), limit)
    assert len(causes) <= 2 and bool(causes) == bool(words) and [w for w in words if w not in str(causes)] == []


@pytest.mark.parametrize(("gates", "changes", "state", "warns"), [
    ({}, {"steps": 2}, "invalid", True),
    ({"stuck_groups": None}, {}, "complete", True),
    ({}, {"algorithm": {"name": "grpo", "group_size": 4}, "control": "random"}, "complete", False),
])  # fmt: skip
def test_a_short_run_without_a_signal_warns_at_once_and_is_invalid(gates, changes, state, warns, tmp_path, caplog):
    result = train(make_spec(gates, **{"steps": 1, **changes}), tmp_path, MemoryLog(), cache=tmp_path)
    told = [record.message for record in caplog.records if "no rewards of the first step differ" in record.message]
    assert (result.state, len(told)) == (state, warns) and all("100% mark no answer" in words for words in told)
    if state == "invalid":
        assert result.reason.startswith("no rewards of 2 steps differ, so nothing is learnt; of the completions, 100%")


@pytest.mark.slow
def test_a_run_without_any_signal_is_invalid_at_the_same_step_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setitem(STEPS, "stuck_groups", 6)
    spec, whole, parts = make_spec({}), MemoryLog(), MemoryLog()
    result = train(spec, tmp_path / "whole", whole, cache=tmp_path)
    assert result.state == "invalid"
    assert "train/stuck_groups was above 0.98 for 6 steps in a row (1 at step 6)" in (result.reason or "")
    assert result.summary["rollouts"] == 6 * 8
    assert whole.history("train/stuck_groups")[-1] == (6, 1.0)  # the step that ended it is on record
    stopped = train(spec, tmp_path / "parts", parts, cache=tmp_path, should_stop=StopAfter(4))
    assert stopped.state == "stopped"
    again = train(spec, tmp_path / "parts", parts, cache=tmp_path)
    assert parts.resumed_at == [-1, 4]
    assert (again.state, again.reason) == (result.state, result.reason)
    assert parts.without_clocks() == whole.without_clocks()


@pytest.mark.parametrize(("rate", "state"), [(1e-30, "invalid"), (1e-5, "complete")])
def test_an_update_that_is_lost_in_rounding_makes_the_run_invalid(rate, state, tmp_path, monkeypatch):
    monkeypatch.setitem(STEPS, "weights_changed", 2)
    spec = make_spec({"stuck_groups": None}, engine="transformers", optimizer={"learning_rate": rate}, steps=3,
                     algorithm={"name": "ppo", "group_size": 4}, rewards={"token_entropy": 1})  # fmt: skip
    log = MemoryLog()
    result = train(spec, tmp_path, log, cache=tmp_path)
    assert result.state == state
    if state == "invalid":  # the one row of the embeddings that is exactly 0 did change: 64 of the sampled weights
        assert "policy/weights_changed was below 0.001 for 2 steps in a row" in (result.reason or "")
        assert len(log.history("policy/weights_changed")) == 2
    else:
        assert min(value for _, value in log.history("policy/weights_changed")) > 0.5
