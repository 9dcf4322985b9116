"""Makes the pictures of the README and of docs/ from the study `quickstart`, which it runs first: `make pictures`.

They are the questions of `cohort start`, the terminal, the report's head, MLflow's first view of the study, and the
trace of a rollout that the group's vote rewarded for a wrong answer. Chromium, its driver and selenium take them. The
study is in the folder `runs` of the current one. `--short`: from a few steps, into the current folder, as a trial.
"""

import sys
from pathlib import Path

from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.ui import serve_ui, study_pages
from mlflow import MlflowClient

DOCS = Path(__file__).resolve().parent.parent
sys.path += [str(DOCS / "scripts"), str(DOCS.parent / "tests")]
import browser  # noqa: E402
import terminal  # noqa: E402

PORT, STUDY = 5077, "quickstart"
SHORT = " --set steps=2 --set evaluation.num_prompts=16 --set evaluation.num_test_prompts=16"
OPEN_ASSESSMENTS = """
for (const button of document.querySelectorAll("button"))
    if (/^assess/i.test(button.innerText.trim() || button.getAttribute("aria-label"))) button.click()
"""


def main(out: Path = DOCS, options: str = "") -> None:
    runs = Path("runs").resolve()
    asked = "printf '%s\\n' tiny arithmetic 'group size' n | cohort start"
    terminal.main(str(out / "start.svg"), asked)
    terminal.main(str(out / "terminal.svg"), f"cohort study run {STUDY}{options}", f"cohort verify {STUDY}")
    with browser.session() as chromium, serve_ui(runs, PORT, STUDY):

        def picture(name: str, address: str, height: int, words: str, then: str = "") -> None:
            size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
            chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            chromium.get(address)
            browser.wait_for(lambda: words in browser.text(chromium), name, 120)
            chromium.execute_script(then)
            browser.wait_for(lambda: chromium.get_screenshot_as_png() == chromium.get_screenshot_as_png(), "rest")
            chromium.save_screenshot(str(out / name))

        site = f"http://127.0.0.1:{PORT}"
        chromium.get(f"{site}/?token={STUDY}#/none")
        browser.wait_for(lambda: "token" not in chromium.current_url, "the page without the secret", 120)
        page = study_pages(runs, f"{site}/")[STUDY]
        picture("report.png", (runs / "studies" / STUDY / "report" / "index.html").as_uri(), 1330, STUDY)
        picture("mlflow.png", page, 660, "grpo | seed 0")
        place = page.partition("#")[2].partition("/runs")[0]
        found = MlflowClient(tracking_uri(runs)).search_traces(
            [place.rpartition("/")[2]], include_spans=False, max_results=100,
            filter_string="tag.arm = 'grpo_self_consistency' AND trace.status = 'ERROR' AND feedback.reward > 0",
        )  # fmt: skip
        trace = f"{site}/#{place}/traces?selectedEvaluationId={found[0].info.trace_id}"
        picture("trace.png", trace, 760, "Inputs", OPEN_ASSESSMENTS)


if __name__ == "__main__":
    main(Path.cwd(), SHORT) if "--short" in sys.argv else main()
