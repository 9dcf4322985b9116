"""Files of a finished study that were moved, swapped or changed, even where the report was written again from them."""

import contextlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cohort.harness.base.files import read_json, write_json
from cohort.harness.record.events import EVENTS, event_line, read_events, summed
from cohort.harness.record.evidence import write_evidence
from cohort.harness.record.study import StudyRecord, read_folder
from cohort.harness.study import worker
from queues import run
from test_verify import a_study, alter_digit, made_study, table_only, verified

A, B = "group_size=4-seed0", "group_size=8-seed0"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return made_study(tmp_path_factory.mktemp("moved") / "runs", seeds=[0, 1])


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made / "studies" / "sizes", tmp_path / "copied"))


def sealed(folder: Path) -> StudyRecord:
    """The record, from which the report was written again."""
    record = read_folder(folder, {})
    (folder / "report").mkdir(exist_ok=True)
    table_only(record, folder / "report", ())
    write_evidence(folder, record)
    return record


def trial(folder: Path, start: str) -> Path:
    (found,) = folder.glob(f"trials/{start}*")
    return found


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("aside"))
    other.rename(one)
    one.with_name("aside").rename(other)


def copied(one: Path, other: Path) -> None:
    shutil.rmtree(other)
    shutil.copytree(one, other)


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document, indent=1))


def replaced(file: Path, **changes: Any) -> None:
    """Replace a document by another one that Cohort wrote, of another start or study."""
    write_json(file, {**{k: v for k, v in read_json(file).items() if k != "format"}, **changes})


NOTHING: dict[str, Any] = {"time": 0, "arms": [], "seeds": [], "digest": "0" * 16}
MOVED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the files of a seed copied onto another": (
        lambda f: copied(trial(f, A), trial(f, "group_size=4-seed1")), "must hold its own run"),
    "two arms swapped": (lambda f: swap(trial(f, A), trial(f, B)), "must hold its own run"),
    "two seeds swapped": (lambda f: swap(trial(f, A), trial(f, "group_size=4-seed1")), "must hold its own run"),
    "the events of two arms swapped": (
        lambda f: [swap(trial(f, A) / one, trial(f, B) / one)
                   for one in (EVENTS, "result.json", "completions", "rollouts")],
        "must hold its own run"),
    "run.json of another arm": (
        lambda f: shutil.copy(trial(f, B) / "run.json", trial(f, A) / "run.json"), "must hold its own run"),
    "run.json of other settings": (
        lambda f: replaced(trial(f, A) / "run.json", spec={**read_json(trial(f, A) / "run.json")["spec"], "steps": 3}),
        "must hold its own run"),
    "a trial of another study": (
        lambda f: replaced(f / "study.json", name="others"), "is no trial of this study: it ran for 'sizes'"),
    "run.json with another rate": (
        lambda f: edit(trial(f, A) / "run.json", lambda d: d["spec"]["optimizer"].update(learning_rate=0.5)),
        "was changed after it was written"),
    "study.json with a seed fewer": (
        lambda f: edit(f / "study.json", lambda d: d.update(seeds=[0])), "was changed after it was written"),
    "study.json of a start with a seed fewer": (
        lambda f: replaced(f / "study.json", seeds=[0]), "is no trial of this study: study.json has no seed 1"),
    "study.json of a start with an arm fewer": (
        lambda f: replaced(f / "study.json", labels=["group_size=4"]), "study.json has no arm 'group_size=8'"),
    "an arm taken back that has run": (
        lambda f: replaced(f / "study.json", amendments=[{**NOTHING, "dropped": ["group_size=8"]}]),
        "study.json says that 'group_size=8' was taken back"),
    "study.json of other settings": (
        lambda f: replaced(f / "study.json", digest="0" * 16), "or with other settings than study.json has"),
    "study.json with the content of another document": (
        lambda f: shutil.copy(trial(f, A) / "run.json", f / "study.json"), "does not hold the documents of a study"),
    "a trial's folder twice": (
        lambda f: shutil.copytree(trial(f, A), f / "trials" / "again"), "must hold its own run"),
    "events without their end": (
        lambda f: cut(trial(f, A) / EVENTS), "result.json | state: stored 'complete', derived nothing"),
}  # fmt: skip


def cut(file: Path) -> None:
    file.write_text("".join(map(event_line, read_events(file)[:-1])))


@pytest.mark.slow
@pytest.mark.attack("Files of a finished study moved, swapped or changed, and its report written again")
@pytest.mark.parametrize("case", list(MOVED))
def test_what_was_moved_is_found_though_the_report_was_written_again(folder, case):
    assert sealed(folder) and verified(folder).is_verified
    change, words = MOVED[case]
    change(folder)
    if case.startswith("study.json with"):  # without it there is no report
        with pytest.raises(ValueError, match=words):
            sealed(folder)
        return
    record, findings = sealed(folder), verified(folder)
    assert any(words in f"{one}{one.stored}" for one in findings.mismatches), findings
    if record.strange:
        assert words in " ".join(record.strange.values())
        assert len(record.trials) < 4 or case == "a trial's folder twice"  # a report has none of its numbers


