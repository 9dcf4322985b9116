"""The package of docs/extending.md is installed as printed, found by its entry points, and trains in a study."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "extending.md").read_text()


def documented_files():
    """{path: text} of every block that stands under its file's name."""
    return dict(re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", TEXT, re.M | re.S))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """(folder of the sources, folder into which pip installed them)."""
    source, target = tmp_path_factory.mktemp("cohort_extras"), tmp_path_factory.mktemp("site")
    (source / "cohort_extras").mkdir()
    (source / "cohort_extras" / "__init__.py").touch()
    for name, text in documented_files().items():
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--target", target, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return source, target


def cohort(installed, *arguments):
    """Standard output of the command in a process that sees the installed package."""
    source, target = installed
    path = os.pathsep.join([str(ROOT), str(target)])
    code = "from cohort.harness.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=source.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_prints_a_whole_package():
    printed = {"pyproject.toml", "study.yaml", *(f"cohort_extras/{n}.py" for n in ("median_baseline", "backwards"))}
    assert set(documented_files()) == printed | {"cohort_extras/states_once.py"}


@pytest.mark.parametrize(
    ("kind", "name", "setting"),
    [
        ("algorithms", "median_baseline", "clip_epsilon"),
        ("tasks", "backwards", "digits"),
        ("rewards", "states_once", "weight"),
    ],
)
def test_the_installed_package_is_listed_with_its_settings(installed, kind, name, setting):
    (found,) = [entry for entry in json.loads(cohort(installed, "list", kind, "--json")) if entry["name"] == name]
    assert setting in [entry["name"] for entry in found["settings"]]


def test_a_study_trains_the_algorithm_on_the_task_with_the_reward(installed, runs):
    source, _ = installed
    cohort(installed, "study", "run", str(source / "study.yaml"), "--runs", str(runs), "--workers", "1")
    rows = list(csv.DictReader((runs / "studies" / "study" / "report" / "results.csv").open()))
    assert sorted(row["arm"] for row in rows) == ["grpo", "median_baseline"]
    assert {row["state"] for row in rows} == {"complete"}
    logs = [[json.loads(line) for line in file.read_text().splitlines()] for file in runs.rglob("events.jsonl")]
    assert len(logs) == 2
    for events in logs:
        metrics = [event["values"] for event in events if "reward/states_once" in event.get("values", {})]
        # four problems of four completions; the sum that is paid is 1 * accuracy + 0.1 * states_once
        assert len(metrics) == 3
        for step in metrics:
            paid = step["reward/accuracy"] + 0.1 * step["reward/states_once"]
            assert step["reward/mean"] == pytest.approx(paid, abs=1e-6)
