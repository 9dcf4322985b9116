"""The README, the pages of docs/ and the help texts: every command, setting, gate, metric and file is one that exists,
every link leads somewhere. What a release is made of agrees with itself: lock file, citation, container, workflows."""

import ast
import importlib.metadata
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from cohort.harness import plugins
from cohort.harness.cli import app
from cohort.harness.mirror.address import TRACKING_URI
from cohort.harness.run.evaluate import metric_names
from cohort.harness.settings import paths
from cohort.harness.settings.run import EvaluationSettings, Gates, RunSpec
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.preflight import is_logged
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cohort

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
DEEPER_KEYS = {"ratio", "value", "restart", "soft", "held_out", "teacher", "order"}  # of no path
AREAS = (
    "train", "validation", "test", "policy", "completion", "critic", "kl", "reward", "mismatch", "staleness", "seconds",
    "vote", "verifier", "flops", "memory", "rejection", "reward_model", "optimizer",
)  # fmt: skip
NEW_FILES = {"algorithms/positive_grpo.py", "tasks/my_problems.py"}  # that a page prints
SHELL = ("console", "shell", "bash", "sh", "")


def shell_lines(page: str) -> Iterator[str]:
    """The lines of the shell blocks of a page, without prompt and comment, a continued line as one."""
    for _, language, body in BLOCK.findall((ROOT / page).read_text()):
        for line in body.replace("\\\n", " ").splitlines() if language in SHELL else ():
            yield " ".join(re.sub(r"\s# .*", "", line).split()).removeprefix("$ ")


def sentences(page: str) -> str:
    return BLOCK.sub("", (ROOT / page).read_text())


def words_in_code(page: str, text: str = "") -> list[str]:
    """What the sentences of a page, or these, set as code."""
    return [" ".join(word.split()) for word in re.findall(r"`([^`]+)`", text or sentences(page))]


def leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every command below a group, with what calls it."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{path} {name}")


COMMANDS = dict(leaves(typer.main.get_command(app.app), "cohort"))
HELP = [line.replace("\\[", "[") for c in COMMANDS.values() for line in c.epilog.splitlines()]
EXAMPLES = [line for line in HELP if line.startswith("cohort ")]
CALLED = sorted({*EXAMPLES, *(line for page in PAGES for line in shell_lines(page) if line.startswith("cohort "))})
# Commands that a sentence names: they may leave out what does not matter there.
NAMED = sorted({word for page in PAGES for word in words_in_code(page) if re.match("cohort [a-z]", word)})
# Run, and not parsed alone: they need no model, no data and no second.
SHOWS = r"cohort (list|study show \w+( |$)|task show arithmetic)"
CHEAP = [line for line in CALLED if re.match(SHOWS, line)]


def command_of(line: str) -> tuple[Any, list[str]]:
    """The command that a line calls, and its arguments."""
    path = next((path for path in COMMANDS if f"{line} ".startswith(f"{path} ")), None)
    assert path, f"no such command: {line}"
    return COMMANDS[path], shlex.split(line.removeprefix(path))


@cache
def known_settings() -> set[str]:
    """Paths that --set takes; those of a plugin without telling which."""
    known = {path for model in (RunSpec, StudySpec) for path, _ in paths.settings(model)}
    for kind in ("task", "algorithm", "sampler", "engine", "reward"):
        for name in plugins.names(kind):
            under = f"rewards.{name}" if kind == "reward" else kind
            known |= {under} | {f"{under}.{key}" for key in plugins.settings_class(kind, name).model_fields}
    return known


def test_the_pages_hold_commands():
    assert {path.split()[1] for path in COMMANDS} >= {"study", "list", "train", "evaluate", "ui"}
    assert len(EXAMPLES) > len(COMMANDS)
    assert len(CALLED) > len(set(EXAMPLES)) + 20
    assert len(NAMED) > 30
    assert len(CHEAP) > 10


@pytest.mark.parametrize("line", CALLED)
def test_every_command_of_a_shell_block_or_a_help_text_is_read_without_an_error(line, monkeypatch):
    monkeypatch.setenv(TRACKING_URI, "")  # which an option sets
    command, words = command_of(line)
    given = command.make_context("cohort", words).params  # a wrong option, number or choice raises
    for override in given.get("sets") or []:
        if override.startswith("@"):
            continue
        path, equals, _ = override.partition("=")
        path = re.sub(r"(template_arguments)\..*", r"\1", path)
        path = re.sub(r"^(stages\.\w+|factors|search\.(space|spaces\.\w+))\.", "", path)
        assert equals
        assert path in known_settings()