@pytest.mark.slow
def test_events_of_an_attempt_with_other_settings_are_no_part_of_the_run(folder):
    """As if another version of Cohort, which reads the study otherwise, had run a part of it."""
    file = trial(folder, A) / EVENTS
    events = [{k: v for k, v in event.items() if k != "sum"} for event in read_events(file)]
    events.insert(1, {**events[0], "settings": "0" * 16})
    file.write_text("".join(event_line(summed(event)) for event in events))
    assert "settings 0000000000000000" in " ".join(sealed(folder).strange.values())


@pytest.mark.slow
def test_attempts_of_before_an_amendment_are_of_one_run_in_records_that_are_there_too(folder):
    """Their `start` events had a hash of all tags, and of no study."""
    file = trial(folder, A) / EVENTS
    start, *others = [{k: v for k, v in event.items() if k != "sum"} for event in read_events(file)]
    del start["study"]
    starts = [{**start, "settings": digit * 16} for digit in "01"]
    file.write_text("".join(event_line(summed(event)) for event in (*starts, *others)))
    assert len(sealed(folder).trials) == 4 and verified(folder).is_verified


QUEUE = (
    "uncommitted.diff", "optuna.journal", "optuna.journal.lock", "lock", "mlflow.json", "mlflow.lock",
    "progress.json", "lease",
)  # fmt: skip


def harmless(before: Path, after: Path, record: StudyRecord | None, touched: list[str]) -> str | None:
    """Why a change that `verify` does not find is harmless, if it is."""
    pairs = {name: (before / name, after / name) for name in touched}
    names = [name for name, (one, other) in pairs.items()
             if not (one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes())]  # fmt: skip
    if not names:
        return "nothing changed: both files are equal"
    if all(name.rpartition("/")[2] in QUEUE or name.startswith("logs/") for name in names):
        return "no number comes from it: the queue, the mirror, a view, a log, the checkout's changes"
    if record is None:
        return None
    if all(name.startswith("report/") or name == "evidence.json" for name in names):
        return "the report was written again"
    if names == ["status.json"] and not (after / "status.json").exists():
        return "where all trials are complete, status.json says nothing"
    if len(record.trials) < record.expected:
        return "the report itself says that a trial is missing"
    return None


def change_one(folder: Path, draw: random.Random) -> tuple[str, list[str]]:
    """Change, move or swap one thing at random; what it was, and the files it touched."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file, other = draw.choice(files), draw.choice(files)
    kind = draw.choice(["bit", "digit", "byte less", "cut", "appended", "deleted", "swapped", "copied", "twins",
                        "trials", "trial copied", "trial deleted", "trial twice"])  # fmt: skip
    if kind == "twins":  # two files of one name
        found = [f for f in files if f.name == file.name and f != file]
        kind, other = ("twins", draw.choice(found)) if found else ("swapped", other)
    content = file.read_bytes()
    at = draw.randrange(len(content)) if content else 0
    names = [file.relative_to(folder).as_posix()]
    if kind.startswith("trial"):
        one, two = draw.sample(sorted((folder / "trials").iterdir()), 2)
        names = [f.relative_to(folder).as_posix() for f in files if f.is_relative_to(one) or f.is_relative_to(two)]
        if kind == "trials":
            swap(one, two)
        elif kind == "trial copied":
            copied(one, two)
        elif kind == "trial deleted":
            shutil.rmtree(one)
        else:
            shutil.copytree(one, folder / "trials" / "twice")
    elif kind == "bit" and content:
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
    elif kind == "digit" and (places := [i for i, byte in enumerate(content) if chr(byte).isdecimal()]):
        alter_digit(file, draw.choice(places))
    elif kind == "byte less":
        file.write_bytes(content[:at] + content[at + 1 :])
    elif kind == "cut":
        lines = content.splitlines(keepends=True)
        file.write_bytes(b"".join(lines[: draw.randrange(len(lines))]) if lines else b"")
    elif kind == "appended":
        file.write_bytes(content + draw.choice([b"\n", b"{}\n", b"x", b"\0"]))
    elif kind == "deleted":
        file.unlink()
    elif kind == "copied":
        shutil.copyfile(other, file) if other != file else None
    elif other != file:
        names.append(other.relative_to(folder).as_posix())
        one, two = file.read_bytes(), other.read_bytes()
        file.write_bytes(two)
        other.write_bytes(one)
    return kind, names


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.attack("A random change, move or swap among all files of a finished study")
@pytest.mark.parametrize("again", [False, True], ids=["as it is", "report again"])
def test_each_random_change_is_found_or_harmless(tmp_path, new_runs, again, record_property):
    runs, draw, found, kinds = new_runs(tmp_path / "runs"), random.Random(int(again)), Counter[str](), Counter[str]()
    run(a_study().model_copy(update={"seeds": [0, 1]}), runs, execute=worker.EXECUTE)
    before, after = runs / "studies" / "sizes", tmp_path / "after"
    sealed(before)
    assert verified(before).is_verified
    for number in range(500):
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(before, after)
        kind, names = change_one(after, draw)
        record, reason = None, "found"
        with contextlib.suppress(ValueError, FileNotFoundError):  # of `sealed` or `verified`, and so found
            record = sealed(after) if again else None
            if verified(after).is_verified:
                reason = harmless(before, after, record, names)
        assert reason is not None, (number, kind, names)
        found[reason] += 1
        kinds[kind] += 1
    print(dict(found), dict(kinds))
    record_property("tried", 500)
