"""Arms stop, go on and are cloned while their study runs; none of it changes a result."""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from cohort.harness.base.files import read_json, whole_manifest, write_json
from cohort.harness.console.progress import Page, show_live, spark
from cohort.harness.mirror.ui import study_pages
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import EVENTS, read_events
from cohort.harness.record.run import CHECKPOINTS, STATE
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import ExploratoryArm, read_study
from cohort.harness.run import loop
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.queue import HELD, Queue, TrialOutcome, study_status
from cohort.harness.study.runner import start_study
from cohort.harness.study.steering import clone_arm, drop_arm, hold_arm, remove_study
from cohort.harness.study.worker import worker_main
from cohort.reports.analysis import analysed
from cohort.reports.prose.answer import answer
from cohort.reports.prose.notes import notes
from cohort.reports.render import write_report as render
from factories import FEW, make_study
from fake_study import fake_study
from fake_trials import a_study
from filelock import FileLock
from queues import DONE, METRIC, a_queue, at_work, check_as_undisturbed, claimed, die, open_queue, run
from rich.console import Console
from safetensors.torch import load_file
from test_checkpoint import save

ARMS = ["group_size=2", "group_size=4"]
CHANGED = {"algorithm.kl_beta": 0.2}
STOPPED = ["clone 2 of a: algorithm.group_size=16"]


pytestmark = pytest.mark.usefixtures("plugins")


stop_arm = functools.partial(hold_arm, held=True)
resume_arm = functools.partial(hold_arm, held=False)
clone = functools.partial(clone_arm, "sizes", execute=fake_trials.EXECUTE)


def test_a_stopped_arm_is_not_claimed_until_it_is_resumed(tmp_path, url):
    queue = a_queue(a_study(), tmp_path, url)
    first = claimed(queue)
    assert first.key == (ARMS[0], 0)
    assert stop_arm("sizes", tmp_path, ARMS[0], storage=url)
    assert not stop_arm("sizes", tmp_path, ARMS[0], storage=url)  # it is already
    assert queue.is_held(ARMS[0]) and not queue.is_held(ARMS[1])
    queue.finish(first, TrialOutcome("stopped", HELD, {"step": 3}))
    for _ in range(2):
        claim = claimed(queue)
        assert claim.key[0] == ARMS[1]
        queue.finish(claim, DONE)
    assert queue.claim() is None and not queue.unfinished()
    status = study_status("sizes", tmp_path, url)
    assert [(t.state, t.reason) for t in status.trials if t.arm == ARMS[0]] == [("stopped", HELD)] * 2
    assert (status.finished, status.all_valid) == (True, True)
    assert resume_arm("sizes", tmp_path, ARMS[0], storage=url)
    assert queue.unfinished()
    assert claimed(queue).key == first.key


@pytest.mark.attack("A kill of a worker whose arm was asked to stop")
def test_a_request_to_stop_outlives_the_worker_and_the_study(tmp_path):
    queue = a_queue(a_study(), tmp_path)
    claim = claimed(queue)
    stop_arm("sizes", tmp_path, ARMS[0])
    die(claim, queue)
    again = a_queue(a_study(), tmp_path)  # the study is started again
    assert {claimed(again).key[0] for _ in range(2)} == {ARMS[1]}
    assert again.claim() is None
    assert [t.reason for t in again.status().trials if t.arm == ARMS[0]] == [HELD] * 2


@pytest.mark.slow
def test_a_running_trial_stops_within_a_step_and_the_study_ends_without_it(runs):
    (runs / "hold").touch()

    def stop(status: StudyStatus) -> None:
        if at_work(status) and stop_arm("sizes", runs, ARMS[0]):
            (runs / "hold").unlink()

    status = run(a_study(seeds=[0]), runs, stop, workers=1)
    assert (status.finished, status.all_valid, status.counts()) == (True, True, {"stopped": 1, "complete": 1})
    stopped = status.trials[0].directory
    assert read_json(stopped / "checkpoint.json")["step"] == last_step(stopped) < 7
    record = read_study(runs, "sizes")
    assert record.stopped == [ARMS[0]]
    (gap,) = analysed(record).gaps
    assert (gap.arm, gap.state, gap.reason) == (ARMS[0], "stopped", "the arm was stopped on request")
    resume_arm("sizes", runs, ARMS[0])
    assert run(a_study(seeds=[0]), runs, workers=1).counts() == {"complete": 2}
    assert read_study(runs, "sizes").stopped == []
    check_as_undisturbed(a_study(seeds=[0]), runs)


