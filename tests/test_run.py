"""A run in progress, part by part: how it is built or resumed, saved, ended and charged."""

import json
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cohort.harness.base.files import sha256
from cohort.harness.devices import ranks
from cohort.harness.policy import flops
from cohort.harness.policy.lora import has_adapter
from cohort.harness.policy.sources import Base
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import build
from cohort.harness.run.checkpoint import Checkpoint
from cohort.harness.settings.stages import Stage
from factories import FEW, make_spec, staged
from fakes import MemoryLog


def prepared(folder, log=None, **changes):
    """A run of few tokens and the number of its finished steps."""
    return build.prepare(make_spec(**{**FEW, **changes}), folder, log or MemoryLog(), folder, lambda: False)


def noting(seen, result=None):
    """A function that notes what it is given."""

    def work(*given, **named):
        seen.append((*given, named) if named else given)
        return result

    return work


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("run"))[0]


@pytest.mark.parametrize(
    ("exact", "staleness", "correction", "does", "expected"),
    [
        (True, 0, "none", False, True), (True, 0, "masked", False, True), (True, 2, "none", False, True),
        (True, 2, "masked", False, False), (False, 0, "none", False, False), (True, 0, "none", True, False),
    ],
)  # fmt: skip
def test_the_samplers_log_probs_stand_for_the_policys_where_both_are_the_same(
    run, exact, staleness, correction, does, expected
):
    own = make_spec(**{**FEW, "staleness": staleness, "mismatch": {"correction": correction}})
    stage = replace(run.stage, does=SimpleNamespace(samplers={"other": "tiny"}) if does else None)
    engine: Any = SimpleNamespace(exact_logprobs=exact)
    other = build.Run(own, engine, run.learner, run.log, run.directory, run.codec, stage=stage)
    assert run.learner.sampler_is_exact is expected and other.memory_before == 0


def test_the_operations_of_a_sampler_and_of_rewards_that_read_a_model_are_counted(run, monkeypatch):
    own = flops.Costs.of(tiny_model(0))
    monkeypatch.setattr(flops.Costs, "named", lambda name: replace(own, adapter=int(name)))
    reward, does = SimpleNamespace(scorer="7"), SimpleNamespace(samplers={"other": "5"})
    spec = run.spec.model_copy(update={"rewards": {"read": reward, "rule": SimpleNamespace(scorer=None)}})
    stage = SimpleNamespace(does=does, spec=spec)
    costs = build.Run(spec, run.engine, run.learner, run.log, run.directory, run.codec, stage=stage).costs  # pyright: ignore
    assert costs == replace(own, sampler=replace(own, adapter=5), scorers=(replace(own, adapter=7),))


def test_a_checkpoint_copies_what_changes_later_and_a_run_that_waits_for_it_copies_nothing(tmp_path, monkeypatch):
    run, _ = prepared(tmp_path, lora={"rank": 2})
    copies, did = [], build.copied
    monkeypatch.setattr(build, "copied", lambda tree, **how: (copies.append(how), did(tree, **how))[1])
    sizes = []
    for step, how in ((1, {}), (2, {"waits": True}), (3, {"is_last": True})):
        run.save(step, **how)
        assert bool(run.writer._thread) is not how.get("waits", False)
        run.writer.check(wait=True)
        sizes.append((tmp_path / f"checkpoints/step-{step:08d}/learner.pt").stat().st_size)
    whole = (
        [how["anew"] for how in copies if "on_first" in how],
        [how["anew"] for how in copies if "on_first" not in how],
    )
    assert whole == ([True, False, True],) * 2 and all(how.get("on_first", True) for how in copies)
    assert sizes[0] == sizes[1] > sizes[2]  # after the last step nothing is trained
    copies.clear()
    plain, _ = prepared(tmp_path / "plain")
    plain.save(1)
    plain.close()
    assert [how.get("on_first", False) for how in copies] == [False, False]
    assert (tmp_path / "plain/checkpoints/step-00000001/state.json").exists()  # it was waited for


