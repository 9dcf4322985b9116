"""The training loop for real on the tiny model: every algorithm, resume, invalid runs, what is logged."""

import copy
import functools
import json
import shutil
from types import SimpleNamespace

import pytest
from cohort.harness import plugins
from cohort.harness.data import InvalidRun
from cohort.harness.devices.sharding import copied
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.run import build as state
from cohort.harness.run.checkpoint import Writer, save_checkpoint
from cohort.harness.run.loop import train
from cohort.harness.settings.run import Checkpoints, parse_run
from cohort.harness.study.preflight import check_claimed
from factories import slow_but
from fakes import MemoryLog, StopAfter, assert_same_weights, check_same_run, final_weights, gone_on

BASE = {
    "task": {"name": "arithmetic", "min_operands": 2, "max_operands": 3}, "cold_start": {"steps": 40},
    "evaluation": {"every": 2, "num_prompts": 8, "num_test_prompts": 16, "num_samples": 2},
    "checkpoints": {"every": 2}, "rollouts_per_step": 16, "steps": 5,
}  # fmt: skip


def make_spec(algorithm="grpo", **changes):
    settings = {"name": algorithm, "group_size": 4, "kl_beta": 0.02}
    return parse_run({**BASE, "algorithm": settings, **changes}, "test")


# Whatever a step may change for the next: rate, KL weight, reference, and the weights that sample.
CHANGING = make_spec(
    kl={"schedule": "adaptive", "target": 1e-4, "refresh_reference_every": 2}, staleness=2,
    optimizer={"learning_rate": 1e-3, "schedule": "cosine"},
)  # fmt: skip
WARMING = make_spec("ppo", critic={"warmup_steps": 4, "head": "fitted"})
BANDED = make_spec(
    task={**BASE["task"], "num_train": 12}, sampler="success_band", dynamic_sampling=2,
    overlong="mask", high_entropy_tokens=0.5,
)  # fmt: skip
SPECS = {
    "changing": CHANGING, "warming": WARMING, "banded": BANDED,
    **{name: make_spec(name) for name in ("grpo", "ppo", "remax")},
}  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """Name -> (folder, log, result) of its run, made when it is first asked for."""

    @functools.cache
    def run_of(name):
        folder, log = tmp_path_factory.mktemp(name), MemoryLog()
        return folder, log, train(SPECS[name], folder, log, cache=cache)

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_whatever_a_run_logs_may_be_claimed(name, undisturbed):
    _, log, result = undisturbed(name)
    names = {*result.summary, *(metric for _, values in log.events for metric in values)}
    assert {"policy/entropy", "seconds/step", "reward/accuracy"} < names
    check_claimed(SimpleNamespace(claim=[SimpleNamespace(metric=one) for one in names]), [SPECS[name]])  # pyright: ignore


