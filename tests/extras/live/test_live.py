"""What a reader finds on a study's live page."""

import dataclasses
import functools
import uuid

import browser
import fake_trials
import pytest
from cohort.harness.api import study
from cohort.harness.extras.live import pages
from cohort.harness.study import runner
from cohort.harness.study.queue import Queue, TrialOutcome
from cohort.harness.study.worker import worker_main
from fake_trials import a_study
from queues import a_queue, claimed
from starlette.requests import Request
from test_browser import HOSTILE


@pytest.mark.slow
@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_live_page_fits_a_phone_and_shows_what_comes_and_nothing_of_it_runs(site):
    chromium, queue = site.chromium, a_queue(a_study(), site.runs)
    queue.finish(claimed(queue), TrialOutcome("failed", HOSTILE))
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chromium.get(f"{site.address}/live/sizes")
    text = browser.wait_for(site.text_if("Failures", "Sampled rollouts", "onerror"), "the rollouts and the failure")
    wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert chromium.execute_script(wider) <= 0
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert "Do larger groups help?" in text and "What is <b>2+2</b>?" in text
    assert text.count("window.hacked = 2") == 2  # in the reason and in the rollout
    assert chromium.find_elements("css selector", "figure svg")
    sample = chromium.find_element("link text", "whole sample").get_attribute("href")
    chromium.execute_script("window.loaded = 1")
    worker_main("sizes", site.runs, execute=fake_trials.EXECUTE)
    browser.wait_for(site.text_if("4 of 4 trials have ended", "2 complete"), "the end of the trials")
    told = chromium.execute_script("return [window.loaded, window.hacked]")
    assert told == [1, None]  # the page was not loaded again
    assert chromium.execute_script("return document.querySelectorAll('main img').length") == 0
    chromium.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=5\">')")
    refused = [one["message"] for one in chromium.get_log("browser") if "Content Security Policy" in one["message"]]
    assert refused and chromium.execute_script("return window.hacked") is None
    chromium.get(sample)  # of a step that the page does not show any more
    browser.wait_for(site.text_if("seed 0", "Prompt", "onerror"), "the whole sample")
    assert site.status(f"{sample.removeprefix(site.address)}0", Cookie=site.cookie)[0] == 404


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/live/none", "/live/..", "/live/%2e%2e", "/live/..%2f..", f"/live/{'a' * 5000}", "/live/%ED%A0%80",
        "/live/%00",
    ],
)  # fmt: skip
def test_a_live_page_of_no_study_is_not_found(site, path):
    assert site.status(path, Cookie=site.cookie)[0] == 404


@pytest.mark.usefixtures("plugins")
def test_a_live_page_says_how_far_a_study_is_and_how_long_it_takes(runs, monkeypatch):
    a_queue(a_study(), runs)
    monkeypatch.setenv("COHORT_RUNS", str(runs))
    was = Queue.status
    monkeypatch.setattr(Queue, "status", lambda self: dataclasses.replace(was(self), left=16.0, workers=1))
    assert pages.LiveStudy("sizes").progress()["words"] == "0 of 4 trials have ended; 16 s left with 1 worker."


@pytest.mark.usefixtures("plugins")
def test_a_live_page_is_sent_again_once_it_has_changed(runs, monkeypatch):
    queue = a_queue(a_study(), runs)
    monkeypatch.setenv("COHORT_RUNS", str(runs))
    monkeypatch.setattr(pages, "_studies", {"sizes": (study := pages.LiveStudy("sizes"))})

    def answer(tag: str):
        study._due = 0.0
        headers = [(b"if-none-match", tag.encode())]
        return pages._show(Request({"type": "http", "path_params": {"name": "sizes"}, "headers": headers}))

    first = answer("")
    tag = first.headers["etag"]
    again = answer(tag)
    assert (first.status_code, again.status_code, again.body) == (200, 304, b"")
    queue.finish(claimed(queue), TrialOutcome("failed", "a reason"))
    changed = answer(tag)
    assert changed.status_code == 200 and b"a reason" in changed.body and changed.headers["etag"] != tag


SECRETS = ("COHORT_SECRET", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN", "WANDB_API_KEY",
           "PGPASSWORD")  # fmt: skip


@pytest.mark.slow
@pytest.mark.attack("A secret in the environment of a study")
def test_no_secret_of_the_environment_is_in_a_log_record_tag_or_page(
    runs, plugins, monkeypatch, caplog, capfd, record_property
):
    planted = {name: uuid.uuid4().hex for name in SECRETS}
    for name, secret in planted.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setenv("COHORT_RUNS", str(runs))
    monkeypatch.setattr(runner, "run_study", functools.partial(runner.run_study, execute=fake_trials.EXECUTE))
    (runs / "crash").touch()
    spec = a_study(seeds=[0, 1], factors={"optimizer.weight_decay": [0.0, 0.1, 0.2]})
    with caplog.at_level("DEBUG", "cohort"):
        study.run_to_report(study.Study("sizes", (), spec, "cohort study run sizes"), runs, 2)
        page = repr(pages.LiveStudy("sizes").shown())
    written = {str(file): file.read_bytes() for file in runs.rglob("*") if file.is_file()}
    assert {"mlflow.db", "index.html", "run.json", "worker-0.log"} <= {name.rpartition("/")[2] for name in written}
    said = {"page": page, "log": caplog.text, "output": "".join(capfd.readouterr())}
    assert "no memory left" in page
    places = written | {name: text.encode() for name, text in said.items()}
    assert [(where, name) for where, text in places.items() for name in planted if planted[name].encode() in text] == []
    record_property("tried", len(SECRETS))