def last_step(directory: Path) -> int:
    return max(event.get("step", 0) for event in read_events(directory / EVENTS))


def a_real_study() -> StudySpec:
    run = {
        **FEW, "algorithm": {"name": "grpo", "group_size": 4, "kl_beta": 0.04}, "cold_start": {"steps": 30}, "steps": 4,
        "rewards": {"format": 1.0}, "sampling": {"max_tokens": 12}, "checkpoints": {"finished": "weights"},
        "evaluation": {**FEW["evaluation"], "every": 2},
    }  # fmt: skip
    return make_study(name="real", run=run, arms={"one": {}}, seeds=[0])


def train_and_stop(spec: Any, directory: Path, log: Any, *, cache: Path, should_stop: Callable[[], bool]) -> Any:
    """As the real loop, but after its second step the arm is stopped from elsewhere."""

    def asked() -> bool:
        return log.step == 2 and stop_arm("real", cache.parent, "one") and should_stop()

    return loop.train(spec, directory, log, cache=cache, should_stop=asked)


@pytest.fixture(scope="module")
def steered(tmp_path_factory, new_runs) -> tuple[Path, Path]:
    """Runs folders: of an undisturbed trial, and of one that was stopped after step 2, cloned twice, resumed."""
    folders = [new_runs(tmp_path_factory.mktemp("steered") / name) for name in ("undisturbed", "steered")]
    for runs in folders:
        a_queue(a_real_study(), runs)
    worker_main("real", folders[0])
    shutil.copytree(folders[0] / "cache", folders[1] / "cache")  # the cold start
    worker_main("real", folders[1], execute="test_steering:train_and_stop")
    (directory,) = (folders[1] / "studies/real/trials").iterdir()
    assert last_step(directory) == 2
    clone_arm("real", folders[1], "one", {"checkpoints.every": 3}, warm=True)
    changes = {"optimizer.learning_rate": 0.01, "algorithm.kl_beta": 0.5, "optimizer.weight_decay": 0.2}
    clone_arm("real", folders[1], "one", changes, warm=True)
    resume_arm("real", folders[1], "one")
    worker_main("real", folders[1])
    return folders[0], folders[1]


def trial(runs: Path, start: str) -> tuple[Path, dict[int, dict[str, float]]]:
    """The folder of a trial, and what it logged at each step, costs apart."""
    (directory,) = (runs / "studies/real/trials").glob(f"{start}*")
    logged: dict[int, dict[str, float]] = {}
    for event in read_events(directory / EVENTS):
        if event["type"] == "metrics":
            kept = {k: v for k, v in event["values"].items() if k.partition("/")[0] not in COST_AREAS}
            logged.setdefault(event["step"], {}).update(kept)
    return directory, logged


