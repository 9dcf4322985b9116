"""What a reader finds on a study's live page, and who may press its buttons."""

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import browser
import fake_trials
import pytest
from cohort.harness.extras.live.pages import LiveStudy
from cohort.harness.record.study import read_study
from cohort.harness.study.queue import Outcome, Queue
from cohort.harness.study.worker import worker_main
from fake_trials import a_study
from queues import a_queue, claimed, open_queue
from test_browser import HOSTILE

ARM = "group_size=4"


@pytest.fixture(scope="module")
def queue(site) -> Queue:
    """The queue of the served study; its first trial has crashed with hostile words."""
    queue = a_queue(a_study(), site.runs)
    queue.finish(claimed(queue), Outcome("failed", HOSTILE))
    return queue


def dialog(chromium: Any, verb: str, arm: str, sets: str = "") -> Any:
    """The button that confirms a request, once its dialog is open."""
    find = f"const one = document.querySelector('[data-verb={verb}][data-arm=\"{arm}\"]')"
    press = f"{find}; if (one) one.click(); return Boolean(one)"  # at once, for the page may be written anew meanwhile
    browser.wait_for(lambda: chromium.execute_script(press), f"a button to {verb} {arm}")
    if sets:
        chromium.find_element("id", "sets").send_keys(sets)
    return chromium.find_element("id", "yes")


def said(chromium: Any, words: str) -> str:
    def found() -> str:
        text = chromium.find_element("id", "said").text
        return text if words in text else ""

    return browser.wait_for(found, f"an answer with '{words}'")


@pytest.mark.attack("Two browsers that ask for the same at once")
def test_two_browsers_that_stop_and_clone_at_once_have_one_effect_each(site, queue):
    with browser.session() as other, ThreadPoolExecutor(2) as pool:
        both = [site.chromium, other]
        for one in both:
            one.get(f"{site.address}/live/sizes")
        yes = [dialog(one, "stop", ARM) for one in both]
        list(pool.map(lambda button: button.click(), yes))
        answers = [said(one, "To continue it: cohort study resume sizes group_size=4") for one in both]
        assert sorted(" stops: " in text for text in answers) == [False, True]  # the other: is already stopped
        yes = [
            dialog(one, "clone", "group_size=2", "algorithm.kl_beta=0.5\noptimizer.weight_decay=2\n") for one in both
        ]
        list(pool.map(lambda button: button.click(), yes))
        label = "clone 1 of group_size=2: algorithm.kl_beta=0.5, optimizer.weight_decay=2"
        for one in both:
            assert said(one, "New arm").startswith(f"New arm: {label}\n")
            browser.wait_for(lambda one=one: label in one.find_element("id", "progress").text, "the clone")
        queue = open_queue(a_study(), site.runs)
        assert {trial.arm for trial in queue.status().trials if trial.held} == {ARM}
        assert [clone.label for clone in queue.clones()] == [label]
        dialog(other, "drop", label).click()
        assert said(other, "is taken back")
        browser.wait_for(lambda: label not in site.chromium.find_element("id", "progress").text, "the page without it")
        dialog(other, "clone", ARM).click()
        assert "would repeat 'group_size=4'" in said(other, "repeat")
    assert [one["dropped"] for one in read_study(site.runs, "sizes").amendments] == [[label]]


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_live_page_shows_what_comes_and_nothing_of_it_runs(site, queue):
    chromium = site.chromium
    chromium.get(f"{site.address}/live/sizes")
    text = browser.wait_for(site.text_if("Failures", "Sampled rollouts", "onerror"), "the rollouts and the failure")
    assert "Do larger groups help?" in text and "What is <b>2+2</b>?" in text
    assert text.count("window.hacked = 2") == 2  # in the reason and in the rollout
    assert chromium.find_elements("css selector", "figure svg")
    dialog(chromium, "stop", ARM).click() if not queue.is_held(ARM) else None  # without the test before
    dialog(chromium, "resume", ARM).click()
    said(chromium, f"{ARM} continues as soon as a worker is free.")
    chromium.execute_script("window.loaded = 1")
    worker_main("sizes", site.runs, execute=fake_trials.EXECUTE)
    browser.wait_for(site.text_if("4 of 4 trials have ended", "2 complete"), "the end of the trials")
    assert chromium.execute_script("return [window.loaded, window.hacked]") == [
        1,
        None,
    ]  # the page was not loaded again
    assert chromium.execute_script("return document.querySelectorAll('#progress img, #rollouts img').length") == 0
    chromium.execute_script("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hacked=5\">')")
    refused = [one["message"] for one in chromium.get_log("browser") if "Content Security Policy" in one["message"]]
    assert refused and chromium.execute_script("return window.hacked") is None


