"""`import cohort`: its names, its frames and the report they must equal, its page in a notebook, its errors."""

import base64
import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from cohort.harness import extras
from cohort.harness.api.result import intervals
from cohort.harness.base.files import write_json
from cohort.harness.data import EvaluationResult, SampleRow
from cohort.reports import statistics
from cohort.reports.render import cell, latex, write_report
from factories import make_spec
from fake_study import factor_grid, fake_study
from IPython.core.formatters import DisplayFormatter
from test_report import hostile_study, read_page

import cohort

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> cohort.Result:
    """Of a study's folder alone, without a store: what is copied from another machine."""
    return cohort.Result(hostile_study(num_problems=16), tmp_path_factory.mktemp("copied") / "fake", None)


def as_csv(frame: pd.DataFrame) -> list[list[str]]:
    """The frame as the report writes a table."""
    rows = [["" if value is None else str(cell(value)) for value in row] for row in frame.itertuples(index=False)]
    return [list(frame.columns), *rows]


def test_these_names_are_public_and_no_others():
    names = ["Evaluation", "Report", "Result", "Study", "compare", "evaluate", "load_study", "open_result", "report"]
    names += ["run", "train"]
    assert cohort.__all__ == [*names, *sorted(extras.public())]
    assert dir(cohort) == sorted(cohort.__all__)
    assert all(getattr(cohort, name).__doc__ for name in cohort.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'plan'"):
        cohort.plan  # noqa: B018


def test_settings_mean_what_they_mean_on_the_command_line():
    study = cohort.load_study("group_size")
    changed = study.with_set(steps=20, **{"algorithm.kl_beta": 1e-5, "factors.algorithm.group_size": (2, 8)})
    again = changed.with_set(name="mine", seeds=np.arange(2).tolist(), steps=np.int64(30))
    assert again.arms == ["group_size=2", "group_size=8"]
    assert (again.name, again.spec.seeds, again.question) == ("mine", [0, 1], study.question)
    run = again.spec.design_arms()[0].spec
    assert (run.steps, run.algorithm.kl_beta) == (30, 1e-5)  # a number, though YAML reads 1e-05 as text
    assert study.spec.run["steps"] != 20  # unchanged


@pytest.mark.parametrize(("call", "words"), [
    (lambda: cohort.load_study("group_sise"), "did you mean 'group_size'"),
    (lambda: cohort.run("group_sise"), "did you mean 'group_size'"),
    (lambda: cohort.run("group_size", workers=0), "the number of workers must be at least 1, got 0"),
    (lambda: cohort.load_study("group_size").with_set(stepz=3), "did you mean 'steps'"),
    (lambda: cohort.load_study("group_size").with_set(steps=object()), "'steps' must be made of numbers, text"),
    (lambda: cohort.load_study("group_size").with_set(**{"algorithm.group_size": 2}), "the study varies it"),
    (lambda: cohort.open_result("fake", runs="nowhere"), "has no study 'fake'"),
    (lambda: cohort.open_result(Path("nowhere/fake")), "it has no study.json"),
    (lambda: cohort.evaluate("tiny", "arithmetik"), "did you mean 'arithmetic'"),
])  # fmt: skip
def test_bad_input_is_one_sentence_with_a_fix(call, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(words)):
        call()
    assert list(tmp_path.iterdir()) == []


def test_by_its_name_alone_a_study_of_the_runs_folder_continues_as_it_was_started(tmp_path):
    started = {"name": "mine", "run": {"task": "arithmetic", "algorithm": "grpo", "device": "cuda:77"}, "seeds": [0]}
    started |= {"question": "Why?", "factors": {"algorithm.kl_beta": [0, 0.1]}}
    (tmp_path / "studies" / "mine").mkdir(parents=True)
    write_json(tmp_path / "studies" / "mine" / "study.json", started)
    with pytest.raises(ValueError, match="cuda:77"):  # a setting of that file, checked before anything runs
        cohort.run("mine", runs=tmp_path)


@pytest.mark.slow
def test_trials_and_comparison_are_the_reports_tables_to_the_last_digit(result, tmp_path):
    files = write_report(hostile_study(num_problems=16), tmp_path, formats=())
    written = list(csv.reader((tmp_path / "results.csv").read_text().splitlines()))
    assert as_csv(result.trials) == written
    assert len(written) == 1 + 9
    assert result.trials["test_accuracy"].isna().sum() == 1  # of the invalid trial
    (table,) = re.findall(r"data:text/csv;charset=utf-8;base64,([\w+/=]+)", files.html.read_text(encoding="utf-8"))
    assert as_csv(result.compare()) == list(csv.reader(base64.b64decode(table).decode().splitlines()))
    assert result.answer.split(":")[0] in files.markdown.read_text().replace("\\", "")


def test_another_baseline_gives_the_comparison_of_a_study_that_names_it(result, tmp_path):
    record = dataclasses.replace(hostile_study(num_problems=16), baseline="grpo")
    other = cohort.Result(record, tmp_path, None)
    pd.testing.assert_frame_equal(result.compare("grpo"), other.compare())
    assert result.compare("grpo")["difference"].isna().tolist() == [False, True, False]
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        result.compare("grpoo")


def test_frames_are_tidy(result):
    record = hostile_study(num_problems=16)
    curves = result.curves
    assert list(curves.columns) == ["arm", "seed", "metric", "step", "value"]
    one = curves[(curves.arm == "grpo") & (curves.seed == 1) & (curves.metric == "validation/accuracy")]
    trial = next(t for t in record.trials if (t.arm, t.seed) == ("grpo", 1))
    assert list(zip(one.step, one.value, strict=True)) == list(trial.history["validation/accuracy"])
    problems = result.problems
    assert list(problems.columns) == ["arm", "seed", "prompt_id", "family", "accuracy", "accuracy_initial"]
    assert len(problems) == 8 * 16  # trials that are complete, problems
    assert problems.accuracy_initial.dtype == float
    means = problems.groupby(["arm", "seed"]).accuracy.mean()
    accuracies = result.trials.dropna(subset="test_accuracy").set_index(["arm", "seed"]).test_accuracy
    pd.testing.assert_series_equal(means, accuracies.sort_index(), check_names=False)
    assert len(result.rollouts) == 2 * 9
    assert set(result.rollouts.answer.dropna()) == {"12", "<script>13"}
    paid = dataclasses.replace(trial.samples[0], rewards={"accuracy": 1.0, "format": 0.5})
    trials = [dataclasses.replace(trial, samples=[paid]), *record.trials[1:]]
    rollouts = cohort.Result(dataclasses.replace(record, trials=trials), result.folder, None).rollouts
    assert rollouts["reward/format"].tolist()[:2] == pytest.approx([0.5, float("nan")], nan_ok=True)


@pytest.mark.parametrize("frame", ["trials", "curves", "problems", "rollouts"])
def test_every_column_is_documented(result, frame):
    text = re.sub(r"_K\b", "_4", str(getattr(cohort.Result, frame).__doc__))
    columns = [c for c in getattr(result, frame).columns if not c.startswith(("algorithm.", "reward/"))]
    assert [column for column in columns if not re.search(rf"(^|[\s,]){re.escape(column)}([\s,]|$)", text)] == []


def test_a_study_without_any_trial_has_empty_frames(tmp_path):
    result = cohort.Result(dataclasses.replace(fake_study(), trials=[]), tmp_path, None)
    assert [len(frame) for frame in (result.trials, result.curves, result.problems, result.rollouts)] == [0] * 4
    assert result.compare()["complete_seeds"].tolist() == [0, 0, 0]
    assert repr(result) == "<Result of study 'fake': 0 of 9 trials complete>"


def test_an_evaluation_has_frames_too(tmp_path):
    row = SampleRow(0, "test", "p1", "1+1=", "2#### 2\x1b[2J", "2", None, False, None, 3, "stop")
    metrics = {"accuracy": 0.75, "greedy_accuracy": 0.5, "num_prompts": 2.0, "num_samples": 4.0}
    found = EvaluationResult("test", metrics, {"p1": 4, "p2": 2}, [row])
    evaluation = cohort.Evaluation(make_spec(), found, tmp_path)
    frame = evaluation.metrics.set_index("metric")
    assert frame.loc["accuracy"].tolist() == [0.75, *intervals(found)["accuracy"]]
    assert frame.loc["num_samples"].isna().tolist() == [False, True, True]
    assert evaluation.problems.values.tolist() == [["p1", 1.0], ["p2", 0.5]]
    assert evaluation.rollouts.completion.tolist() == [r"2#### 2\x1b[2J"]
    assert repr(evaluation) == "<Evaluation: accuracy 75.0 % of 2 test problems>"


def test_problems_of_one_family_count_as_one_in_the_intervals_of_an_evaluation():
    # blocks of 2 with means 1, 0.5, 0.25, 0.75 of 4 samples each: not the spread of 8 problems
    counts = dict(zip("abcdefgh", (4, 4, 4, 0, 1, 1, 3, 3), strict=True))
    metrics = {"accuracy": 0.625, "greedy_accuracy": 0.5, "pass_at_4": 0.875, "num_prompts": 8.0, "num_samples": 4.0}
    alone = EvaluationResult("test", metrics, counts, [])
    related = dataclasses.replace(alone, families={name: f"story {i // 2}" for i, name in enumerate(counts)})
    found = intervals(related)
    expected = statistics.fraction_interval([[1.0, 0.5, 0.25, 0.75]], num_problems=8)
    assert expected is not None and found["accuracy"] == pytest.approx((expected.low, expected.high))
    passes = statistics.fraction_interval([[1.0, 0.5, 1.0, 1.0]], num_problems=8)
    assert passes is not None and found["pass_at_4"] == pytest.approx((passes.low, passes.high))
    assert found["greedy_accuracy"] == statistics.wilson_interval(0.5, 4)
    assert intervals(alone)["accuracy"] == statistics.wilson_interval(0.625, 8)
    each = dataclasses.replace(alone, families={name: name for name in counts})
    assert intervals(each) == intervals(alone)


@pytest.mark.attack("Hostile text on a page or in a file")
def test_a_notebook_shows_the_page_in_a_frame_that_may_do_nothing(result):
    (page := result.folder / "report" / "index.html").parent.mkdir(parents=True)
    page.write_text(text := '<p title="\'">&quot;</p></iframe><script>alert(1)</script>', encoding="utf-8")
    report = result.report()
    assert ([*result.folder.rglob("*.*")], page.read_text(encoding="utf-8")) == ([page], text)  # as it was copied
    assert report.path == page
    shown = read_page(report._repr_html_())
    attributes = dict(shown.attributes)
    assert (shown.tags, attributes["sandbox"], attributes["srcdoc"]) == (["iframe"], "allow-downloads", text)


@pytest.mark.slow
def test_a_figure_is_the_reports_and_is_saved_as_pdf(result, tmp_path):
    backend = matplotlib.rcParams["backend"]
    matplotlib.rcParams["backend"] = "svg"
    try:
        figure = result.figure("differences")
        assert matplotlib.rcParams["backend"].lower() == "svg"  # a notebook goes on drawing as before
    finally:
        matplotlib.rcParams["backend"] = backend
    shown = DisplayFormatter().format(figure)[0]["image/png"]  # as a notebook shows the last value of a cell
    image = matplotlib.image.imread(io.BytesIO(shown), format="png")
    assert image.shape[1] == pytest.approx(150 * figure.get_figwidth(), abs=1)  # 150 dots per inch, all of the figure
    figure.set_size_inches(2.6, 2.0)
    figure.draw_without_rendering()
    assert all(tick.label1.get_window_extent().x0 >= 0 for tick in figure.axes[0].yaxis.get_major_ticks())
    figure.savefig(tmp_path / "differences.pdf")
    assert (tmp_path / "differences.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(ValueError, match=r"did you mean 'final'\? it has: final, differences, "):
        result.figure("finale")


def test_the_latex_table_has_the_reports_rounded_numbers(tmp_path):
    result = cohort.Result(fake_study(factor_grid({"algorithm.group_size": [2, 8]}), num_problems=16), tmp_path, None)
    lines = result.to_latex().splitlines()
    one = result.compare().set_index("arm").loc["group_size=8"]
    shown = f"{100 * one.difference:+.1f} [{100 * one.difference_low:+.1f}, {100 * one.difference_high:+.1f}]"
    row = next(line for line in lines if line.startswith(r"group\_size=8 & 3/3 & "))
    assert f"{100 * one['test/accuracy']:.1f} [" in row
    assert shown.replace("-", "$-$") in row
    assert [line.count("&") for line in lines if line.endswith(r"\\")] == [4, 4, 4]
    assert lines[1] == r"\begin{tabular}{lrrrr}"


@pytest.mark.attack("Hostile text on a page or in a file")
def test_no_text_of_a_user_is_a_command_of_latex(result):
    assert r"$<$script$>$alert(4)$<$/script$>$$|$\$x\textasciicircum{}\{\$=1 & " in result.to_latex()
    told = r"\textbackslash{}input\{/etc/passwd\} \%\textasciitilde{}\#\_\&$-$1"
    assert latex("\\input{/etc/passwd}\n%~#_&-1") == told
    assert latex("[2cm] a") == "{}[2cm] a"  # after the end of a row a bracket would be a length


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_kept_without_outputs_and_calls_what_is_public(file):
    cells = json.loads(file.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
    assert [file.with_stem(name) for name in ("first_ablation", "paper_figure")] == NOTEBOOKS
    called = {name for text in code for name in re.findall(r"\bcohort\.(\w+)", text)}
    assert called
    assert called <= set(cohort.__all__)
