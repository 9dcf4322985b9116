"""`cohort gpu`: every claim on a fake GPU, with and without a fault that it must find, and on this machine."""

import copy
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, cycle
from pathlib import Path
from typing import ClassVar

import fake_vllm
import psutil
import pytest
import torch
from cohort.harness.api.machine import Check
from cohort.harness.checks.memory import estimate, estimate_run, peak_bytes
from cohort.harness.data import PromptFormat
from cohort.harness.engines.vllm import INVARIANT, VLLMEngine
from cohort.harness.extras.gpu import backend, book, claims, raising
from cohort.harness.extras.gpu.backend import Backend, make_up
from cohort.harness.extras.gpu.book import measure_claims
from cohort.harness.extras.gpu.claims import CLAIMS, KEPT, LORA, PPO, RECOMPUTED, Number, _difference
from cohort.harness.policy.model import load_policy
from cohort.harness.policy.text import load_codec
from cohort.harness.record.events import EVENTS, RunHistory, read_history
from cohort.harness.settings.run import parse_run
from fakes import tiny_codec
from pretend_cuda import pretend_cuda
from real_data import golden
from transformers import Qwen2Config

GIB = 2**30
BY_NAME = {claim.name: claim for claim in CLAIMS}


class LLM(fake_vllm.LLM):
    """The fake vLLM with the fault that is planted in the process that checks a claim."""

    faults = frozenset()

    def _add_lora(self, request):
        super()._add_lora(request)
        if "the adapter is not there" in LLM.faults:
            self.adapted[request.number] = self.model

    def collective_rpc(self, method, args=(), kwargs=None):
        if "changes are not seen" in LLM.faults and method is backend._change:
            return [None]
        return super().collective_rpc(method, args, kwargs)

    def generate(self, prompts, parameters, use_tqdm, lora_request=None):
        if LLM.faults & {"noise of the batch", "invariant noise of the batch"}:
            parameters = [replace(one, seed=(one.seed or 0) + len(prompts)) for one in parameters]
        return super().generate(prompts, parameters, use_tqdm, lora_request)

    def _answer(self, row, parameters, model):
        if "samples with old weights" in LLM.faults and parameters.prompt_logprobs is None:
            model = vars(self).setdefault("old", copy.deepcopy(model))
        if "short rows" in LLM.faults:
            parameters = replace(parameters, max_tokens=3)
        found = super()._answer(row, parameters, model)
        is_off = ("long rows are off" if parameters.max_tokens > 9 else f"{self.dtype} is off") in LLM.faults
        if is_off and parameters.prompt_logprobs is None and "sleep" not in self.calls:
            values = found.outputs[0].logprobs.logprobs
            values[:] = [value - 3 for value in values]
        return found


