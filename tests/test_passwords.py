"""A password of a database reaches no message, no file of a runs folder and no arguments of a process."""

import contextlib
import logging
from typing import Any

import fake_trials
import postgres_server
import psutil
import pytest
import typer
from cohort.harness.base.addresses import hides, shown, without_secrets
from cohort.harness.cli import app
from cohort.harness.record.status import StudyStatus
from cohort.harness.settings.errors import SpecError
from cohort.harness.study.queue import open_storage
from cohort.harness.study.runner import run_study
from fake_trials import a_study

SECRET = "s3cret"
URLS = [
    "postgresql://me:s3cret@db/x", "postgresql+psycopg://me:s3cret@db:5432/x", "POSTGRESQL://me:s3cret@db/x",
    "postgresql://:s3cret@db/x", "postgresql:me:s3cret@db/x", "postgresql:/me:s3cret@db/x", "me:s3cret@db/x",
    "postgresql://me:s3cret", "postgresql://me:@s3cret@db/x", "postgresql://me:a@b:s3cret@db/x",
    "postgresql://me:/s3cret@db/x", "postgresql://me:a/s3cret@db/x", "postgresql://me:?s3cret@db/x",
    "postgresql://me:#s3cret@db/x", "postgresql://me: s3cret@db/x", "postgresql://me:%40s3cret@db/x",
    "postgresql://me%3As3cret@db/x", "postgresql://me@corp:s3cret@db/x", "postgresql://me:s3cret@[::1]:5432/x",
    "postgresql://me:s3cret@a:1,b:2/x", "postgresql://me:a@db/x?user=s3cret@db", "postgresql://db/me:s3cret",
    "postgresql://db/x?user=me&password=s3cret", "postgresql://db/x?PASSWORD=s3cret",
    "postgresql://db/x?pass%77ord=s3cret", "postgresql://db/x?password=a@s3cret", "postgresql://db/x?sslpassword=s3cret",
    "postgresql://db/x?options=-cs3cret", "postgresql://db/x?passfile=/s3cret", "postgresql://db/x?user=me:s3cret",
    "postgresql://db/x?sslmode=require;password=s3cret", "host=db user=me password=s3cret", "https://me:s3cret@host",
    "mysql://me:s3cret@db/x", "http://me:s3cret@127.0.0.1:9",
]  # fmt: skip

needs_postgres = pytest.mark.skipif(postgres_server.missing() is not None, reason=str(postgres_server.missing()))


@pytest.fixture(autouse=True)
def plugins(tmp_path, monkeypatch):
    fake_trials.install(tmp_path / "plugins", monkeypatch)
    monkeypatch.setenv("COHORT_RUNS", str(tmp_path / "runs"))


@pytest.mark.attack("A password in the URL of a database, written in any way")
def test_no_spelling_of_a_url_shows_its_password(record_property):
    for url in URLS:
        assert SECRET not in shown(url), url
        assert hides(url), url
    record_property("tried", len(URLS))


@pytest.mark.parametrize(
    "url",
    ["postgresql://me@db:5432/x?sslmode=require", "http://host:5000", "ftp://host/x", "runs/mlflow.db", "nonsense"],
)
def test_a_url_without_a_password_is_shown_as_it_is(url):
    assert shown(url) == url
    assert not hides(url)


def test_the_words_of_a_server_lose_every_secret():
    url = "postgresql://me:a%2Fs3cret@db/x?options=-c%20x=y"
    assert without_secrets("me a/s3cret a%2Fs3cret '-c x=y' db", url) == "me *** *** '***' db"


@pytest.mark.attack("A password in a URL that is refused")
def test_a_url_that_is_refused_does_not_show_its_password(tmp_path, capsys, record_property):
    refused = [url for url in URLS if "@b:" in url or ":@" in url or not url.startswith("postgresql")]
    for url in refused:
        with pytest.raises(SpecError, match=r"`storage` must be a URL as postgresql://.*%40") as caught:
            open_storage(tmp_path, "sizes", url)
        assert SECRET not in str(caught.value)
        with pytest.raises(SystemExit, match="2"):
            app.main(["report", "sizes", "--tracking-uri", url])
        out, err = capsys.readouterr()
        assert SECRET not in out + err
    record_property("tried", 2 * len(refused))


def test_a_password_on_the_command_line_is_warned_of(capsys, monkeypatch):
    words = "can read a password in --storage (with ps); give it in COHORT_STORAGE or ~/.pgpass"
    status = ["study", "status", "sizes"]
    nowhere = "postgresql://me:s3cret@127.0.0.1:1/x"
    monkeypatch.setenv("COHORT_STORAGE", nowhere)
    for arguments, warned in (
        ([*status, "--storage", nowhere], True),
        ([*status, "--storage", "postgresql://me@127.0.0.1:1/x"], False),
        (status, False),
    ):
        with pytest.raises(SystemExit):
            app.main(arguments)
        out, err = capsys.readouterr()
        assert (words in err) == warned
        assert SECRET not in out + err


@pytest.mark.parametrize("workers", [["--workers", "3"], []])
def test_the_command_that_reproduces_a_study_names_the_workers_and_no_password(workers, monkeypatch):
    asked: dict[str, Any] = {}

    def run(*_: object, **given: Any) -> StudyStatus:
        asked.update(given)
        raise typer.Exit(0)

    monkeypatch.setattr("cohort.harness.study.runner.run_study", run)
    monkeypatch.setattr("cohort.harness.api.study.default_workers", lambda devices: 7)
    storage = ["--storage", "postgresql://me:s3cret@127.0.0.1:1/x"]
    with pytest.raises(SystemExit, match="0"):
        app.main(["study", "run", "quickstart", "--seeds", "0", *storage, *workers])
    count = 3 if workers else 7
    assert asked["command"] == f"cohort study run quickstart --set 'seeds=[0]' --workers {count}"
    assert asked["workers"] == count  # named because it is used


@pytest.mark.slow
@needs_postgres
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
