"""One bad file costs one trial: it fails once and names the file; the others run, and the report says so."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from cohort.harness.api.reporting import write_report
from cohort.harness.base.disk import EXIT_STATUS, UNFIT, DiskFull
from cohort.harness.base.files import write_json, write_text
from cohort.harness.record.events import read_events
from cohort.harness.record.run import RunLog, read_result
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.harness.study.preflight import check_unchanged
from cohort.harness.study.queue import Queue
from cohort.harness.study.runner import run_study
from cohort.harness.study.storage.files import LocalStorage
from cohort.harness.study.workers import MAX_CRASHES, MAX_KILLS, WorkerPool
from fake_trials import a_study, begin_study

START = b'{"type":"start","host":"h","pid":1,"time":1}\n'
BAD_FILES = {  # one for each trial but the first: file -> content
    ("group_size=2", 1): ("events.jsonl", START + b"garbage\n" + START),
    ("group_size=4", 0): ("events.jsonl", b"\xff\xfe\n" * 3),
    ("group_size=4", 1): ("events.jsonl", START + b'{"type":"metrics","step":"two","values":[1],"time":1}\n'),
    ("group_size=8", 0): ("run.json", b""),
    ("group_size=8", 1): ("run.json", b'{"format": 3, "colour": "blue"}'),
    ("group_size=16", 0): ("result.json", b'{"format": 3, "state": "complete"}'),
    ("group_size=16", 1): ("result.json", b"[]"),
}

pytestmark = pytest.mark.usefixtures("plugins")


def a_grid() -> StudySpec:
    return a_study(factors={"algorithm.group_size": [2, 4, 8, 16]}, seeds=[0, 1])


def run(runs: Path) -> StudyStatus:
    return run_study(a_grid(), runs, workers=1, command="", execute=fake_trials.EXECUTE)


@pytest.mark.long
@pytest.mark.attack("A damaged file in a trial's folder")
def test_trials_with_a_bad_file_fail_once_and_name_it_and_others_run_and_are_reported(runs, cohort, record_property):
    plan = Plan(a_grid(), runs)
    for key, (name, content) in BAD_FILES.items():
        plan.directory(key).mkdir(parents=True)
        (plan.directory(key) / name).write_bytes(content)
    status = run(runs)
    assert (status.finished, status.all_valid) == (True, False)  # so the exit code is 1
    reasons = {(t.arm, t.seed): str(t.reason) for t in status.trials if t.state == "failed"}
    assert reasons.keys() == BAD_FILES.keys() and status.counts() == {"failed": 7, "complete": 1}
    for key, (name, _) in BAD_FILES.items():
        assert str(plan.directory(key) / name) in reasons[key], reasons[key]
    assert Queue(plan).num_claims() == 8  # none was tried twice

    record, files = write_report("sizes", runs)
    assert {(t.arm, t.seed): t.reason for t in record.trials if t.state == "failed"} == reasons
    assert "no trial yet" not in files.html.read_text() and "garbage" not in files.html.read_text()
    assert cohort("study", "status", "sizes", "--runs", runs, "--json") == 1
    assert cohort.json()["counts"] == {"complete": 1, "failed": 7}
    assert cohort("list", "studies", "--runs", runs) == cohort("report", "sizes", "--runs", runs) == 0

    for key in BAD_FILES:  # as the words advise
        plan.directory(key).rename(plan.folder / f"away-{plan.directory(key).name}")
    assert run(runs).counts() == {"complete": 8}
    assert [trial.state for trial in read_study(runs, "sizes").trials] == ["complete"] * 8
    record_property("tried", len(BAD_FILES))


@pytest.mark.slow
@pytest.mark.attack("A damaged file in a trial's folder")
def test_a_bad_file_of_a_trial_that_has_ended_is_named_once_and_changes_nothing(runs, caplog):
    study = a_study(seeds=[0])
    first, second = (Plan(study, runs).directory(key) for key in Plan(study, runs).keys)
    arguments: dict[str, Any] = {"workers": 1, "command": "", "execute": fake_trials.EXECUTE}
    run_study(study, runs, **arguments)
    (first / "events.jsonl").write_text("garbage\n")
    (second / "run.json").write_text("{")
    caplog.set_level(logging.WARNING)
    assert run_study(study, runs, **arguments).counts() == {"complete": 2}
    caplog.clear()
    trials = read_study(runs, "sizes").trials
    bad = (first / "events.jsonl", second / "run.json")
    assert [trial.state for trial in trials] == ["failed"] * 2
    assert all(str(file) in str(trial.reason) for file, trial in zip(bad, trials, strict=True))
    said = [record.message for record in caplog.records]
    assert [sum(str(file) in words for words in said) for file in bad] == [1, 1]


def test_a_trial_that_says_that_it_runs_counts_as_failed_when_the_queue_knows_better(runs):
    """As after the death of all its workers."""
    study = a_study(factors={"algorithm.group_size": [2]}, seeds=[0])
    plan, folder = Plan(study, runs), begin_study(runs, study)
    (key,) = plan.keys
    settings: dict[str, Any] = {"run_name": plan.run_name(key), "tags": plan.tags(key)}
    log = RunLog(runs, plan.directory(key), plan.spec(key), experiment="sizes", **settings)
    log.metrics(0, {"validation/accuracy": 0.5})
    assert [trial.state for trial in read_study(runs, "sizes").trials] == ["running"]
    one = {"trial": plan.directory(key).name, "arm": key[0], "seed": 0, "factors": {}, "reason": "died 10 times"}
    write_json(folder / "status.json", {"state": "complete", "stopped": [], "failed": [one]})
    (trial,) = read_study(runs, "sizes").trials
    assert (trial.state, trial.reason) == ("failed", "died 10 times")
    assert trial.history["validation/accuracy"] == [(0, 0.5)]


@pytest.mark.parametrize("line", [
    b"garbage", b"[]", b"7", b'{"type": "metrics"}', b'{"type": "dance", "time": 1}', b'"\xff"',
    b'{"type": "samples", "step": 1, "time": 1, "rows": [3]}', b"[" * 100_000,
    b'{"type": "metrics", "step": null, "time": 1, "values": {}}',
], ids=range(9))  # fmt: skip
@pytest.mark.attack("A damaged file in a trial's folder")
def test_a_line_that_is_no_event_is_named(tmp_path, line):
    file = tmp_path / "events.jsonl"
    file.write_bytes(START + START + line + b"\n" + START)
    with pytest.raises(ValueError, match=r"events.jsonl has no event of a run in line 3 \(.*move its folder away"):
        read_events(file)


@pytest.mark.parametrize("end", [
    b'{"type":"metrics","st', b"\xff\xfe garbage", b"\0" * 40, b'{"type"' + b"\0" * 50 + b"\n" + START, b"\0\n",
], ids=range(5))  # fmt: skip
@pytest.mark.attack("A damaged file in a trial's folder")
def test_a_run_that_goes_on_after_half_a_line_says_so_and_keeps_the_whole_ones(runs, end, caplog):
    (key, *_) = (plan := Plan(a_grid(), runs)).keys
    folder = plan.directory(key)
    folder.mkdir(parents=True)
    line = b'{"type":"metrics","step":1,"values":{"a":0.5},"time":1}\n'
    (folder / "events.jsonl").write_bytes(START + line + end)
    with RunLog(runs, folder, plan.spec(key), experiment="sizes", run_name="run") as log:
        log.resume(1)
        assert log.latest == {"a": 0.5}
    words = f"{folder / 'events.jsonl'}: truncated last line ignored, 2 whole lines kept"
    assert [record.message for record in caplog.records] == [words]
    assert (folder / "events.jsonl").read_bytes().startswith(START + line + b'{"type":"start"')


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"format": 2}', r"must have format 3, got 2.*another version"), ('{"format": 3', "not valid JSON"),
     ('{"format": 3}', "result.json was changed after it was written")]
    + [
        ({"state": "complete", "reason": None, "summary": {}, "metrics": {}, **changes},
         "result.json holds no result of a run")
        for changes in ({"summary": None}, {"metrics": {"a": "b"}}, {"summary": [1]}, {"state": None, "metrics": 3})
    ],
)  # fmt: skip
def test_a_result_of_another_version_or_shape_or_half_of_one_is_refused(tmp_path, text, words):
    file = tmp_path / "result.json"
    file.write_text(text) if isinstance(text, str) else write_json(file, text)
    with pytest.raises(ValueError, match=words):
        read_result(tmp_path)


@pytest.mark.parametrize("lost", ["digest", "seeds", "inputs"])
def test_a_record_of_a_started_study_that_lost_a_part_is_refused_by_its_path(tmp_path, lost):
    study, folder = a_grid(), tmp_path / "sizes"
    folder.mkdir()
    whole = {"digest": study.digest(), "seeds": [0, 1], "inputs": {}}
    write_json(folder / "study.json", {key: value for key, value in whole.items() if key != lost})
    with pytest.raises(SpecError, match=f"study.json' has no {lost}; restore it"):
        check_unchanged(study, LocalStorage(folder))


@pytest.mark.attack("A worker that is killed over and over before it can claim a trial")
@pytest.mark.parametrize(("status", "size", "claims", "limit", "kind", "words"), [
    (1, 1, 0, MAX_CRASHES, ChildProcessError, "ended with status 1"),
    (-9, 1, 0, MAX_KILLS + 1, ChildProcessError, "was killed by signal 9"),
    (EXIT_STATUS, 1, 0, 1, DiskFull, "then the same command continues"),
    (UNFIT, 1, 0, 1, SpecError, "^last words$"),
    (UNFIT, 9, 0, MAX_CRASHES, SpecError, "^last words$"),
    (UNFIT, 9, 1, 9, SpecError, "^last words$"),  # some machine was fit: it goes on while there is another
])  # fmt: skip
def test_workers_that_end_over_and_over_or_have_no_fit_machine_or_disk_end_the_study(
    tmp_path, status, size, claims, limit, kind, words
):
    pool = WorkerPool({}, size, tmp_path)
    pool.collect(claims)
    for _ in range(limit - 1):
        pool._note_end("a worker", status, "Error: last words\nof another process")
    with pytest.raises(kind, match=words):
        pool._note_end("a worker", status, "Error: last words\nof another process")


@pytest.mark.attack("Two writers of one file")
def test_two_writers_of_one_file_leave_whole_texts_and_no_remains(tmp_path):
    (folder := tmp_path / "report").mkdir()
    file = folder / "report.html"
    write_text(file, "a" * 200_000)

    def work(letter: str) -> set[str]:
        found: set[str] = set()
        for _ in range(100):
            write_text(file, letter * 200_000, sync=False)
            found |= {text[:1] if text == text[:1] * 200_000 else "torn" for text in [file.read_text()]}
        return found

    with ThreadPoolExecutor(2) as pool:
        assert set().union(*pool.map(work, "ab")) <= {"a", "b"}
    assert [one.name for one in folder.iterdir()] == ["report.html"]
