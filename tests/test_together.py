"""LoRA runs that share one frozen model and one engine: each samples, learns and ends as it does alone."""

import os
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cohort.harness.base.files import read_json
from cohort.harness.checks.memory import estimate
from cohort.harness.console.views import show_dry_run
from cohort.harness.data import Call, Group, Prompt, Rollout, Sampling
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.lora import adapter_weights, policies_on
from cohort.harness.policy.model import model_config
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import together as together_module
from cohort.harness.run.cold_start import start_policy
from cohort.harness.run.loop import train
from cohort.harness.run.together import Together
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import LoRA, parse_run
from cohort.harness.study.plan import Plan, sharing_key
from cohort.harness.study.preflight import trials_together
from cohort.harness.study.queue import Outcome, Queue
from cohort.harness.study.runner import dry_run, run_study
from factories import make_study
from fakes import MemoryLog, StopAfter, tiny_codec
from safetensors.torch import load_file
from test_train import BASE

ADAPTER = {"rank": 4, "alpha": 8.0}
FEW_PROBLEMS = {"every": 2, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 1}
PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7="])]


@pytest.fixture(scope="session")
def cache(cache):
    """With the start of the specs here: a cold start would ask `should_stop` too."""
    start_policy(make_spec(), cache)
    return cache


def make_spec(algorithm="grpo", group_size=4, **changes):
    settings = {"name": algorithm, "group_size": group_size}
    rewards = {"format": 1.0}  # of a model that has learned next to nothing some completions earn it
    fixed = {"lora": ADAPTER, "steps": 3, "optimizer": {"learning_rate": 1e-2}, "rewards": rewards,
             "evaluation": FEW_PROBLEMS}  # fmt: skip
    return parse_run({**BASE, **fixed, "algorithm": settings, **changes}, "test")


def train_all(specs, folder, cache, stops):
    """(results, logs) of runs that train together, each in a folder of its number."""
    logs = [MemoryLog() for _ in specs]

    def work(number, models):
        directory = folder / str(number)
        return train(specs[number], directory, logs[number], cache=cache, should_stop=stops[number], models=models)

    return Together(specs, [partial(work, number) for number in range(len(specs))]).results(), logs


def final_adapter(folder):
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "policy" / "adapter_model.safetensors")


def policies(count=3):
    """Policies with adapters that change what they say, all on one model."""
    base = tiny_model(0)
    made = policies_on(base, [(LoRA(**ADAPTER), seed) for seed in range(count)])
    for number, policy in enumerate(made):
        generator = torch.Generator().manual_seed(number)
        for weight in adapter_weights(policy).values():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    return base, made


def test_policies_on_one_model_share_its_weights_and_nothing_else():
    base, (first, second) = policies(2)
    frozen = dict(base.named_parameters())
    for policy in (first, second):
        held = [p for p in policy.parameters() if not p.requires_grad]
        assert {id(p) for p in held} == {id(p) for p in frozen.values()}
    before = {name: weight.clone() for name, weight in adapter_weights(second).items()}
    for weight in adapter_weights(first).values():
        weight.zero_()
    assert all(torch.equal(before[name], weight) for name, weight in adapter_weights(second).items())


@pytest.mark.parametrize("max_batch_rows", [512, 8])
def test_each_row_samples_from_the_policy_of_its_call(max_batch_rows):
    base, made = policies()
    settings = TransformersEngine.Settings(max_batch_rows=max_batch_rows)
    sampling = Sampling(max_tokens=24)
    calls = [Call(PROMPTS, 4, 0, 3, 0), Call(PROMPTS[:3], 2, 1, 3, 1), Call(PROMPTS[1:], 3, 0, 5, 2)]  # rows end apart
    common = TransformersEngine.on_base(settings, base, tiny_codec(), made).generate_each(calls, sampling)
    for call, groups in zip(calls, common, strict=True):
        alone = TransformersEngine(settings, made[call.policy], tiny_codec())
        expected = alone.generate(call.prompts, call.group_size, sampling, seed=call.seed, step=call.step)
        assert [g.prompt.id for g in groups] == [p.id for p in call.prompts]
        assert [[r.token_ids for r in g.rollouts] for g in groups] == [
            [r.token_ids for r in g.rollouts] for g in expected
        ]
        for group, other in zip(groups, expected, strict=True):
            for rollout, same in zip(group.rollouts, other.rollouts, strict=True):
                assert rollout.logprobs == pytest.approx(same.logprobs, abs=1e-5)
    lengths = {len(r.token_ids) for groups in common for g in groups for r in g.rollouts}
    assert len(lengths) > 3  # lines left the batch at different times


