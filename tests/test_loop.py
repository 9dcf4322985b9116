"""The order of a run, followed through fakes in the places of its models, its engine and its files."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from cohort.harness.base.files import sha256
from cohort.harness.data import EvaluationResult, InvalidRun
from cohort.harness.devices import ranks
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.run import loop
from cohort.harness.run.build import RunResult, StoppedEarly, Totals
from cohort.harness.run.rollout import Rollouts
from factories import FEW, make_spec
from fakes import MemoryLog, StopAfter

INPUTS = {"model m": {"config.json": "0" * 64}}
SUMMARY = {"rollouts": 3.0}
COMPLETE = RunResult("complete", None, {})
GATES = SimpleNamespace(model_copy=lambda update: f"gates without {' and '.join(sorted(update))}")


@dataclass
class Row:
    step: int
    limit: int | None


def a_stage(start: int, end: int, *, kept: tuple[int, ...] = (), does: Any = None, **changes: Any) -> Any:
    checkpoints = SimpleNamespace(every=3, minutes=10.0)
    spec = {"prompts_per_step": 2, "gates": GATES, "control": None, "max_tokens": 8, "checkpoints": checkpoints}
    spec |= {"algorithm": SimpleNamespace(learns_from_rewards=True), **changes}
    return SimpleNamespace(spec=SimpleNamespace(**spec), start=start, end=end, kept=kept, does=does)


class Followed:
    """A run that notes in `did` what the loop asks of it. Its clock goes on by `tick` seconds with each look at it; it
    is spent after so many `seconds`."""

    def __init__(self, *stages: Any, tick: float = 1.0, seconds: float = math.inf, **evaluation: Any) -> None:
        self.did, self.time, self.tick, self.seconds = [], 0.0, tick, seconds
        settings = make_spec(**{**FEW, "evaluation": {**FEW["evaluation"], "every": 2, **evaluation}}).evaluation
        self.whole = SimpleNamespace(steps=stages[-1].end, staged=lambda: stages, evaluation=settings)
        self.stage, self.spec, self.gates, self.totals = stages[0], stages[0].spec, "its gates", Totals()
        self.writer = SimpleNamespace(check=lambda: self.did.append("check"))
        self.learner = SimpleNamespace(weights=lambda: "weights")
        self.engine = SimpleNamespace(load_weights=lambda *given: self.did.append(("load", *given)))
        self.log = SimpleNamespace(
            metrics=lambda step, values: self.did.append(("metrics", step, values)),
            progress=lambda phase, done, total: self.did.append(f"{phase} {done}/{total}"),
            samples=lambda rows: self.did.append(("samples", rows)),
        )

    def now(self) -> float:
        self.time += self.tick
        return self.time

    def begin(self, stage: Any) -> None:
        self.did.append(f"begin {stage.start}")
        self.stage, self.spec = stage, stage.spec

    def charge(self, seconds: float) -> None:
        self.totals.seconds += seconds

    def note_peak(self) -> None:
        self.totals.peak_memory_bytes += 100

    def keep(self, step: int, rows: Any) -> None:
        self.did.append(("keep", step, rows))

    def save(self, step: int, *, is_last: bool, waits: bool) -> None:
        self.did.append("save" + " the last" * is_last + " and wait" * waits)

    def summary(self) -> dict[str, float]:
        return SUMMARY

    @property
    def is_spent(self) -> bool:
        return self.totals.seconds >= self.seconds


@pytest.fixture
def follow(monkeypatch):
    """A function that runs the loop over a followed run from a step on: its result, and what was done."""

    def work(run: Any, step: int = 0, *, stop: Any = lambda: False, facts: Any = None, told: str = "") -> Any:
        def trained(run: Any, prompts: Any, step: int) -> Any:
            run.did.append(f"train {step}")
            return {"seconds/step": 0.5, "reward/mean": step}, Rollouts()

        def tested(run: Any, step: int, area: str, should_stop: Any) -> None:
            assert should_stop is stop
            run.did.append(f"test {step} {area}")

        def evaluated(run: Any, split: str, step: int, area: str = "", should_stop: Any = None) -> None:
            assert (should_stop is stop) is (step == 0)
            run.did.append(f"evaluate {split} {step} {area}".strip())

        def noted(name: str, result: Any = None) -> Any:
            return lambda *given, **_: (run.did.append((name, *given)), result)[1]

        fakes = {
            "train_step": trained, "_test": tested, "logged_evaluation": evaluated,
            "check_agreement": lambda run, prompts, step: (run.did.append(f"agree {step}"), facts or {})[1],
            "run_facts": lambda run: {"memory/x": 1.0} if facts else {},
            "charge_step": lambda run, counts, seconds: {"train/rollouts": counts, "own": seconds},
            "check_gates": noted("gates"), "check_signal": noted("signal"),
            "without_signal": lambda metrics, limit: (run.did.append(f"look at {metrics['reward/mean']}"), told)[1],
            "sample_rows": lambda *_, step, split, limit=None: [Row(step, limit)],
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(loop, name, fake)
        monkeypatch.setattr(Rollouts, "lengths", lambda self, prompts: f"counts of {prompts}")
        return loop._loop(run, [], step, stop), run.did

    return work


def metrics(step: int, **changes: float) -> tuple[str, int, dict[str, Any]]:
    """As the loop logs them: each step is charged for one look at the clock."""
    own = {"seconds/step": 0.5, "reward/mean": step - 1, "train/rollouts": "counts of 2", "own": 0.5}
    return "metrics", step, {**own, "seconds/total": float(step), "memory/peak_bytes": 100 * step, **changes}


def gates(step: int, of: Any = GATES) -> tuple[Any, ...]:
    return "gates", of, "its gates", metrics(step)[2], step


def test_a_run_goes_through_its_steps_in_one_order(follow, caplog):
    run = Followed(a_stage(0, 4, kept=(1,)), test_at_start=True, test_last=2)
    result, did = follow(run, facts={"mismatch/y": 2.0}, told="nothing is learnt")
    assert result == RunResult("complete", None, SUMMARY)
    assert did == [
        "agree 0", ("metrics", 0, {"memory/x": 1.0, "mismatch/y": 2.0}), "evaluate validation 0", "test 0 start",
        "check", "train 0", metrics(1), "look at 0", ("keep", 1, [{"step": 1, "limit": None}]), "train 1/4", gates(1),
        "check", "train 1", metrics(2), "train 2/4", gates(2),
        ("samples", [Row(2, 8)]), "evaluate validation 2", "evaluate test 2 test",
        "check", "train 2", metrics(3), "train 3/4", gates(3), "save",
        "check", "train 3", metrics(4), "train 4/4", gates(4), ("samples", [Row(4, 8)]),
        ("signal", GATES, "its gates", metrics(4)[2], 4, 8), "evaluate validation 4", "save the last", "test 4 test",
    ]  # fmt: skip
    assert [record.message for record in caplog.records] == ["nothing is learnt"]


def test_a_stage_that_learns_otherwise_has_no_gates_saves_what_it_sampled_and_gives_the_next_its_weights(follow):
    does = SimpleNamespace(
        step=lambda run, prompts, step, stop: ({"seconds/step": 0.5, "reward/mean": step}, "counts of 2")
    )
    first, then = a_stage(0, 2, does=does, kept=(1, 2)), a_stage(2, 6, kept=(3,), control="frozen")
    run = Followed(first, then)
    did = follow(run)[1]
    own = "gates without answered and stuck_groups"
    assert did[:14] == [
        "agree 0", "evaluate validation 0",
        "check", metrics(1), "look at 0", "train 1/6", "save",
        "check", metrics(2), "train 2/6", ("load", "weights", 2), ("samples", [Row(2, 8)]), "evaluate validation 2",
        "save",
    ]  # fmt: skip
    assert did[14:] == [
        "check", "begin 2", "train 2", metrics(3), ("keep", 3, [{"step": 3, "limit": None}]), "train 3/6",
        gates(3, own), "save",
        "check", "train 3", metrics(4), "train 4/6", gates(4, own), ("samples", [Row(4, 8)]), "evaluate validation 4",
        "check", "train 4", metrics(5), "train 5/6", gates(5, own),
        "check", "train 5", metrics(6), "train 6/6", gates(6, own), ("samples", [Row(6, 8)]),
        ("signal", own, "its gates", metrics(6)[2], 4, 8), "evaluate validation 6", "save the last", "test 6 test",
    ]  # fmt: skip


def test_a_stopped_run_saves_its_step_and_leaves_the_test_to_the_next_attempt(follow, caplog):
    stops = {n: follow(Followed(a_stage(0, 2)), stop=StopAfter(n)) for n in (1, 2, 3, 4)}
    assert [result.state for result, _ in stops.values()] == ["stopped", "stopped", "stopped", "complete"]
    assert all(result.summary == SUMMARY for result, _ in stops.values())
    assert [did[-1] for _, did in stops.values()] == ["save", "save the last", "save the last", "test 2 test"]
    assert follow(Followed(a_stage(0, 2)), 2)[1] == ["test 2 test"]  # nothing is left to be agreed on or trained
    assert not caplog.records


def test_a_run_ends_when_it_is_spent_and_saves_when_it_is_late(follow):
    told = lambda did: [one for one in did if isinstance(one, str) and one.startswith(("save", "test", "sig"))]  # noqa: E731
    result, did = follow(Followed(a_stage(0, 9), seconds=2.0))
    assert result.state == "complete" and told(did) == ["save the last", "test 2 test"]
    assert [one[0] for one in did if one[0] == "signal"] == ["signal"]
    late = SimpleNamespace(every=20, minutes=0.5)  # 30 s, or two steps
    did = follow(Followed(a_stage(0, 6, checkpoints=late), tick=15.0))[1]
    assert told(did) == 2 * ["save and wait"] + ["save the last and wait", "test 6 test"]
    plain = SimpleNamespace(learns_from_rewards=False)
    did = follow(Followed(a_stage(0, 1, algorithm=plain)))[1]
    assert not any(one == "look at 0" or one[0] == "signal" for one in did)


@pytest.fixture
def around(monkeypatch):
    """What `train` asks, with a loop that ends as it is told."""
    asked = []

    def noted(name: str, result: Any = None) -> Any:
        return lambda *given, **named: (asked.append((name, *given, *([named] if named else []))), result)[1]

    run = SimpleNamespace(summary=lambda: SUMMARY, close=lambda: asked.append("close"))
    for name, fake in {
        "run_inputs": noted("inputs", INPUTS), "first_prompt": lambda spec, split: f"first of {split}",
        "run_sizes": lambda spec: {"weights": 5}, "check_length": noted("length"), "prepare": lambda *_: (run, 3),
    }.items():  # fmt: skip
        monkeypatch.setattr(loop, name, fake)
    monkeypatch.setattr(ranks, "check_alike", noted("alike"))
    monkeypatch.setattr(TransformersEngine.Settings, "check", noted("engine"))

    def work(folder: Any, end: Any = COMPLETE, told: bool = True, early: Any = None, **changes: Any) -> Any:
        asked.clear()

        def ended(*given: Any) -> RunResult:
            asked.append(("loop", *given))
            if isinstance(end, BaseException):
                raise end
            return end

        def failed(*_: Any) -> None:
            raise early

        monkeypatch.setattr(loop, "_loop", ended)
        monkeypatch.setattr(ranks, "tell", noted("tell", told))
        if early is not None:
            monkeypatch.setattr(loop, "prepare", failed)
        log = SimpleNamespace(about=lambda **facts: asked.append(("about", facts)))
        spec = make_spec(**{**FEW, **changes})
        return loop.train(spec, folder, log, cache=folder), spec, asked, run  # pyright: ignore

    return work


@pytest.mark.parametrize(("steps", "split"), [(3, "train"), (0, "validation")])
def test_a_run_says_what_it_reads_and_that_all_its_processes_see_the_same(steps, split, around, tmp_path):
    for name in ("step-00000002", "step-00000001"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    result, spec, asked, run = around(tmp_path, steps=steps)
    assert result.state == "complete" and run.inputs == INPUTS
    *before, (_, given, prompts, step, stop), last = asked
    assert before == [
        ("inputs", [spec], tmp_path),
        ("alike", tmp_path, {"checkpoints": ["step-00000001", "step-00000002"], "inputs": INPUTS}),
        ("about", {"inputs": INPUTS}), ("engine", spec.engine, spec.sampling_with_limit()), ("length", spec),
        ("about", {"prompt": f"first of {split}", "sizes": {"weights": 5}}),
    ]  # fmt: skip
    assert (given, step, stop(), last) == (run, 3, False, "close")
    assert prompts == (spec.task.prompts("train") if steps else [])


def test_a_run_that_ends_early_says_so_and_closes_what_it_has(around, tmp_path):
    stopped, _, asked, _ = around(tmp_path, StoppedEarly())
    assert stopped == RunResult("stopped", None, SUMMARY) and asked[-1] == "close"
    error = InvalidRun("it diverged")
    invalid, _, asked, _ = around(tmp_path, error)
    assert invalid == RunResult("invalid", "it diverged", SUMMARY) and asked[-2:] == [("tell", error), "close"]
    for closes in (True, False):  # not where the processes of a run end without a word to each other
        with pytest.raises(RuntimeError, match="of a rank"):
            around(tmp_path, RuntimeError("of a rank"), told=closes)
        assert (asked[-1] == "close") is closes
    assert around(tmp_path, early=StoppedEarly())[0] == RunResult("stopped", None, {})
    invalid, _, asked, _ = around(tmp_path, early=error)
    assert invalid == RunResult("invalid", "it diverged", {}) and asked[-1] == ("tell", error)


def test_shuffled_answers_need_a_second_problem(around, tmp_path):
    one = {"name": "arithmetic", "min_operands": 2, "max_operands": 2, "num_train": 1}
    assert around(tmp_path, task=one)[0].state == "complete"
    assert around(tmp_path, control="shuffled_gold")[0].state == "complete"
    with pytest.raises(ValueError, match="needs at least 2 train problems, got 1"):
        around(tmp_path, task=one, control="shuffled_gold")


def test_what_a_step_costs_is_added_to_what_the_run_has_cost():
    totals, asked = Totals(rollouts=10, generated_tokens=100, optimizer_steps=6), []
    learner = SimpleNamespace(operations=lambda *given: asked.append(given))
    run: Any = SimpleNamespace(
        totals=totals, spec=SimpleNamespace(updates_per_step=2), learner=learner,
        charge_flops=lambda operations: (operations("costs"), {"flops/train": 9.0})[1],
    )  # fmt: skip
    sampled, trained, greedy = [(5, [3, 4])], [(5, [3])], [(5, [6])]
    assert loop.charge_step(run, (sampled, trained, greedy), 2.0) == {
        "train/rollouts": 10 + 3, "train/generated_tokens": 100 + 13, "train/optimizer_steps": 6 + 2,
        "throughput/tokens_per_second": 13 / 2.0, "flops/train": 9.0,
    }  # fmt: skip
    assert asked == [("costs", sampled, trained, greedy)]
    found = loop.charge_step(run, ([], [], []), 0.0)
    assert "throughput/tokens_per_second" not in found and found["train/optimizer_steps"] == 8


class Evaluated:
    """A run whose evaluations find these accuracies, one after the other; what an evaluation is given is in `given`."""

    def __init__(self, folder: Any, *accuracies: float) -> None:
        self.left, self.given, self.now_is, self.charged = [*accuracies], [], 0.0, []
        self.whole = make_spec(**{**FEW, "steps": 4, "evaluation": {**FEW["evaluation"], "every": 2, "test_last": 2}})
        self.directory, self.log, self.accuracies, self.during = folder, MemoryLog(), {}, lambda run, progress: None
        self.engine, self.learner, self.charge = (
            SimpleNamespace(),
            SimpleNamespace(policy="policy"),
            self.charged.append,
        )
        self.told = []
        self.log.per_problem = lambda *given: self.told.append(given)
        (folder / "completions").mkdir(exist_ok=True)

    def now(self) -> float:
        self.now_is += 5.0
        return self.now_is

    def charge_flops(self, operations: Any) -> dict[str, float]:
        return {"flops/evaluation": operations("costs")["evaluation"]}

    def found(self, spec: Any, engine: Any, split: Any, step: int, progress: Any, *, kept: Any, weights: int) -> Any:
        assert kept is None or not kept.exists()
        self.given.append((spec, engine, split, step, kept, weights))
        self.during(self, progress)
        if kept is not None:
            kept.write_text("rows")
        values = {"accuracy": self.left.pop(0), "num_samples": 2.0}
        return EvaluationResult(split, values, {"p": 1}, [f"sample of {step}"], {}, {"p": "f"}, [(1, [2])])  # pyright: ignore


@pytest.fixture
def evaluated(monkeypatch, tmp_path):
    def made(*accuracies: float) -> Any:
        run = Evaluated(tmp_path, *accuracies)
        monkeypatch.setattr(loop, "evaluate_run", run.found)
        monkeypatch.setattr(loop, "weights_read", lambda *given: 7)
        monkeypatch.setattr(loop.flops, "sampled", lambda costs, drawn: 40.0)
        return run

    return made


def test_an_evaluation_is_logged_charged_and_in_the_summary(evaluated):
    run = evaluated(0.2, 0.5, 0.3, 0.7, 0.9)
    file = run.directory / "completions/test-000002.jsonl"
    file.write_text("of an attempt that was killed")
    run.during = lambda run, progress: progress(1, 2)
    loop.logged_evaluation(run, "validation", 0)
    loop.logged_evaluation(run, "test", 2)
    loop.logged_evaluation(run, "validation", 2)
    loop.logged_evaluation(run, "test", 4)
    other = SimpleNamespace(name="other")
    loop.logged_evaluation(run, "test", 4, "test_other", other)  # pyright: ignore
    mean = (0.5 + 0.7) / 2  # of the two tests
    assert run.accuracies == {"accuracy_initial": 0.2, "accuracy_final": 0.3, "test_accuracy": pytest.approx(mean)}
    assert run.given[1] == (run.whole, run.engine, "test", 2, file, 0) and run.given[4][0] is other
    assert run.charged == [5.0] * 5 and run.log.files["completions/test-000002.jsonl"] == sha256(file)
    own = {"test_other/accuracy": 0.9, "test_other/num_samples": 2.0, "flops/evaluation": 40.0}
    assert run.log.events[-1] == (4, own)
    assert run.told == [({"p": 0.5}, area, {"p": "f"}) for area in ("test", "test", "test_other")]
    assert run.log.rows == ["sample of 0", "sample of 2", "sample of 2", "sample of 4"]
    assert not vars(run.engine)


def test_an_evaluation_stops_between_its_parts_and_within_a_long_one(evaluated, monkeypatch):
    monkeypatch.setattr(loop, "PART_WEIGHTS", 21.0)
    asked, run = [], evaluated(0.5)

    def during(run: Any, progress: Any) -> None:
        progress(0, 2)
        progress(2, 2)
        for count in (2, 1, 1, 3, 1):  # of 7 weights each: 14, 21, then 28; again 21, then 28
            asked.append(count)
            run.engine.note_tokens(count)

    run.during = during
    loop.logged_evaluation(run, "test", 4, should_stop=lambda: asked.append("stop?"))  # pyright: ignore
    assert asked == [2, 1, 1, "stop?", 3, 1, "stop?"]
    assert run.log.phases == [("test", 0, 2), ("test", 2, 2)]
    for work in (lambda run, progress: progress(1, 2), lambda run, progress: run.engine.note_tokens(4)):
        run.during = work
        with pytest.raises(StoppedEarly):
            loop.logged_evaluation(run, "test", 4, should_stop=lambda: True)


def test_several_processes_evaluate_small_parts_and_the_first_keeps_them(evaluated, monkeypatch):
    run = evaluated(0.5)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    run.during = lambda run, progress: run.told.append(hasattr(run.engine, "note_tokens"))
    loop.logged_evaluation(run, "validation", 2)
    assert run.given == [(run.whole, run.engine, "validation", 2, None, 7)] and run.told == [False]
    assert not run.log.files


def test_the_tests_of_a_run_are_scored_after_its_own_and_stop_alike(monkeypatch):
    asked, stop = [], lambda: False
    monkeypatch.setattr(loop, "logged_evaluation", lambda run, *given, **named: asked.append((*given, *named.values())))
    loop._test(SimpleNamespace(whole=SimpleNamespace(tests={"a": "spec of a"})), 4, "test", stop)  # pyright: ignore
    assert asked == [("test", 4, "test", stop), ("test", 4, "test_a", "spec of a", stop)]