@pytest.mark.parametrize("line", NAMED)
def test_every_command_that_a_sentence_names_has_its_options(line):
    command, words = command_of(line.replace("...", ""))
    options = {spelling for parameter in command.params for spelling in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options | {"--help"}


@pytest.mark.parametrize("line", CHEAP)
def test_every_command_that_only_shows_something_runs(line, tmp_path, monkeypatch, cohort):
    monkeypatch.setenv("COHORT_RUNS", str(tmp_path / "runs"))
    assert cohort(*shlex.split(line)[1:]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_sentence_names_exists(page: str):
    """`section.key`, also with a value, and `key: value`, of which the section may be left out."""
    known = known_settings()
    heads = {path.partition(".")[0] for path in known if "." in path}
    keys = {path.rpartition(".")[2] for path in known} | heads | DEEPER_KEYS
    for word in words_in_code(page):
        found = re.fullmatch(r"([a-z_]+)(\.[a-z_]+)*(: \S.*|=\S+)?", word)
        if found and ((found[2] and found[1] in heads) or (found[3] or "").startswith(": ")):
            path = re.match(r"(stages\.\w+\.|factors\.|search\.spaces?\.)?([\w.]+)", word)
            is_file = re.search(r"\.(json|csv|txt|py)$", word)
            assert is_file or (path and path[2] in known | keys), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES)
def test_every_gate_that_a_sentence_names_exists(page: str):
    known = {*Gates.model_fields, *known_settings(), *(path.partition(".")[0] for path in known_settings())}
    for sentence in re.split(r"(?<=[.;])\s", sentences(page)):
        if re.search(r"\bgates?\b", sentence):
            words = {word for word in words_in_code(page, sentence) if re.fullmatch(r"[a-z_]+", word)}
            assert words <= known, f"{page}: {sentence}"


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_a_sentence_names_is_logged(page: str):
    known = {f"{split}/{name}" for split in ("validation", "test") for name in metric_names(EvaluationSettings(), True)}
    known.add("reward/NAME")
    for word in words_in_code(page):
        if re.fullmatch(r"[a-z_]+/[A-Za-z_]+", word) and word.partition("/")[0] in AREAS:
            metric = re.sub("_(low|high)$", "", word.replace("_K", f"_{EvaluationSettings().num_samples}"))
            assert metric in known or is_logged(metric), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_of_the_repository_that_a_sentence_names_exists(page: str):
    """From the top, or from `harness/`, as pages abbreviate."""
    for word in words_in_code(page):
        folder = word.partition("/")[0]
        places = [place for place in (ROOT, ROOT / "harness", ROOT / "tests") if (place / folder).is_dir()]
        if re.fullmatch(r"[\w/]+\.(py|yaml|md)", word) and "/" in word and places and word not in NEW_FILES:
            assert any((place / word).exists() for place in places), f"{page}: {word}"


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file_and_its_heading(page):
    made = re.findall(r"generated/\w+\.md", (ROOT / "mkdocs.yml").read_text())  # pages that the site makes of the code
    for target in re.findall(r"\]\(([^)\s]+)\)", sentences(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists() or name in made, f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{page}: {target}"


def anchors(text: str) -> set[str]:
    """The headings of a page as MkDocs and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_every_target_of_make_in_a_page_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", (ROOT / page).read_text())}
    named |= {line.split()[1] for page in PAGES for line in shell_lines(page) if line[:5] == "make "}
    assert {"quickstart", "docs"} <= named <= targets


@pytest.mark.parametrize("page", ["README.md", "docs/python-api.md"])
def test_every_name_of_the_python_api_in_a_page_exists(page):
    blocks = [body for _, language, body in BLOCK.findall((ROOT / page).read_text()) if language == "python"]
    owners = {"cohort": cohort, "result": cohort.Result, "evaluation": cohort.Evaluation, "study": cohort.Study}
    used = {
        (node.value.id, node.attr)
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners
    }
    assert {("cohort", "run"), ("cohort", "load_study"), ("result", "compare")} <= used
    assert [(owner, name) for owner, name in used if not hasattr(owners[owner], name)] == []


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
    chosen = '"$([ "${DEVICE}" = cuda ] && echo g++ || echo libtcmalloc-minimal4)"'  # for Triton, or workers on a CPU
    assert f"apt-get install --yes --no-install-recommends {chosen}" in last


@pytest.mark.slow
def test_the_arithmetic_of_an_h100_is_what_its_script_prints():
    script = runpy.run_path(str(ROOT / "tests/benchmarks/h100.py"))
    assert script["table"]() in (ROOT / "docs/gpu.md").read_text()