def noting(callers, name, method):
    def noted(self, *args):
        callers.setdefault(name, set()).add(threading.current_thread())
        return method(self, *args)

    return noted


@pytest.mark.slow
def test_runs_together_sample_learn_stop_and_go_on_as_they_do_alone(tmp_path, cache, monkeypatch):
    lora, callers = {**ADAPTER, "alpha": 16.0}, {}  # the threads that call the engine, by method
    for name in ("__init__", "generate_each", "load_adapter", "close"):
        monkeypatch.setattr(TransformersEngine, name, noting(callers, name, getattr(TransformersEngine, name)))
    specs = [make_spec(), make_spec("ppo", 8, seed=1, lora=lora, evaluation={**FEW_PROBLEMS, "every": 1})]
    (stopped, _), logs = train_all(specs, tmp_path, cache, [StopAfter(2), lambda: False])
    assert len(callers) == 4 and set.union(*callers.values()) == {threading.current_thread()}
    assert stopped.state == "stopped"
    assert train(specs[0], tmp_path / "0", logs[0], cache=cache).state == "complete"
    assert logs[0].resumed_at == [-1, 2]
    for number, spec in enumerate(specs):
        alone, log = tmp_path / f"alone-{number}", MemoryLog()
        assert train(spec, alone, log, cache=cache).state == "complete"
        for name in ("completion/length", "validation/accuracy", "test/accuracy", "reward/mean"):
            assert logs[number].history(name) == log.history(name), name  # equal samples and grades in every step
        mine, yours = final_adapter(tmp_path / str(number)), final_adapter(alone)
        assert mine.keys() == yours.keys()
        assert max(float((mine[name] - yours[name]).abs().max()) for name in mine) <= 1e-5
        assert log.history("memory/estimate_bytes")
        assert not logs[number].history("memory/estimate_bytes")  # of a process that others use too
    assert logs[0].history("completion/length") != logs[1].history("completion/length")  # they are not one run


class Recorder:
    """An engine that records the calls of each batch, each of which takes a second, and fails when it is told to."""

    def __init__(self, failing=()):
        self.batches, self.failing, self.threads = [], failing, set()

    def generate_each(self, calls, sampling):
        self.threads.add(threading.current_thread())
        self.batches.append(([call.policy for call in calls], sampling.temperature))
        if len(self.batches) - 1 in self.failing:
            raise MemoryError("no room")
        return [[] for _ in calls]


@pytest.fixture
def sampling_takes_all_time(monkeypatch):
    """Of the engine that the test gives to this function."""
    return lambda engine: monkeypatch.setattr(
        together_module, "time", SimpleNamespace(perf_counter=lambda: float(len(engine.batches)))
    )


def turns(specs, works, engine):
    """Runs of works that get (a function that samples, their number) instead of models."""
    together = Together(specs, [lambda models, work=work, n=n: work(partial(ask, together, n), n)
                                for n, work in enumerate(works)])  # fmt: skip
    together.engine = engine
    return together


def ask(together, number, temperature=1.0, *, version=None):
    if version is not None:
        together.versions[number] = version
    together.sample(number, Call(PROMPTS, 2, 0, 0, number), Sampling(temperature=temperature, max_tokens=4))


