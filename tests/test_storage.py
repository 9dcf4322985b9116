"""The queue keeps its promises wherever it lives: in files or in a storage of an extra."""

import subprocess
import sys
import threading

import fake_trials
import pytest
from cohort.harness.base.files import read_json, write_json
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.queue import MAX_LOST, TrialOutcome, open_storage, study_status
from cohort.harness.study.storage.files import FileLease, LocalStorage
from fake_trials import a_study
from queues import DONE, a_queue, claimed, die, open_queue, run

pytestmark = pytest.mark.usefixtures("plugins")


def one_trial() -> StudySpec:
    return a_study(factors={"algorithm.group_size": [2]}, seeds=[0])


def test_each_trial_is_claimed_once_and_its_end_is_seen_by_all(tmp_path, url):
    queue = a_queue(a_study(), tmp_path, url)
    other = open_queue(a_study(), tmp_path, url)
    claims = [claimed(queue), claimed(other), claimed(other), claimed(queue)]
    assert [claim.key for claim in claims] == queue.plan.keys
    assert queue.claim() is None and other.claim() is None
    assert queue.status().counts() == {"running": 4}
    queue.finish(claims[0], DONE)
    other.finish(claims[1], TrialOutcome("invalid", "policy/loss is NaN"))
    other.finish(claims[2], TrialOutcome("stopped"))
    status = open_queue(a_study(), tmp_path, url).status()
    assert [(t.state, t.reason) for t in status.trials] == [
        ("complete", None), ("invalid", "policy/loss is NaN"), ("stopped", None), ("running", None)
    ]  # fmt: skip
    first = status.trials[0]
    assert (first.accuracy, first.seconds, first.generated_tokens) == (0.5, 8.0, 100.0)
    other.retry_failed()  # the study is started again
    assert claimed(queue).key == claims[2].key  # what was stopped comes again, and nothing else
    assert queue.claim() is None and other.claim() is None
    assert queue.num_claims() == other.num_claims() == 5


def test_claims_of_many_threads_at_once_never_meet(tmp_path, url):
    study = a_study(factors={"algorithm.group_size": [1, 2, 4, 8, 16, 32]}, seeds=[0, 1])
    a_queue(study, tmp_path, url)
    keys: list[object] = []

    def work() -> None:
        queue = open_queue(study, tmp_path, url)
        while (claim := queue.claim()) is not None:
            queue.finish(claim, DONE)
            keys.append(claim.key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    queue = open_queue(study, tmp_path, url)
    assert sorted(keys, key=str) == sorted(queue.plan.keys, key=str)  # 6 arms x 2 seeds, none twice
    assert queue.num_claims() == 12


@pytest.mark.attack("A worker that dies with a trial")
def test_a_dead_workers_trial_is_handed_on_and_its_late_result_dropped(tmp_path, url):
    queue = a_queue(one_trial(), tmp_path, url)
    claim = claimed(queue)
    assert queue.claim() is None
    die(claim, queue)
    assert queue.status().counts() == {"stopped": 1}
    again = claimed(open_queue(one_trial(), tmp_path, url))
    assert (again.key, again.number) == (claim.key, 1)
    queue.finish(again, DONE)
    queue.finish(claim, TrialOutcome("failed", "too late"))
    assert queue.status().counts() == {"complete": 1}


@pytest.mark.attack("A trial that kills every worker")
def test_a_trial_that_keeps_killing_its_worker_fails_with_a_reason(tmp_path, url):
    queue = a_queue(one_trial(), tmp_path, url)
    progress = queue.plan.directory(queue.plan.keys[0]) / "progress.json"
    progress.parent.mkdir(parents=True)
    for attempt in range(MAX_LOST + 3):
        claim = claimed(queue)
        write_json(progress, {"step": min(attempt, 3)})  # the first three attempts get further each time
        die(claim, queue)
    assert queue.claim() is None
    (trial,) = queue.status().trials
    reason = "the worker died 10 times at step 3, the last time without an error"
    assert (trial.state, trial.reason) == ("failed", reason)
    queue.retry_failed()  # the study is started again
    assert claimed(queue).number == MAX_LOST + 3


HOLDER = """
import sys, time
from pathlib import Path
from cohort.harness.study.queue import open_storage
from cohort.harness.study.storage import files
from cohort.harness import extras
for one in (files, *extras.modules("storage").values()):
    one.BEAT_SECONDS = 0.05
storage = open_storage(Path(sys.argv[1]), "sizes", sys.argv[2])
storage.write_document({})
assert storage.take_lease(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_worker_ends_at_once_when_another_has_its_lease(tmp_path, url):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), url or ""], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    storage = open_storage(tmp_path, "sizes", url)
    assert storage.held([tmp_path]) == {tmp_path}
    if url is None:
        write_json(tmp_path / "lease", {**read_json(tmp_path / "lease"), "token": "another"})
    else:
        storage._rows("UPDATE cohort_leases SET token = 'another'")  # pyright: ignore
    assert process.wait(240) == 3


def test_another_spec_under_the_same_name_is_refused(tmp_path, url, new_runs):
    here, there = new_runs(tmp_path / "here"), new_runs(tmp_path / "there")
    a_queue(a_study(), here, url)
    second = here if url is None else there  # another host knows of it by the database alone
    words = r"(?s)a started study cannot change.*run.steps: then 7, now 8\n.*restore the settings.*`name`"
    with pytest.raises(SpecError, match=words):
        run(a_study(run=fake_trials.run_settings(steps=8)), second, storage=url)
    assert study_status("sizes", second, url).counts() == {"waiting": 4}


@pytest.mark.parametrize("torn", [b"", b"{", b"\xff\x00", b'{"format": 1, "step": "two"}'])
@pytest.mark.attack("A torn progress or lease file")
def test_a_lease_whose_file_was_torn_is_kept_and_progress_that_cannot_be_read_is_none(tmp_path, torn):
    lease = FileLease(tmp_path)
    for name in ("lease", "progress.json"):
        (tmp_path / name).write_bytes(torn[:1] if name == "lease" else torn)
    assert LocalStorage(tmp_path).progress([tmp_path]) == {tmp_path: {}}
    assert lease._renew()
    lease.release()
    assert not (tmp_path / "lease").exists()