@pytest.mark.parametrize(("error", "asked"), [(None, [{"wait": True}]), (KeyboardInterrupt, [])])
def test_a_run_ends_its_engine_after_its_last_checkpoint_unless_a_user_ends_it_at_once(run, error, asked, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "writer", SimpleNamespace(check=lambda **how: seen.append(how)))
    monkeypatch.setattr(run.engine, "close", noting(seen))
    with suppress(KeyboardInterrupt):
        try:
            if error is not None:
                raise error
        finally:
            run.close()
    assert seen == [*asked, ()]


def test_a_kept_file_is_on_disk_before_its_hash_is_logged(run, monkeypatch):
    order, rows = [], [{"text": "a"}, {"text": "b"}]
    monkeypatch.setattr(build, "sync", order.append)
    monkeypatch.setattr(run.log, "kept", noting(order))
    run.keep(3, rows)
    file = run.directory / "rollouts/step-000003.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert order == [file.parent, (3, "rollouts/step-000003.jsonl", sha256(file))]


def test_a_runs_peak_is_the_highest_of_all_and_the_last_is_forgotten(run, monkeypatch):
    seen, peaks = [], iter([5, 9, 7])
    monkeypatch.setattr(build, "peak_memory", lambda: next(peaks))
    monkeypatch.setattr(build, "forget_peak_memory", noting(seen))
    monkeypatch.setattr(run.totals, "peak_memory_bytes", 0)
    assert [run.note_peak() for _ in range(3)] == [5, 9, 7] and len(seen) == 3
    assert run.totals.peak_memory_bytes == 9


@pytest.mark.parametrize(("device", "unit", "each"), [("cpu", "core_seconds", 3), ("cuda", "gpu_seconds", 1)])
def test_a_run_is_charged_for_all_its_devices(run, device, unit, each, monkeypatch):
    monkeypatch.setattr(build, "resolve_device", torch.device)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(run, "spec", run.spec.model_copy(update={"devices": 2, "device": device}))
    monkeypatch.setattr(run, "spent", {unit: 1.0})
    before = run.totals.seconds
    run.charge(10.0)
    assert run.spent == {unit: 1.0 + 2 * each * 10.0} and run.totals.seconds == before + 10.0


def test_operations_are_charged_where_they_are_counted_and_a_summary_has_what_was_measured(run, monkeypatch):
    monkeypatch.setattr(run, "spent", {})
    monkeypatch.setattr(run, "totals", build.Totals(rollouts=3))
    assert run.charge_flops(lambda costs: {"learning": 2.0}) == {"flops/learning": 2.0, "flops/train": 2.0}
    monkeypatch.setattr(run, "costs", None)
    assert run.charge_flops(lambda costs: {"learning": 2.0}) == {"flops/learning": 2.0, "flops/train": 2.0}
    totals = {
        "rollouts": 3.0,
        "generated_tokens": 0.0,
        "optimizer_steps": 0.0,
        "seconds": 0.0,
        "peak_memory_bytes": 0.0,
    }
    assert run.summary() == {**totals, "flops_learning": 2.0, "flops_train": 2.0}
    run.totals.learner_peak_bytes = 4
    assert run.summary()["learner_peak_bytes"] == 4.0


def test_work_without_checkpoints_tells_its_progress_before_it_stops():
    log = MemoryLog()
    build.note_progress(log, lambda: False, "cold start", 1, 2)
    with pytest.raises(build.StoppedEarly):
        build.note_progress(log, lambda: True, "cold start", 2, 2)
    assert log.phases == [("cold start", 1, 2), ("cold start", 2, 2)]


class Placed:
    """A model that notes where it is placed."""

    def __init__(self):
        self.places = []

    def to(self, *place, **named):
        self.places.append((*place, named) if named else place)
        return self


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_goes_to_the_device_of_the_run_unless_several_share_it_and_a_scorer_is_frozen_first(size, monkeypatch):
    monkeypatch.setattr(ranks, "world_size", lambda: size)
    held = []
    monkeypatch.setattr(build, "hold_scorer", lambda model, autocast: (held.append(autocast), model)[1])
    spec, device = make_spec(**{**FEW, "dtype": "bfloat16", "autocast": False}), torch.device("cpu")
    policy, scorer = Placed(), Placed()
    assert build.placed(policy, spec) is policy and not held  # pyright: ignore
    assert build.placed(scorer, spec, scores=True) is scorer and held == [False]  # pyright: ignore
    place = device if size == 1 else None  # None: the learner moves it, in parts
    assert policy.places == [(place, torch.bfloat16)]
    assert scorer.places == [({"dtype": torch.bfloat16},), (place,)]


