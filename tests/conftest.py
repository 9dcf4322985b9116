"""Fixtures of studies that train nothing, and docs/attacks.md, the table of what the tests marked `attack` tried and
survived: `make chaos` writes it.

A test counts as one try for each set of its parameters; one that tries many things records their number as the property
`tried`. A test that is skipped has not tried anything.
"""

import functools
import gc
import importlib
import json
import os
import random
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_trials
import numpy as np
import pytest
import torch
from cohort.harness import engines
from cohort.harness.cli import app
from cohort.reports.figures import curves
from cohort.tasks import _latex

TABLE = Path(__file__).resolve().parents[1] / "docs/attacks.md"
HEAD = """# Attacks

What the tests have tried against Cohort, and what it survived: hostile text and input, damaged files, kills, outages.
`make chaos` runs them all and writes this table; [the threat model](threat-model.md) says what is trusted. A row counts
kills, files, texts or cases; a row without a number was not tried on the machine that wrote the table.

| Attack | Tried | Survived | Tests |
|---|---:|---:|---|
"""


@dataclass
class Row:
    tried: int = 0
    survived: int = 0
    tests: set[str] = field(default_factory=set)


os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the suite is the same on every machine
engines.__path__.append(str(Path(__file__).parent / "engines"))  # the engine `scripted`
SERVERS: dict[str, Any] = {}  # module that starts the server of a storage, by the name of its extra
for _file in Path(__file__).parent.glob("extras/*/*_server.py"):
    sys.path.append(str(_file.parent))
    SERVERS[_file.parent.name] = importlib.import_module(_file.stem)
# Answers are compared within 3 s of processor, as ever, but on a crowded machine that takes longer by the clock.
_latex.Checker.__init__.__kwdefaults__["wall_seconds"] = 60.0
ROWS: defaultdict[str, Row] = defaultdict(Row)


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws at random is the same in every run, in any order of the tests."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    for name in ("COHORT_TRACKING_URI", "COHORT_MIRROR"):
        monkeypatch.setenv(name, "")  # which a command sets


@pytest.fixture(autouse=True, scope="module")
def few_figures(request) -> Iterator[None]:
    """Reports draw two of the figures on the inside of runs, all of them in a file marked `every_figure`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("every_figure") is None:
            patch.setattr(curves, "DYNAMICS", curves.DYNAMICS[:2])
        yield


@pytest.fixture
def plugins(tmp_path, monkeypatch):
    """The task, algorithm and engine named `fake`."""
    fake_trials.install(tmp_path / "plugins", monkeypatch)


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """The folder of the cold starts that all runs of this process share."""
    return tmp_path_factory.mktemp("cold-starts")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory) -> Path:
    return fake_trials.empty_store(tmp_path_factory)


@pytest.fixture(scope="session")
def new_runs(empty_store) -> Callable[[Path], Path]:
    """Makes a runs folder with an empty store; making a store takes seconds."""

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(empty_store, folder / "mlflow.db")
        return folder

    return make


@pytest.fixture
def runs(tmp_path, new_runs) -> Path:
    return new_runs(tmp_path / "runs")


@pytest.fixture
def endless_disk(monkeypatch):
    """Room for models of real scale, whose folders have no weights here."""
    monkeypatch.setattr("cohort.harness.policy.model.check_weights", lambda name: None)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**15))


class Shell:
    """Runs `cohort` in this process and keeps what it printed; `said` is its errors in one line."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            app.main([str(one) for one in arguments])
        self.out, self.err = self._capsys.readouterr()
        self.said = " ".join(self.err.split())
        return int(ended.value.code or 0)

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def cohort(capsys) -> Shell:
    return Shell(capsys)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") is not None and not os.environ.get("COHORT_CHAOS"):
            item.add_marker(pytest.mark.skip(reason="long; set COHORT_CHAOS=1 to run it"))
        mark = item.get_closest_marker("attack")
        if mark is not None:
            item.user_properties.append(("attack", mark.args[0]))


def pytest_collection_finish() -> None:
    gc.freeze()  # every run and every engine collects, and nothing of a library is garbage


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    facts = dict(report.user_properties)
    if "attack" not in facts or (report.when != "call" and report.passed):
        return
    row = ROWS[str(facts["attack"])]
    row.tests.add(report.nodeid.partition("[")[0])
    if not report.skipped:
        tried = int(facts.get("tried", 1))
        row.tried += tried
        row.survived += tried if report.passed else 0


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    whole = config.getoption("markexpr") == "attack or long" and not config.getoption("keyword")
    whole = whole and config.args == config.getini("testpaths") and not config.option.collectonly
    if whole and os.environ.get("COHORT_CHAOS") and not hasattr(config, "workerinput"):
        TABLE.write_text(HEAD + "".join(f"{_line(words, ROWS[words])}\n" for words in sorted(ROWS)))


def _line(words: str, row: Row) -> str:
    files = sorted({name.partition("::")[0].removeprefix("tests/") for name in row.tests})
    numbers = f"{row.tried:,} | {row.survived:,}" if row.tried else "| "
    return f"| {words} | {numbers} | {', '.join(f'`{file}`' for file in files)} |"


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Any]]:
    """The server of a storage by the name of its extra, started once."""
    with ExitStack() as after:
        yield functools.cache(lambda name: after.enter_context(SERVERS[name].server()))


@pytest.fixture(
    params=["files", *(pytest.param(name, marks=[one.needed, pytest.mark.slow]) for name, one in SERVERS.items())]
)
def url(request) -> str | None:
    """Where the queue of the test lives; None for files."""
    return None if request.param == "files" else request.getfixturevalue("servers")(request.param).new_database()
