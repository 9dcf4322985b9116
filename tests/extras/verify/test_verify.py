"""`cohort verify`: an untouched study follows from its files, one altered digit anywhere does not."""

import dataclasses
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from cohort.harness.base.files import read_json, sha256, write_json
from cohort.harness.extras.verify.verification import Findings, Scope, _check_result, verify_study
from cohort.harness.record.events import EVENTS, RunHistory, event_line, read_events, summed
from cohort.harness.record.evidence import EVIDENCE, read_evidence, write_evidence
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import StudyRecord, read_study
from cohort.harness.run.loop import train
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.reports.render import results_csv
from cohort.reports.render import write_report as render
from factories import FEW, make_study
from fake_study import fake_study
from fake_trials import begin_study
from filelock import FileLock
from test_claims_page import SCRIPT

from cohort import open_result

pytestmark = [pytest.mark.every_figure, pytest.mark.slow]  # a command draws them all; its study takes 16 s


def a_study() -> StudySpec:
    longer = {"name": "arithmetic", "min_operands": 4, "max_operands": 4}
    few = {"num_prompts": 8, "num_test_prompts": 12, "num_samples": 4, "tests": [longer], "test_at_start": True}
    task = {"name": "arithmetic", "min_operands": 2, "max_operands": 3, "num_train": 64}
    small = {"sampling": {"max_tokens": 14}, "cold_start": {"steps": 80}, "steps": 2}
    run = {**FEW, "task": task, "evaluation": few, **small}
    claim = {
        "sentence": "Larger groups help.", "source": "a paper",
        "contrast": {"group_size=8": 1.0, "group_size=4": -1.0}, "predicts": "above",
    }  # fmt: skip
    return make_study(name="sizes", run=run, factors={"algorithm.group_size": [4, 8]}, seeds=[0], claim=claim)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A runs folder that all of pytest's workers read: the first that asks for it makes it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with FileLock(shared / "made.lock"):
        runs = shared / "made"
        return runs if runs.exists() else made_study(runs, seeds=[0])


def made_study(runs: Path, seeds: list[int]) -> Path:
    """The runs folder of a finished study, without an MLflow store."""
    study = a_study().model_copy(update={"seeds": seeds})
    plan = Plan(study, runs)
    begin_study(runs, study)
    for key in plan.keys:
        spec, directory = plan.spec(key), plan.directory(key)
        with RunLog(runs, directory, spec, experiment="sizes", run_name=plan.run_name(key), tags=plan.tags(key)) as log:
            ended = train(spec, directory, log, cache=runs / "cache")
            log.finish(ended.state, ended.reason, ended.summary)
    record = read_study(runs, "sizes")
    render(record, plan.folder / "report", ("svg",))
    write_evidence(plan.folder, record)
    return runs


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of the study's folder alone, elsewhere: no store, no runs folder."""
    return Path(shutil.copytree(made / "studies" / "sizes", tmp_path / "copied"))


def table_only(record: StudyRecord, folder: Path, formats: Sequence[str]) -> None:
    """A report of which nothing but the table is written: drawing takes seconds."""
    (folder / "results.csv").write_text(results_csv(record))


def verified(folder: Path, write: Callable[..., Any] = table_only) -> Findings:
    return verify_study(folder, write)[1]


def events_files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"trials/*/{EVENTS}"))


def alter_digit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] = ord("0") + (content[place] - ord("0") + 1) % 10
    file.write_bytes(bytes(content))


def test_a_copied_study_folder_is_verified_without_the_store_and_its_report_is_written_anew(folder, cohort):
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert cohort("verify", folder, "--json") == 0
    document = cohort.json()
    assert (document["verified"], document["mismatches"], document["lacks"]) == (True, [], [])
    # 2 trials: validation twice (8 problems), two tests at the start and the end (12), 4 samples and a greedy one each;
    # 8 rollouts kept; for the reader 8 rollouts of the last step and 16 of each evaluation but other tests and starts
    assert document["completions"] == 2 * ((2 * 8 + 4 * 12) * 5 + 8 + 8 + 3 * 16)
    assert document["numbers"]["report"] > 20
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before