@dataclass(frozen=True)
class Fake(Backend):
    """A GPU with vLLM, both fake, whose runs are not trained but told; `faults` is what is wrong with it."""

    faults: frozenset[str] = frozenset()
    num_devices: int = 2
    on_gpu: bool = True
    late: ClassVar = [0.0]  # seconds that have passed in the process of a claim: the clock decides nothing

    @property
    def device(self):
        return torch.device("cpu")

    def checks(self):
        if "crash" in self.faults:
            os.abort()
        if "full memory" in self.faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.faults & {"interrupt", "hang"}:
            sleeper = subprocess.Popen(["sleep", "600"])
            (self.folder / "sleeper").write_text(str(sleeper.pid))
            if "interrupt" in self.faults:
                os.kill(os.getppid(), signal.SIGINT)
            sleeper.wait()
        return [Check("driver", "problem" if "old driver" in self.faults else "ok", "580.1", "update it")]

    def free_bytes(self):
        return 0 if "memory is taken" in self.faults else 80 * GIB

    def now(self):
        self.late[0] += 60 * ("slow copy" in self.faults)
        is_slow = "slow disk" in self.faults and (self.folder / "written").exists()
        return self.late[0] + 60 * is_slow

    def settings(self, **changes):
        few = {"sampling": {"max_tokens": 3}, "rollouts_per_step": 8, "device": "cpu", "steps": 3}
        return super().settings(**{**few, **changes})

    def start(self, spec, policy, codec):
        noise = ["noise of the batch", "invariant noise of the batch"]
        LLM.faults = self.faults - {noise[not spec.engine.batch_invariant]}
        fake_vllm.LLM.loads_weights = "stale tensor" not in self.faults
        os.environ[INVARIANT] = str(int(spec.engine.batch_invariant))  # that vLLM was loaded with
        if (started := self.folder / "started").exists():
            self.late[0] += 150 * ("slow start" in self.faults)
        else:
            self.late[0] += 400 * ("slow first start" in self.faults)
        started.touch()
        return VLLMEngine(spec.engine.for_run(spec.dtype, spec.autocast, lambda: 30, 8), policy, codec)

    def cache_of(self, engine):
        return "fake.Runner", 1

    def held_bytes(self):
        if (llm := vars(fake_vllm.LLM).get("last")) is None:
            return 0
        parts = estimate_run(self.spec())[0]
        held = (parts["engine"] + parts["kv_cache"]) * (3 if "it takes too much" in self.faults else 1)
        return (
            held * ("memory stays" in self.faults or not llm.asleep)
            + ("memory leaks" in self.faults) * len(llm.calls) * GIB // 10
        )

    def train(self, name, settings, *, kill_after=None):
        if f"{name} fails" in self.faults:
            raise RuntimeError("a run that failed")
        spec = parse_run(settings, name)
        peak = peak_bytes(estimate_run(spec)[0])
        facts = {"memory/estimate_bytes": 5 * GIB + peak, "mismatch/at_start": 0.1 + 9 * ("wrong parts" in self.faults)}
        each = {"policy/loss": 1.0, "policy/grad_norm": 1 + 0.1 * (f"{name} differs" in self.faults),
                "policy/entropy": 1.0, "reward/mean": float("nan"),
                "seconds/step": 4.0 + 9 * (f"{name} is slow" in self.faults),
                "seconds/total": 16 + 99 * (name == "every-1" and "slow checkpoints" in self.faults),
                "memory/peak_bytes": 5 * GIB + peak * (3 if f"{name} is large" in self.faults else 1)
                - peak // 3 * (f"{name} is small" in self.faults),
                "seconds/update": 1 + 99 * ("slow update" in self.faults),
                "seconds/grade": 0.1 + 3 * ("slow grading" in self.faults)}  # fmt: skip
        steps = range(1, (kill_after or spec.steps) + 1)
        history = {key: {0: (value, 0)} for key, value in facts.items()}
        history |= {key: dict.fromkeys(steps, (value, 0)) for key, value in each.items()}
        first, last = 0.25 + 0.5 * ("real-start is another" in self.faults), 0.7 - 0.4 * ("real is slow" in self.faults)
        history["validation/accuracy"] = {0: (first, 0), spec.steps: (last, 0)}
        history["mismatch/kl"] = {1: (1e-3, 0), 2: (1e-3 + (f"{name} drifts" in self.faults), 0)}
        work = ("sampling", "scoring", "learning")
        history |= {f"flops/{key}": {step: (1e9 * step, 0) for step in steps} for key in work}
        is_second = name == "killed" and kill_after is None and "it begins anew" not in self.faults
        return RunHistory(history=history, attempts=[{}] * (1 + is_second))

    def fail_one(self, settings, rank):
        assert parse_run(settings, "raises").devices == 2
        return 20 + 1800 * (
            f"rank {rank} waits" in self.faults
        ), "no words" if "no reason" in self.faults else raising.WORDS

    def real_settings(self, **changes):
        return self.settings(**changes)

    def train_here(self, name, settings):
        parse_run(settings, name)
        off = 1.002 if name == "ppo-cpu" and "PPO differs" in self.faults else 1.0
        steps = {1: (1.0, 0), 2: (off, 0)}
        return RunHistory(history=dict.fromkeys(("policy/loss", "policy/grad_norm", "policy/entropy"), steps))

    def rates(self, dtype):
        return 1e9, 1e12


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A GPU for processes that are forked from this one, which has imported and counted what they need."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("book")
        fake_vllm.install(patch, folder / "vllm")
        patch.setattr(sys.modules["vllm"], "LLM", LLM)
        patch.setattr(VLLMEngine, "_last", None)
        patch.setenv(INVARIANT, "0")
        one = Fake(folder, "tiny", "vllm", num_tokens=20, num_rows=8, num_cycles=3, long_tokens=12)
        for changes in (KEPT | PPO, RECOMPUTED, RECOMPUTED | PPO, KEPT, KEPT | LORA, {"devices": 2}):
            estimate_run(one.spec(**changes))
        for changes in ({}, LORA):
            spec = one.spec(**changes)
            one.start(spec, *one.policy(spec)).close()
        del fake_vllm.LLM.last
        yield one


