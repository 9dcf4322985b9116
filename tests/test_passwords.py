"""A password of a database reaches no message, no file of a runs folder and no arguments of a process."""

from typing import Any

import fake_trials
import pytest
import typer
from cohort.harness.base.addresses import hides, shown, without_secrets
from cohort.harness.record.status import StudyStatus
from real_data import golden

SECRET = "s3cret"
URLS = golden("passwords")


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


def test_a_password_on_the_command_line_is_warned_of(cohort, monkeypatch):
    words = "can read a password in --storage (with ps); give it in COHORT_STORAGE or ~/.pgpass"
    status = ["study", "status", "sizes"]
    nowhere = "postgresql://me:s3cret@127.0.0.1:1/x"
    monkeypatch.setenv("COHORT_STORAGE", nowhere)
    for arguments, warned in (
        ([*status, "--storage", nowhere], True),
        ([*status, "--storage", "postgresql://me@127.0.0.1:1/x"], False),
        (status, False),
    ):
        cohort(*arguments)
        assert (words in cohort.err) == warned
        assert SECRET not in cohort.out + cohort.err


@pytest.mark.parametrize("workers", [["--workers", "3"], []])
def test_the_command_that_reproduces_a_study_names_the_workers_and_no_password(workers, monkeypatch, cohort):
    asked: dict[str, Any] = {}

    def run(*_: object, **given: Any) -> StudyStatus:
        asked.update(given)
        raise typer.Exit(0)

    monkeypatch.setattr("cohort.harness.study.runner.run_study", run)
    monkeypatch.setattr("cohort.harness.api.study.auto_workers", lambda spec: 7)
    storage = ["--storage", "postgresql://me:s3cret@127.0.0.1:1/x"]
    assert cohort("study", "run", "quickstart", "--seeds", "0", *storage, *workers) == 0
    count = 3 if workers else 7
    assert asked["command"] == f"cohort study run quickstart --set 'seeds=[0]' --workers {count}"
    assert asked["workers"] == count  # named because it is used
