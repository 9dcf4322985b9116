"""What a release is made of agrees with itself: the lock file, the citation, the container and the workflows."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PINNED = re.compile(r"^([\w.-]+)==([^ ;]+)( ; [^\\]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)


def locked() -> dict[str, str]:
    return {found[0]: found[1] for found in PINNED.findall(LOCK) if "never" not in found[2]}


def needed(name: str, found: set[str]) -> set[str]:
    """Packages that a package needs on this machine, torch and what torch alone needs apart."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        required = canonicalize_name(requirement.name)
        marker = requirement.marker
        if required in {"torch", *found} or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        found.add(required)
        needed(required, found)
    return found


def test_the_lock_file_has_a_hash_for_all_that_cohort_needs_in_the_versions_of_the_constraints():
    assert needed("cohort-rl", set()) <= set(locked())
    assert len(PINNED.findall(LOCK)) == len(re.findall(r"^\S+==", LOCK, re.M))
    lines = [line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    constraints = {canonicalize_name(name): version for name, _, version in lines}
    both = locked().keys() & constraints.keys()
    assert len(both) > 80
    assert {name: locked()[name] for name in both} == {name: constraints[name] for name in both}


def test_the_citation_names_this_version():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


@pytest.mark.parametrize("workflow", ["ci", "release"])
def test_a_workflow_runs_scripts_that_exist(workflow):
    jobs = yaml.safe_load((ROOT / ".github/workflows" / f"{workflow}.yml").read_text())["jobs"]
    steps = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    scripts = {word for step in steps for word in step.split() if word.startswith(".ci/")}
    assert scripts
    for script in scripts:
        assert (ROOT / script).stat().st_mode & 0o111, script


def test_scripts_are_valid_and_the_container_is_made_by_one_of_them():
    for script in (ROOT / ".ci").iterdir():
        subprocess.run(["bash", "-n", script], check=True)
    build, last = (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]
    assert "RUN .ci/install /opt/cohort ${DEVICE}" in build
    assert "apt-get install --yes --no-install-recommends g++" in last  # for Triton, at run time
