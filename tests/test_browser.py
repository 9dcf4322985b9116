"""What a reader finds in the MLflow UI: the arms of a study in the runs table, a rollout with its rewards in a trace.

One server and one browser for all; the pages are single-page applications, so every look waits for what it looks for.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import browser
import fake_trials
import psutil
import pytest
from cohort.harness import api, extras
from cohort.harness.api.reporting import keep_report
from cohort.harness.mirror import ui
from cohort.harness.mirror.address import health, tracking_uri
from cohort.harness.mirror.ui import APP, study_pages
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.record.study import read_study
from cohort.harness.study.queue import TrialOutcome
from fake_trials import a_study, begin_study, in_mlflow
from mlflow import MlflowClient
from queues import METRIC, a_queue, claimed
from test_cli import cohort_process
from test_tracking import log_trial, open_log

HOSTILE = (
    "2+2=4<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload='window.hacked = 3'>[click](javascript:window.hacked=4)#### 4"
)

OPEN_ASSESSMENTS = """
for (const button of document.querySelectorAll('button, [role=tab]'))
    if (/^assess/i.test(button.innerText.trim() || button.getAttribute('aria-label'))) button.click()
"""

# As markup, each would act or load something.
ACTS = "window.hacked = 1; document.title = 'hacked'"
ACTIVE = [
    f"</script></title></textarea><script>{ACTS}</script>",
    f'<img src=x onerror="{ACTS}">',
    "<script>setTimeout(() => alert(1))</script>",
    "<iframe name=foreign src=http://evil.example/></iframe>",
    "<a href=javascript:alert(2)>press</a>",
]
HOSTILE_MARKUP = f"{''.join(ACTIVE)}[press](javascript:alert(3))![](http://evil.example/x.png)"

pytestmark = pytest.mark.slow


@dataclasses.dataclass
class Served:
    """The served studies."""

    address: str
    token: str
    pid: int
    runs: Path
    hostile: dict[str, tuple[str, ...]]
    hostile_trace: str
    experiment: str

    def status(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        """What the server answers to a request with these headers, and with no other but `Host`."""
        connection = HTTPConnection(self.address.removeprefix("http://"))
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()

    @property
    def cookie(self) -> str:
        return f"cohort-{self.address.rpartition(':')[2]}={self.token}"


@dataclasses.dataclass
class Site(Served):
    """The same, and the browser that looks at them."""

    chromium: Any

    def text_with(self, page: str, *words: str) -> str:
        """The text of a page as soon as it shows all the words."""
        self.chromium.get(f"{self.address}/#{page}")
        return browser.wait_for(self.text_if(*words), f"a page with {', '.join(words)}", 90)

    def text_if(self, *words: str) -> Callable[[], str]:
        """A function that gives the text of the page that is open, empty where a word is missing."""

        def shown() -> str:
            found = browser.text(self.chromium)
            return found if all(word in found for word in words) else ""

        return shown


@pytest.fixture(scope="module")
def served(tmp_path_factory, new_runs) -> Iterator[Served]:
    """`cohort ui`, which ends with one Ctrl-C."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("browser")
        fake_trials.install(folder / "plugins", patch)
        with (folder / "plugins" / "fake_plugins-1.dist-info" / "entry_points.txt").open("a") as points:
            points.write(f"[mlflow.app]\n{APP} = cohort.harness.mirror.page:app\n")  # as an install has it
        runs = new_runs(folder / "runs")
        hostile = write_hostile_study(runs)
        trace = write_study(runs)
        port = fake_trials.free_port()
        process = cohort_process("ui", "--port", str(port), "--runs", str(runs))
        try:
            told = process.stdout.readline()
            assert f"http://127.0.0.1:{port}" in told
            token = re.findall(r"\?token=([\w-]+)", told)[0]
            yield Served(f"http://127.0.0.1:{port}", token, process.pid, runs, hostile, *trace)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
        finally:
            process.kill()
        assert health(f"http://127.0.0.1:{port}", 5) is not None


@pytest.fixture(scope="module")
def site(served) -> Iterator[Site]:
    with browser.session() as chromium:
        link = f'<meta http-equiv="refresh" content="0; url={served.address}/?token={served.token}#/none">'
        chromium.get(f"data:text/html,{quote(link)}")  # from a page elsewhere, as links and files of `--open` do
        browser.wait_for(lambda: chromium.current_url == f"{served.address}/#/none", "the page without the token")
        yield Site(**vars(served), chromium=chromium)