@pytest.mark.parametrize("algorithm", slow_but(["grpo"], ["grpo", "ppo", "remax"]))
def test_a_run_completes_and_accounts_for_its_budget(algorithm, undisturbed):
    _, log, result = undisturbed(algorithm)
    assert result.state == "complete"
    needs_greedy = plugins.load("algorithm", algorithm).needs_greedy  # pyright: ignore
    assert result.summary["rollouts"] == 5 * (16 + 4 * needs_greedy)  # one more for each of 4 prompts
    assert result.summary["optimizer_steps"] == 5
    trained_on = sum(v * 16 for _, v in log.history("completion/length"))
    greedy = result.summary["generated_tokens"] - trained_on
    assert 20 <= greedy <= 20 * 24 if needs_greedy else greedy == 0
    assert [s for s, _ in log.history("validation/accuracy")] == [0, 2, 4, 5]
    assert [s for s, _ in log.history("test/accuracy")] == [5]
    assert result.summary["test_accuracy"] == log.history("test/accuracy")[0][1]
    validated = [value for _, value in log.history("validation/accuracy")]
    assert (result.summary["accuracy_initial"], result.summary["accuracy_final"]) == (validated[0], validated[-1])
    assert [row.step for row in log.rows if row.split == "train"] == 8 * [2] + 8 * [4] + 8 * [5]
    assert len(log.fractions) == 16
    assert sum(log.fractions.values()) / 16 == pytest.approx(result.summary["test_accuracy"])
    assert all(value < 1e-6 for _, value in log.history("mismatch/kl"))
    assert [value for _, value in log.history("mismatch/max_ratio")] == pytest.approx([1] * 5, abs=1e-4)
    assert all(value == 1 for _, value in log.history("policy/ratio_max"))
    assert bool(log.history("critic/explained_variance")) == (algorithm == "ppo")
    assert result.summary["peak_memory_bytes"] == log.history("memory/peak_bytes")[-1][1] > 1e7
    assert result.summary["learner_peak_bytes"] == log.history("memory/learner_peak_bytes")[-1][1] > 1e7
    total, own = ([0.0, *(v for _, v in log.history(f"seconds/{kind}"))] for kind in ("total", "step"))
    assert all(total[i] - total[i - 1] >= 0.99 * own[i] > 0 for i in range(1, 6))
    assert result.summary["seconds"] > total[5]  # the test came after
    parts = [log.history(f"seconds/{phase}") for phase in ("generate", "grade", "annotate", "update", "sync")]
    assert all(0 < sum(v for _, v in step) <= own[i] for i, step in enumerate(zip(*parts, strict=True), start=1))


def test_the_learners_own_peak_has_no_part_of_sampling_or_of_the_engine(tmp_path, cache, monkeypatch):
    now = {"peak": 0}

    def uses(owner, name, count):
        did = getattr(owner, name)

        def work(*given, **named):
            now["peak"] = max(now["peak"], count)
            return did(*given, **named)

        monkeypatch.setattr(owner, name, work)

    for owner, name, count in [(TransformersEngine, "generate", 900), (TransformersEngine, "load_weights", 700),
                               (state.Learner, "annotate", 300), (state.Learner, "update", 500)]:  # fmt: skip
        uses(owner, name, count)
    monkeypatch.setattr(state, "peak_memory", lambda: now["peak"])
    monkeypatch.setattr(state, "forget_peak_memory", lambda: now.update(peak=0))
    result = train(make_spec(steps=1), tmp_path, MemoryLog(), cache=cache)
    assert (result.summary["peak_memory_bytes"], result.summary["learner_peak_bytes"]) == (900, 500)


@pytest.mark.slow
def test_test_problems_may_be_scored_at_the_start_and_at_the_last_evaluations(tmp_path, cache, undisturbed):
    folder, plain, _ = undisturbed("grpo")
    asked, changes = MemoryLog(), {"num_test_samples": 3, "test_at_start": True, "test_last": 3, "num_test_prompts": 40}
    spec = make_spec(evaluation={**BASE["evaluation"], **changes})
    tested = lambda: bool(asked.history("test/accuracy"))  # noqa: E731
    assert train(spec, tmp_path, asked, cache=cache, should_stop=tested).state == "stopped"
    result = train(spec, tmp_path, asked, cache=cache)
    assert asked.history("start/num_samples") == [(0, 3.0)]
    assert asked.history("test/num_samples") == [(2, 3.0), (4, 3.0), (5, 3.0)]
    assert asked.history("validation/num_samples")[0][1] == 2
    assert set(asked.start_fractions) == set(asked.fractions)
    assert asked.start_fractions != asked.fractions
    values = [value for _, value in asked.history("test/accuracy")]  # their mean counts, after a stop too
    assert result.summary["test_accuracy"] == pytest.approx(sum(values) / 3, abs=1e-12) != values[-1]
    assert result.summary["accuracy_initial"] == asked.history("validation/accuracy")[0][1]
    assert_same_weights(final_weights(tmp_path), final_weights(folder))  # training has not noticed
    assert not plain.history("start/accuracy")


