"""What a run reads is part of it: changed data, model, tokenizer or Hub commit are refused by name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_trials
import pytest
from cohort.harness.base import files
from cohort.harness.base.files import read_json, sha256
from cohort.harness.base.inputs import InputsChanged, check_same, digested, expecting
from cohort.harness.checks.preflight import run_inputs
from cohort.harness.mirror.store import connect
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.study import read_study
from cohort.harness.run.loop import train
from cohort.harness.run.standalone import train_once
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue, study_status
from cohort.harness.study.runner import dry_run, run_study
from cohort.harness.study.worker import EXECUTE, worker_main
from cohort.tasks.gsm8k import GSM8K
from factories import FEW, make_spec
from fakes import MemoryLog, StopAfter

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("plugins")
COMMIT, OTHER = "a" * 40, "b" * 40


def write_rows(folder, first=2):
    """A GSM8K folder; `first` is a number in its first training problem."""
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 24), ("test", 4)):
        sums = [(first if split == "train" and a == 0 else a + 2, a + 3) for a in range(count)]
        rows = [{"question": f"{split} {a}+{b}=", "answer": f"{a}+{b}\n#### {a + b}"} for a, b in sums]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def data(tmp_path):
    write_rows(tmp_path / "data")
    return tmp_path / "data"


def a_study(data, seeds=(0,), **changes):
    task = {"name": "gsm8k", "path": str(data), "validation_fraction": 0.2}
    settings = fake_trials.run_settings(task=task, steps=2, **changes)
    return fake_trials.a_study(run=settings, factors={"algorithm.group_size": [2]}, seeds=list(seeds))


def begun(study, runs):
    """The storage of a study as `run_study` leaves it that is stopped at once."""
    queue = Queue(Plan(study, runs))
    queue.plan.folder.mkdir(parents=True)
    queue.retry_failed()
    inputs = run_inputs([arm.spec for arm in study.checked_arms()], runs / "cache")
    queue.storage.write_document({"digest": study.digest(), "inputs": inputs, **study.model_dump(mode="json")})
    return queue.storage


def start(study, runs):
    return run_study(study, runs, workers=1, command="cmd", execute=fake_trials.EXECUTE)


def a_run(data, **changes):
    """A run on the data with the tiny model, in a second."""
    task = {"name": "gsm8k", "path": str(data), "validation_fraction": 0.2}
    return make_spec(**{**FEW, "task": task, "steps": 2, "sampling": {"max_tokens": 4}, **changes})


@pytest.mark.slow
@pytest.mark.attack("Data, model or tokenizer edited after the start")
def test_a_study_whose_data_were_edited_takes_no_more_seeds_until_they_are_restored(data, runs):
    begun(a_study(data), runs)
    document, old = read_json(runs / "studies" / "sizes" / "study.json"), sha256(data / "train.jsonl")
    write_rows(data, first=90)
    new = sha256(data / "train.jsonl")
    for again in (start, lambda study, runs: dry_run(study, runs, workers=1, execute=fake_trials.EXECUTE)):
        with pytest.raises(InputsChanged) as refused:
            again(a_study(data, [0, 1]), runs)
        assert f"'train.jsonl' of data {data} (main, train) was {old[:16]} and is {new[:16]}" in str(refused.value)
        assert "restore it, or start again under another `name`" in str(refused.value)
    assert read_json(runs / "studies" / "sizes" / "study.json") == document
    write_rows(data)
    assert start(a_study(data, [0, 1]), runs).finished
    shown = read_study(runs, "sizes").versions
    assert shown[f"data {data} (main, train)"] == old[:16] and "torch" in shown


@pytest.mark.attack("Data, model or tokenizer edited after the start")
def test_a_data_file_that_came_or_went_is_a_change(data):
    def found():
        return digested(GSM8K(path=str(data)).inputs("train"))

    before = found()
    (data / "more-train.jsonl").write_text((data / "train.jsonl").read_text())
    for then, now in ((before, found()), (found(), before)):
        with pytest.raises(InputsChanged, match=r"'more-train\.jsonl' of data .* absent"):
            check_same(then, now)


@pytest.mark.attack("Data, model or tokenizer edited after the start")
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_model_folder_replaced_by_one_of_equal_size_and_time_is_refused(tmp_path, data, file):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "config.json", "README.md"):
        (folder / name).write_bytes(b"old")
    spec = a_run(data, model=str(folder))
    with expecting(run_inputs([spec], tmp_path)):
        (folder / "README.md").write_bytes(b"new")
        run_inputs([spec], tmp_path)
        times = (folder / file).stat()
        (folder / file).write_bytes(b"new")
        os.utime(folder / file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(InputsChanged, match=rf"'{file}' of model {folder} was [0-9a-f]{{16}} and is"):
            run_inputs([spec], tmp_path)


@pytest.mark.attack("Data, model or tokenizer edited after the start")
def test_a_worker_refuses_a_trial_whose_data_changed_after_the_start(data, runs):
    begun(a_study(data), runs)
    write_rows(data, first=90)
    assert worker_main("sizes", runs, execute=EXECUTE) == 0
    (refused,) = study_status("sizes", runs).trials
    assert refused.state == "failed"
    assert "SHA-256 of 'train.jsonl'" in (refused.reason or "")
    shutil.rmtree(data)
    assert study_status("sizes", runs).counts()["failed"] == 1  # reads no data


@pytest.mark.slow
@pytest.mark.attack("Data, model or tokenizer edited after the start")
def test_a_run_neither_goes_on_with_other_data_nor_is_it_shown_as_their_result(data, runs, tmp_path):
    spec, log = a_run(data), MemoryLog()
    assert train(spec, tmp_path / "run", log, cache=tmp_path, should_stop=StopAfter(1)).state == "stopped"
    assert set(log.read) == {f"data {data} (main, train)", f"data {data} (main, test)"}
    write_rows(data, first=90)
    with pytest.raises(InputsChanged, match=r"'train\.jsonl'"):
        train(spec, tmp_path / "run", MemoryLog(), cache=tmp_path)
    write_rows(data)
    assert train(spec, tmp_path / "run", MemoryLog(), cache=tmp_path).state == "complete"
    assert train_once(a_run(data, steps=1), runs, "one").state == "complete"
    (run,) = connect(runs).search_runs(["1"])
    assert json.loads(run.data.tags["cohort.inputs"])[f"data {data} (main, test)"] == sha256(data / "test.jsonl")[:16]
    write_rows(data, first=90)
    with pytest.raises(InputsChanged, match=r"'train\.jsonl'"):
        train_once(a_run(data, steps=1), runs, "one")


@pytest.mark.attack("Data edited while a process reads them")
def test_a_process_reads_what_it_was_told_to_find_whatever_it_has_read_before(data):
    task = GSM8K(path=str(data), validation_fraction=0.2)

    def texts():
        return {prompt.text for split in ("train", "validation") for prompt in task.prompts(split)}

    old, before = digested(task.inputs("train")), texts()
    write_rows(data, first=90)
    new = digested(task.inputs("train"))
    with expecting(new):
        after = texts()
    with expecting(old):  # still in memory, and what is in memory is what the record says
        assert texts() == before
    assert len(after - before) == 1
    write_rows(data, first=91)
    wrong = {name: dict.fromkeys(found, "0" * 64) for name, found in new.items()}
    with expecting(wrong), pytest.raises(InputsChanged, match="SHA-256"):
        task.prompts("train")


@pytest.mark.attack("Torn or altered model folder")
def test_a_saved_model_folder_that_is_torn_is_refused_by_name(tmp_path, data):
    save_model(tmp_path / "model", tiny_model(0), tiny_tokenizer())
    spec = a_run(data, model=str(tmp_path / "model"))
    assert run_inputs([spec], tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model' is torn or altered: it does not match its manifest\.json"):
        run_inputs([spec], tmp_path)


def test_the_hash_of_a_large_file_is_noted_for_other_processes_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1e9)  # the file need not lie still for the test
    large, notes = tmp_path / "large", tmp_path / "notes"
    with large.open("wb") as stream:
        stream.truncate(files.LARGE)
    first = sha256(large, notes)
    (note,) = notes.iterdir()
    note.write_text("c" * 64)
    files._hashes.clear()
    assert sha256(large, notes) == "c" * 64  # so it was not read again
    note.write_text("no hash")
    files._hashes.clear()
    assert sha256(large, notes) == first
    times = large.stat()
    with large.open("r+b") as stream:
        stream.write(b"x")
    os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sha256(large, notes) != first


OFFLINE = """
import json, sys
from pathlib import Path
from datasets import Dataset, DatasetInfo, config
from datasets.splits import SplitDict, SplitInfo
from huggingface_hub import constants
from cohort.harness.base.inputs import InputsChanged, digested, expecting
from cohort.harness.policy.model import load_policy, save_model
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.tasks.gsm8k import GSM8K

