"""Ctrl-C at the start of a command, and processes in which none can run; test_cli.py has what it does to a study."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

# Ends in the middle of the imports of a command, before it has a graceful way to stop.
EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from cohort.harness.cli.app import main
main(sys.argv[2:])
"""


@pytest.mark.attack("Ctrl-C at the start of a command")
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_during_the_imports_ends_without_a_traceback(module, tmp_path):
    arguments = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo", "--runs", os.fspath(tmp_path)]
    command = [sys.executable, "-c", EARLY, module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not any(os.scandir(tmp_path))


@pytest.mark.attack("A process in which no command can run")
@pytest.mark.parametrize(
    ("change", "optimize", "words"),
    [
        (None, "2", "PYTHONOPTIMIZE must be below 2, got 2"),
        (lambda: os.rmdir(os.getcwd()), "", "the working folder does not exist any more"),
        (lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)), "",
         "the address space (`ulimit -v`) must be at least 1310720 KiB, got 1048576"),
    ],
)  # fmt: skip
def test_a_process_in_which_no_command_can_run_is_refused_in_one_sentence(change, optimize, words, tmp_path):
    here = os.fspath(Path(__file__).resolve().parents[1])
    (folder := tmp_path / "here").mkdir()
    environment = {**os.environ, "PYTHONOPTIMIZE": optimize, "PYTHONPATH": here}
    ended = subprocess.run(
        [sys.executable, "-m", "cohort", "list", "studies"],
        capture_output=True, text=True, check=False, cwd=folder, preexec_fn=change, env=environment,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"Error: {words}")
    assert len(ended.stderr.splitlines()) == 1