@pytest.fixture
def fake(warm, tmp_path):
    return replace(warm, folder=tmp_path)


FAULTS, OTHER_FAULTS = golden("gpu_faults").values()
# Those of four in which the fault of a claim is planted; neighbours are in different ones.
ROUNDS = dict(zip(FAULTS, cycle(combinations(range(4), 2)), strict=False))


def found_of(backend, claims=CLAIMS, **how):
    found, _ = measure_claims(claims, backend, print, start="fork", **how)
    return {one.claim: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_a_fault_makes_its_own_claim_fail_and_no_other_and_every_claim_passes_without_its_fault(fake, number):
    """A fault that made another claim fail would be seen in the round that has the first and not the second."""
    planted = {claim for claim, rounds in ROUNDS.items() if number in rounds}
    found = found_of(replace(fake, faults=frozenset(FAULTS[claim][0] for claim in planted)))
    failed = {claim: one.reason for claim, one in found.items() if one.state == "FAIL"}
    assert failed.keys() == planted, failed
    assert list(found) == list(BY_NAME) == list(FAULTS)
    assert all(one.state == "PASS" and one.numbers for one in found.values() if one.claim not in planted)
    for claim in planted:
        assert FAULTS[claim][1] in found[claim].reason


@pytest.mark.parametrize(("claim", "fault", "words"), OTHER_FAULTS)
def test_a_second_fault_of_a_claim_makes_it_fail_too(fake, claim, fault, words):
    limited = replace(BY_NAME[claim], limit=0.5 if fault == "hang" else 60)
    found = found_of(replace(fake, faults=frozenset([fault])), [limited])[claim]
    assert found.state == "FAIL" and words in found.reason


@pytest.mark.parametrize(
    ("changes", "skipped"),
    [
        ({"num_devices": 1}, {"two-devices", "tensor-parallel", "rank-raises"}),
        ({"on_gpu": False}, {"batch-invariant", "algorithms", "real-model"}),
    ],
)
def test_what_a_machine_lacks_skips_the_claims_that_need_it(fake, changes, skipped):
    names = ("two-devices", "tensor-parallel", "rank-raises", "batch-invariant", "algorithms", "real-model", "resume")
    found = found_of(replace(fake, **changes), [BY_NAME[name] for name in names])
    assert {claim for claim, one in found.items() if one.state == "SKIPPED"} == skipped
    assert all(found[claim].reason for claim in skipped) and found["resume"].state == "PASS"


def test_without_vllm_its_claims_are_skipped_with_what_to_install(fake):
    names = ("cold-start", "warm-start", "batch-invariant", "tensor-parallel")
    found = found_of(replace(fake, engine="transformers"), [BY_NAME[name] for name in names])
    assert {(one.state, "pip install" in one.reason) for one in found.values()} == {("SKIPPED", True)}


@pytest.mark.parametrize(("fault", "seconds", "reason"), [("interrupt", 60, "interrupted"), ("hang", 0.5, "is over")])
def test_a_signal_and_the_end_of_the_time_skip_what_is_left(fake, fault, seconds, reason):
    told, claims = [], [BY_NAME[name] for name in ("machine", "free-memory")]
    backend = replace(fake, faults=frozenset([fault]))
    found, is_whole = measure_claims(claims, backend, told.append, seconds, start="fork")
    assert [(one.claim, one.state) for one in found] == [("machine", "SKIPPED"), ("free-memory", "SKIPPED")]
    assert all(reason in one.reason for one in found) and told == found
    assert is_whole == (fault == "hang")
    if fault == "interrupt":
        sleeper = int((fake.folder / "sleeper").read_text())
        while is_running(sleeper):  # until the signal that killed its whole group has arrived
            time.sleep(0.01)


def is_running(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_claims_and_backend_reach_a_process_that_is_started_anew(warm):
    real = Backend(warm.folder, "tiny", "vllm")
    for claim in CLAIMS:
        sent, backend = pickle.loads(pickle.dumps((claim, real)))
        assert (sent.name, repr(sent.check), backend) == (claim.name, repr(claim.check), real)


def test_runs_of_the_book_stay_out_of_the_store_that_the_user_named(tmp_path, monkeypatch):
    for name in ("COHORT_TRACKING_URI", "COHORT_STORAGE", "COHORT_RUNS"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/sh\nenv > "$5"\nexit 3\n')
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(RuntimeError, match="the run 'one' ended with status 3"):
        Backend(tmp_path, "tiny", "transformers").train("one", {})
    assert "PATH=" in (told := (tmp_path / "one.yaml").read_text()) and re.findall("COHORT_.*", told) == [
        "COHORT_MIRROR=none"
    ]


@pytest.mark.slow
def test_algorithms_are_those_that_learn_from_rewards_and_steps_of_one_device_are_equal(warm, tmp_path, monkeypatch):
    class Gpu(Backend):
        device, on_gpu = torch.device("cpu"), True

    few, names = ["distill", "grpo", "ppo"], claims.plugins.names
    monkeypatch.setattr(claims.plugins, "names", lambda kind: few if kind == "algorithm" else names(kind))
    monkeypatch.setenv("COHORT_MIRROR", "mlflow")
    count, furthest = claims.algorithms(Gpu(tmp_path, "tiny", "vllm"))
    assert (count.value, furthest.value) == (2, 0)
    for name in ("ppo-gpu", "ppo-cpu"):
        assert read_history(tmp_path / "runs/train" / name / EVENTS).history["policy/grad_norm"][2][0] > 0
    assert not (tmp_path / "runs/mlflow.db").exists()


def test_a_number_holds_within_its_bounds_and_never_where_it_is_not_finite():
    held = [Number("n", 1.0), Number("n", 1, most=1), Number("n", 1, least=1, most=2), Number("n", "text")]
    broken = [Number("n", 1, most=0.9), Number("n", 1, least=1.1), Number("n", math.nan), Number("n", math.inf)]
    assert [one.holds for one in (*held, *broken)] == [True] * 4 + [False] * 4
    assert str(Number("largest", 0.25, "nats", least=0, most=1)) == "largest 0.25 nats (at least 0, at most 1)"


def test_runs_are_told_apart_by_one_value_and_by_what_they_lack():
    def run(**values):
        return RunHistory(history={name.replace("_", "/"): {1: (value, 0)} for name, value in values.items()})

    one = run(a_loss=2.0, seconds_step=1.0, a_nan=math.nan, system_cpu=5.0)
    assert _difference(one, run(a_loss=2.0, seconds_step=9.0, a_nan=math.nan, memory_peak=1.0)) == 0
    assert _difference(one, run(a_loss=1.5, seconds_step=1.0, a_nan=math.nan)) == 0.25
    assert _difference(one, run(a_loss=2.0)) == math.inf


def test_the_command_says_each_claim_and_ends_with_1_if_one_fails(fake, tmp_path, monkeypatch, cohort):
    def gpu(only, *options, faults=()):
        monkeypatch.setattr(book, "Backend", lambda *_: replace(fake, faults=frozenset(faults)))
        monkeypatch.setattr(book, "measure_claims", partial(measure_claims, start="fork"))
        return cohort("gpu", "tiny", "--runs", tmp_path / "runs", "--only", only, *options)

    assert gpu("machine,free-memory") == 0 and "PASS free-memory" in cohort.err
    assert "580.1" in cohort.out and "free 80 GiB (at least" in cohort.out and "2 PASS" in cohort.out
    assert gpu("machine,free-memory", "--json", faults=["memory is taken"]) == 1
    claims = cohort.json()["claims"]
    assert [one["state"] for one in claims] == ["PASS", "FAIL"]
    (number,) = claims[1]["numbers"]
    assert number.pop("least") > 0 and number == {"name": "free", "value": 0, "unit": "GiB", "most": None}
    assert gpu("machine,free-memory", faults=["interrupt"]) == 130
    assert gpu("sleeps") == 2 and "did you mean 'sleep'" in cohort.err
    assert list((tmp_path / "runs").iterdir()) == []  # it leaves nothing


def test_a_call_of_a_few_minutes_goes_on_where_the_last_one_stopped(fake, tmp_path, monkeypatch):
    def call(*faults):
        monkeypatch.setattr(book, "Backend", lambda *_: replace(fake, faults=frozenset(faults)))
        told = []
        found, is_whole = book.run_book(tmp_path, "tiny", [], told.append, minutes=9)
        return [one.claim for one in told], [one.state for one in found], is_whole

    names = ("free-memory", "machine", "resume")
    monkeypatch.setattr(book, "CLAIMS", [BY_NAME[name] for name in names])
    monkeypatch.setattr(book, "measure_claims", partial(measure_claims, start="fork"))
    assert call("interrupt") == ([*names], ["PASS", "SKIPPED", "SKIPPED"], False)
    assert call() == (["machine", "resume"], ["PASS"] * 3, True)
    assert call() == ([*names], ["PASS"] * 3, True)  # a book that is whole begins anew


@pytest.mark.slow
def test_what_is_kept_and_what_is_computed_again_have_estimates_of_their_own():
    """Of the shape that a GPU gets: a share of vLLM in them would hide it."""
    config = Qwen2Config(**backend.SHAPES["cuda"], tie_word_embeddings=True)
    on_gpu = Backend(Path(), "tiny", "vllm")
    with pretend_cuda():
        found = {name: peak_bytes(estimate(on_gpu.spec(**own), config, 30)) for name, own in claims.PEAKS.items()}
    for algorithm in ("grpo", "ppo"):
        assert found[f"{algorithm}-memory"] > 1.25 * found[f"{algorithm}-memory-recomputed"]


def test_a_model_that_is_made_up_can_be_used_and_has_a_character_for_each_token(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_up(tmp_path / "model", {**sizes, "intermediate_size": 64, "vocab_size": 300})
    policy = load_policy(str(tmp_path / "model"), seed=0)
    codec = load_codec(str(tmp_path / "model"), PromptFormat())
    assert codec.end_ids(policy) == [1] and policy.config.vocab_size == 300
    text = codec.decode(range(3, 300))
    assert len(set(text)) == 297 and codec.encode("1+2=") == tiny_codec().encode("1+2=")


@pytest.mark.long
def test_a_claim_is_checked_on_this_machine_with_weights_that_are_made_up(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,), is_whole = book.run_book(tmp_path, None, ["checkpoint"], print)
    assert (found.state, is_whole) == ("PASS", True), found.reason
    size, *_ = found.numbers
    assert size.value * GIB > 4 * (4096 * 128 + 4 * 3 * 128 * 384)  # embeddings and products, in float32