def test_those_who_wait_sample_in_one_batch_and_an_evaluation_comes_before_a_step(sampling_takes_all_time):
    order = []

    def steps(sample, number):
        for version in range(2):
            sample(version=version)
            order.append((number, version))

    def evaluates(sample, number):
        sample(version=0)
        sample(0.0, version=1)  # greedy
        sample(version=1)
        order.append((number, "end"))

    engine = Recorder()
    sampling_takes_all_time(engine)
    together = turns([make_spec()] * 3, [steps, steps, evaluates], engine)
    together.results()
    assert engine.batches == [([0, 1, 2], 1.0), ([2], 0.0), ([0, 1, 2], 1.0)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, "end")]
    assert together._seconds == pytest.approx([2 / 3, 2 / 3, 5 / 3])  # a share of a third in two batches, one alone
    assert engine.threads == {threading.current_thread()}


class Writer(Recorder):
    """Writes a completion of so many tokens for each run."""

    def generate_each(self, calls, sampling):
        super().generate_each(calls, sampling)
        ends = [Rollout("", (5,) * n, (0.0,) * n, "stop") for n in (2, 14)]
        return [[Group(PROMPTS[0], (5,), (ends[call.policy],))] for call in calls]


def test_the_seconds_of_a_common_batch_are_shared_by_tokens(sampling_takes_all_time):
    sampling_takes_all_time(engine := Writer())
    together = turns([make_spec()] * 2, [], engine)
    for seat in range(2):
        together._waiting[seat] = (Call(PROMPTS[:1], 1, 0, 0, seat), Sampling(max_tokens=16))
    together._sample()
    assert together._seconds == pytest.approx([3 / 18, 15 / 18])  # one more than their tokens
    sampling_takes_all_time(engine := Recorder(failing=[0]))
    failing = turns([make_spec()] * 2, [], engine)
    failing._waiting.update({seat: (Call(PROMPTS[:1], 1, 0, 0, seat), Sampling(max_tokens=16)) for seat in range(2)})
    failing._sample()
    assert failing._seconds == [0.5, 0.5]


def test_an_error_in_a_run_or_a_batch_leaves_nobody_waiting():
    reached = []

    def fails(sample, number):
        sample()
        raise KeyError("mine")

    def survives(sample, number):
        sample()
        with pytest.raises(MemoryError):
            sample()
        sample()
        reached.append(number)

    with pytest.raises(KeyError, match="mine"):
        turns([make_spec()] * 3, [survives, fails, survives], Recorder(failing=[1])).results()
    assert reached == [0, 2]


def test_an_error_of_the_engine_is_that_of_the_run_which_called_it():
    def load(weights):
        raise ZeroDivisionError(weights)

    found = []
    works = [lambda _: together.call(load, "mine"), lambda _: found.append(together.call(abs, -3))]
    together = Together([make_spec()] * 2, works)
    with pytest.raises(ZeroDivisionError, match="mine"):
        together.results()
    assert found == [3]


def test_what_runs_must_have_in_common():
    spec = make_spec()
    same = [
        make_spec("ppo"), make_spec(seed=7), make_spec(group_size=8), make_spec(lora={**ADAPTER, "alpha": 1.0}),
        make_spec(optimizer={"learning_rate": 1e-4}), make_spec(rewards={"format": 0.1, "repetition": 0.1}),
        make_spec(steps=9),
    ]  # fmt: skip
    assert {sharing_key(other) for other in same} == {sharing_key(spec)}
    others = [
        make_spec(lora={**ADAPTER, "rank": 8}), make_spec(lora={**ADAPTER, "targets": ["q_proj"]}),
        make_spec(sampling={"temperature": 0.9}), make_spec(cold_start={"steps": 41}), make_spec(dtype="bfloat16"),
        make_spec(engine={"name": "transformers", "max_batch_rows": 64}), make_spec(task={"name": "arithmetic"}),
    ]  # fmt: skip
    assert len({sharing_key(other) for other in [spec, *others]}) == 1 + len(others)
    nobody = [make_spec(lora=None), make_spec(engine="scripted"), make_spec(devices=2), make_spec(steps=0)]
    assert {sharing_key(other) for other in nobody} == {None}