def test_python_reads_the_same_result_from_the_runs_folder_and_from_a_copy_of_the_study_alone(made, folder):
    stored, copied = open_result("sizes", runs=made), open_result(folder)
    for frame in ("trials", "curves", "problems", "rollouts"):
        assert len(getattr(stored, frame))
        assert getattr(stored, frame).equals(getattr(copied, frame))
    assert stored.compare().equals(copied.compare())
    assert repr(open_result(made / "studies" / "sizes")) == repr(copied)
    with pytest.raises(ValueError, match="did you mean 'sizes'"):
        open_result("size", runs=made)


def test_the_report_is_compared_with_one_written_anew_and_a_changed_cell_named_by_arm_seed_and_column(folder):
    page = folder / "report" / "report.md"
    page.write_text(re.sub(r"(\d)(\.\d %)", lambda m: f"{(int(m[1]) + 1) % 10}{m[2]}", page.read_text(), count=1))
    reseal(folder)
    (found,) = [one for one in verified(folder, render).mismatches if one.file == "report/report.md"]
    assert found.place.startswith("line ")
    assert found.stored != found.derived
    table = folder / "report" / "results.csv"
    header, first, *rest = table.read_text().splitlines()
    cells = first.split(",")
    place = header.split(",").index("test_accuracy")
    derived, cells[place] = cells[place], "0.987"
    table.write_text("\n".join([header, ",".join(cells), *rest]) + "\n")
    reseal(folder)
    (found,) = verified(folder).mismatches
    assert (found.trial, found.file, found.place) == ("group_size=4 | seed 0", "report/results.csv", "test_accuracy")
    assert (found.stored, found.derived) == ("0.987", derived)


def test_a_forged_accuracy_with_its_hashes_made_anew_does_not_follow_from_the_completions(folder):
    file = events_files(folder)[0]
    rewrite(file, lambda e: "test/accuracy" in e.get("values", {}) and e["values"].update({"test/accuracy": 0.9}))
    reseal(folder)
    places = {one.place for one in verified(folder).mismatches}
    assert "test/accuracy at step 2" in places
    assert {"metrics/test/accuracy", "finish/test_accuracy"} <= places


@pytest.mark.parametrize("area", ["test", "test_arithmetic"])
def test_a_completion_that_is_turned_right_is_found_though_its_hashes_are_made_anew(folder, area):
    file = sorted(folder.glob(f"trials/*/completions/{area}-*.jsonl"))[0]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    row = next(row for row in rows if f"#### {row['gold']}" not in row["samples"][0][0])
    row["samples"][0][0] = f"#### {row['gold']}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digest = sha256(file)
    name = f"completions/{file.name}"
    rewrite(file.parents[1] / EVENTS, lambda e: e.update(sha256=digest) if e.get("file") == name else None)
    reseal(folder)
    places = {one.place for one in verified(folder).mismatches}
    assert {f"{area}/accuracy at step 2", f"{area} problem {row['id']}"} <= places


def test_the_accuracy_at_the_start_is_that_of_the_first_evaluation(folder):
    file = events_files(folder)[0]

    def forge(event: dict[str, Any], initial: float) -> None:
        if "validation/accuracy" in event.get("values", {}):
            event["values"]["validation/accuracy"] = 0.25 if event["step"] == 0 else 0.75
        if event["type"] == "finish":
            event["summary"]["accuracy_initial"] = initial

    for initial, is_found in ((0.25, False), (0.75, True)):
        rewrite(file, partial(forge, initial=initial))
        reseal(folder)
        assert ("finish/accuracy_initial" in {one.place for one in verified(folder).mismatches}) == is_found


def test_numbers_agree_to_the_rounding_of_another_machine_and_no_further():
    for derived, differ in ((0.5 * (1 + 1e-12), 0), (0.5 * (1 + 1e-7), 1), (0.5 + 1e-3, 1)):
        findings = Findings()
        Scope(findings).compare("events", "file", "loss", 0.5, derived)
        assert len(findings.mismatches) == differ


