"""What checks ask of a task's data comes from another process, and is what reading it here would give."""

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import psutil
import pytest
from cohort.harness.checks.survey import longest, surveyed
from cohort.harness.data import Demonstration, Prompt, Split
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.word_problems import WordProblems

HERE = os.getpid()


class Numbers(Arithmetic):
    """Notes the process that reads each split."""

    name: Literal["arithmetic"] = "arithmetic"
    readers: ClassVar[list[int]] = []
    fails: bool = False
    warns: bool = False
    dies: bool = False
    is_bare: bool = False

    def prompts(self, split: Split) -> Sequence[Prompt]:
        Numbers.readers.append(os.getpid())
        if self.fails:
            raise ValueError(f"no {split} split")
        if self.warns:
            logging.getLogger("task").warning("left out a row")
        if self.dies and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        texts = [] if self.is_bare else ["7=", "1+2+3=", f"{len(split)}+1="]
        return [Prompt(text, text, "6") for text in texts]

    def demonstrations(self) -> Sequence[Demonstration]:
        return [] if self.is_bare else [Demonstration("1+1=", "#### 2"), Demonstration("1+1+1=", "#### 3")]


@pytest.fixture(autouse=True)
def as_if_torch_were_not_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    Numbers.readers.clear()


def test_another_process_reads_the_data():
    task = Numbers()
    with surveyed([(task, "train"), (task, "demonstrations")]):
        assert longest(task, "train") == ["7=", "5+1=", "1+2+3="]
        assert longest(task, "demonstrations") == ["1+1="]
        assert Numbers.readers == []
    assert longest(task, "train") == ["7=", "5+1=", "1+2+3="]
    assert Numbers.readers == [HERE]


def test_a_part_without_problems_is_empty_and_one_that_nobody_asked_for_is_read_here():
    bare, task = Numbers(is_bare=True), Numbers()
    with surveyed([(bare, "train"), (bare, "demonstrations")]):
        assert longest(bare, "train") == longest(bare, "demonstrations") == []
        assert Numbers.readers == []
        assert longest(task, "test") == ["7=", "4+1=", "1+2+3="]
    assert Numbers.readers == [HERE]


def test_what_fails_there_fails_here_with_its_error():
    task, other = Numbers(fails=True), Numbers()
    with surveyed([(task, "train"), (other, "train")]):
        with pytest.raises(ValueError, match="no train split"):
            longest(task, "train")
        assert longest(other, "train") == ["7=", "5+1=", "1+2+3="]
    assert Numbers.readers == [HERE]


def test_a_warning_is_given_here_and_once(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]):
    task = Numbers(warns=True)
    with surveyed([(task, "train")]):
        assert longest(task, "train") == ["7=", "5+1=", "1+2+3="]
    assert [record.message for record in caplog.records] == ["left out a row"]
    assert Numbers.readers == [HERE]
    assert "left out" not in capfd.readouterr().err


def test_a_process_that_is_killed_is_done_without():
    task = Numbers(dies=True)
    with surveyed([(task, "train")]):
        assert longest(task, "train") == ["7=", "5+1=", "1+2+3="]
    assert Numbers.readers == [HERE]


def test_once_torch_is_imported_everything_is_read_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    task = Numbers()
    with surveyed([(task, "train")]):
        longest(task, "train")
    assert Numbers.readers == [HERE]


def test_the_process_is_gone_with_the_survey():
    before = set(psutil.Process().children())
    with surveyed([(WordProblems(num_train=100_000), "train")]):
        assert set(psutil.Process().children()) > before
    assert set(psutil.Process().children()) == before


def test_a_dry_run_says_the_same_where_everything_is_read_here(tmp_path: Path):
    program = """
    from pathlib import Path
    from cohort.harness.spec.load import load_study
    from cohort.harness.study.runner import dry_run

    memory = dry_run(load_study("quickstart"), Path("runs"), workers=2)["memory"]
    print(json.dumps({arm: found["components"] for arm, found in memory.items()}))
    """
    first, second = (
        subprocess.run(
            [sys.executable, "-c", f"import {modules}\n{textwrap.dedent(program)}"],
            cwd=tmp_path, capture_output=True, check=True,
        )
        for modules in ("json", "json, torch")
    )  # fmt: skip
    assert first.stdout == second.stdout
    assert len(json.loads(first.stdout)) == 3
