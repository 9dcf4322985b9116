"""Ctrl-C at the start of a command; test_cli.py has what it does to a study."""

import os
import subprocess
import sys

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
def test_an_interrupt_during_the_imports_ends_without_a_traceback(module: str, tmp_path: os.PathLike[str]):
    arguments = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo", "--runs", os.fspath(tmp_path)]
    command = [sys.executable, "-c", EARLY, module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not any(os.scandir(tmp_path))