@pytest.mark.parametrize("name", slow_but(["grpo"], SPECS))
def test_a_stopped_run_resumes_bit_for_bit(name, tmp_path, cache, undisturbed, monkeypatch):
    load, loaded = TransformersEngine.load_weights, []
    whole = undisturbed(name)[:2]
    monkeypatch.setattr(TransformersEngine, "load_weights", lambda *to: (loaded.append(to[-1]), load(*to)))
    log = gone_on(SPECS[name], tmp_path, cache, 3)
    assert log.resumed_at == [-1, 3]
    assert loaded == [1, 2, 3, 3, 4, 5]  # an engine that starts again gets the weights of the checkpoint
    check_same_run((tmp_path, log), whole)


@pytest.mark.slow
def test_a_warm_up_costs_its_rollouts_and_its_critics_updates_alone(undisturbed):
    (_, warm, result), (_, plain, full) = undisturbed("warming"), undisturbed("ppo")
    assert result.summary["rollouts"] == full.summary["rollouts"] == 5 * 16
    (_, alone), (_, both) = warm.history("flops/learning")[0], plain.history("flops/learning")[0]
    # of one batch: without 2 of 6 parts, or a few less, as the critic has no vocabulary
    assert 0.6 < alone / both < 0.9
    assert [value for _, value in warm.history("kl/reference")][:4] == [0.0] * 4
    assert [value for _, value in warm.history("policy/no_signal")] == [1, 1, 1, 1, 0]
    assert [step for step, _ in warm.history("critic/fitted_variance")] == [1]
    spent, tokens = ([v for _, v in warm.history(n)] for n in ("flops/learning", "train/generated_tokens"))
    assert spent[0] / tokens[0] > 1.1 * (spent[1] - spent[0]) / (tokens[1] - tokens[0])  # the fit's pass
    explained = [value for _, value in warm.history("critic/explained_variance")]
    assert explained[0] == 0.0 and explained[4] != 0.0


@pytest.mark.attack("Events that a power cut took")
@pytest.mark.parametrize(("lost", "step"), [(3, 4), (1, 5)])  # of step 5: its update, its validation, the test
def test_a_checkpoint_whose_events_were_lost_gives_way_to_the_one_before(lost, step, tmp_path, cache, undisturbed):
    folder, whole, _ = undisturbed("grpo")
    shutil.copytree(folder, tmp_path / "cut")
    log = copy.deepcopy(whole)
    del log.events[-lost:]
    train(make_spec(), tmp_path / "cut", log, cache=cache)
    assert log.resumed_at == [-1, step]
    assert log.without_clocks() == whole.without_clocks()


class LateWriter:
    """Writes each checkpoint as late as it may: when it is waited for."""

    late = 0

    def begin(self, copy, write):
        self.check(wait=True)
        copies = copy()
        self.work = lambda: write(copies)

    def check(self, *, wait=False):
        if wait:
            LateWriter.late += "work" in vars(self)
            vars(self).pop("work", lambda: None)()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "changing"])
def test_a_checkpoint_holds_its_own_step_however_late_it_is_written(name, tmp_path, cache, undisturbed, monkeypatch):
    folders = [folder / "checkpoints" for folder in (tmp_path, undisturbed(name)[0])]
    for method in ("begin", "check"):
        monkeypatch.setattr(Writer, method, getattr(LateWriter, method))
    monkeypatch.setattr(LateWriter, "late", 0)
    train(SPECS[name], tmp_path, MemoryLog(), cache=cache)
    late, own = ([json.loads(file.read_text()) for file in sorted(folder.glob("*/state.json"))] for folder in folders)
    assert [one["step"] for one in late] == [4, 5] and LateWriter.late == 3
    assert [one["files"] for one in late] == [one["files"] for one in own]
    assert [one["progress"]["totals"]["rollouts"] for one in late] == [64, 80]
    sizes = [(folders[0] / f"step-{step:08d}/learner.pt").stat().st_size for step in (4, 5)]
    assert sizes[1] < 2000 < sizes[0]  # after the last step nothing is trained