def test_a_family_that_the_completions_do_not_have_is_found(folder):
    file = events_files(folder)[0]
    forged: list[str] = []

    def forge(event: dict[str, Any]) -> None:
        if event["type"] == "per_problem":
            forged.append(min(event["fractions"]))
            event["families"] = {forged[0]: "one"}

    rewrite(file, forge)
    reseal(folder)
    assert f"families/{forged[0]}" in {one.place for one in verified(folder).mismatches}


@pytest.mark.attack("A digit altered in a finished study")
def test_one_altered_digit_in_any_of_many_places_is_found(folder, record_property):
    """With COHORT_CHAOS=1 in 200 places, the report written anew for each."""
    whole = bool(os.environ.get("COHORT_CHAOS"))
    kept, trials = ["trials/*/completions/*", "trials/*/rollouts/*"], ["trials/*/run.json", "trials/*/result.json"]
    others = [EVIDENCE, "study.json", "report/index.html", "report/report.md", *trials]
    tried = 0
    for patterns, count in (([f"trials/*/{EVENTS}"], 10), (kept, 10), (["report/results.csv"], 6), (others, 6)):
        files = sorted(file for pattern in patterns for file in folder.glob(pattern))
        for place in range(count * (6 if whole else 1)):
            find_altered_digit(folder, files, random.Random(f"{patterns} {place}"), render if whole else table_only)
            tried += 1
    record_property("tried", tried)
    assert verified(folder).is_verified


WRONG = [None, True, 1, "x", [1], {"a": 1}, {"a": [1]}, [{"a": 1}], [{"findings": 1}]]


@pytest.mark.attack("A study that cannot be verified")
def test_evidence_with_values_of_wrong_types_is_refused_in_one_sentence(folder, record_property):
    """A stranger's file, whose sum is right."""
    known = {key: value for key, value in read_json(folder / EVIDENCE).items() if key != "format"}
    right = [("answer", "x"), *((key, {"a": "x"}) for key in ("versions", "colors"))]
    right += [("extras", {"a": value}) for value in (1, [1])]
    wrong = [{**known, key: value} for key in known for value in WRONG if (key, value) not in right]
    wrong += [{**known, "more": 1}, *({k: v for k, v in known.items() if k != key} for key in known)]
    for document in wrong:
        write_json(folder / EVIDENCE, document)
        with pytest.raises(ValueError, match="is not what Cohort wrote there"):
            read_evidence(folder)
    for key, value in right:
        write_json(folder / EVIDENCE, {**known, key: value})
        assert getattr(read_evidence(folder), key) == value
    record_property("tried", len(wrong))


def test_an_evaluation_without_its_completions_is_lacking_and_a_trial_whose_folder_is_gone_is_named(folder):
    file = events_files(folder)[0]
    events = [event for event in read_events(file) if event["type"] != "kept"]
    file.write_text("".join(event_line(event) for event in events))
    reseal(folder)
    findings = verified(folder)
    assert not findings.mismatches and not findings.is_verified
    assert any("4 evaluations on the test split have no completions" in words for words in findings.lacks)
    shutil.rmtree(events_files(folder)[0].parent)
    findings = verified(folder)
    assert any(one.file.endswith(EVENTS) and one.stored is None for one in findings.mismatches)


@pytest.mark.attack("A study that cannot be verified")
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: (folder / EVIDENCE).unlink(), "cohort report copied"),
        (lambda folder: [rewrite(file, stop) for file in events_files(folder)], "has no results"),
        (lambda folder: (folder / "study.json").unlink(), "is not the folder of a study"),
        (lambda folder: (folder / EVIDENCE).write_text("[1"), "is not valid JSON"),
        (lambda folder: write_json(folder / EVIDENCE, {}), "is not what Cohort wrote"),
        (lambda folder: (folder / EVIDENCE).write_text('{"format": 3}'), "was changed after it was written"),
        (lambda folder: reseal(folder, lambda known: known["files"].update({"../outside": "0"})), "must name files of"),
    ],
)
def test_a_folder_that_cannot_be_verified_is_one_sentence(folder, break_it, words, tmp_path):
    break_it(folder)
    with pytest.raises(ValueError, match=re.escape(words)):
        verified(folder)
    assert [file.name for file in tmp_path.iterdir()] == ["copied"]


