"""Scores that other programs measured: read from their files, refused in one sentence, reported as our own."""

import dataclasses
import hashlib
import itertools
import json
import math
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cohort.harness.extras.imports import gates
from cohort.harness.extras.imports import scores as imports
from cohort.harness.extras.verify.verification import verify_study
from cohort.harness.record.evidence import write_evidence
from cohort.harness.record.study import StudyRecord, read_study
from cohort.reports import statistics
from cohort.reports.claims import check_claims
from cohort.reports.join import join
from cohort.reports.prose.methods import best_checkpoint, methods
from cohort.reports.prose.notes import notes
from cohort.reports.render import analysed, write_report
from fake_study import fake_study, with_trials
from numpy.random import Generator
from scipy import stats
from test_steering import killed_at

import cohort

ROW = {"arm": "a", "seed": 0, "problem": "p", "score": 1.0}


def table(rng: Generator | None = None, arms: Mapping[str, float] = {"a": 0.4, "b": 0.7}, **more: Any) -> pd.DataFrame:
    """Scores 0 or 1 of two arms with three seeds on 40 problems."""
    rng = rng or np.random.default_rng(0)
    rows = [
        {"arm": arm, "seed": seed, "problem": f"p{i}", "score": float(rng.random() < right), **more}
        for arm, right in arms.items()
        for seed in range(3)
        for i in range(40)
    ]
    return pd.DataFrame(rows)


