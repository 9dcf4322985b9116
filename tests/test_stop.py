"""Ctrl-C is heard at once, whatever the main thread is doing."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from cohort.harness.ground.stop import STEP, acknowledged, stop_on_signals

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


def say_to(said: list[str], heard: threading.Event) -> Callable[[str], None]:
    def say(words: str) -> None:
        said.append(words)
        heard.set()

    return say


def test_a_signal_is_acknowledged_while_the_main_thread_is_in_a_long_operation():
    said: list[str] = []
    before: list[list[str]] = []
    heard = threading.Event()

    def send() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        heard.wait(30)
        before.append(list(said))

    with acknowledged(say_to(said, heard)), stop_on_signals() as should_stop:
        thread = threading.Thread(target=send)
        thread.start()
        for _ in range(40):  # each call is one operation, in which Python runs no handler
            hashlib.pbkdf2_hmac("sha256", b"", b"", 400_000)
            if said:
                break
        thread.join()
        assert should_stop()
    assert before == [[STEP]]


def test_what_has_no_orderly_way_to_stop_is_told_so():
    said: list[str] = []
    heard = threading.Event()
    own = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        with acknowledged(say_to(said, heard)):
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.wait(30)
    finally:
        signal.signal(signal.SIGINT, own)
    assert said == ["Stopping; Ctrl-C again stops at once."]
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.attack("Ctrl-C at the start of a command")
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_during_the_imports_ends_without_a_traceback(module: str, tmp_path: os.PathLike[str]):
    arguments = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo", "--runs", os.fspath(tmp_path)]
    command = [sys.executable, "-c", EARLY, module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not any(os.scandir(tmp_path))
