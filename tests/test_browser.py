"""What a reader finds in the MLflow UI: the arms of a study in the runs table, a rollout with its rewards in a trace.

One server and one browser for all; the pages are single-page applications, so every look waits for what it looks for.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import browser
import fake_trials
import pytest
from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.ui import APP, serve_ui, study_pages
from fake_trials import a_study, begin_study, in_mlflow
from mlflow import MlflowClient
from test_tracking import log_trial

HOSTILE = (
    "2+2=4<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    "<svg onload='window.hacked = 3'>[click](javascript:window.hacked=4)#### 4"
)


OPEN_ASSESSMENTS = """
for (const button of document.querySelectorAll('button, [role=tab]'))
    if (/^assess/i.test(button.innerText.trim() || button.getAttribute('aria-label'))) button.click()
"""


@dataclasses.dataclass
class Site:
    """A served study, and the browser that looks at it."""

    address: str
    runs: Path
    hostile_trace: str
    experiment: str
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
def site(tmp_path_factory: pytest.TempPathFactory, new_runs: Callable[[Path], Path]) -> Iterator[Site]:
    with browser.session() as chromium, pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("browser")
        fake_trials.install(folder / "plugins", patch)
        with (folder / "plugins" / "fake_plugins-1.dist-info" / "entry_points.txt").open("a") as points:
            points.write(f"[mlflow.app]\n{APP} = cohort.harness.api.live:app\n")  # as an install has it
        runs = new_runs(folder / "runs")
        trace = write_study(runs)
        port = fake_trials.free_port()
        with serve_ui(runs, port):
            yield Site(f"http://127.0.0.1:{port}", runs, *trace, chromium)


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


def test_the_runs_table_of_a_study_shows_its_arms_and_its_metric(site: Site):
    page = study_pages(site.runs, "")["sizes"].removeprefix("/#")
    text = site.text_with(page, "group_size=2 | seed 0", "group_size=4 | seed 0", "Group: group_size=2", "Group: study")
    assert "sizes" in text  # the experiment has the study's name
    assert "Additional runs" not in text
    assert "shared view" not in text
    chart = site.text_with(f"{page}&compareRunsMode=CHART", "Add chart", "group_size=4 (validation/accuracy)")
    before = re.split(r"validation\s+\(1\)", chart)[0]  # the section of the study's metric is the first
    assert before != chart
    assert not re.search(r"(kl|completion|summary)\s+\(\d+\)", before)


def test_the_bare_address_opens_the_newest_study(site: Site):
    site.chromium.get("about:blank")
    site.chromium.get(site.address)
    browser.wait_for(site.text_if("group_size=4 | seed 0"), "the runs of the newest study", 90)
    assert "Latency" not in browser.text(site.chromium)
    shown = "return [...document.querySelectorAll('button[data-assistant-ui]')].filter(one => one.offsetParent).length"
    assert site.chromium.execute_script(shown) == 0


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_trace_shows_a_rollout_with_its_rewards_and_nothing_of_it_runs(site: Site):
    page = f"/experiments/{site.experiment}/traces?selectedEvaluationId={site.hostile_trace}"
    site.text_with(page, "Inputs", "onerror")
    site.chromium.execute_script(OPEN_ASSESSMENTS)
    text = browser.wait_for(site.text_if("reward_format", "Feedback"), "the assessments")
    assert "What is <b>2+2</b>?" in text  # as text: the page made no element of it
    for name, value in {"correct": "False", "reward": "-0.25", "reward_accuracy": "0", "reward_format": "0.5"}.items():
        assert name in text
        assert value.lower() in text.lower()
    assert site.chromium.execute_script("return window.hacked") is None
    analyze = "[...document.querySelectorAll('button[data-component-id$=analyze-trace]')]"  # it opens the assistant
    assert site.chromium.execute_script(f"return {analyze}.map(one => one.offsetParent !== null)") == [False]
    injected = "return document.querySelectorAll('img[src=x], svg[onload], a[href^=javascript]').length"
    assert site.chromium.execute_script(injected) == 0


def test_the_pages_ask_no_other_machine_for_anything(site: Site):
    outside = [url for url in browser.requests(site.chromium) if url.startswith("http")]
    assert outside
    assert {url.split("/")[2] for url in outside} == {site.address.split("/")[2]}, json.dumps(outside[:5])


@pytest.mark.attack("A page that names this machine by a foreign name")
@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:{port}", None, 200), ("localhost:{port}", "http://localhost:{port}", 200),
        ("10.evil.example:{port}", None, 403), ("192.168.evil.example", None, 403), ("evil.example", None, 403),
        ("localhost", None, 403), ("127.0.0.1:1", None, 403), ("", None, 403),
        ("127.0.0.1:{port}", "http://10.evil.example:{port}", 403), ("127.0.0.1:{port}", "null", 403),
        ("127.0.0.1:{port}", "http://localhost:1", 403),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/ajax-api/2.0/mlflow/experiments/get?experiment_id=0", "/version"])
def test_no_route_answers_a_foreign_host_or_origin(site: Site, path: str, host: str, origin: str | None, status: int):
    port = int(site.address.rpartition(":")[2])
    connection = HTTPConnection("127.0.0.1", port)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host.format(port=port))
    if origin is not None:
        connection.putheader("Origin", origin.format(port=port))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    if status == 200:
        assert answer.status == 200
    else:
        assert (answer.status, b"MLFLOW_SERVER_ALLOWED_HOSTS" in body or b"Invalid" in body) == (403, True)
        assert b"sizes" not in body


@pytest.mark.attack("A page that names this machine by a foreign name")
def test_a_browser_at_a_rebound_name_reads_nothing(site: Site):
    port = site.address.rpartition(":")[2]
    with browser.session("--host-resolver-rules=MAP 10.evil.example 127.0.0.1") as chromium:
        chromium.get(f"http://10.evil.example:{port}/")
        assert "sizes" not in chromium.page_source
        assert "alone" in browser.text(chromium)
        ask = "return fetch('/ajax-api/2.0/mlflow/experiments/get?experiment_id=1').then(answer => answer.status)"
        assert chromium.execute_script(ask) == 403