@pytest.mark.parametrize("when", slow_but(["during"], ["before", "during"]))
def test_a_stop_leaves_the_last_test_to_the_next_attempt(when, tmp_path, cache, undisturbed, monkeypatch):
    whole = undisturbed("grpo")[1]  # and its cold start, in which nothing is asked below
    log, stop = MemoryLog(), StopAfter(6)  # after 5 steps
    if when == "during":  # of its first and only part
        monkeypatch.setattr("cohort.harness.run.loop.PART_WEIGHTS", 16 * 32 * 166_592)
    during = lambda: log.phases[-1] == ("test", 0, 16)  # noqa: E731
    result = train(make_spec(), tmp_path, log, cache=cache, should_stop=stop if when == "before" else during)
    assert (result.state, result.summary["rollouts"], log.history("test/accuracy")) == ("stopped", 80, [])
    assert train(make_spec(), tmp_path, log, cache=cache).state == "complete"
    assert log.resumed_at == [-1, 5]
    assert log.phases.count(("test", 0, 16)) == (1 if when == "before" else 2)
    assert log.phases.count(("test", 16, 16)) == 1
    assert log.fractions == whole.fractions


@pytest.mark.slow
def test_a_slow_run_writes_checkpoints_by_time_without_copies_and_resumes(tmp_path, cache, undisturbed, monkeypatch):
    kept, copies = [], []

    def copying(*given, anew, **named):
        copies.append(anew)
        return copied(*given, anew=anew, **named)

    def saving(place, run, *rest):
        kept.append(run.step)
        save_checkpoint(place, run, *rest)

    monkeypatch.setattr(state, "copied", copying)
    monkeypatch.setattr(state, "save_checkpoint", saving)
    monkeypatch.setattr(Checkpoints, "minutes", 0.0)
    spec = make_spec(checkpoints={"every": 20})
    log = gone_on(spec, tmp_path, cache, {"kill": 4})
    assert log.resumed_at == [-1, 3] and kept == [1, 2, 3, 4, 5] and not any(copies)
    check_same_run((tmp_path, log), undisturbed("grpo")[:2])
    monkeypatch.setattr(Checkpoints, "minutes", 10.0)
    kept.clear()
    train(spec, tmp_path / "quick", MemoryLog(), cache=cache)
    assert kept == [5] and copies[-1]


@pytest.mark.slow
def test_a_run_stops_during_its_cold_start_and_begins_it_anew(tmp_path):
    log = MemoryLog()
    assert train(make_spec(), tmp_path, log, cache=tmp_path, should_stop=StopAfter(7)).state == "stopped"
    assert log.phases[-1] == ("cold start", 7, 40)
    assert train(make_spec(steps=0), tmp_path, log, cache=tmp_path).state == "complete"
    assert log.phases.count(("cold start", 7, 40)) == 2


@pytest.mark.slow
def test_arms_with_one_seed_share_prompts_and_their_first_rollouts(tmp_path, cache):
    logs = {}
    for name in ("grpo", "ppo", "grpo_self_consistency"):
        logs[name] = MemoryLog()
        few = {"num_prompts": 1, "num_test_prompts": 1, "num_samples": 1}
        train(make_spec(name, steps=1, evaluation=few), tmp_path / name, logs[name], cache=cache)
    texts = [[(r.prompt, r.completion) for r in log.rows if r.split == "train"] for log in logs.values()]
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]


def test_a_run_that_is_invalid_before_it_has_a_state_or_diverges_says_why(tmp_path, cache, monkeypatch):
    def prepare(*_):
        raise InvalidRun("a cold start that diverged")

    with monkeypatch.context() as patch:
        patch.setattr("cohort.harness.run.loop.prepare", prepare)
        result = train(make_spec(), tmp_path, MemoryLog(), cache=cache)
    assert (result.state, result.reason, result.summary) == ("invalid", "a cold start that diverged", {})
    result = train(make_spec(optimizer={"learning_rate": 1e30}), tmp_path, MemoryLog(), cache=cache)
    assert result.state == "invalid"
    assert "optimizer.learning_rate" in (result.reason or "")
    assert "test_accuracy" not in result.summary
