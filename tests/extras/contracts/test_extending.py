"""The package of docs/extending.md is installed as printed, found by its entry points, and trains in a study."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cohort.harness.extras.contracts.plugins import check_package, of_kind
from cohort.harness.settings.load import load_study
from cohort.harness.study.queue import study_status
from cohort.harness.study.runner import start_study
from cohort.harness.study.worker import worker_main

TEXT = (Path(__file__).resolve().parents[3] / "docs/extending.md").read_text()


@pytest.mark.slow
def test_a_study_trains_the_algorithm_on_the_task_with_the_reward(runs, tmp_path, monkeypatch):
    source, target = tmp_path / "cohort_extras", tmp_path / "site"
    (source / "cohort_extras").mkdir(parents=True)
    (source / "cohort_extras/__init__.py").touch()
    for name, text in re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S):
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", target, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(target)
    found = list(check_package("Cohort_Extras"))
    assert {(one.kind, one.name) for one in found} == {
        ("algorithm", "median_baseline"), ("task", "backwards"), ("reward", "states_once")}  # fmt: skip
    assert [one for one in found if one.found] == []
    assert len(found) == 3 + sum(len(of_kind(kind)) for kind in ("algorithm", "task", "reward"))
    start_study(load_study(str(source / "study.yaml")), runs, command="")
    assert worker_main("study", runs) == 0
    trials = study_status("study", runs).trials
    assert sorted((one.arm, one.state) for one in trials) == [("grpo", "complete"), ("median_baseline", "complete")]
    for trial in trials:
        events = [json.loads(line) for line in (trial.directory / "events.jsonl").read_text().splitlines()]
        metrics = [event["values"] for event in events if "reward/states_once" in event.get("values", {})]
        # four problems of four completions; the sum that is paid is 1 * accuracy + 0.1 * states_once
        assert len(metrics) == 3
        for step in metrics:
            paid = step["reward/accuracy"] + 0.1 * step["reward/states_once"]
            assert step["reward/mean"] == pytest.approx(paid, abs=1e-6)
