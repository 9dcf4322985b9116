"""Stored completions are found by a condition and a text, and a page compares two arms by problem."""

import itertools
import json
import math
import re
import resource
import signal
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cohort.harness.extras.imports.scores import _rows, _split
from cohort.harness.extras.samples.condition import condition
from cohort.harness.extras.samples.exports import export
from cohort.harness.extras.samples.page import page
from cohort.harness.extras.samples.reading import samples
from cohort.harness.record.events import EVENTS
from cohort.harness.record.run import RunLog
from cohort.harness.run.loop import train
from cohort.harness.study.plan import Plan
from cohort.reports.statistics import flip_tests
from factories import FEW, make_study
from fake_trials import begin_study
from scipy import stats
from test_steering import killed_at

from cohort import open_result


@pytest.mark.parametrize(("text", "meets"), [
    ("correct and tokens > 200", True), ("not correct or level in ('1', '2')", False), ("reward > 0", False),
    ("reward is None and -1 < step <= 5", True), ("'b' in completion", True),
])  # fmt: skip
def test_a_condition_compares_names_and_constants(text, meets):
    row = {"correct": True, "tokens": 201, "level": "3", "reward": None, "step": 5, "completion": "abc"}
    assert condition(text)[0](row) is meets


@pytest.mark.parametrize(
    "text", ["f()", "a.b", "a[0]", "[x for x in a]", "lambda: 1", "a + 1", "f'{a}'", "1 <", "(" * 999]
)
def test_a_condition_of_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="`where` must compare"):
        condition(text)


@pytest.mark.filterwarnings("error")
def test_a_difference_between_seeds_is_tested_by_flipping_its_signs():
    # four seeds agree: 2 of 16 ways are as far from zero, and Holm counts the 2 columns with a difference
    p, adjusted, needed = flip_tests(np.array([[1.0, 0, 1], [1, 0, -1], [1, 0, 0], [1, 0, 0]]))
    assert (p.tolist(), adjusted.tolist()) == ([0.125, 1.0, 1.0], [0.25, 1.0, 1.0])
    # level 0.025: 2 / 2^n <= 0.025 from 7 seeds on
    assert needed.tolist() == [7, math.inf, math.inf]
    assert flip_tests(np.ones((4, 1)))[2].tolist() == [6]  # alone: level 0.05
    # a sum of 2 is a score of 2 / sqrt(4) = 1 with 4 seeds: 4 z^2 of them have z = 2.2414 of level 0.025, 20.1
    p, _, needed = flip_tests(np.array([[1.0, 0.3], [1, -0.1], [1, -0.1], [-1, -0.1]]))  # 0.3 - 3 * 0.1 is 0 but for
    assert p[0] == 10 / 16 and needed.tolist() == [21, math.inf]  # rounding; 10 of 16 ways have no sum of 0


