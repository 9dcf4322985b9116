"""Child processes that answer questions: their limits, their ends, and one for each thread that asks."""

import os
import subprocess
import sys
import threading

import child_work
import psutil
import pytest
from cohort.tasks import _child
from cohort.tasks._child import Children, Reply
from queues import python
from real_data import ROOT

EVER = 10**6


def make(cpu_seconds=60.0, wall_seconds=60.0, wait_seconds=60.0):
    return Children(
        child_work.__name__, cpu_seconds, wall_seconds,
        cpu_seconds=cpu_seconds, wait_seconds=wait_seconds, memory_bytes=2**30,
    )  # fmt: skip


@pytest.fixture
def children():
    return make(cpu_seconds=0.3)


def process(children: Children) -> psutil.Process:
    return psutil.Process(children._own.child.process.pid)


@pytest.mark.attack("Hostile text in a completion")
@pytest.mark.parametrize(("limits", "question", "spent"), [
    ({"cpu_seconds": 0.2}, ("compute", EVER), True),
    ({"wall_seconds": 0.2}, ("sleep", EVER), False),
    ({}, ("fill", 2**31), True),
], ids=["processor", "clock", "memory"])  # fmt: skip
def test_the_child_keeps_each_limit_by_itself_and_the_next_one_answers(limits, question, spent):
    # The parent waits for a minute, so it is the kernel that ends the child; only the clock may be a busy machine.
    children = make(**limits)
    assert children.ask("sleep", 0).answer == 0
    first = process(children)
    assert children.ask(*question)[:3] == (None, 0, spent)
    assert not first.is_running()  # nor a zombie
    assert children.ask("sleep", 0, 1).answer == 0


def test_a_child_that_says_nothing_is_killed_and_one_that_died_while_idle_replaced():
    children = make()
    assert children.ask("sleep", 0).answer == 0
    stopped = process(children)
    stopped.suspend()
    children._own.child._wait_seconds = 0.2
    assert children.ask("sleep", 0.0, 1).answer is None
    assert not stopped.is_running() and children.ask("sleep", 0, 2).answer == 0
    process(children).kill()
    children._own.child.process.wait()
    assert [children.ask("sleep", 0, n).answer for n in (3, 4)] == [None, 0]


@pytest.mark.attack("Hostile text in a completion")
def test_the_child_writes_no_files(children, tmp_path):
    assert children.ask("write", str(tmp_path / "text")).answer is None  # the kernel ends it at the first byte
    assert not (tmp_path / "text").exists() or (tmp_path / "text").read_text() == ""


def test_a_child_that_cannot_start_is_no_answer(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"\(-P -m cohort\.tasks\._child child_work\) does not start"):
        make().ask("sleep", 0)


def test_each_thread_has_a_child_of_its_own_that_ends_with_it(children):
    pids: list[int] = []
    both = threading.Barrier(2, timeout=240.0)

    def ask() -> None:
        children.ask("sleep", 0, threading.get_ident())
        both.wait()  # before either ends
        pids.append(process(children).pid)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == 2
    assert not any(map(psutil.pid_exists, pids))


FORK = """
import os
from test_children import make, process
children = make()
children.ask("sleep", 0)
first = process(children).pid
if os.fork() == 0:
    assert children.ask("sleep", 0, 1).answer == 0
    assert process(children).pid != first
    children._own.child.end()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
assert children.ask("sleep", 0, 2).answer == 0
assert process(children).pid == first
print("both")
"""
BUSY = """
from test_children import make, process
children = make(cpu_seconds=0.3)
children.ask("sleep", 0)
print(process(children).pid, flush=True)
children.ask("compute", 10**6)
"""


PATH = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])


def test_a_forked_process_starts_a_child_of_its_own():
    assert python(FORK, path=PATH).stdout.split() == ["both"]


def test_a_busy_child_does_not_outlive_a_killed_parent_by_more_than_its_limits(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATH)
    parent = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=240.0)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


class Tired:
    """A child that answers every question, after half of the limit if there is a 5 in it, and none that has a 9."""

    num_questions = 0
    parent = os.getpid()

    def __init__(self, *_): ...

    def ask(self, question):
        asked.append(question)
        return Reply(stage=0) if 9 in question else Reply("so", cpu_seconds=1.5 if 5 in question else 0.2)

    def end(self) -> None: ...


asked: list[tuple] = []


@pytest.fixture
def tired(monkeypatch):
    asked.clear()
    monkeypatch.setattr(_child, "Child", Tired)
    return make(cpu_seconds=3.0)


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_slow_answers_use_up_what_overruns_may_cost_and_quick_ones_are_free(tired):
    tired.allow_overruns(2)
    assert [tired.ask(n).answer for n in (1, 2, 3, 4, 6, 7, 8)] == ["so"] * 7
    # Half a limit each: four of them are as two overruns.
    assert [tired.ask(5, n).answer for n in range(16)] == ["so"] * 4 + [None] * 12
    assert len(asked) == 7 + 4
    assert tired.ask(1).answer == "so"  # known
    assert tired.allow_overruns(None) == 0
    assert tired.ask(5, 8).answer == "so"


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_after_the_overruns_that_are_allowed_nothing_new_is_asked(tired):
    tired.allow_overruns(2)
    assert [tired.ask(9, n).answer for n in range(16)] == [None] * 16
    assert len(asked) == 2
    assert tired.ask(1).answer is None
    assert tired.allow_overruns(None) == 0
    assert tired.ask(1).answer == "so"
