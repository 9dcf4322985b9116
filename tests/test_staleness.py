"""Rollouts of older weights: which weights sample, what ratios and corrections then see, what is refused."""

import hashlib
import threading
from copy import deepcopy

import factories
import pytest
import torch
from cohort.harness.checks.disk import estimate_disk
from cohort.harness.checks.memory import estimate_run, peak_bytes
from cohort.harness.devices.sharding import copied
from cohort.harness.record.run import CHECKPOINTS
from cohort.harness.run import build as state
from cohort.harness.run.build import prepare
from cohort.harness.run.checkpoint import latest_checkpoint
from cohort.harness.run.loop import train
from cohort.harness.run.step import train_step
from factories import FEW
from fakes import MemoryLog


def make_spec(**changes):
    rewards = {"token_entropy": 1.0}  # teaches an untrained policy too
    fixed = {"rewards": rewards, "checkpoints": {"every": 2}, "optimizer": {"learning_rate": 1e-3}, "steps": 5}
    return factories.make_spec(**{**FEW, **fixed, **changes})


class WatchedEngine:
    """An engine that notes the hash of the policy's weights whenever it samples, and whenever it gets a version."""

    def __init__(self, engine, policy):
        self.engine, self.policy = engine, policy
        self.sampled, self.versions = [], {0: self.fingerprint()}

    def fingerprint(self):
        numbers = [value.numpy().tobytes() for value in self.policy.state_dict().values()]
        return hashlib.sha256(b"".join(numbers)).hexdigest()

    def sample(self, *arguments, **settings):
        self.sampled.append(self.fingerprint())
        return self.engine.sample(*arguments, **settings)

    def load_weights(self, weights, version):
        self.engine.load_weights(weights, version)
        self.versions[version] = self.fingerprint()

    def __getattr__(self, name):
        return getattr(self.engine, name)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_step_t_samples_from_the_weights_of_step_t_minus_l(staleness, lora, tmp_path):
    spec = make_spec(staleness=staleness, lora=lora)
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    run.engine = engine = WatchedEngine(run.engine, run.learner.policy)  # pyright: ignore
    for step in range(5):
        train_step(run, spec.task.prompts("train"), step)
    assert len(set(engine.versions.values())) == 6  # every step changes the weights
    assert engine.sampled == [engine.versions[max(0, step - staleness)] for step in range(5)]
    trained = {name for name, p in run.learner.policy.named_parameters() if p.requires_grad}
    assert all(older.keys() == trained for older in run.learner.older)  # of frozen weights no copies are kept


def test_a_checkpoint_that_is_copied_while_older_weights_sample_has_the_newest_ones(tmp_path, monkeypatch):
    spec, sampling = make_spec(staleness=1), threading.Event()
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    policy, engine, sample = run.learner.policy, run.engine, run.engine.sample
    train_step(run, spec.task.prompts("train"), 0)
    newest = deepcopy(policy.state_dict())

    def until_copied(*given, **named):
        assert not torch.equal(newest["lm_head.weight"], policy.state_dict()["lm_head.weight"])
        sampling.set()
        assert run.writer.copied.wait(60)
        return sample(*given, **named)

    def while_it_samples(tree, **how):
        assert sampling.wait(60)
        return copied(tree, **how)

    engine.sample = until_copied  # pyright: ignore
    monkeypatch.setattr(state, "copied", while_it_samples)
    run.save(1)
    train_step(run, spec.task.prompts("train"), 1)
    run.close()
    saved = latest_checkpoint(tmp_path / CHECKPOINTS, spec.digest())
    for name, value in saved.policy_weights(policy).items():
        assert torch.equal(value, newest[name]), name


def steps_of(tmp_path, **changes):
    log = MemoryLog()
    assert train(make_spec(**changes), tmp_path, log, cache=tmp_path).state == "complete"
    return log


def test_ratios_are_those_to_the_weights_that_sampled(tmp_path):
    log = steps_of(tmp_path, staleness=2)
    kl, ratio = (dict(log.history(name)) for name in ("staleness/kl", "policy/ratio_max"))
    assert abs(kl[1]) < 1e-9 and ratio[1] == pytest.approx(1, abs=1e-5)  # nothing is older than the start
    assert all(kl[step] > 1e-6 and ratio[step] > 1.001 for step in (2, 3, 4, 5))
    shares = [share for _, share in log.history("staleness/effective_samples")]
    assert shares[0] == pytest.approx(1, abs=1e-5) and all(0.05 < share < 0.99999 for share in shares[1:])
    assert not log.history("mismatch/kl")  # the engine's own error, which has a gate


@pytest.mark.slow
def test_a_correction_weighs_stale_rollouts_and_the_ratio_starts_at_the_policy_of_the_step(tmp_path):
    log = steps_of(tmp_path, staleness=2, mismatch={"correction": "truncated"})
    weights = dict(log.history("mismatch/weight"))
    assert weights[1] == pytest.approx(1, abs=1e-5)
    assert abs(weights[5] - 1) > 1e-5
    assert all(value == pytest.approx(1, abs=1e-4) for _, value in log.history("policy/ratio_max"))


def test_older_weights_count_in_memory_and_on_disk():
    fresh, stale = make_spec(), make_spec(staleness=3)
    disk = [estimate_disk(spec, "nothing") for spec in (fresh, stale)]
    weights = estimate_run(fresh)[0]["gradients"]  # as many bytes as weights
    assert disk[1].checkpoint - disk[0].checkpoint == 3 * weights
    assert peak_bytes(estimate_run(stale)[0]) - peak_bytes(estimate_run(fresh)[0]) == 3 * weights