@pytest.mark.attack("Another machine that calls a server of ours")
def test_ui_serves_this_machine_alone(served):
    ours = [served.pid, *(child.pid for child in psutil.Process(served.pid).children(recursive=True))]
    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in ours]
    assert {c.laddr.ip for c in listening if c.laddr} == {"127.0.0.1"}


# What another user of the machine, a page of his and an old address may ask for: nothing.
ROUTES = [
    "GET /", "GET /live", "GET /live/hostile", "GET /version", "GET /static-files/static/js/main.js", "GET /metrics",
    "POST /ajax-api/2.0/mlflow/experiments/delete", "POST /api/2.0/mlflow/runs/search", "POST /graphql",
    "GET /ajax-api/2.0/mlflow/experiments/get?experiment_id=1", "GET /get-artifact?path=x", "POST /v1/traces",
    "GET /api/2.0/mlflow-artifacts/artifacts", "GET //live", "GET /health/", "GET /health/../live", "OPTIONS /live",
]  # fmt: skip
STRANGERS: list[dict[str, str]] = [
    {}, {"Cookie": "cohort-{port}="}, {"Cookie": "cohort-{port}={wrong}"}, {"Cookie": "cohort-1={token}"},
    {"Authorization": "Bearer {wrong}"}, {"Authorization": "Bearer "}, {"Authorization": "{token}"},
    {"Cookie": "cohort-{port}={token}", "Origin": "http://127.0.0.1:1"},
    {"Cookie": "cohort-{port}={token}", "Origin": "https://127.0.0.1:{port}"},
    {"Cookie": "cohort-{port}={token}", "Origin": "null"}, {"Origin": "http://127.0.0.1:{port}"},
    {"Cookie": "cohort-{port}={token}", "Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "same-origin"},
    {"Cookie": "cohort-{port}={token}", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"},
    {"Host": "10.evil.example:{port}"}, {"Host": ""}, {"Host": "evil.example", "Cookie": "cohort-{port}={token}"},
]  # fmt: skip


@pytest.mark.attack("A request of another user or page to the pages of `cohort ui`")
@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_the_secret(served, route, record_property):
    names = {"port": served.address.rpartition(":")[2], "token": served.token, "wrong": served.token[::-1]}
    method, path = route.split()
    for one in STRANGERS:
        headers = {name: value.format(**names) for name, value in one.items()}
        status, body = served.status(path, method, **headers)
        assert (status, body[:26]) == (403, b"These pages open at the ad"), (one, status, body)
    assert served.status(f"{path}{'&' if '?' in path else '?'}token={names['wrong']}", method)[0] == 403
    record_property("tried", len(STRANGERS) + 1)


def test_the_address_gives_a_strict_cookie_and_mlflows_client_a_token(served, monkeypatch):
    connection = HTTPConnection(served.address.removeprefix("http://"))
    connection.request("GET", f"/live?token={served.token}", headers={"Sec-Fetch-Site": "cross-site"})
    answer = connection.getresponse()
    assert answer.headers["Set-Cookie"] == f"{served.cookie}; Path=/; HttpOnly; SameSite=Strict"
    assert served.token.encode() not in answer.read()
    assert served.status("/live", Cookie=f"other=1; {served.cookie}", Sec_Fetch_Site="none")[0] == 200
    assert served.status("/health") == (200, b"OK")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", served.token)
    assert MlflowClient(served.address).get_experiment(served.experiment).name == "sizes"
    seen = [" ".join(one.cmdline()) for one in psutil.Process(served.pid).children(recursive=True)]
    assert seen and not any(served.token in words for words in seen)  # other users see these


@pytest.mark.attack("A request of another user or page to the pages of `cohort ui`")
def test_a_browser_is_told_a_file_of_this_user_alone(runs, cohort, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("typer.launch", told.append)
    monkeypatch.setattr(api, "browse", lambda runs, port, show: show({"MLflow": "http://127.0.0.1:1/?token=secret#/x"}))
    for _ in range(2):
        assert cohort("ui", "--open", "--runs", runs) == 0
    link = runs.resolve() / "open.html"
    assert (told, link.stat().st_mode & 0o777) == ([link.as_uri()] * 2, 0o600)
    assert "url=http://127.0.0.1:1/?token=secret#/x" in link.read_text()


def test_ctrl_c_ends_ui_while_it_lists_the_studies(runs, monkeypatch):
    monkeypatch.setattr(ui, "serve_ui", lambda *_: nullcontext(SimpleNamespace(poll=lambda: None)))  # runs for ever
    assert ui.browse(runs, 1, lambda pages: os.kill(os.getpid(), signal.SIGINT)) is None


def write_hostile_study(runs: Path) -> dict[str, tuple[str, ...]]:
    """A study whose words are all hostile, with its report; page -> words that it has and the one before lacks."""
    settings = {f"arm{n}{markup}": {"algorithm.group_size": n} for n, markup in zip((2, 4), ACTIVE, strict=False)}
    study = a_study(name="hostile", question=f"question{HOSTILE_MARKUP}", factors={}, arms=settings, seeds=[0])
    begin_study(runs, study)
    row = dataclasses.replace(fake_trials.sample(1, f"completion{HOSTILE_MARKUP}"), prompt=f"prompt{HOSTILE_MARKUP}")
    logs = []
    for number, arm in enumerate(study.design_arms()):
        tags = fake_trials.of_study(runs, "hostile", f"trial{number}", arm=arm.label)
        log = open_log(
            runs, f"studies/hostile/trials/trial{number}", arm.run_spec(0), experiment="hostile",
            run_name=f"{arm.label} | seed 0", tags=tags,
        )  # fmt: skip
        log.metrics(0, {METRIC: 0.25})
        log.samples([row])
        log.per_problem({"p1": 0.75})
        log.finish("complete", None, {"accuracy_final": 0.5, "seconds": 1.5})
        logs.append(log)
    queue = a_queue(study, runs)
    queue.finish(claimed(queue), TrialOutcome("failed", f"reason{HOSTILE_MARKUP}"))
    keep_report(read_study(runs, "hostile"), runs)
    trial = in_mlflow(runs, logs[0].directory)
    parent = str(MirrorState.load(runs / "studies" / "hostile").run_id)
    at = f"/#/experiments/{MlflowClient(tracking_uri(runs)).get_run(trial).info.experiment_id}"
    return {
        f"{at}/runs?workflowType=machine_learning": ("arm2<", "arm4<"),
        f"{at}/runs?workflowType=machine_learning&compareRunsMode=CHART": ("Add chart", "arm2<"),
        f"{at}/runs/{trial}": (trial, "arm2<", "Finished"),
        f"{at}/runs/{parent}": (parent, "question<", "arm4<"),
        f"{at}/runs/{parent}/artifacts/report/index.html": ("report/index.html",),
        f"{at}/traces": ("prompt<", "completion<"),
        **({"/live": ("question<",), "/live/hostile": ("question<", "arm2<", "reason<", "prompt<", "completion<")}
           if "live" in extras.names() else {}),
    }  # fmt: skip


def write_study(runs: Path) -> tuple[str, str]:
    """A study of two arms, the first with a hostile rollout; the ids of its trace and of the experiment."""
    begin_study(runs, a_study())
    row = dataclasses.replace(
        fake_trials.sample(1, HOSTILE), prompt="What is <b>2+2</b>?", correct=False, reward=-0.25,
        rewards={"accuracy": 0.0, "format": 0.5},
    )  # fmt: skip
    log = log_trial(runs, "group_size=2", 0, "complete", rows=[row])
    log_trial(runs, "group_size=4", 0, "complete")
    client = MlflowClient(tracking_uri(runs))
    run_id = in_mlflow(runs, log.directory)
    experiment = client.get_run(run_id).info.experiment_id
    wanted = f"metadata.`mlflow.sourceRun` = '{run_id}'"
    (found,) = client.search_traces(locations=[experiment], filter_string=wanted, include_spans=False)
    return found.info.trace_id, experiment


def test_the_runs_table_of_a_study_shows_its_arms_and_its_metric(site):
    page = study_pages(site.runs, "")["sizes"].removeprefix("#")
    text = site.text_with(page, "group_size=2 | seed 0", "group_size=4 | seed 0", "Group: group_size=2", "Group: study")
    assert "sizes" in text  # the experiment has the study's name
    assert "Additional runs" not in text
    assert "shared view" not in text
    chart = site.text_with(f"{page}&compareRunsMode=CHART", "Add chart", "group_size=4 (validation/accuracy)")
    before = re.split(r"validation\s+\(1\)", chart)[0]  # the section of the study's metric is the first
    assert before != chart
    assert not re.search(r"(kl|completion|summary)\s+\(\d+\)", before)


def test_the_bare_address_opens_the_newest_study(site):
    site.chromium.get("about:blank")
    site.chromium.get(site.address)
    browser.wait_for(site.text_if("group_size=4 | seed 0"), "the runs of the newest study", 90)
    assert "Latency" not in browser.text(site.chromium)
    shown = "return [...document.querySelectorAll('button[data-assistant-ui]')].filter(one => one.offsetParent).length"
    assert site.chromium.execute_script(shown) == 0


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_trace_shows_a_rollout_with_its_rewards_and_nothing_of_it_runs(site):
    page = f"/experiments/{site.experiment}/traces?selectedEvaluationId={site.hostile_trace}"
    site.text_with(page, "Inputs", "onerror")
    site.chromium.execute_script(OPEN_ASSESSMENTS)
    text = browser.wait_for(site.text_if("reward_format", "Feedback"), "the assessments")
    assert "What is <b>2+2</b>?" in text  # as text: the page made no element of it
    for name, value in {"correct": "False", "reward": "-0.25", "reward_accuracy": "0", "reward_format": "0.5"}.items():
        assert name in text
        assert value.lower() in text.lower()
    assert acted(site.chromium) == []
    analyze = "[...document.querySelectorAll('button[data-component-id$=analyze-trace]')]"  # it opens the assistant
    assert site.chromium.execute_script(f"return {analyze}.map(one => one.offsetParent !== null)") == [False]


def test_the_pages_ask_no_other_machine_for_anything(site):
    outside = [url for url in browser.requests(site.chromium) if url.startswith("http")]
    assert outside
    assert {url.split("/")[2] for url in outside} == {site.address.split("/")[2]}, json.dumps(outside[:5])


def acted(chromium: Any) -> list[Any]:
    """What foreign text did or made on the page that is open, or in a frame of it."""
    exceptions = pytest.importorskip("selenium.common.exceptions")
    with contextlib.suppress(exceptions.NoAlertPresentException):
        chromium.switch_to.alert.accept()
        return ["a dialog"]
    made = "[onerror], [onload], [name=foreign], [src='x'], [src*='evil.example'], [href^=javascript]"
    look = f'return [window.hacked, ...document.querySelectorAll("{made}")].filter(one => one)'
    found = ["the title"] if chromium.title == "hacked" else []
    found += chromium.execute_script(look)
    for frame in chromium.find_elements("css selector", "iframe"):
        chromium.switch_to.frame(frame)
        found += chromium.execute_script(look)
        chromium.switch_to.default_content()
    return found


@pytest.mark.attack("Active markup in every text of a study, on every page that is served")
def test_no_text_of_a_study_acts_on_any_page_that_is_served(site, record_property):
    browser.requests(site.chromium)  # forget earlier pages
    for page, words in site.hostile.items():
        site.chromium.get(f"{site.address}{page}")
        browser.wait_for(site.text_if(*words), f"{page} with {', '.join(words)}", 60)
        if "report" in page:
            browser.wait_for(lambda: in_frame(site.chromium, "question</script>"), "the report in its frame")
        assert acted(site.chromium) == [], page
    asked = [url for url in browser.requests(site.chromium) if url.startswith("http")]
    assert {url.split("/")[2] for url in asked} == {site.address.split("/")[2]}
    record_property("tried", len(site.hostile))


def in_frame(chromium: Any, words: str) -> bool:
    """Whether the only frame of a page shows these words."""
    frames = chromium.find_elements("css selector", "iframe")
    if len(frames) != 1:
        return False
    chromium.switch_to.frame(frames[0])
    shown = words in browser.text(chromium)
    chromium.switch_to.default_content()
    return shown


@pytest.mark.parametrize("made", ACTIVE, ids=["script", "handler", "dialog", "frame", "link"])
def test_what_would_act_is_seen_on_a_page_that_does_not_escape(site, made):
    site.chromium.get("data:text/html,<title>a page</title>")
    assert acted(site.chromium) == []
    site.chromium.execute_script("document.write(arguments[0]); document.close()", made)
    assert browser.wait_for(lambda: acted(site.chromium), "what acts")


@pytest.mark.attack("A page that names this machine by a foreign name")
def test_a_browser_at_a_rebound_name_reads_nothing(site):
    port = site.address.rpartition(":")[2]
    with browser.session("--host-resolver-rules=MAP 10.evil.example 127.0.0.1") as chromium:
        chromium.get(f"http://10.evil.example:{port}/")
        assert "sizes" not in chromium.page_source
        assert "that `cohort ui` printed" in browser.text(chromium)
        ask = "return fetch('/ajax-api/2.0/mlflow/experiments/get?experiment_id=1').then(answer => answer.status)"
        assert chromium.execute_script(ask) == 403