@pytest.mark.parametrize("seeds", [2, 13, 14])
def test_all_signs_are_flipped_up_to_13_seeds_and_4096_ways_drawn_beyond(seeds):
    opposed = np.ones((seeds, 1))
    opposed[: seeds // 3] = -1
    (p,), *_ = flip_tests(opposed)
    expected = stats.binomtest(seeds // 3, seeds).pvalue
    assert p == (pytest.approx(expected, abs=1e-9) if seeds <= 13 else pytest.approx(expected, abs=0.03))
    assert (4096 * p).is_integer()  # the exact p of 14 seeds is 1471 / 8192
    (p,), *_ = flip_tests(np.ones((seeds, 1)))
    assert p == pytest.approx(0.5 ** (seeds - 1), abs=1e-3) and p >= 1 / 4096  # the signs as they are count too


ROW = {"arm": "grpo", "seed": 1, "area": "test", "step": 4, "problem": "p1", "family": "", "prompt": "2+2=",
       "gold": "4", "sample": 0, "greedy": True, "completion": "</script> #### 4\ud800", "answer": "4", "correct": True,
       "reward": None, "tokens": 5, "cut": False, "run_on": False, "level": "3"}  # fmt: skip
ROWS = [ROW, {**ROW, "greedy": False, "completion": "5", "answer": None, "correct": False, "cut": True}]


def test_a_log_of_inspect_holds_every_sample_with_its_verdict(tmp_path):
    file = tmp_path / "logs" / "sizes.eval"
    assert export(iter(ROWS), "sizes", file) == 2
    with zipfile.ZipFile(file) as log:
        right, wrong = (json.loads(log.read(f"samples/{number}.json")) for number in (1, 2))
    assert [_split(row, file, 0, None)[1] for row in _rows(file, {})] == [{"correct": 1.0}, {"correct": 0.0}]
    assert (right["id"], right["epoch"], wrong["epoch"]) == ("p1 grpo 1 test 4", 1, 2)
    assert [one["scores"]["correct"]["value"] for one in (right, wrong)] == ["C", "I"]
    assert [one["output"]["choices"][0]["stop_reason"] for one in (right, wrong)] == ["stop", "max_tokens"]
    assert right["metadata"]["level"] == "3" and right["messages"][1]["content"] == ROW["completion"]


def test_rows_of_lm_eval_hold_every_sample_and_are_read_as_its_scores(tmp_path):
    file = tmp_path / "samples_sizes_1.jsonl"
    export(iter(ROWS), "sizes", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["resps"][0][0] for row in rows] == [row["completion"] for row in ROWS]
    assert [row["filtered_resps"] for row in rows] == [["4"], ["[invalid]"]]
    assert [_split(row, file, 0, None)[1] for row in rows] == [{"exact_match,cohort": 1.0}, {"exact_match,cohort": 0.0}]
    with pytest.raises(ValueError, match=r"must end in .html .* got 'x.txt'"):
        export(iter(ROWS), "sizes", Path("x.txt"))


@pytest.mark.attack("A kill at any write of a page or an export of samples")
@pytest.mark.parametrize("name", ["log.eval", "rows.jsonl"])
def test_samples_that_are_written_again_are_whole_wherever_a_kill_ends_that(name, tmp_path, record_property):
    rows = {False: ROWS, True: [*ROWS, *({**ROW, "sample": number} for number in range(9))]}

    def write(file: Path, again: bool, most: int = resource.RLIM_INFINITY) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))  # the kernel kills who writes more
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        export(iter(rows[again]), "sizes", file)

    file, whole = tmp_path / name, tmp_path / f"whole-{name}"
    assert not killed_at(-1, partial(write, whole, True)) and not killed_at(-1, partial(write, file, False))
    before, size = file.read_bytes(), whole.stat().st_size
    ends = range(0, size - 99, size // 8)  # a log has its time in it: some bytes more or less
    for most in ends:
        assert killed_at(-1, partial(write, file, True, most))
        assert file.read_bytes() == before
    moments = next(m for m in itertools.count() if not killed_at(m, partial(write, file, True)))
    assert moments == 3 and abs(file.stat().st_size - size) < 99
    record_property("tried", len(ends) + moments)


@pytest.mark.slow
@pytest.mark.attack("A kill at any write of a page or an export of samples")
def test_two_arms_their_problems_and_their_samples(tmp_path, cohort, record_property):
    few = {"num_prompts": 4, "num_test_prompts": 6, "num_samples": 2}
    task = {"name": "arithmetic", "min_operands": 2, "max_operands": 3, "num_train": 64}
    run = {
        **FEW,
        "task": task,
        "evaluation": few,
        "sampling": {"max_tokens": 14},
        "cold_start": {"steps": 80},
        "steps": 1,
    }
    study = make_study(name="sizes", run=run, factors={"algorithm.group_size": [4, 8]}, seeds=[0])
    plan = Plan(study, tmp_path)
    begin_study(tmp_path, study)
    for key in plan.keys:
        spec, folder = plan.spec(key), plan.directory(key)
        with RunLog(
            tmp_path, folder, spec, experiment="sizes", run_name=plan.run_name(key), tags=plan.tags(key)
        ) as log:
            ended = train(spec, folder, log, cache=tmp_path / "cache")
            log.finish(ended.state, ended.reason, ended.summary)
        assert (folder / EVENTS).is_file()
    result = open_result("sizes", runs=tmp_path)
    a, b = dict.fromkeys(result.trials.arm)
    frame = result.compare_problems(a, b).set_index("prompt_id")
    tests = list(samples("sizes", where="area == 'test' and not greedy", runs=tmp_path))
    assert len(tests) == 2 * 6 * 2
    for arm, side in ((a, "accuracy_a"), (b, "accuracy_b")):  # grading again agrees with the record
        for problem in frame.index:
            own = [row["correct"] for row in tests if (row["arm"], row["problem"]) == (arm, problem)]
            assert sum(own) / 2 == frame[side][problem]
    assert (frame.difference == frame.accuracy_a - frame.accuracy_b).all()
    assert {row["arm"] for row in samples("sizes", b, grep=tests[0]["prompt"], runs=tmp_path)} == {b}
    written = page(result, a, b, tmp_path)
    data = json.loads(re.search(r'id="data">(.*?)</script>', written)[1])
    assert {one["id"]: len(one["runs"]) for one in data["problems"]} == dict.fromkeys(frame.index, 2 * 3)
    for name in ("log.eval", "rows.jsonl"):
        assert cohort("samples", "sizes", "--runs", tmp_path, "--out", tmp_path / name) == 0
        assert (tmp_path / name).stat().st_size
    html = partial(cohort, "samples", "sizes", "--runs", tmp_path, "--out", tmp_path / "page.html")
    for moment in range(2):  # before and after it gets its name
        assert killed_at(moment, html) and (tmp_path / "page.html").exists() == moment
    assert not killed_at(2, html) and (tmp_path / "page.html").read_text() == written
    record_property("tried", 2)
    assert cohort("report", "sizes", "--runs", tmp_path) == 0
    index, listed = (tmp_path / "studies" / "sizes" / "report" / name for name in ("index.html", "problems.html"))
    assert 'href="problems.html"' in index.read_text() and listed.read_text() == page(result, b, a, tmp_path)
    assert cohort("samples", "sizes", "--runs", tmp_path, "--where", "corect") == 2
    assert "did you mean 'correct'" in cohort.said