@pytest.mark.parametrize("width", [390, 1280])
def test_a_live_page_fits_its_width(site, queue, width):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 400}
    site.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        site.chromium.get(f"{site.address}/live/sizes")
        browser.wait_for(site.text_if("Sampled rollouts"), "the rollouts")
        wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert site.chromium.execute_script(wider) <= 0
    finally:
        site.chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.attack("A page of another site that presses a button")
@pytest.mark.parametrize(
    ("headers", "body", "status", "words"),
    [
        ({"X-Cohort-Token": None}, {}, 403, "load it again"),
        ({"X-Cohort-Token": "x" * 43}, {}, 403, "load it again"),
        ({"Origin": None}, {}, 403, "load it again"),
        ({"Origin": "http://evil.example"}, {}, 403, ""),
        ({"Origin": "null"}, {}, 403, ""),
        ({"Host": "evil.example"}, {}, 403, ""),
        ({}, {"verb": "delete"}, 400, "must be stop, resume, clone, drop, got 'delete'"),
        ({}, {"arm": 7}, 400, "must have a verb, an arm"),
        ({}, {"arm": "x" * 70_000}, 400, "at most 65536 bytes"),
        ({}, {"arm": "group_size=3"}, 400, "ARM must be an arm of study 'sizes', got 'group_size=3'"),
    ],
    ids=["no token", "another token", "no origin", "foreign", "null", "foreign host", "verb", "type", "long", "arm"],
)
def test_a_request_that_is_not_of_an_own_page_changes_nothing(site, queue, headers, body, status, words):
    host = site.address.removeprefix("http://")
    connection = HTTPConnection(host)
    connection.request("GET", "/live/sizes")
    (token,) = re.findall(r'data-token="([^"]+)"', connection.getresponse().read().decode())
    known = {"Host": host, "Origin": site.address, "X-Cohort-Token": token, **headers}
    before = (site.runs / "studies/sizes/optuna.journal").read_bytes()
    asked = json.dumps({"verb": "stop", "arm": "group_size=2", "sets": [], **body})
    given = {name: value for name, value in known.items() if value is not None}
    connection.request("POST", "/live/sizes/ask", asked, {"Content-Type": "application/json", **given})
    answer = connection.getresponse()
    text = answer.read().decode()
    assert (answer.status, words in text) == (status, True), text
    assert (site.runs / "studies/sizes/optuna.journal").read_bytes() == before


@pytest.mark.parametrize(
    "path", ["/live/none", "/live/none/events", "/live/..", "/live/%2e%2e/events", "/live/..%2f.."]
)
def test_a_live_page_of_no_study_is_not_found(site, path):
    connection = HTTPConnection(site.address.removeprefix("http://"))
    connection.request("GET", path)
    assert connection.getresponse().status == 404


@pytest.mark.usefixtures("plugins")
def test_a_live_page_says_how_far_a_study_is_and_how_long_it_takes(runs, monkeypatch):
    a_queue(a_study(), runs)
    monkeypatch.setenv("COHORT_RUNS", str(runs))
    was = Queue.status
    monkeypatch.setattr(Queue, "status", lambda self: dataclasses.replace(was(self), left=16.0, workers=1))
    assert "0 of 4 trials have ended; 16 s left with 1 worker" in LiveStudy("sizes")._read_progress()["progress"]