def logs(folder: Path, files: Mapping[str, Any]) -> Path:
    """A folder of JSON files, and of JSON Lines from lists."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        lines = content if name.endswith(".jsonl") else [content]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def problems(result: cohort.Result) -> dict[tuple[str, int], dict[str, float]]:
    return {(trial.arm, trial.seed): dict(trial.per_problem) for trial in record_of(result).trials}


def record_of(result: cohort.Result) -> StudyRecord:
    return read_study(result.folder.parents[1], result.name)


def lm_eval_line(doc_id: int, score: float, name: str) -> dict[str, Any]:
    """A line of `lm_eval --log_samples`, version 0.4.13."""
    return {
        "doc_id": doc_id, "doc": {"question": "1+1=", "answer": "2"}, "target": "2",
        "arguments": {"gen_args_0": {"arg_0": "1+1=", "arg_1": {"until": ["\n"]}}}, "resps": [["#### 2"]],
        "filtered_resps": ["#### 2"], "filter": name, "metrics": ["exact_match"], "doc_hash": f"{doc_id:064x}",
        "prompt_hash": "0" * 64, "target_hash": "1" * 64, "exact_match": score,
    }  # fmt: skip


def test_a_log_of_lm_eval_and_our_evaluation_with_the_same_verdicts_give_the_same_intervals(tmp_path):
    rng, files, graded = np.random.default_rng(1), {}, dict[tuple[str, int], dict[str, float]]()
    for arm, chance in (("grpo", 0.5), ("ppo", 0.8)):
        for seed in range(4):
            graded[arm, seed] = {f"p{i}": float(rng.random() < chance) for i in range(30)}
            files[f"{arm}/{seed}/model/samples_sums_2026-11-25T08-21-58.7.jsonl"] = [
                lm_eval_line(i, score if filtered == "strict-match" else 0.0, filtered)
                for filtered in ("strict-match", "flexible-extract")
                for i, score in enumerate(graded[arm, seed].values())
            ]
            files[f"{arm}/{seed}/model/results_2026-11-25T08-21-58.7.json"] = {"results": {"sums": {"exact_match": 1}}}
    imported = cohort.import_scores(logs(tmp_path / "lm", files), "lm", score="exact_match,strict-match", runs=tmp_path)
    record = fake_study(seeds=range(4))
    ours = dataclasses.replace(record, arms=["grpo", "ppo"], baseline="grpo", trials=[
        dataclasses.replace(record.trials[0], arm=arm, seed=seed, per_problem=cells,
                            summary={"test_accuracy": sum(cells.values()) / 30})
        for (arm, seed), cells in graded.items()
    ])  # fmt: skip
    one, two = analysed(ours), analysed(record_of(imported))
    assert 0 < one.arm("grpo").mean < one.arm("ppo").mean < 1
    for mine, theirs in zip([*one.arms, *one.comparisons], [*two.arms, *two.comparisons], strict=True):
        assert mine.interval and theirs.interval
        for field in ("estimate", "low", "high"):
            assert getattr(theirs.interval, field) == pytest.approx(getattr(mine.interval, field), abs=1e-12)
    assert one.comparisons[0].p == pytest.approx(two.comparisons[0].p, abs=1e-12)


def zstd_zip(file: Path, members: Mapping[str, Any]) -> None:
    """A zip file with members that are packed by zstd, as inspect writes its logs."""
    whole = {name: json.dumps(content).encode() for name, content in members.items()}
    with zipfile.ZipFile(file, "w") as stored:
        for name, content in whole.items():
            stored.writestr(name, pa.compress(content, codec="zstd", asbytes=True))
    data = bytearray(file.read_bytes())
    start = data.index(b"PK\1\2")
    for content in whole.values():  # of the central directory: the method, and the length before packing
        struct.pack_into("<H", data, start + 10, 93)
        struct.pack_into("<I", data, start + 24, len(content))
        start = data.find(b"PK\1\2", start + 4)
    file.write_bytes(data)


INSPECT = [
    {"id": f"p{i}", "epoch": epoch, "scores": {"match": {"value": value, "answer": "4"}, "f1": {"value": 0.25}}}
    for i, values in enumerate(("CI", "CC", "PN"))
    for epoch, value in enumerate(values, start=1)
]


MEMBERS = {"header.json": {"eval": {"task": "toy"}}, "summaries.json": INSPECT}


def inspect_deflated(run: Path) -> None:
    with zipfile.ZipFile(run / "log.eval", "w", zipfile.ZIP_DEFLATED) as log:
        for name, content in MEMBERS.items():
            log.writestr(name, json.dumps(content))


def lighteval(run: Path) -> None:
    rows = [
        {"doc": {"id": str(i), "query": "?", "task_name": "toy|0"}, "model_response": {"text": ["4"]},
         "metric": {"match": value, "f1": 0.5, "notes": None}}
        for i, value in enumerate((0.5, 1.0, 0.25))
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), run / "details_toy_2026.parquet")


def trl(run: Path) -> None:
    """Two steps, four completions of two prompts in the last."""
    for step, rows in ((5, [("x", 0.0), ("y", 1.0)]), (10, [("x", 0.0), ("x", 1.0), ("y", 1.0), ("y", 1.0)])):
        made = [
            {"step": step, "prompt": [{"role": "user", "content": prompt}], "completion": [{"content": "4"}],
             "match": value, "format": 0.5, "advantage": 0.1}
            for prompt, value in rows
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(made), run / f"completions_{step:05d}.parquet")


def verl(run: Path) -> None:
    rows = [("x", False), ("x", True), ("y", True), ("y", True)]
    lines = [{"input": x, "output": "4", "gts": "4", "score": 2.0, "step": 10, "match": right} for x, right in rows]
    logs(run, {"10.jsonl": lines})


@pytest.mark.parametrize(
    ("write", "means"),
    [  # two epochs of correct, incorrect, partial, no answer: (1 + 0) / 2, (1 + 1) / 2, (1/2 + 0) / 2
        (lambda run: logs(run, {"log.json": {"version": 2, "eval": {"task": "toy"}, "samples": INSPECT}}),
         [0.25, 0.5, 1.0]),
        (lambda run: zstd_zip(run / "log.eval", MEMBERS), [0.25, 0.5, 1.0]),
        *((write, [0.25, 0.5, 1.0]) for write in (inspect_deflated, lighteval)),
        *((write, [0.5, 1.0]) for write in (trl, verl)),  # x is right in one of two completions, y in both
    ],
)  # fmt: skip
def test_the_logs_of_other_programs_are_read(write, means, tmp_path):
    for arm in ("a", "b"):
        (run := tmp_path / "logs" / arm / "seed1").mkdir(parents=True)
        write(run)
    found = problems(cohort.import_scores(tmp_path / "logs", "x", score="match", runs=tmp_path))
    assert {run: sorted(cells.values()) for run, cells in found.items()} == {("a", 1): means, ("b", 1): means}
    with pytest.raises(ValueError, match="has no score 'mach'; did you mean 'match'"):
        cohort.import_scores(tmp_path / "logs", "x", score="mach", runs=tmp_path)


def test_what_nemo_rl_writes_is_read_at_its_last_step_and_its_training_batches_are_refused(tmp_path):
    for arm, step in itertools.product("ab", (5, 10)):
        rows = [("x", 0.0), ("x", 1.0), ("y", (arm == "b") * step / 10)]
        said = [[{"role": "user", "content": x}, {"role": "assistant", "content": str(y)}] for x, y in rows]
        lines = [{"content": [m], "rewards": [y], "idx": 0} for m, (_, y) in zip(said, rows, strict=True)]
        logs(tmp_path / "logs" / arm / "seed1", {f"exp_001/val_data_step{step}.jsonl": lines})
    found = problems(cohort.import_scores(tmp_path / "logs", "x", runs=tmp_path))
    assert {run: sorted(cells.values()) for run, cells in found.items()} == {("a", 1): [0, 0.5], ("b", 1): [0.5, 1]}
    logs(tmp_path / "logs/a/seed1", {"train_data_step5.jsonl": lines})
    with pytest.raises(ValueError, match="only val_data_step"):
        cohort.import_scores(tmp_path / "logs", "y", runs=tmp_path)


def test_steps_with_other_problems_are_training_and_those_with_the_same_are_tests(tmp_path):
    rows = [("p", 0.0, 1), ("q", 1.0, 1), ("z", 0.5, 2), ("p", 1.0, 3), ("q", 1.0, 3)]
    frame = pd.DataFrame(rows, columns=["problem", "score", "step"]).assign(
        arm="a", seed=0, tokens=[10, 10, 20, 30, 30]
    )
    (trial,) = record_of(cohort.import_scores(frame, "x", runs=tmp_path)).trials
    assert trial.history["test/accuracy"] == [(1, 0.5), (3, 1.0)]
    assert trial.history["train/accuracy"] == [(2, 0.5)]
    assert trial.history["train/generated_tokens"] == [(1, 10.0), (2, 20.0), (3, 30.0)]
    assert trial.summary == {"test_accuracy": 1.0, "generated_tokens": 30.0}


def test_all_forms_of_a_table_are_the_same_study(tmp_path):
    frame = table().assign(family=[f"f{i % 8}" for i in range(240)])
    frame.to_csv(tmp_path / "scores.csv", index=False)
    frame.to_json(tmp_path / "scores.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "scores.parquet")
    for (arm, seed), rows in frame.groupby(["arm", "seed"]):
        (run := tmp_path / "runs" / str(arm) / f"{seed}").mkdir(parents=True)
        rows.assign(arm="another").drop(columns="seed").to_csv(run / "scores.csv", index=False)  # the folder decides
    first = cohort.import_scores(frame, "frame", runs=tmp_path)
    assert len(record_of(first).trials[0].families) == 40
    for number, path in enumerate(("scores.csv", "scores.jsonl", "scores.parquet", "runs")):
        other = cohort.import_scores(tmp_path / path, f"file-{number}", runs=tmp_path)
        assert problems(other) == problems(first)
        pd.testing.assert_frame_equal(other.compare(), first.compare())
    # what a study of ours has by problem is a table, too
    first.problems.to_csv(tmp_path / "ours.csv", columns=["arm", "seed", "prompt_id", "accuracy"], index=False)
    for number, ours in enumerate((first.problems, tmp_path / "ours.csv")):
        assert problems(cohort.import_scores(ours, f"ours-{number}", runs=tmp_path)) == problems(first)


def test_the_same_scores_again_change_nothing_and_others_need_another_name(tmp_path):
    first = cohort.import_scores(table(), "mine", runs=tmp_path)
    before = {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()}
    cohort.import_scores(table(), "mine", runs=tmp_path)
    assert {file: file.read_bytes() for file in first.folder.rglob("*") if file.is_file()} == before
    for other in (table(np.random.default_rng(5)), table().replace({"arm": {"a": "c"}})):
        with pytest.raises(ValueError, match="holds another study, or other scores; import these under another name"):
            cohort.import_scores(other, "mine", runs=tmp_path)
    with pytest.raises(ValueError, match="must have settings to run, got imported scores"):
        cohort.run("mine", runs=tmp_path)


def test_a_run_without_scores_is_invalid_and_the_others_are_tested(tmp_path):
    frame = table()
    result = cohort.import_scores(frame[(frame.arm != "b") | (frame.seed != 2)], "x", runs=tmp_path)
    assert "(2 seeds, Holm-adjusted p" in result.answer and "1 invalid trial is left out" in result.answer
    assert "Preliminary" not in result.answer
    text = dict(methods(analysed(record_of(result))))["What was left out?"]
    assert text == "Left out: 'b', seed 2 (invalid: no scores of it)."


def changed(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame([ROW, {**ROW, "problem": "q"}]).assign(**columns)


REFUSED = [
    (changed(score=["0.5", "yes"]), "column score of the scores, row 2: input should be a valid number", "'yes'"),
    (changed(score=[0.5, math.nan]), "row 2: input should be a finite number", "nan"),
    (changed(step=[1, None]), "column step of the scores, row 2: input should be a finite number", "correct it"),
    (changed(score=[0.5, 87.5]), "from 0 to 1 in all arms, 1 of 1 have others (such as 87.5 in 'a')", "by 100"),
    (changed(score=[-1.0, 1.0]), "(such as -1 in 'a')", "of fractions as `score` (verl's is acc)"),
    (changed(arm=["a", "b"], score=[0.5, 50.0]), "in all arms, 1 of 2 have others (such as 50 in 'b')", "divide"),
    (changed(problem="p"), "score a problem once at a step, got 'p' of 'a', seed 0, step 0 twice", "column sample"),
    (changed(arm=["a", "b"], problem="p", step=[50, 100]), "'a', seed 0, ends at 50, 'b', seed 0, at 100", "same step"),
    (changed(seed=[0, 1]), "'a', seed 0, lacks 1 of 2, such as 'q'; add them, with 0 for a failed", "everywhere"),
    (pd.DataFrame([{**ROW, "arm": arm, "seed": seed} for arm, seed in (("a", 0), ("b", 0), ("c", 1))]),
     "arms must share seeds with the baseline 'a'", "and 'c' has none; number the runs of each arm 0, 1, 2"),
    (changed(seed=[0, 0.5]), "column seed of the scores, row 2: input should be a valid integer", "0.5"),
    (changed(seed=[0, -1]), "column seed of the scores, row 2", "greater than or equal to 0, got -1"),
    (changed(arm=["a", ""]), "column arm of the scores, row 2: string should have at least 1 character", "''"),
    (changed(problem=["p", "q" * 301]), "column problem of the scores, row 2", "at most 300 characters"),
    (changed(problem="p", sample=[0, 1], family=["f", "g"]), "a problem has one family, got 'g' and 'f' for 'p'", ""),
    (changed().drop(columns="seed"), "scores must have a column seed (or arm and seed as folders ARM/SEED/)", "add it"),
    (changed()[:0], "column score of the scores: list should have at least 1 item", "got 0"),
    (pd.DataFrame([{**ROW, "seed": i} for i in range(2001)]),
     "too many (arm, seed) pairs, at most 2,000;", "column seed?"),
]  # fmt: skip


@pytest.mark.parametrize(("frame", "words", "fix"), REFUSED)
def test_a_bad_table_is_refused_in_one_sentence(frame, words, fix, tmp_path):
    with pytest.raises(ValueError) as caught:
        cohort.import_scores(frame, "bad", runs=tmp_path)
    assert words in str(caught.value) and fix in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "studies").exists()


@pytest.mark.parametrize("name", ["../up", "", "a/b", "a" * 81, "..", "-x", "a\n"])
@pytest.mark.attack("Names of imported studies that lead out of the runs folder")
def test_no_name_of_an_import_leaves_the_runs_folder(name, tmp_path):
    with pytest.raises(ValueError, match="`name` must be letters"):
        cohort.import_scores(table(), name, runs=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.txt", b"1", "scores must be a file (.csv, .jsonl, .parquet, .eval, .json) or a folder"),
        ("x.csv", b"arm,seed,problem\na,0,p\n", "x.csv' has no score 'score'; choose one with `score`: "),
        ("x.csv", b"\xff\xfe", "holds no scores (UnicodeDecodeError"),
        ("x.csv", b"arm,seed\n" + b"a" * 200_000, "holds no scores (Error: field larger than field limit"),
        ("x.jsonl", b"[" * 100_000, "holds no scores ("),
        ("x.jsonl", b"3\n", "holds no scores (AttributeError"),
        ("x.jsonl", b'{"score": ' + b"9" * 5000 + b"}", "holds no scores (ValueError: Exceeds the limit"),
        ("x.parquet", b"PAR1", "holds no scores (ArrowInvalid"),
        ("x.json", b'{"samples": 3, "eval": 4}', "holds no scores (TypeError"),
        ("x.eval", b"PK", "holds no scores (BadZipFile"),
        ("x.csv", b"arm,seed,problem,score,score\na,0,p,1,0\n", "two columns 'score'"),
        ("x.jsonl", b'{"arm": "a", "seed": 0, "problem": "p", "score": 1, "score": 0}', "two keys 'score'"),
        ("x.csv", b",".join(b"c%d" % i for i in range(200_000)) + b"\n" + b"1," * 199_999 + b"1\n", "has no score"),
    ],
)
@pytest.mark.attack("Files of scores that are none")
def test_a_file_that_holds_no_scores_is_refused_in_one_sentence(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as caught:
        cohort.import_scores(tmp_path / name, "bad", runs=tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.attack("Scores that change while they are imported")
@pytest.mark.parametrize("end", [".csv", ".jsonl", ".parquet"])
def test_the_recorded_hash_is_of_the_bytes_whose_scores_were_taken(end, tmp_path, monkeypatch):
    write = {".csv": pd.DataFrame.to_csv, ".parquet": pd.DataFrame.to_parquet}.get(end, partial(
        pd.DataFrame.to_json, orient="records", lines=True))  # fmt: skip
    write(table(), file := tmp_path / f"x{end}")
    read, checked = hashlib.sha256(file.read_bytes()).hexdigest(), imports._checked
    monkeypatch.setattr(imports, "_checked", lambda *given: file.write_bytes(b"other") and checked(*given))
    imported = cohort.import_scores(file, "x", runs=tmp_path)
    assert json.loads((imported.folder / "study.json").read_text())["inputs"] == {"scores": {file.name: read}}
    assert problems(imported) == problems(cohort.import_scores(table(), "frame", runs=tmp_path))


@pytest.mark.parametrize("place", ["a", "a/0", "a/0/deep"])
@pytest.mark.attack("A folder of scores that is a link to the whole disk")
def test_a_link_in_a_folder_of_scores_is_not_followed(place, tmp_path):
    (link := tmp_path / "scores" / place).parent.mkdir(parents=True)
    link.symlink_to("/")
    with pytest.raises(ValueError, match=rf"scores/{place}' is a link to a folder; put the folder itself there"):
        cohort.import_scores(tmp_path / "scores", "bad", runs=tmp_path)


@pytest.mark.slow
@pytest.mark.attack("A kill at every write of an import")
def test_an_import_that_is_killed_at_any_write_is_done_by_the_next_one(tmp_path, record_property):
    few = table().query("seed == 0")
    want = repr(cohort.import_scores(few, "s", runs=tmp_path / "whole").trials.to_dict())
    for moment in itertools.count():
        runs = tmp_path / str(moment)
        if not killed_at(moment, partial(cohort.import_scores, few, "s", runs=runs)):
            break
        document = runs / "studies/s/study.json"
        before = document.read_bytes() if document.exists() else None
        assert repr(cohort.import_scores(few, "s", runs=runs).trials.to_dict()) == want
        assert [one.name for one in (runs / "studies").iterdir()] == ["s"]
        assert before in (None, document.read_bytes())
    record_property("tried", moment)
    assert moment >= 10


@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.attack("A log that unpacks to far more than its size")
def test_no_more_is_unpacked_than_a_log_says(packing, tmp_path):
    with zipfile.ZipFile(tmp_path / "x.eval", "w", packing) as log:
        log.writestr("header.json", b'{"eval": 1}' + b" " * 2**26)
    content = (tmp_path / "x.eval").read_bytes()
    (tmp_path / "x.eval").write_bytes(content.replace(struct.pack("<I", 2**26 + 11), struct.pack("<I", 11)))
    tracemalloc.start()
    with pytest.raises(ValueError, match="holds no scores"):
        cohort.import_scores(tmp_path / "x.eval", "bad", runs=tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.attack("A log that unpacks to far more than its size")
def test_nothing_is_unpacked_that_is_too_large(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.eval", "w", zipfile.ZIP_DEFLATED) as log:
        log.writestr("header.json", "{}")
        log.writestr("summaries.json", b" " * (imports.MOST_JSON + 1))
    zeros = pa.array(np.zeros(1_000_000))
    pq.write_table(pa.table({"score": zeros, "more": zeros}), tmp_path / "x.parquet", use_dictionary=False)
    assert max(file.stat().st_size for file in tmp_path.iterdir()) < 1_000_000
    monkeypatch.setattr(imports, "MOST_BYTES", 8_000_000)
    for name, words in (("x.eval", "must have at most 67,108,864 bytes"), ("x.parquet", "8,000,000 bytes unpacked")):
        with pytest.raises(ValueError, match=words):
            cohort.import_scores(tmp_path / name, "bad", runs=tmp_path)
    table().to_csv(tmp_path / "x.csv")
    monkeypatch.setattr(imports, "MOST_ROWS", 239)
    with pytest.raises(ValueError, match=r"at most 239 rows, .*x\.csv' has more"):
        cohort.import_scores(tmp_path / "x.csv", "bad", runs=tmp_path)


@pytest.mark.slow
@pytest.mark.attack("Markup in the names of imported arms, problems and families")
def test_the_page_of_imported_scores_says_what_is_unknown_and_escapes_every_name(tmp_path):
    evil = "<script>alert(1)</script>"
    frame = table(arms={evil: 0.3, "b": 0.6}).assign(family=evil)
    frame.loc[frame.problem == "p0", "problem"] = evil
    result = cohort.import_scores(frame, "evil", runs=tmp_path)
    files = write_report(record_of(result), tmp_path / "report")
    page, text = files.html.read_text("utf-8"), files.markdown.read_text("utf-8")
    assert "<script" not in page and all("<script" not in part for part in text.split("```")[::2])
    assert "Scores from elsewhere" in page and "Not known are the model, budgets, tuning" in page
    assert page.count("because scores were imported") == 12  # six answers, in the list and in the paragraph
    assert "Validation accuracy" not in page and "Tokens<br>" not in page
    assert "model unknown" in page


@pytest.mark.slow
def test_verify_derives_an_imported_report_again_and_imported_scores_are_not_joined_with_a_study(tmp_path):
    result = cohort.import_scores(table(), "mine", runs=tmp_path)
    record = record_of(result)
    write_report(record, result.folder / "report")
    write_evidence(result.folder, record)
    _, findings = verify_study(result.folder)
    assert findings.mismatches == [] and findings.numbers["events"] > 0
    assert len(findings.lacks) == 6 and all("imported, so nothing can be graded" in words for words in findings.lacks)
    with pytest.raises(ValueError, match="must be measured here to be compared, got the imported 'mine'"):
        join([record, fake_study()])


def test_choosing_the_best_step_adds_what_the_maximum_is_above_the_last():
    curves = {0: [(0, 0.9), (10, 0.5), (20, 0.8), (30, 0.6)], 1: [(0, 0.9), (10, 0.4), (20, 0.5), (30, 0.7)]}
    record = with_trials(fake_study(seeds=range(2)), lambda one: {"history": {"validation/accuracy": curves[one.seed]}})
    # (0.8 - 0.6 + 0.7 - 0.7) / 2 = 0.1; the start is no checkpoint
    assert best_checkpoint(analysed(record)).count("10.0 points to ") == 3
    short = with_trials(record, lambda _: {"history": {"validation/accuracy": curves[0][:2]}})
    assert best_checkpoint(analysed(short)) == ""


@pytest.mark.parametrize(
    ("change", "question", "words"),
    [
        ({}, "compared", "They were fixed before the first run."),
        ({"added": [2], "looks": [2]}, "compared", "Not all of them were fixed before the first run, as"),
        ({}, "settings", "Nothing was tuned in this study"),
        ({"search": {"tuning": {"ppo": {"arms": [{}, {}]}, "grpo": {"arms": [{}]}}}}, "settings",
         "'ppo' (2) and 'grpo' (1)"),
        ({}, "compute", "on hardware that is not recorded"),
        ({}, "budgets", "All arms draw 128 rollouts per step"),
        ({}, "test used", "scored once, at the end of each run"),
        ({}, "left out", "Left out: no run."),
    ],
)  # fmt: skip
def test_what_a_reviewer_asks_is_answered_from_the_record(change, question, words):
    record = dataclasses.replace(fake_study(seeds=range(3)), **change)
    (answer,) = [text for asked, text in methods(analysed(record)) if question in asked]
    assert words in answer


def test_compute_is_the_sum_over_runs_on_named_hardware():
    def on(trial: Any) -> dict[str, Any]:
        spent = {"seconds": 1200.0, "core_seconds": 3600.0, "gpu_seconds": 1800.0, "peak_memory_bytes": 2.0**30}
        return {"versions": {"processor": "Xeon", "gpu": "H100"}, "summary": {**trial.summary, **spent}}

    record = with_trials(fake_study(seeds=range(2)), on)  # 6 runs: 7200 s, 6 core-hours, 3 GPU-hours
    text = dict(methods(analysed(record)))["How much compute, on what?"]
    spent = "2 h 00 min, 6 core-hours, 3 GPU-hours, at most 1.00 GiB of memory with the engine"
    assert text == f"All runs took {spent}, on H100 and Xeon."


def logged(folder: Path, log: Mapping[str, Any], steps: int = 10) -> Path:
    """Runs of two arms with four seeds; seed 3 of b stopped at step 5 with other scores, and has this log of training,
    the others have sound ones. (TRL writes trainer_state.json, verl's logger `file` lines of step and data.)"""
    frame = table().query("seed == 0").drop(columns="seed")
    for arm, seed in itertools.product("ab", range(4)):
        rows, bad = frame[frame.arm == arm].drop(columns="arm"), (arm, seed) == ("b", 3)
        (run := folder / arm / str(seed)).mkdir(parents=True)
        rows = rows.assign(step=5 if bad else 10, score=0.0 if bad else rows.score).iloc[int(bad) :]
        rows.to_csv(run / "x.csv", index=False)
        sound = {"loss": 0.1, "grad_norm": 0.5, "reward": 0.4, "reward_std": 0.3, "entropy": 0.2, "learning_rate": 1e-6}
        lines = [{"step": step, "data": {**sound, **(log if bad else {})}} for step in range(steps)]
        if "actor/lr" in log and bad:
            logs(run, {"verl.jsonl": lines})
        else:
            logs(run, {"trainer_state.json": {"log_history": [{**one["data"], "step": one["step"]} for one in lines]}})
    return folder


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ({"loss": math.nan}, "its log has loss = nan at step 0"),
        ({"grad_norm": math.inf}, "its log has grad_norm = inf at step 0"),
        ({"actor/pg_loss": None, "actor/lr": 1e-6}, "its log has actor/pg_loss = nan at step 0"),
        ({"rollout_corr/kl": 0.2, "actor/lr": 1e-6}, "its log has rollout_corr/kl = 0.2 at step 0, above 0.1"),
        ({"critic/score/max": 1.0, "critic/score/min": 1.0, "actor/lr": 1e-6},
         "its log shows that no rewards of a step ever differ, so nothing is learnt"),
        ({"reward_std": 0.0}, "its log shows that no rewards of a step ever differ, so nothing is learnt"),
        ({"grad_norm": 0.0}, "its log shows that the gradient is 0 throughout, so weights do not move"),
        ({"actor/lr": 0.0}, "its log shows that the learning rate is 0 throughout, so weights do not move"),
        ({"entropy": 1e-5}, "its log has an entropy of 1e-05 nats per token at most in its last 20 steps"),
    ],
)  # fmt: skip
def test_a_run_whose_log_shows_what_ends_a_run_of_ours_is_invalid_and_not_averaged_in(log, reason, tmp_path):
    result = cohort.import_scores(logged(tmp_path / "logs", log, 20), "x", runs=tmp_path)
    found = {(trial.arm, trial.seed): (trial.state, trial.reason) for trial in record_of(result).trials}
    assert found.pop(("b", 3)) == ("invalid", reason) and set(found.values()) == {("complete", None)}
    assert "(3 seeds, Holm-adjusted p" in result.answer and "1 invalid trial is left out" in result.answer
    assert analysed(record_of(result)).arm("b").scores.keys() == {0, 1, 2}


