"""A headless Chromium for tests of pages: `session` opens one, `requests` says what a page asked for.

Use it as `with browser.session() as chromium:` in a fixture of the test module, which skips with the reason where
there is no Chromium, no driver or no selenium. A session takes seconds to start: one for each module is enough.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from queues import wait_for as wait_for

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DRIVER = "chromedriver"


@contextmanager
def session(*flags: str, width: int = 1440, height: int = 900) -> Iterator[Any]:
    """A selenium driver of a fresh browser profile; it and all it wrote are gone afterwards.

    Nothing is downloaded: without a local browser and driver the test is skipped.
    """
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install 'cohort-rl[dev]')")
    binary = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which(DRIVER)
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options.add_argument("--headless=new")
        options.add_argument(f"--user-data-dir={profile}")
        options.add_argument(f"--window-size={width},{height}")
        for flag in ("--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--hide-scrollbars", *flags):
            options.add_argument(flag)
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium's own sandbox refuses to run as root
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            chromium.set_page_load_timeout(240)
            yield chromium
        finally:
            chromium.quit()


def requests(chromium: Any) -> list[str]:
    """The addresses that pages asked for since the last call, the pages themselves and sockets included, the browser's
    own not."""
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    opened = ("Network.webSocketCreated", "Network.webTransportCreated")
    urls += [event["params"]["url"] for event in events if event["method"] in opened]
    return [url for url in urls if not url.startswith("chrome://")]


def text(chromium: Any) -> str:
    """The text that a reader sees on the page."""
    return chromium.execute_script("return document.body.innerText")
