"""The queue in PostgreSQL, whose clock and connections it trusts: outages, hosts that share nothing else, passwords."""

import contextlib
import logging
import subprocess
import sys

import fake_trials
import postgres_server
import psutil
import pytest
from cohort.harness.base.files import write_json
from cohort.harness.record.status import StudyStatus
from cohort.harness.settings.errors import SpecError
from cohort.harness.study import worker
from cohort.harness.study.queue import TrialOutcome, open_storage
from cohort.harness.study.runner import run_study
from cohort.harness.study.storage.base import StorageUnavailable
from fake_trials import a_study
from queues import DONE, a_queue, check_once_each, claimed, open_queue, run, wait_for
from test_killed import mixed, values
from test_passwords import SECRET, URLS
from test_storage import one_trial
from test_tracking import HOSTILE

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture(scope="module")
def server(servers):
    return servers("postgres")


@pytest.mark.slow
@postgres_server.needed
def test_a_worker_elsewhere_lives_as_long_as_the_database_saw_its_heartbeat(tmp_path, server, monkeypatch):
    from cohort.harness.extras.postgres import storage as postgres

    queue = a_queue(one_trial(), tmp_path, server.new_database())
    storage, directory = queue.storage, queue.plan.directory(queue.plan.keys[0])
    claim = claimed(queue)
    claim.lease._released.set()  # pyright: ignore
    storage._rows("UPDATE cohort_leases SET host = 'elsewhere'")  # pyright: ignore
    assert storage.held([directory]) == {directory}
    storage._rows("UPDATE cohort_leases SET beat = clock_timestamp() - interval '1 day'")  # pyright: ignore
    # The server started less than an hour ago: until then no heartbeat could be written, so nobody is dead yet.
    monkeypatch.setattr(postgres, "GRACE_SECONDS", 3600.0)
    assert storage.held([directory]) == {directory}
    monkeypatch.setattr(postgres, "GRACE_SECONDS", 0.0)
    assert storage.held([directory]) == set()
    assert claimed(queue).key == claim.key


@pytest.mark.slow
@postgres_server.needed
@pytest.mark.attack("Loss of the PostgreSQL server")
def test_a_lease_outlives_the_loss_of_the_server(tmp_path, monkeypatch):
    from cohort.harness.extras.postgres import storage as postgres

    monkeypatch.setattr(postgres, "BEAT_SECONDS", 0.1)
    with postgres_server.server() as own:
        queue = a_queue(one_trial(), tmp_path, own.url())
        claim = claimed(queue)
        queue.plan.directory(claim.key).mkdir(parents=True)
        write_json(queue.plan.directory(claim.key) / "progress.json", {"step": 3, "phase": "train", "done": 3})
        own.stop()
        with pytest.raises(StorageUnavailable, match=r"postgresql://cohort:\*\*\*@.*cannot be used now"):
            queue.status()
        own.start()
        south = open_queue(one_trial(), tmp_path / "south", own.url())  # another host: it has no folder of the trial
        wait_for(lambda: south.status().trials[0].done == 3)
        (trial,) = south.status().trials
        assert (trial.state, trial.phase, trial.done) == ("running", "train", 3)
        queue.finish(claim, DONE)
        assert queue.status().counts() == {"complete": 1}


@postgres_server.needed
@pytest.mark.attack("Loss of the PostgreSQL server")
def test_a_server_out_of_reach_or_that_refuses_is_named_without_the_password_before_any_write(server, tmp_path):
    nobody, words = "postgresql://me:wr0ng@127.0.0.1:1/x", r"postgresql://me:\*\*\*@127.0.0.1:1/x cannot be used now"
    refused = server.url().replace(server.password, "wr0ng")
    for url, message in ((nobody, words + ".*`storage`"), (refused, "authentication failed")):
        with pytest.raises(ConnectionError, match=message) as caught:
            run(a_study(), tmp_path / "new", storage=url)
        assert "wr0ng" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.attack("NUL and broken Unicode in a reason")