def test_a_stages_rewards_are_checked_and_its_reference_is_a_scorer(tmp_path, monkeypatch):
    seen, model, places = [], tiny_model(0), []
    reward = SimpleNamespace(check=noting(seen), inputs=lambda: seen.append("inputs"))
    spec = make_spec(**{**FEW, "kl": {"reference": "tiny"}, "algorithm.kl_beta": 0.1})
    monkeypatch.setattr(Stage, "placed", lambda *_: spec.model_copy(update={"rewards": {"one": reward}}))
    monkeypatch.setattr(build, "load_policy", lambda name, *, seed: (name, seed))
    monkeypatch.setattr(build, "placed", lambda policy, spec, *, scores: (places.append((policy, scores)), model)[1])
    monkeypatch.setattr(build, "Learner", lambda spec, policy, reference, origin: SimpleNamespace(reference=reference))
    learner = build.learner_of(Stage("", spec, start=4), tiny_model(1), tmp_path)
    assert (seen, places, learner.reference, learner.start) == ([(), "inputs"], [(("tiny", 0), True)], model, 4)


def test_a_policy_recomputes_only_if_it_is_asked_to():
    seen = []
    old, new = (SimpleNamespace(gradient_checkpointing_enable=noting(seen, "old")) for _ in range(2))
    new.activation_checkpointing_enable = lambda: seen.append("new")
    assert build.recomputing(old, False) is old and not seen  # pyright: ignore
    assert build.recomputing(old, True) is old and build.recomputing(new, True) is new  # pyright: ignore
    assert seen == [(), "new"]


@pytest.mark.parametrize(
    ("setting", "decision", "before", "expected"),
    [
        ("auto", True, False, True),
        ("auto", False, True, True),
        ("auto", False, False, False),
        (False, False, True, False),
    ],
)
def test_a_resumed_run_has_the_weights_of_its_checkpoint_and_recomputes_as_before(
    tmp_path, setting, decision, before, expected, monkeypatch
):
    log, loaded, told, reset = MemoryLog(), [], [], []
    monkeypatch.setattr(build, "reset_peak_memory", lambda: reset.append("reset"))
    spec = make_spec(**{**FEW, "gradient_checkpointing": setting})
    monkeypatch.setattr(build, "decided", lambda spec: spec.model_copy(update={"gradient_checkpointing": before}))
    run, step = build.prepare(spec, tmp_path, log, tmp_path, lambda: False)
    assert (step, log.resumed_at, log.threads, run.base) == (0, [-1], [torch.get_num_threads()], None)
    run.learner.policy.lm_head.weight.data += 1
    run.save(2)
    run.close()
    monkeypatch.setattr(build, "decided", lambda spec: spec.model_copy(update={"gradient_checkpointing": decision}))
    built = build.build_engine(spec, run.learner.policy, run.codec)
    monkeypatch.setattr(built, "load_weights", lambda weights, version: loaded.append((dict(weights), version)))
    monkeypatch.setattr(build, "build_engine", lambda *_: built)
    again, step = build.prepare(spec, tmp_path, log, tmp_path, lambda: False, told.append)
    assert (step, log.resumed_at, again.now, again.cache) == (2, [-1, 2], told.append, tmp_path)
    assert len(reset) == 2 and {*vars(build.Totals()).values()} == {0}
    assert build.recomputes(again.learner.policy) is expected
    ((weights, version),) = loaded
    assert version == 2 and torch.equal(weights["lm_head.weight"], run.learner.policy.lm_head.weight)


