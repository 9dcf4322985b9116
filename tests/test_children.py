"""Child processes that answer questions: their limits, their ends, and several of them at once."""

import os
import signal
import subprocess
import sys
import threading

import child_work
import psutil
import pytest
from cohort.tasks._child import Child, Children, Reply
from real_data import ROOT

EVER = 10**6


def make(cpu_seconds=60.0, wall_seconds=60.0, wait_seconds=60.0, count=1, kind=Children):
    return kind(
        child_work.__name__, (cpu_seconds, wall_seconds),
        cpu_seconds=cpu_seconds, wait_seconds=wait_seconds, memory_bytes=2**30, count=count,
    )  # fmt: skip


@pytest.fixture
def children():
    """One child, that may compute 0.3 s for a question."""
    made = make(cpu_seconds=0.3)
    yield made
    made.close()


class Noting(Children):
    """It notes the replies of its children."""

    def _note(self, question, reply, is_kept):
        replies.append(reply)
        super()._note(question, reply, is_kept)


replies: list[Reply] = []


@pytest.mark.attack("Hostile text in a completion")
@pytest.mark.parametrize(
    ("limits", "question", "is_certain"),
    [
        ({"cpu_seconds": 0.2}, ("compute", EVER), True),
        ({"wall_seconds": 0.2}, ("sleep", EVER), False),
        ({}, ("fill", 2**31), True),
    ],
    ids=["processor", "clock", "memory"],
)
def test_the_child_keeps_each_limit_by_itself(limits, question, is_certain):
    # The parent waits for a minute, so it is the kernel that ends the child; only the clock may be a busy machine.
    children = make(**limits, kind=Noting)
    replies.clear()
    assert children.ask(question) is None
    assert [(reply.stage, reply.is_certain) for reply in replies] == [(0, is_certain)]
    assert children.ask(("sleep", 0)) == 0
    children.close()


def test_the_parent_kills_a_child_that_says_nothing():
    children = make(wait_seconds=0.2)
    assert children.ask(("sleep", 0)) == 0
    stopped = psutil.Process(children._idle[0].process.pid)
    stopped.suspend()
    assert children.ask(("sleep", 0.0, 1)) is None
    assert not stopped.is_running()
    children.close()


def test_the_next_question_after_a_kill_is_answered_and_no_zombie_stays(children):
    for number in range(2):
        assert children.ask(("compute", EVER, number)) is None
        assert children.ask(("sleep", 0, number)) == 0
    assert psutil.STATUS_ZOMBIE not in [child.status() for child in psutil.Process().children()]
    ended = children._idle[0].process
    children.close()
    assert ended.returncode == -signal.SIGKILL  # waited for
    assert children.ask(("sleep", 0, 2)) == 0


def test_a_child_that_died_while_idle_is_replaced(children):
    assert children.ask(("sleep", 0)) == 0
    os.kill(children._idle[0].process.pid, signal.SIGKILL)
    children._idle[0].process.wait()
    assert children.ask(("sleep", 0, 1)) is None
    assert children.ask(("sleep", 0, 2)) == 0


@pytest.mark.attack("Hostile text in a completion")
def test_the_child_writes_no_files(children, tmp_path):
    assert children.ask(("write", str(tmp_path / "text"))) is None  # the kernel ends it at the first byte
    assert not (tmp_path / "text").exists() or (tmp_path / "text").read_text() == ""


def test_an_answer_is_kept_unless_it_is_asked_not_to_be(children):
    for is_kept in (False, True, True):
        children.ask(("sleep", 0), is_kept=is_kept)
    assert children._idle[0].num_questions == 2


def test_a_child_that_cannot_start_is_no_answer(children, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"\(-P -m cohort\.tasks\._child child_work\) does not start"):
        children.ask(("sleep", 0))


FORK = """
import os
from test_children import make
children = make()
children.ask(("sleep", 0))
first = children._idle[0].process.pid
if os.fork() == 0:
    assert children.ask(("sleep", 0, 1)) == 0
    assert children._idle[0].process.pid != first
    children.close()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
assert children.ask(("sleep", 0, 2)) == 0
assert children._idle[0].process.pid == first
print("both")
"""
BUSY = """
from test_children import make
children = make(cpu_seconds=1.0)
children.ask(("sleep", 0))
print(children._idle[0].process.pid, flush=True)
children.ask(("compute", 10**6))
"""


def python(program: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_forked_process_starts_a_child_of_its_own():
    assert python(FORK).communicate()[0].split() == ["both"]


def test_a_busy_child_does_not_outlive_a_killed_parent_by_more_than_its_limits():
    parent = python(BUSY)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=60.0)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