def find_altered_digit(folder: Path, files: Sequence[Path], draw: random.Random, write: Callable[..., Any]) -> None:
    """Alter one digit of one file; the file must be named. It is then as it was."""
    file = draw.choice(files)
    before = file.read_bytes()
    place = draw.choice([i for i, byte in enumerate(before) if chr(byte).isdecimal()])
    alter_digit(file, place)
    name = file.relative_to(folder).as_posix()
    try:
        found = {one.file for one in verified(folder, write).mismatches}
    except ValueError as error:  # a format or a name that is no longer one
        found = {name} if file.name in str(error) else set()
    assert name in found, (name, before[place - 20 : place + 20])
    file.write_bytes(before)


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change events and make the sums of their lines anew."""
    events = [{k: v for k, v in event.items() if k != "sum"} for event in read_events(file)]
    for event in events:
        change(event)
    file.write_text("".join(event_line(summed(event)) for event in events))


def stop(event: dict[str, Any]) -> None:
    if event["type"] == "finish":
        event.update(state="stopped")


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda document: None) -> None:
    """Make the hashes of a folder anew, as one who forges it would."""
    document = read_json(folder / EVIDENCE)
    document["files"] = {name: sha256(folder / name) for name in document["files"]}
    change(document)
    write_json(folder / EVIDENCE, document)


@pytest.mark.slow
def test_findings_come_from_a_verified_record_and_a_changed_study_counts_as_not_run(made, tmp_path):
    record = tmp_path / "sizes"
    shutil.copytree(made / "studies" / "sizes", record)
    said = a_study().model_dump(mode="json")
    file, changed = tmp_path / "sizes.yaml", tmp_path / "changed.yaml"
    file.write_text("# Words of the study.\n" + yaml.safe_dump(said))
    changed.write_text(yaml.safe_dump({**said, "seeds": [1]}))
    found = SCRIPT["findings"](record, file)
    (claim,) = found["claims"]
    assert (found["study"], found["trials"], found["evidence"]) == ("sizes", "2 of 2", sha256(record / EVIDENCE))
    assert (claim["verdict"], claim["p"], claim["otherwise"]) == ("not tested", None, [])  # a single seed
    rollouts, tokens = 2 * 2 * 8, 14  # of two arms, two steps each; a completion has at most 14 tokens
    assert rollouts <= found["tokens"] <= rollouts * tokens
    text = SCRIPT["page"]({file: a_study()}, {"sizes": found})
    assert "| Larger groups help. | a paper | [sizes](#sizes) | not tested |" in text
    assert "Words of the study." in text and found["evidence"] in text and "2 of 2 trials" in text
    assert "[sizes](#sizes) | not run |" in SCRIPT["page"]({changed: a_study()}, {"sizes": found})
    with pytest.raises(ValueError, match="must have the settings of"):
        SCRIPT["findings"](record, changed)
    holds = SCRIPT["_holds"]  # a setting that came later is none of the record
    assert holds({"a": {"b": 1, "later": 2}}, {"a": {"b": 1}}) and not holds({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}})
    for result in record.glob("trials/*/result.json"):
        result.write_text(result.read_text().replace("complete", "compleat"))
    with pytest.raises(ValueError, match="must be verified to be shown"):
        SCRIPT["findings"](record, file)


def test_the_mean_of_the_last_test_evaluations_is_recomputed():
    trial = fake_study(seeds=range(1)).trials[0]
    trial = dataclasses.replace(trial, spec={**trial.spec, "evaluation": {"test_last": 2}})

    def mismatches(test_accuracy: float) -> list[str]:
        events, summary = RunHistory(), {"test_accuracy": test_accuracy}
        for step, value in ((10, 0.1), (20, 0.5), (30, 0.6)):
            events.add({"type": "metrics", "step": step, "time": 0, "values": {"test/accuracy": value}})
        end = {"state": "complete", "reason": None, "summary": summary}
        events.add({"type": "finish", **end})
        place = Scope(found := Findings())
        _check_result(trial, events, {**end, "metrics": events.latest()}, place)
        return [one.place for one in found.mismatches]

    assert mismatches(0.55) == []  # of the last two
    assert mismatches(0.6) == ["finish/test_accuracy"]