old, new = sys.argv[1:]
model = Path(constants.HF_HUB_CACHE) / "models--some--model"
for seed, commit in enumerate((old, new)):
    save_model(model / "snapshots" / commit, tiny_model(seed), tiny_tokenizer())
(model / "refs").mkdir()
(model / "refs" / "main").write_text(old)
started = digested(model_sources("some/model"))
(model / "refs" / "main").write_text(new)
moved = digested(model_sources("some/model"))
weights = [load_policy("some/model", seed=0).lm_head.weight.sum().item()]
with expecting(started):
    weights.append(load_policy("some/model", seed=0).lm_head.weight.sum().item())
expected = [tiny_model(seed).lm_head.weight.sum().item() for seed in (1, 0)]

data = Path(config.HF_DATASETS_CACHE) / "some___problems" / "main" / "0.0.0" / old
data.mkdir(parents=True)
splits = SplitDict()
for split in ("train", "test"):
    rows = [{"question": f"{split} {i}?", "answer": f"so\\n#### {i}"} for i in range(20)]
    made = Dataset.from_list(rows)
    made.save_to_disk(data / split)
    (data / split / "data-00000-of-00001.arrow").rename(data / f"problems-{split}.arrow")
    splits.add(SplitInfo(split, num_examples=20, dataset_name="problems"))
DatasetInfo(features=made.features, splits=splits, config_name="main", dataset_name="problems", builder_name="json",
            version="0.0.0").write_to_directory(data)
task = GSM8K(path="some/problems")
recorded = digested(task.inputs("test"))
refused = ""
with expecting({name: {"revision": new} for name in recorded}):
    try:
        task.prompts("test")
    except InputsChanged as error:
        refused = str(error)
print(json.dumps([started, moved, weights == expected, recorded, len(task.prompts("test")), refused]))
"""


@pytest.mark.slow
def test_commits_of_the_hubs_caches_are_recorded_and_pinned_without_a_network(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", OFFLINE, COMMIT, OTHER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    started, moved, pinned, recorded, rows, refused = json.loads(done.stdout.splitlines()[-1])
    assert started == {"model some/model": {"revision": COMMIT}}
    assert moved == {"model some/model": {"revision": OTHER}}
    assert pinned  # the weights of the commit that was asked for, though `main` has moved on
    assert recorded == {"data some/problems (main, test)": {"revision": COMMIT}}
    assert rows == 20
    assert f"revision of data some/problems (main, test) was {OTHER[:16]} and is {COMMIT[:16]}" in refused