class Meeting(Child):
    """A child without a process; it says whether as many threads as must meet ask at the same time."""

    def __init__(self, together: threading.Barrier):
        self.num_questions = 0
        self._together = together

    def ask(self, question):
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            return Reply("alone")
        return Reply("together")

    def end(self) -> None: ...


def meeting(count: int, together: int, seconds: float = 60.0) -> Children:
    """Such children, which are counted."""
    barrier = threading.Barrier(together, timeout=seconds)

    class MeetingChildren(Children):
        num_started = 0

        def _start_child(self):
            self.num_started += 1
            return Meeting(barrier)

    return make(count=count, kind=MeetingChildren)


def ask_together(children: Children, questions: list[tuple]) -> list[object]:
    """The answers, each question asked by a thread of its own."""
    answers: list[object] = [None] * len(questions)

    def ask(place: int) -> None:
        answers[place] = children.ask(questions[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_two_children_answer_two_questions_at_once():
    children = meeting(count=2, together=2)
    assert ask_together(children, [(n,) for n in range(4)]) == ["together"] * 4
    assert (children.num_started, len(children._idle)) == (2, 2)
    children.set_count(1)  # the one beyond it ends
    assert len(children._idle) == 1


def test_threads_that_ask_one_child_take_turns():
    # Two questions would meet within the time if they had their turn together.
    children = meeting(count=1, together=2, seconds=0.2)
    assert ask_together(children, [(n,) for n in range(4)]) == ["alone"] * 4
    assert children.num_started == 1


def test_more_children_start_only_for_threads_that_ask_together():
    children = meeting(count=4, together=1)
    assert [children.ask((n,)) for n in range(8)] == ["together"] * 8
    assert children.num_started == 1


def test_raising_the_number_of_children_lets_a_waiting_thread_go_on():
    # The first question waits for a second, which has its turn only when there may be two children.
    children = meeting(count=1, together=2)
    threads = [threading.Thread(target=children.ask, args=((n,),)) for n in range(2)]
    for thread in threads:
        thread.start()
    children.set_count(2)
    for thread in threads:
        thread.join()
    assert sorted(children._answers) == [(0,), (1,)]


def test_a_slow_question_is_stopped_while_the_other_child_answers_and_both_end_with_the_checker():
    children = make(cpu_seconds=0.3, count=2)
    before = set(psutil.Process().children())
    questions = [("compute", EVER), *(("sleep", n / 1000) for n in range(40))]
    assert ask_together(children, questions) == [None, *(n / 1000 for n in range(40))]
    assert children._num_busy == 0
    started = set(psutil.Process().children()) - before
    assert 1 <= len(started) <= 2
    children.close()
    assert not any(child.is_running() for child in started)


def test_a_question_whose_child_is_closed_meanwhile_has_no_answer():
    children = make()
    children.ask(("sleep", 0))
    answers: list[object] = []
    asking = threading.Thread(target=lambda: answers.append(children.ask(("sleep", EVER))))
    asking.start()
    while not children._busy:
        pass
    children.close()
    asking.join(timeout=60.0)
    assert answers == [None]
    assert children.ask(("sleep", 0, 1)) == 0
    children.close()


class Tired(Children):
    """Its child answers every question, after half of the limit if there is a 5 in it, and none that has a 9."""

    def _start_child(self):
        class Half(Child):
            def __init__(self):
                self.num_questions = 0

            def ask(self, question):
                asked.append(question)
                return Reply(stage=0) if 9 in question else Reply("so", cpu_seconds=1.5 if 5 in question else 0.2)

            def end(self) -> None: ...

        return Half()


asked: list[tuple] = []


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_slow_answers_use_up_what_overruns_may_cost_and_quick_ones_are_free():
    asked.clear()
    children = make(cpu_seconds=3.0, kind=Tired)
    children.allow_overruns(2)
    assert [children.ask((n,)) for n in (1, 2, 3, 4, 6, 7, 8)] == ["so"] * 7
    # Half a limit each: four of them are as two overruns.
    assert [children.ask((5, n)) for n in range(16)] == ["so"] * 4 + [None] * 12
    assert len(asked) == 7 + 4
    assert children.ask((1,)) == "so"  # known
    assert children.allow_overruns(None) == 0
    assert children.ask((5, 8)) == "so"


@pytest.mark.attack("Expressions that read fast and compare slowly")
def test_after_the_overruns_that_are_allowed_nothing_new_is_asked():
    asked.clear()
    children = make(cpu_seconds=3.0, kind=Tired)
    children.allow_overruns(2)
    assert [children.ask((9, n)) for n in range(16)] == [None] * 16
    assert len(asked) == 2
    assert children.ask((1,)) is None
    assert children.allow_overruns(None) == 0
    assert children.ask((1,)) == "so"