@postgres_server.needed
def test_a_reason_that_postgresql_refuses_is_recorded_there(server, tmp_path):
    queue = a_queue(a_study(), tmp_path, server.new_database())
    queue.finish(claimed(queue), TrialOutcome("failed", HOSTILE + "x" * 1_000_000))
    (failed,) = [trial for trial in queue.status().trials if trial.state == "failed"]
    assert str(failed.reason).startswith("boom")


@pytest.mark.attack("A password in a URL that is refused")
def test_a_url_that_is_refused_does_not_show_its_password(tmp_path, cohort, record_property):
    refused = [url for url in URLS if "@b:" in url or ":@" in url or not url.startswith("postgresql")]
    for url in refused:
        with pytest.raises(SpecError, match=r"`storage` must be a URL as postgresql://.*%40") as caught:
            open_storage(tmp_path, "sizes", url)
        assert SECRET not in str(caught.value)
        assert cohort("report", "sizes", "--mirror", f"mlflow={url}") == 2
        assert SECRET not in cohort.out + cohort.err
    record_property("tried", 2 * len(refused))


@pytest.mark.slow
@postgres_server.needed
@pytest.mark.attack("A password in processes, logs and files of a study")
def test_no_process_log_or_file_of_a_study_has_the_password(server, runs, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    arguments = set[str]()

    def look(_: object) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has ended since, a zombie too
                arguments.add(" ".join(process.cmdline()))

    study, url = a_study(factors={"algorithm.group_size": [2]}, seeds=[0]), server.new_database()
    status = run_study(study, runs, workers=1, command="", on_status=look, execute=fake_trials.EXECUTE, storage=url)
    assert status.all_valid
    assert any("cohort.harness.study.worker" in words for words in arguments)
    files = [file for file in runs.rglob("*") if file.is_file()]
    assert {"worker-0.log", "mlflow.db", "study.json"} <= {file.name for file in files}
    assert [file for file in files if server.password.encode() in file.read_bytes()] == []
    assert server.password not in " ".join([*arguments, *capfd.readouterr(), caplog.text])


@pytest.mark.long
@postgres_server.needed
@pytest.mark.attack("Crash of the PostgreSQL server")
def test_a_database_that_crashes_twice_delays_a_grid_and_loses_nothing(runs, server, monkeypatch, record_property):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    study, url, crashes = a_study(seeds=list(range(12))), server.new_database(), []

    def crash(status: StudyStatus) -> None:
        if len(crashes) < 2 and status.counts().get("complete", 0) > 4 * (len(crashes) + 1):
            crashes.append(server.crash())
            server.start()

    status = run(study, runs, crash, storage=url)
    assert (status.finished, status.all_valid, len(crashes)) == (True, True, 2)
    record_property("tried", len(crashes))
    check_once_each(open_queue(study, runs, url))


HOST = """
import sys
from pathlib import Path
from test_killed import mixed, run, worker
run(mixed("grid"), Path(sys.argv[1]), storage=sys.argv[2], execute=worker.EXECUTE)
"""


@pytest.mark.long
@postgres_server.needed
def test_two_hosts_that_share_only_a_database_have_the_values_of_one(tmp_path, new_runs, server, monkeypatch):
    """Two workers everywhere: the number of threads of a worker follows from it, and with it the order of sums."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, url = mixed("grid"), server.new_database()
    quiet, *places = (new_runs(tmp_path / name / "runs") for name in ("quiet", "north", "south"))
    run(study, quiet, execute=worker.EXECUTE)
    processes = [subprocess.Popen([sys.executable, "-c", HOST, str(place), url], cwd=place.parent) for place in places]
    assert [process.wait(1800) for process in processes] == [0, 0]
    check_once_each(open_queue(study, places[0], url))
    north, south = (values(place) for place in places)
    assert north and south and not north.keys() & south.keys()
    assert {**north, **south} == values(quiet)
