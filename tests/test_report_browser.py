"""The report in headless Chromium: it runs nothing, loads nothing, fits a phone and a desk, and prints whole."""

import base64
import dataclasses
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import requests, session
from cohort.harness.record.study import StudyRecord
from cohort.reports.render import write_report
from fake_study import HOSTILE_ARM, factor_grid, fake_study, with_claims, with_trials
from test_report import hostile_study as hostile_arms
from test_report import search_of

pytestmark = [pytest.mark.every_figure, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with session() as chromium:
        yield chromium


def hostile_study() -> StudyRecord:
    """Hostile completions, arm name, reason and parameter names; wide labels; a search; a self-consistency arm."""
    record = hostile_arms()
    accuracies = {f"test/{name}": [(20, 0.5)] for name in ("greedy_accuracy", "pass_at_2", "pass_at_4", "maj_at_4")}
    found = {"<img src=x onerror=alert(8)>": 0.9, "a_parameter_with_a_rather_long_name.of_a_section": 0.1}
    arms = [(arm, found, "complete", {"validation/accuracy": 0.5}) for arm in record.arms]
    importances = {"method": "<b>", "values": found, "reason": None}
    search = search_of(arms, importances=importances, best=HOSTILE_ARM)
    record = with_trials(record, lambda t: {"history": {**t.history, **accuracies}})
    return dataclasses.replace(record, search=search)


CONTRASTS = """
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
    const light = color => {
        canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1)
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
            .map(part => part / 255).map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b
    }
    const paper = light(getComputedStyle(document.body).backgroundColor)
    const found = {paper: paper, low: []}
    for (const node of document.querySelectorAll('h1, h2, td, th, p, pre, dd, a, figcaption')) {
        const color = getComputedStyle(node).color
        const lights = [light(color), paper].sort((a, b) => b - a)
        const contrast = (lights[0] + 0.05) / (lights[1] + 0.05)
        if (contrast < 4.5) found.low.push([contrast, color, node.textContent.trim().slice(0, 40)])
    }
    return found
"""


@pytest.fixture(scope="module", params=["hostile", "grid"])
def page(request, tmp_path_factory) -> Path:
    levels = {"algorithm.group_size": [4, 16], "algorithm.kl_beta": [0.0, 0.04], "algorithm.clip_epsilon": [0.1, 0.2]}
    record = hostile_study() if request.param == "hostile" else fake_study(factor_grid(levels), num_steps=20)
    claim = {"sentence": "Claims <script>alert(9)</script>", "contrast": dict(zip(record.arms, (1, -1), strict=False))}
    return write_report(with_claims(record, claim), tmp_path_factory.mktemp(request.param), formats=()).html


def opened(browser: Any, page: Path, width: int) -> None:
    """The page in a window of that many CSS pixels, a phone's where it is narrow."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())


@pytest.mark.attack("Hostile text on a page or in a file")
def test_nothing_runs_and_nothing_is_loaded(browser, page):
    browser.get_log("browser"), requests(browser)  # forget earlier pages
    opened(browser, page, 1440)
    assert browser.title.startswith("fake: ")
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    with pytest.raises(pytest.importorskip("selenium.common.exceptions").NoAlertPresentException):
        _ = browser.switch_to.alert.text
    assert {url for url in requests(browser) if not url.startswith(("data:", "about:"))} == {page.as_uri()}
    assert browser.execute_script("return document.scripts.length + document.images.length") == 0
    text = browser.execute_script("return document.body.textContent")
    assert "Claims <script>alert(9)</script>" in text
    assert "hostile" not in str(page) or "<script>alert(1)</script>" in text


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_fits_its_width_without_scrolling_sideways(browser, page, width):
    opened(browser, page, width)
    assert browser.execute_script("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    wider = """
        return [...document.querySelectorAll('body *')].filter(node => !node.closest('svg') && !node.closest('thead')
            && (node.getBoundingClientRect().right > innerWidth + 0.5 || node.getBoundingClientRect().left < -0.5))
            .map(node => node.outerHTML.slice(0, 80))"""
    assert browser.execute_script(wider) == []
    narrowest = "return Math.min(...[...document.querySelectorAll('svg')].map(svg => svg.clientWidth))"
    assert browser.execute_script(narrowest) > 250


def test_on_paper_the_page_is_whole_and_no_table_or_figure_is_cut(browser, page):
    # A4 less its margins is 182 mm = 688 CSS pixels wide
    opened(browser, page, 688)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        cut = """
            return [...document.querySelectorAll('table, figure, pre, .side')]
                .filter(node => node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
                    || node.scrollWidth > node.clientWidth + 1)
                .map(node => node.outerHTML.slice(0, 80))"""
        assert browser.execute_script(cut) == []
        heads = """
            return [...document.querySelectorAll('thead')].map(head => getComputedStyle(head).display)"""
        assert set(browser.execute_script(heads)) == {"table-header-group"}  # not a phone's layout
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True, "printBackground": True}
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", paper)["data"])
    assert printed.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 30


def test_in_the_dark_the_page_and_its_figures_are_dark_and_all_text_is_legible(browser, page):
    opened(browser, page, 1440)
    assert browser.execute_script(CONTRASTS)["paper"] == pytest.approx(1)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    try:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": dark})
        seen = browser.execute_script(CONTRASTS)
        assert seen["paper"] < 0.02
        assert seen["low"] == []
        drawn = "return [...document.querySelectorAll('svg')].map(svg => getComputedStyle(svg).filter)"
        assert {one.partition("(")[0] for one in browser.execute_script(drawn)} == {"invert"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
        assert browser.execute_script(CONTRASTS)["paper"] == pytest.approx(1)  # paper is light
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})


def test_the_probe_for_executed_text_sees_a_page_that_executes_it(browser, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src=http://127.0.0.1:9/x onerror='console.error(1)'><div style='width: 3000px'>wide</div>"
        "<script>new WebSocket('ws://127.0.0.1:9/y')</script>"
    )
    browser.get_log("browser"), requests(browser)
    opened(browser, bad, 390)
    until, seen = time.monotonic() + 240, []  # the refused image is logged some time after the page has loaded
    while not seen and time.monotonic() < until:
        seen = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert seen
    assert {"http://127.0.0.1:9/x", "ws://127.0.0.1:9/y"} <= {*requests(browser)}
    assert browser.execute_script("return document.documentElement.scrollWidth") > 390
