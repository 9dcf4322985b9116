"""The page of importances says which setting mattered, how sure that is, and acts on no text of a study."""

import sys
from dataclasses import replace

import browser
import pytest
from cohort.harness.extras.importance import page as ours
from cohort.harness.extras.importance.page import importance, page, settings
from cohort.harness.record.study import LOOKS
from fake_study import FakeArm, factor_grid, fake_study

HOSTILE = "</script><script>hacked = 1</script><a href='//evil'>x</a><img src=x onerror=hacked=2>"
BAD = [FakeArm(*one, 0.68, other) for *one, other in (
    ("a", "grpo", {}), ("b", "grpo", {f"algorithm.{HOSTILE}": 1}), ("c", "grpo", {"model": HOSTILE}))]  # fmt: skip
GRID = fake_study(factor_grid({"algorithm.group_size": [4, 8, 16], "algorithm.kl_beta": [0.0, 0.04]}), num_steps=20)
HOVER = """
    const texts = document.getElementById("coordinates").data.map(one => (one.customdata || []).map(pair => pair[1]))
    const hostile = text => text.includes("img src=x"), curveNumber = texts.findIndex(one => one.some(hostile))
    Plotly.Fx.hover("coordinates", [{curveNumber, pointNumber: texts[curveNumber].findIndex(hostile)}])
    return [document.querySelectorAll(".wide a, img").length, window.hacked]
"""


def test_settings_that_differ_are_numbers_or_text_and_those_that_change_together_are_one():
    runs = [{"seed": 0, "a": {"x": 1, "y": 2}, "b": None, "c": 3}, {"seed": 1, "a": {"x": 4}, "b": True, "c": 3}]
    found, alike = settings([*runs, {"a": {"x": 1.5, "y": 2}, "b": None, "c": 3}])
    levels = {"b": ["not set", "True", "not set"], "a.x": [1, 4, 1.5]}
    assert {name: column.tolist() for name, column in found.items()} == levels
    assert alike == ["b stands for a.y too"]


def test_studies_that_cannot_tell_which_setting_mattered_are_refused(monkeypatch):
    pytest.importorskip("plotly")
    with pytest.raises(ValueError, match=r"differ in a setting and in validation/accuracy, got 3 runs, 0 settings"):
        page([fake_study([FakeArm("a")])])
    with pytest.raises(ValueError, match="share their metric"):
        page([GRID, replace(GRID, metric="reward/mean")])
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ValueError, match=r"pip install 'cohort-rl\[importance\]'"):
        page([GRID])


@pytest.mark.slow
@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_page_of_two_studies_draws_all_runs_and_nothing_of_their_text_acts(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    bad = fake_study(BAD, (0, 1), name="<img src=y onerror=hacked=3>", states={("a", 1): "failed"}, num_steps=20)
    known = {record.name: record for record in (GRID, bad)}
    for name in known:
        (tmp_path / "studies" / name).mkdir(parents=True)
    monkeypatch.setattr(ours, "read_record", lambda name, _: known[name])
    file = importance(*known, runs=tmp_path)
    assert all((tmp_path / "studies" / name / LOOKS).is_file() for name in known)
    with browser.session() as chromium:
        chromium.get(file.as_uri())
        assert chromium.execute_script(HOVER) == [0, None]
        assert [one for one in chromium.get_log("browser") if one["level"] == "SEVERE"] == []
        assert not any(url.startswith("http") for url in browser.requests(chromium))
        shown = browser.text(chromium)
    assert f"model: {HOSTILE}" in shown and shown.count(HOSTILE) > 2 and "1 more run is not complete" in shown
    names, counts = zip(*(line.split("\t", 1) for line in shown.splitlines() if line.count("\t") == 4), strict=True)
    assert names[1] == "group_size" and counts[1].endswith("\t3\t3\t-") and float(counts[1][:4]) > 0.7
    assert {one.rpartition("\t")[2] for one in counts[2:]} == {"few seeds"}