def weights(directory: Path) -> dict[str, Any]:
    return load_file(directory / "checkpoints/step-00000004/policy/model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("start", ["one-seed0", "clone-1-"])
def test_a_resumed_arm_and_a_warm_clone_that_learns_the_same_equal_a_run_that_was_never_stopped(steered, start):
    (before, undisturbed), (after, found) = trial(steered[0], "one"), trial(steered[1], start)
    assert found == undisturbed
    ours, theirs = weights(after), weights(before)
    assert ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


@pytest.mark.slow
def test_a_warm_clone_keeps_the_past_and_takes_its_own_settings(steered):
    (_, parent), (folder, warm) = trial(steered[1], "one"), trial(steered[1], "clone-2-")
    assert all(parent[step]["policy/grad_norm"] > 0 for step in (1, 2, 3, 4))
    assert {step: warm[step] for step in (0, 1, 2)} == {step: parent[step] for step in (0, 1, 2)}
    assert warm[3]["policy/grad_norm"] != parent[3]["policy/grad_norm"]  # of the KL term
    ours, others = weights(folder), [weights(trial(steered[1], start)[0]) for start in ("one", "clone-1-")]
    changed, same = (max(float((ours[name] - other[name]).abs().max()) for name in ours) for other in others)
    assert changed == same > 0.005  # two steps of Adam at 0.01


@pytest.mark.slow
def test_the_report_shows_clones_apart_with_their_parent_and_the_step_they_left(steered, tmp_path):
    assert study_status("real", steered[1]).counts() == {"complete": 3}
    queue = open_queue(a_real_study(), steered[1])
    queue.status()
    left = [(c.parent, list(c.seeds), list(c.steps)) for c in queue.clones()]
    assert left == [("one", [0], [2])] * 2
    found = queue.plan.tags((queue.clones()[1].label, 0))
    assert (found["cohort.phase"], found["cohort.parent"], found["cohort.left_at"]) == ("exploratory", "one", "2")
    record = read_study(steered[1], "real")
    assert record.arms == ["one"] and {t.arm for t in record.trials} <= {"one"}
    assert [(arm.parent, arm.left_at) for arm in record.exploratory] == [("one", {0: 2})] * 2
    page = render(record, tmp_path, formats=()).html.read_text()
    section = page.split('<section id="exploratory">')[1].split("</section>")[0]
    assert section.count("clone ") == 2 and "a separate study with other seeds" in section


@pytest.mark.slow
def test_clones_change_nothing_in_the_comparison(tmp_path):
    record = fake_study()
    best = [t for t in fake_study(rng_seed=5).trials if t.arm == "grpo"]
    hostile = ExploratoryArm("clone 1 of grpo: <b>x</b>", "grpo", {"algorithm.kl_beta": 0.1}, {0: 40, 1: 60}, best)
    with_clone = dataclasses.replace(record, exploratory=[hostile])
    plain, other = (analysed(one) for one in (record, with_clone))
    for name in ("comparisons", "gaps"):
        assert getattr(plain, name) == getattr(other, name)
    assert [arm.label for arm in plain.arms] == [arm.label for arm in other.arms]
    assert answer(plain) == answer(other)
    files = render(with_clone, tmp_path, formats=())
    text = files.html.read_text()
    assert "<b>x</b>" not in text and "40 to 60" in text
    assert "clone 1" not in files.csv.read_text()


def torn_checkpoints(queue: Queue, steps: tuple[int, ...]) -> Path:
    """The file that is torn in the newest of new checkpoints of the first arm's trial with seed 0."""
    folder = queue.plan.directory((ARMS[0], 0)) / CHECKPOINTS
    for step in steps:
        save(folder, step)
    learner = folder / f"step-{steps[-1]:08d}/learner.pt"
    learner.write_bytes(learner.read_bytes()[:-1])
    return learner


@pytest.mark.attack("A torn or altered checkpoint")
def test_a_warm_clone_names_a_torn_checkpoint_of_its_parent_and_the_step_it_starts_from(tmp_path, caplog):
    queue = a_queue(a_study(), tmp_path)
    torn = torn_checkpoints(queue, (3,))
    before = files_of(tmp_path)
    with pytest.raises(SpecError, match=f"none for seed 0; '{torn}' is torn, altered or missing: wait for the next"):
        clone(tmp_path, ARMS[0], CHANGED, warm=True)
    assert not caplog.records and files_of(tmp_path) == before
    torn = torn_checkpoints(queue, (1, 3))
    assert list(clone(tmp_path, ARMS[0], CHANGED, warm=True).steps) == [1, 0]
    assert [record.message for record in caplog.records] == [
        f"a checkpoint must be as it was saved, but '{torn}' is torn, altered or missing; the run starts from step 1"
    ]


@pytest.mark.slow
def test_an_arm_or_a_clone_that_has_not_begun_is_taken_back_and_the_record_says_so(runs, cohort):
    clones: list[str] = []

    def drop(status: StudyStatus) -> None:  # while a worker of another process has the trials in its plan
        if at_work(status) and not clones:
            clones.extend(clone(runs, ARMS[0], {"algorithm.group_size": size}).label for size in (8, 16))
            assert drop_arm("sizes", runs, clones[0])
            assert drop_arm("sizes", runs, ARMS[1])
            assert not drop_arm("sizes", runs, ARMS[1])
            words = r"'group_size=2' has: its results count; stop it instead: cohort study"
            with pytest.raises(SpecError, match=words):
                drop_arm("sizes", runs, ARMS[0])
            with pytest.raises(SpecError, match="ARM must be an arm of study 'sizes', got 'group_size=4'; "):
                stop_arm("sizes", runs, ARMS[1])
            (runs / "hold").unlink()

    (runs / "hold").touch()
    status = run(a_study(seeds=[0]), runs, drop, workers=1)
    assert [(trial.arm, trial.state) for trial in status.trials] == [(ARMS[0], "complete"), (clones[1], "complete")]
    assert (status.finished, status.all_valid) == (True, True)
    again = clone(runs, ARMS[0], {"algorithm.group_size": 8})
    assert again.label == "clone 3 of group_size=2: algorithm.group_size=8"  # it is not the one that was taken back
    assert cohort("study", "rm", "sizes", again.label, "--runs", runs) == 0
    assert run(a_study(seeds=[0]), runs, workers=1).counts() == {"complete": 2}  # a new start changes nothing
    record = read_study(runs, "sizes")
    assert (record.arms, record.expected) == ([ARMS[0]], 1)
    assert [one["dropped"] for one in record.amendments] == [[clones[0]], [ARMS[1]], [again.label]]
    assert not analysed(record).gaps and not record.strange
    (text,) = [text for topic, text in notes(analysed(record)) if topic == "Some arms were taken back"]
    assert text == f"Taken back before they began: {clones[0]}, {ARMS[1]} and {again.label}."


def test_the_baseline_stays_and_arms_of_a_search_are_not_stopped(tmp_path):
    space = {"algorithm.group_size": {"choices": [2, 4, 8]}}
    a_queue(a_study(name="searched", design="search", factors={}, search={"space": space, "trials": 2}), tmp_path)
    a_queue(a_study(), tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(SpecError, match="the other arms are compared with 'group_size=2', so it stays"):
        drop_arm("sizes", tmp_path, ARMS[0])
    with pytest.raises(SpecError, match="'searched' is a search, whose sampler and pruner choose them"):
        stop_arm("searched", tmp_path, "001: group_size=2")
    assert files_of(tmp_path) == before


@pytest.mark.slow
def test_a_stopped_clone_stands_in_the_report_whether_it_began_or_not(runs, tmp_path):
    def stop(status: StudyStatus) -> None:
        if at_work(status) and (runs / "hold").exists():
            for size in (8, 16):
                clone(runs, "a", {"algorithm.group_size": size})
            stop_arm("sizes", runs, *STOPPED)
            (runs / "hold").unlink()  # only now may a worker take a clone

    (runs / "hold").touch()
    run(a_study(factors={}, arms={"a": {"algorithm.group_size": 2}}, seeds=[0]), runs, stop, workers=1)
    record = dataclasses.replace(read_study(runs, "sizes"), stopped=["clone 1 of a: algorithm.group_size=8", *STOPPED])
    assert read_study(runs, "sizes").stopped[-1:] == STOPPED
    page = render(record, tmp_path, formats=()).html.read_text()
    section = page.split('<section id="exploratory">')[1].split("</section>")[0]
    assert "group_size=8 (stopped)" in section and "group_size=16 (stopped before it began)" in section


def test_a_deleted_study_leaves_nothing_and_may_be_run_again(runs, url):
    study = a_study(seeds=[0])
    queue = a_queue(study, runs, url)
    claim = claimed(queue)
    with pytest.raises(SpecError, match="'sizes' has 1 trials at work; stop its command with Ctrl-C first"):
        remove_study("sizes", runs, url)
    queue.finish(claim, DONE)
    remove_study("sizes", runs, url)
    with pytest.raises(SpecError, match="no study 'sizes' was started"):
        study_status("sizes", runs, url)
    assert not list(runs.glob("studies/*")) and not list(runs.glob(".*"))
    again = a_queue(study, runs, url)
    assert {trial.state for trial in again.status().trials} == {"waiting"} and again.num_claims() == 0


@pytest.mark.slow
def test_a_deletion_that_is_killed_anywhere_leaves_a_study_or_none_and_is_ended_by_the_next_one(runs):
    for moment in itertools.count():
        folder = a_queue(a_study(), runs).plan.folder
        if not killed_at(moment, functools.partial(remove_study, "sizes", runs)):
            break
        assert not folder.exists() or read_study(runs, "sizes").arms == ARMS
        with contextlib.suppress(SpecError):  # there is none
            remove_study("sizes", runs)
        assert not list(runs.glob("studies/*")) and not list(runs.glob(".*"))
    assert moment >= 8


@pytest.mark.slow
def test_mlflow_forgets_a_deleted_study(runs):
    run(a_study(seeds=[0]), runs, workers=1)
    begun = a_queue(a_study(name="other"), runs).plan.folder
    assert study_pages(runs, "").keys() == {"sizes"}
    remove_study("sizes", runs)
    assert study_pages(runs, "") == {} and begun.exists()


def test_a_clone_never_takes_the_label_of_another_arm(tmp_path):
    label = "clone 1 of a: algorithm.group_size=8"
    arms = {"a": {"algorithm.group_size": 2}, label: {"algorithm.group_size": 4}}
    study = a_study(factors={}, arms=arms, seeds=[0])
    a_queue(study, tmp_path)
    for size, number in ((8, 2), (16, 3)):
        made = clone(tmp_path, "a", {"algorithm.group_size": size})
        assert made.label == f"clone {number} of a: algorithm.group_size={size}"
    queue = open_queue(study, tmp_path)
    found = {trial.arm: queue.plan.spec((trial.arm, 0)).algorithm.group_size for trial in queue.status().trials}
    assert list(found.values()) == [2, 4, 8, 16] and found[label] == 4


def test_a_clone_that_is_asked_for_twice_is_there_once(tmp_path):
    queue = a_queue(a_study(), tmp_path)
    save(queue.plan.directory((ARMS[0], 0)) / CHECKPOINTS, 3)
    ask = functools.partial(clone, tmp_path, ARMS[0])
    for changes, warm in ((CHANGED, False), (CHANGED, True), ({"algorithm.kl_beta": 0.5}, True)):
        one, before = ask(changes, warm=warm), files_of(tmp_path)
        assert ask(changes, warm=warm) == one and files_of(tmp_path) == before
    assert [list(one.steps) for one in open_queue(a_study(), tmp_path).clones()] == [[0, 0], [3, 0], [3, 0]]


def killed_at(moment: int, command: Callable[[], object]) -> bool:
    """Whether a process that does `command` got killed: at the given place among those that flush, rename, delete, make
    a folder or lock, before or after it."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    count = itertools.count()

    def deadly(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*args, **kwargs)
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    FileLock.acquire = deadly(FileLock.acquire)  # pyright: ignore[reportAttributeAccessIssue]
    status = 1
    try:
        command()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.slow
@pytest.mark.attack("A kill at every write of a command that stops, resumes or clones an arm")
@pytest.mark.parametrize(
    "what", ["stop", "resume", "clone", "drop", pytest.param("warm clone", marks=pytest.mark.long)]
)
def test_a_command_that_is_killed_has_done_its_request_or_nothing_and_does_it_when_asked_again(
    tmp_path, what, record_property
):
    ways: dict[str, Callable[[Path], object]] = {
        "stop": lambda runs: stop_arm("sizes", runs, ARMS[0]),
        "resume": lambda runs: resume_arm("sizes", runs, ARMS[0]),
        "drop": lambda runs: drop_arm("sizes", runs, ARMS[1]),
        "clone": lambda runs: clone(runs, ARMS[0], CHANGED),
        "warm clone": lambda runs: clone(runs, ARMS[0], CHANGED, warm=True),
    }
    for moment in itertools.count():
        runs = tmp_path / str(moment)
        queue = a_queue(a_study(), runs)
        save(queue.plan.directory((ARMS[0], 0)) / CHECKPOINTS, 3)
        if what == "resume":
            stop_arm("sizes", runs, ARMS[0])
        if not killed_at(moment, functools.partial(ways[what], runs)):
            break
        first = open_queue(a_study(), runs)
        first.status()
        assert len(first.clones()) in (0, 1)
        start_study(a_study(), runs, command="", execute=fake_trials.EXECUTE)
        said = [arm for one in read_study(runs, "sizes").amendments for arm in one["dropped"]]
        assert said == first.dropped()
        ways[what](runs)
        queue = open_queue(a_study(), runs)
        trials = queue.status().trials
        assert len(read_study(runs, "sizes").arms) == len({trial.arm for trial in trials} & {*ARMS})
        assert (ARMS[1] not in [trial.arm for trial in trials]) == (what == "drop")
        assert len(read_study(runs, "sizes").amendments) == (what == "drop")
        assert {trial.held for trial in trials if trial.arm == ARMS[0]} == {what == "stop"}
        assert [[*one.steps] for one in queue.clones()] == {"clone": [[0, 0]], "warm clone": [[3, 0]]}.get(what, [])
        for made in queue.clones():
            folder = queue.plan.directory((made.label, 0)) / CHECKPOINTS
            assert [one.name for one in folder.glob("*")] == (["step-00000003"] if what == "warm clone" else [])
            assert what == "clone" or whole_manifest(folder / "step-00000003", STATE)["step"] == 3
    assert moment >= 4
    record_property("tried", moment)


def test_a_clone_without_warm_does_not_start_from_what_a_killed_warm_one_left(tmp_path, monkeypatch):
    queue = a_queue(a_study(), tmp_path)
    save(queue.plan.directory((ARMS[0], 0)) / CHECKPOINTS, 3)
    ask = functools.partial(clone, tmp_path, ARMS[0], CHANGED)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "add_clone", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        assert killed_at(-1, functools.partial(ask, warm=True))
    assert list(tmp_path.rglob("clone-1*/checkpoints/step-*"))
    made, queue = ask(), open_queue(a_study(), tmp_path)
    queue.status()
    assert list(made.steps) == [0, 0] and not queue.plan.directory((made.label, 0)).exists()


@pytest.mark.parametrize(
    ("arm", "changes", "warm", "message"),
    [
        ("group_size=3", {}, False, r"ARM must be .*, got 'group_size=3'; did you mean .*it has: 'group_size=2' and"),
        (ARMS[0], {"algorithm.kl_bta": 0.1}, False, "unknown key 'kl_bta'; did you mean 'kl_beta'"),
        (ARMS[0], {"optimizer.learning_rate": -1}, False, "learning_rate: Input should be greater than 0, got -1"),
        (ARMS[0], {}, False, "a setting that has an effect, and this one would repeat 'group_size=2'; change another"),
        (ARMS[0], {}, True, "this one would repeat 'group_size=2'"),
        (ARMS[0], {"algorithm.group_size": 4}, False, "this one would repeat 'group_size=4'"),
        (ARMS[0], {"mismatch.bound": 3.0}, False,
         r"'group_size=2' \(mismatch.bound has an effect only with a mismatch"),
        (ARMS[0], {"seed": 7}, False, "a clone has the seeds of its parent"),
        (ARMS[0], {"devices": 2}, False, "devices of a clone must be at most 1"),
        (ARMS[0], {"task.empty_split": "test"}, False, "in its test split"),
        (ARMS[0], {"dtype": "bfloat16"}, True, "cannot change dtype; leave `warm` out"),
        (ARMS[0], CHANGED, True, r"has none for seed 0; a trial that has ended keeps none"),
        (ARMS[1], CHANGED, True, r"has none for seed 0; a trial writes one every checkpoints.every steps"),
    ],
)  # fmt: skip
def test_a_clone_that_cannot_be_is_refused_in_one_sentence_and_nothing_changes(tmp_path, arm, changes, warm, message):
    queue = a_queue(a_study(), tmp_path)
    queue.finish(claimed(queue), DONE)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        clone(tmp_path, arm, changes, warm=warm)
    assert "\n" not in str(caught.value)
    assert files_of(tmp_path) == before


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file() and "lock" not in file.name}


def test_a_watched_study_has_a_line_for_each_arm_with_its_curve(tmp_path, capsys):
    queue = a_queue(a_study(), tmp_path)
    directory = queue.plan.directory((ARMS[0], 0))
    claim = claimed(queue)
    lines = [
        {"type": "metrics", "step": 2 * i, "values": {METRIC: v}, "time": 0} for i, v in enumerate((0.1, 0.2, 0.8))
    ]
    (directory / EVENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(directory / "progress.json", {"phase": "train", "done": 4, "total": 7, "step": 4})
    screen = Console(width=120, record=True, file=io.StringIO())
    screen.print(Page().render(queue.status()))
    first, second = (line for line in screen.export_text().splitlines() if "group_size" in line)
    assert "\u2581\u2582\u2588" in first and "0.8" in first
    assert "2/7" in first and "1 running, 1 waiting" in first  # mean of 4 and 0
    assert "2 waiting" in second
    queue.finish(claim, TrialOutcome("invalid", "NaN"))
    show_live(queue.status)  # no terminal: once
    assert "1 invalid" in capsys.readouterr().out
    assert spark([]) == "" and spark([1.0]) == "\u2581"
