"""A study is expanded once: no process validates the run of an arm twice, whatever the design and the seeds."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import fake_trials
import pytest
import yaml
from cohort.harness.settings import run as settings
from cohort.harness.settings.load import load_study, runs_of, shipped_studies
from cohort.harness.settings.raw import with_overrides
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue
from cohort.harness.study.runner import dry_run, run_study
from cohort.harness.study.worker import worker_main
from factories import slow_but

RATE = {"low": 1e-5, "high": 1e-3, "log": True}
TUNING = {"space": {"optimizer.learning_rate": RATE}, "trials": 2, "seeds": [7]}
DESIGNS: dict[str, dict[str, Any]] = {
    "grid": {"factors": {"algorithm.group_size": [2, 4]}},
    "tuned": {"design": "compare", "compare": {"algorithms": ["fake", "grpo"], "tasks": ["fake"]}, "search": TUNING},
    "search": {"design": "search", "search": {"space": {"optimizer.learning_rate": RATE}, "trials": 3}},
}
pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def parsed(monkeypatch) -> Counter[str]:
    """How often this process has parsed the settings of each run, apart from its seed."""
    counts: Counter[str] = Counter()
    parse_run = settings.parse_run

    def counted(raw: Mapping[str, Any], where: str) -> Any:
        counts[json.dumps({key: value for key, value in raw.items() if key != "seed"}, sort_keys=True)] += 1
        return parse_run(raw, where)

    for name, module in list(sys.modules.items()):
        if name.startswith("cohort.") and getattr(module, "parse_run", None) is parse_run:
            monkeypatch.setattr(module, "parse_run", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("design", DESIGNS)
def test_each_process_of_a_study_parses_an_arm_once(design, tmp_path, empty_store, parsed, cohort):
    file, runs = tmp_path / "toy.yaml", tmp_path / "runs"
    raw = {"question": "?", "run": fake_trials.run_settings(), "seeds": [0, 1], **DESIGNS[design]}
    file.write_text(yaml.safe_dump(raw))
    most: dict[str, int] = {}

    def note(process: str) -> None:
        most[process] = max(parsed.values())
        parsed.clear()

    assert cohort("study", "show", file, "--runs", runs) == 0
    note("a look at the study")
    runs_of(str(file))
    note("an estimate of its memory")
    dry_run(load_study(str(file)), runs, workers=1, execute=fake_trials.EXECUTE)
    note("a dry run")
    study = load_study(str(file))
    queue = Queue(Plan(study, runs))
    queue.plan.folder.mkdir(parents=True)
    queue.storage.write_document({"digest": study.digest(), "inputs": {}, **study.model_dump(mode="json")})
    queue.retry_failed()
    shutil.copy(empty_store, runs / "mlflow.db")
    parsed.clear()
    assert worker_main("toy", runs, execute=fake_trials.EXECUTE) == 0
    note("a worker")
    # nothing is left to run, so this process starts no worker
    status = run_study(load_study(str(file)), runs, workers=1, command="", execute=fake_trials.EXECUTE)
    note("the study's own process")
    assert status.finished and status.all_valid
    assert len(most) == 5 and set(most.values()) == {1}, most


@pytest.mark.parametrize("name", slow_but(("quickstart", "dapo_parts", "group_size"), shipped_studies()))
def test_the_run_of_an_arm_and_a_seed_is_the_one_that_its_settings_describe(name):
    study = load_study(name)
    for arm in study.checked_arms():
        for seed in study.seeds:
            described = settings.parse_run(with_overrides(study.run, {**arm.overrides, "seed": seed}), "here")
            assert arm.run_spec(seed) == described
            assert arm.run_spec(seed).digest() == described.digest()