def test_a_log_of_fewer_steps_with_zeros_and_a_low_entropy_in_some_of_them_is_sound():
    row = {"reward_std": 0.0, "grad_norm": 0.0, "entropy": 0.0, "critic/score/max": 1.0, "critic/score/min": 1.0}
    later = {"reward_std": 0.1, "grad_norm": 0.1, "entropy": 2e-4, "critic/score/max": 1.0, "critic/score/min": 0.0}
    assert gates.fault({**dict.fromkeys(range(18), row), 18: later, 19: row}) is None  # one of the last 20 is high
    assert gates.fault({step: {"entropy": 0.0} for step in range(19)}) is None
    assert gates.fault({}) is None


def test_arms_of_which_no_two_runs_share_a_seed_are_compared_without_pairs(tmp_path):
    frame = table(arms={"a": 0.3, "b": 0.9, "c": 0.4})
    frame["seed"] += 10 * frame.arm.map(ord)
    result = cohort.import_scores(frame, "x", claims=[CLAIM], runs=tmp_path)
    one = (analysis := analysed(record_of(result))).comparisons[0]
    seeds = [[*analysis.arm(label).scores.values()] for label in "ba"]
    theirs = stats.ttest_ind(*seeds, equal_var=False)
    assert one.student is not None and (one.student.df, one.tests[0]) == (pytest.approx(theirs.df), one.student)
    assert statistics.t_test(one.student) == pytest.approx(theirs.pvalue)
    assert one.interval == max(one.tests, key=lambda test: test.high - test.low) and one.bootstrap is None
    assert one.estimate == pytest.approx(np.mean(seeds[0]) - np.mean(seeds[1]))
    assert "(3 seeds, Holm-adjusted p" in result.answer and "Preliminary" not in result.answer
    assert result.answer.count("seed") == 1 and not analysis.gaps
    assert check_claims(analysis)[0].verdict == "supported"
    answer = cohort.import_scores(
        frame[(frame.arm != "c") | (frame.seed == frame.seed.max())], "z", runs=tmp_path
    ).answer
    assert "'c' (" in answer and "with one run)" in answer and "shared seed" not in answer
    alone = frame[frame.seed.isin([10 * ord(arm) for arm in "ab"])]
    assert "; with one run no interval" in cohort.import_scores(alone, "w", runs=tmp_path).answer
    files = write_report(record_of(result), tmp_path / "report")
    assert "No two runs share a seed" in files.markdown.read_text("utf-8")
    assert "No two runs share a seed" not in str(
        notes(analysed(record_of(cohort.import_scores(table(), "y", runs=tmp_path))))
    )