def test_a_resumed_run_is_in_the_stage_of_its_step_which_the_loop_ends(tmp_path):
    spec = staged({"name": "one", "steps": 2}, {"name": "two", "steps": 2})
    for step, name in ((0, "one"), (1, "one"), (2, "one"), (3, "two")):
        run, found = build.prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
        assert (found, run.stage.name) == (step, name)
        run.save(step + 1)
        run.close()


@pytest.mark.parametrize("size", [1, 2])
def test_a_stage_begins_with_the_policy_as_it_is_of_which_the_first_process_has_a_whole_copy(
    size, tmp_path, monkeypatch
):
    run, _ = prepared(tmp_path)
    policy, learner, origins, copies = run.learner.policy, run.learner, [], []
    policy.lm_head.weight.data += 1
    policy.gradient_checkpointing_enable()
    monkeypatch.setattr(ranks, "world_size", lambda: size)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(ranks, "from_first", lambda work: work())
    monkeypatch.setattr(build, "assembled", lambda tree, group: tree)
    monkeypatch.setattr(build, "copied", lambda tree, **how: (copies.append(how), tree)[1])
    monkeypatch.setattr(build, "learner_of", lambda *given: (origins.append(given[-1]), learner)[1])
    waits = []
    monkeypatch.setattr(run, "writer", SimpleNamespace(check=lambda *, wait: waits.append(wait), group=None))
    run.begin(Stage("next", run.spec, start=3))
    (origin,) = origins
    assert run.stage.name == "next" and (origin is policy) is (size == 1) and len(copies) == size - 1
    assert torch.equal(origin.lm_head.weight, policy.lm_head.weight) and build.recomputes(origin)
    assert copies == [{"on_first": True}] * (size - 1) and waits == [True]  # for a copy of what the last learner has


def test_one_process_that_must_recompute_makes_all_recompute(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "of_all", lambda value: [value, True] if isinstance(value, bool) else [value])
    assert build.recomputes(prepared(tmp_path)[0].learner.policy)


def test_the_adapter_of_a_run_names_its_base_and_comes_back_without_it(tmp_path, monkeypatch):
    run, _ = prepared(tmp_path, lora={"rank": 2})
    assert run.base == Base.of("tiny", run.spec.cold_start.seed) and has_adapter(run.learner.policy)
    run.save(1)
    run.close()
    monkeypatch.setattr(Checkpoint, "policy_weights", None)  # an adapter is in the learner's state
    assert prepared(tmp_path, lora={"rank": 2})[1] == 1


def test_the_facts_of_a_run_have_its_cold_start_its_memory_and_what_a_gpu_decides(tmp_path, monkeypatch):
    spec = {"cold_start.steps": 3, "gradient_checkpointing": "auto"}
    monkeypatch.setattr(build, "start_policy", lambda *_: (tiny_model(0), None))
    run, _ = prepared(tmp_path, **spec)
    run.memory_before, estimated = 7, []
    monkeypatch.setattr(build, "peak_bytes", lambda needed: sum(needed.values()))
    monkeypatch.setattr(
        build, "estimate_run", lambda spec: (estimated.append(spec), ({"kv_cache": 5, "sampling": 5}, None))[1]
    )
    pairs = [(d.prompt, d.completion) for d in run.spec.task.demonstrations()]
    rows = [(len(run.codec.encode(p)), [len(run.codec.encode_completion(c))]) for p, c in pairs]
    mean = sum(flops.fitted(run.costs, [row]) for row in rows) / len(rows)
    facts = build.run_facts(run)
    whole = pytest.approx(3 * run.spec.cold_start.batch_size * mean)
    assert facts == {"flops/cold_start": whole, "memory/estimate_bytes": 5.0 + 5.0 + 7.0}
    assert [one.gradient_checkpointing for one in estimated] == [False]
    monkeypatch.setattr(build, "resolve_device", lambda device: torch.device("cuda"))
    assert build.run_facts(run)["memory/recomputes"] == 0.0
    run.spec = run.spec.model_copy(update={"cold_start": run.spec.cold_start.model_copy(update={"steps": 0})})
    run.spec = run.spec.model_copy(update={"gradient_checkpointing": False, "steps": 0})
    assert build.run_facts(run) == {}
