"""An arm has one label, and every place shows it whole: terminal, MLflow, report, figures, errors, lists."""

import dataclasses
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cohort.harness.base.words import in_markdown, quoted
from cohort.harness.console import terminal
from cohort.harness.console.progress import Page
from cohort.harness.record.status import StudyStatus, TrialStatus
from cohort.harness.record.study import StudyRecord, study_document
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import arm_label
from cohort.harness.study.plan import Plan
from cohort.reports.figures import curves, outcome
from cohort.reports.figures.style import Drawing, drawn, wrapped
from cohort.reports.prose.answer import answer
from cohort.reports.render import analysed, write_report
from factories import make_study, slow_but
from fake_study import HOSTILE_ARM, factor_grid, fake_study, three_algorithms
from matplotlib.text import Text
from rich.console import Console

pytestmark = pytest.mark.every_figure

LONG = "group_size=16, kl_beta=0.04, learning_rate=1e-05, without the clip of dapo"
LABELS = {
    "short": ["a", "b", "optimal_token_baseline"],
    "similar": [f"clip_higher_than_the_others_{n}" for n in (1, 11, 111)],
    "long": [f"{LONG} {n}" for n in range(7)],
    "wide": ["W" * 100, "x" * 100, "_".join(["w"] * 50)],
    "hostile": [HOSTILE_ARM, "$a_b^2$ {x}_ y \\frac", "]]><b>&amp; 'quoted', \"so\""],
}


def labelled(labels: list[str]) -> StudyRecord:
    kinds = three_algorithms()
    arms = [dataclasses.replace(kinds[i % 3], label=label) for i, label in enumerate(labels)]
    return fake_study(arms, num_steps=20)