def a_study(**changes):
    run = {**BASE, "lora": ADAPTER, "steps": 2, "algorithm": {"name": "grpo", "group_size": 4}}
    arms = {"grpo": {}, "rloo": {"algorithm": {"name": "rloo", "group_size": 4}}}
    return make_study(**{"name": "lockstep", "run": run, "arms": arms, **changes})


def test_a_study_says_which_trials_share(tmp_path, capsys):
    plan = Plan(a_study(), tmp_path)
    (found,) = trials_together(plan, 2, None).values()
    assert found == {"trials": plan.keys, "at_once": 2}  # 4 trials for 2 workers
    spec = plan.spec(plan.keys[0])
    parts = [estimate(spec, model_config("tiny"), 12, torch.device("cpu"), together=n) for n in (1, 3)]
    trainable = parts[0]["gradients"]  # float32; weight, gradient and two moments of each
    assert parts[1]["gradients"] == 3 * trainable and parts[1]["optimizer"] == 6 * trainable
    assert parts[1]["policy"] - parts[0]["policy"] == 2 * trainable
    assert parts[1]["activations"] == parts[0]["activations"]  # one learns at a time
    show_dry_run("s", "?", dry_run(a_study(), tmp_path, workers=2))
    words = " ".join(capsys.readouterr().out.split())
    assert "4 trials share one model and engine, 2 at a time in each worker ('grpo' and 'rloo')" in words
    assert dry_run(a_study(), tmp_path, workers=2, together=False)["together"] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": {**BASE, "algorithm": {"name": "grpo", "group_size": 4}}}, "they must have lora, devices=1"),
        ({"seeds": [0], "arms": {"a": {}, "b": {"lora.rank": 8}}}, "all differ in one of model, task"),
    ],
)
def test_together_is_refused_where_nothing_can_be_shared(tmp_path, changes, words):
    with pytest.raises(SpecError, match=words):
        trials_together(Plan(a_study(**changes), tmp_path), 2, True)


def test_a_worker_takes_trials_that_share_but_none_along_with_one_that_kills_its_workers(tmp_path):
    study = a_study(arms={"grpo": {}, "full": {"lora": None}, "rloo": {"algorithm": "rloo"}})
    queue = Queue(Plan(study, tmp_path))
    queue.retry_failed()
    first = queue.claim()
    assert first is not None and first.key == ("grpo", 0)
    assert [claim.key for claim in queue.claim_with(first, 2)] == [("rloo", 0), ("grpo", 1)]
    assert queue.claim_with(first, 0) == []
    for number in range(3):  # its worker dies again and again, and nobody else's
        first.lease.release()
        queue.status()
        if number < 2:
            first = _claimed_again(queue, first.key)
    again = _claimed_again(queue, first.key)
    assert again.stuck and queue.claim_with(again, 5) == []
    queue.finish(again, Outcome("invalid", "test"))


def _claimed_again(queue, key):
    while (claim := queue.claim()) is not None and claim.key != key:
        pass
    assert claim is not None
    return claim


@pytest.mark.attack("Death of a process with several runs")
@pytest.mark.long
def test_a_killed_process_takes_no_finished_work_with_it(tmp_path):
    killed: list[int] = []

    def kill(status):
        running = [t for t in status.trials if t.state == "running" and t.done >= 2 and t.phase == "train"]
        if running and len(killed) < 2:
            lease = read_json(next(Path(running[0].directory).glob("*lease*")))
            killed.append(lease["pid"])
            os.kill(lease["pid"], signal.SIGKILL)

    study = a_study(run={**a_study().run, "steps": 6, "checkpoints": {"every": 1}})
    status = run_study(study, tmp_path / "killed", workers=1, command="x", on_status=kill, together=True)
    assert killed and status.finished and status.all_valid
    whole = run_study(study, tmp_path / "whole", workers=1, command="x", together=False)
    assert [t.accuracy for t in status.trials] == [t.accuracy for t in whole.trials]
    assert [t.generated_tokens for t in status.trials] == [t.generated_tokens for t in whole.trials]