def test_a_run_that_left_a_log_alone_is_invalid_for_its_reason(tmp_path):
    folder = logged(tmp_path / "logs", {"loss": math.nan})
    (folder / "b/3/x.csv").unlink()
    (trial,) = [t for t in record_of(cohort.import_scores(folder, "x", runs=tmp_path)).trials if t.state == "invalid"]
    assert (trial.arm, trial.seed, trial.reason) == ("b", 3, "its log has loss = nan at step 0")


CLAIM = {"sentence": "b is better.", "source": "us", "predicts": "above", "contrast": {"b": 1, "a": -1}}


def test_claims_are_fixed_with_an_import_and_judged_in_its_report(tmp_path):
    result = cohort.import_scores(table(arms={"a": 0.1, "b": 0.9}), "x", claims=[CLAIM], runs=tmp_path)
    (claim,) = check_claims(analysed(record_of(result)))
    assert claim.verdict == "supported" and claim.registered.startswith("registered 20")
    folder = logged(tmp_path / "logs", {})
    (folder / "claims.yaml").write_text(json.dumps({"claim": CLAIM}))
    (folder / "b/3/x.csv").unlink()
    assert len(record_of(cohort.import_scores(folder, "y", runs=tmp_path)).claims) == 1
    (folder / "claims.yaml").write_text(json.dumps({"claim": {**CLAIM, "predicts": "below"}}))
    with pytest.raises(ValueError, match="holds another study, or other scores"):
        cohort.import_scores(folder, "y", runs=tmp_path)  # no other prediction of scores that were read
    for wrong, words in (({"margin": -1}, "claim.0.margin"), ({"contrast": {"c": 1, "a": -1}}, "got 'c'")):
        with pytest.raises(ValueError, match=words):
            cohort.import_scores(table(), "z", claims=[{**CLAIM, **wrong}], runs=tmp_path)