def texts(drawing: Drawing) -> Iterator[Text]:
    """The texts that the figure shows; ticks beyond the ends of an axis are not."""
    figure = drawing.figure
    for axes in figure.axes:
        yield from [*axes.texts, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            yield from (tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)
    yield from figure.findobj(lambda one: one is figure._suptitle)  # pyright: ignore[reportAttributeAccessIssue]


def figures(record: StudyRecord) -> list[Drawing]:
    """Every kind of figure that names arms or levels."""
    analysis = analysed(record)
    makers = (outcome.estimates, outcome.difficulty_maps, outcome.heat_maps)
    return [one for make in makers for one in make(analysis)] + curves.learning_curves(analysis, ("steps",))


GRID = factor_grid({
    "algorithm.group_size": [2, 4],
    "algorithm.clip": ["clip_higher_and_lower", "clip_higher_or_not", "a" * 40],
})  # fmt: skip


@pytest.mark.parametrize("labels", slow_but((LABELS["hostile"], []), [*LABELS.values(), []]), ids=[*LABELS, "grid"])
def test_no_text_leaves_its_figure_and_no_label_is_cut(labels):
    record = labelled(labels) if labels else fake_study(GRID, num_steps=20)
    drawings = figures(record)
    expected = {"final", "differences", "learning_steps", "difficulty_0"}
    assert expected | (set() if labels else {"heat_0"}) == {one.name for one in drawings}
    for drawing in drawings:
        drawing.figure.set_dpi(600)  # where letters have their true widths, as in an SVG
        drawing.figure.draw_without_rendering()
        width, height = drawing.figure.bbox.size
        shown = [text for text in texts(drawing) if text.get_visible() and text.get_text()]
        for text in shown:
            box = text.get_window_extent()
            inside = box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= width + 0.5 and box.y1 <= height + 0.5
            assert inside, (drawing.name, text.get_text(), box.extents, (width, height))
        if drawing.name in ("final", "learning_steps", "difficulty_0") and labels:
            whole = {re.sub(r"\s", "", text.get_text()) for text in shown}
            assert {re.sub(r"\s", "", label) for label in record.arms} <= whole, drawing.name


def test_a_long_title_has_lines_that_fit_and_lines_of_a_label_hold_all_of_it():
    drawing = drawn("x", "W" * 90, "", lambda figure: figure.add_subplot().set_axis_off(), 3.7, 2.6)
    (title,) = (text for text in texts(drawing) if text.get_text())
    assert title.get_window_extent().x1 <= drawing.figure.bbox.width
    assert title.get_text().replace("\n", "") == "W" * 90
    lines = ["a_ b", "group_size=16,", "optimizer.", "learning_", "rate=1e-05"]
    assert wrapped("a_ b group_size=16, optimizer.learning_rate=1e-05", 14) == lines


@pytest.mark.slow
def test_the_report_names_arms_by_their_labels_and_quotes_them_in_lists(tmp_path):
    labels = LABELS["hostile"]
    record = labelled(labels)
    files = write_report(record, tmp_path, formats=())
    page = html.unescape(files.html.read_text(encoding="utf-8"))
    frame = (tmp_path / "results.csv").read_text(encoding="utf-8").replace('""', '"')
    markdown = files.html.with_name("report.md").read_text(encoding="utf-8")
    for label in labels:
        assert label in page and label in frame and in_markdown(label) in markdown
    assert answer(analysed(record)).startswith(f"Only '{labels[0]}' and '{labels[1]}' end detectably above ")
    assert quoted(["a, b", "c", "d"], most=2) == "'a, b', 'c' and 1 more"
    assert in_markdown("$x_1$ <b>") == "&#36;x\\_1&#36; &lt;b&gt;"  # no dollar for formulas, no escape MLflow shows


@pytest.fixture
def screen(monkeypatch) -> Console:
    """A terminal of 80 columns."""
    screen = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(terminal, "console", lambda **_: screen)
    return screen


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_a_screen_of_80_columns_shows_whole_labels(labels, screen):
    facts = ("running", None, "train", 120, 400, 0.8125, 100.0, 754.0, Path("/none"))
    trials = tuple(TrialStatus(arm, 0, *facts) for arm in labels)
    rows = [[x.arm, x.seed, x.state, "train", "120/400", "81.2 %", "12 min 34 s", "some reason"] for x in trials]
    terminal.show_table("", ["arm", "seed", "state", "phase", "done", "accuracy", "time", "note"], rows)
    screen.print(Page().render(StudyStatus("s", "?", trials)))
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    ends = [place for place, line in enumerate(lines) if set(line.strip()) == {"\u2500"}]  # below each header
    for start in ends:
        width = lines[start - 1].index("se" if "seed" in lines[start - 1] else "ste") - 1
        column = [line[:width] for line in lines[start + 1 :]]
        for label in labels:
            assert re.sub(r"\s", "", label) in re.sub(r"\s", "", "".join(column))
            short = {word for word in label.split() if len(word) <= 20}
            assert short <= {word for line in column for word in line.split()}  # unbroken


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_mlflow_groups_names_and_colours_runs_by_the_same_labels(labels, tmp_path):
    study = make_study(arms={label: {"steps": 3 + i} for i, label in enumerate(labels)}, seeds=[0])
    plan = Plan(study, tmp_path)
    assert study.arm_labels() == labels
    assert [plan.tags(key)["cohort.arm"] for key in plan.keys] == labels
    assert [plan.run_name(key) for key in plan.keys] == [f"{label} | seed 0" for label in labels]
    assert list(study_document(study, "")["shown"]["colors"]) == labels


def test_an_unknown_arm_is_answered_with_the_labels_in_quotes():
    factors = {"algorithm.group_size": [2, 4], "algorithm.kl_beta": [0.0, 0.04]}
    with pytest.raises(SpecError, match=r"arms: 'group_size=2, kl_beta=0', .* and 'group_size=4, kl_beta=0.04'"):
        make_study(factors=factors, baseline="group_size=8")


@pytest.mark.parametrize(("levels", "label"), [
    ({"arm": "plain", "algorithm.kl_beta": 0.04}, "plain, kl_beta=0.04"),
    ({"algorithm.name": "ppo", "task.name": "gsm8k", "steps": 3}, "ppo, gsm8k, steps=3"),
    ({"algorithm.kl_beta": 0.1234567}, "kl_beta=0.1234567"),  # six digits would not tell it from the next
    ({"algorithm.kl_beta": 0.1234568}, "kl_beta=0.1234568"),
    ({"prompt.system": "one\ntwo\u202e"}, "prompt.system=one\\ntwo\\u202e"),
])  # fmt: skip
def test_a_label_names_each_level_in_one_line_and_numbers_by_the_digits_that_tell_them_apart(levels, label):
    assert arm_label(levels) == label
    assert arm_label({"optimizer.learning_rate": 0.00012345}, digits=3) == "learning_rate=0.000123"


def test_two_long_columns_share_the_room_of_a_table(screen):
    table = terminal.table_of(["prompt", "completion", "gold"], [["a few words " * 20, "some more words " * 20, "12"]])
    widths = [column.width for column in table.columns]
    assert sum(widths) == 80 - 4 and abs(widths[0] - widths[1]) <= 5 and widths[2] == len("gold")
