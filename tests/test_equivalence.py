"""Equality of mathematical answers on the hand-written golden corpus, and the checker that works on several at once."""

import threading
from collections import Counter
from pathlib import Path

import hostile
import psutil
import pytest
import yaml
from cohort.tasks import _symbolic
from cohort.tasks._symbolic import Checker, Reply
from cohort.tasks.math import Math

CASES = yaml.safe_load((Path(__file__).parent / "golden" / "math_equivalence.yaml").read_text("ascii"))
# fmt: off
KINDS = {
    "fractions", "decimals", "mixed_numbers", "large_numbers", "surds", "intervals", "inequalities", "tuples",
    "matrices", "degrees", "percent", "money", "text", "units", "sets", "equations", "polynomials", "complex",
    "logs_trig", "counting", "bases_ratios", "expressions",
}
# fmt: on
MATH = Math.model_validate({"name": "math"})


def boxed(answer: str) -> str:
    stated = MATH.extract(rf"Hence it is $\boxed{{{answer}}}$.")
    assert stated is not None, answer
    return stated


def names() -> list[str]:
    return [f"{number}: {case['kind']} {case['gold']}" for number, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=names())
def test_every_equal_spelling_is_equal_both_ways(case):
    gold = boxed(case["gold"])
    wrong = [
        other
        for other in case["equal"]
        if not (MATH.equivalent(boxed(other), gold) and MATH.equivalent(gold, boxed(other)))
    ]
    assert wrong == []


@pytest.mark.parametrize("case", CASES, ids=names())
def test_every_near_miss_is_different_both_ways(case):
    gold = boxed(case["gold"])
    wrong = [
        other
        for other in case["different"]
        if MATH.equivalent(boxed(other), gold) or MATH.equivalent(gold, boxed(other))
    ]
    assert wrong == []


def test_the_corpus_has_every_kind_and_enough_spellings():
    kinds = Counter(case["kind"] for case in CASES)
    assert len(CASES) >= 130
    assert set(kinds) == KINDS
    assert min(kinds.values()) >= 5
    assert len({(case["kind"], case["gold"]) for case in CASES}) == len(CASES)
    for case in CASES:
        assert set(case) == {"kind", "gold", "equal", "different"}
        spellings = [case["gold"], *case["equal"], *case["different"]]
        assert len(case["equal"]) >= 5
        assert len(case["different"]) >= 2
        assert len(set(spellings)) == len(spellings), case["gold"]


@pytest.mark.parametrize("other", ["(0,2)", "[0,2)", "(0,2]", "[0,3]", "(2,0)", r"\{0,2\}"])
def test_the_checker_itself_tells_an_interval_from_another(other):
    assert _symbolic.checker().compare("[0,2]", other) == "different"
    assert _symbolic.checker().compare("[0,2]", r"[0,\frac{4}{2}]") == "equal"


class Meeting(_symbolic._Child):
    """A child that answers once `together` threads ask at the same time, and notes if they never do."""

    def __init__(self, together: threading.Barrier):
        self.num_questions = 0
        self._together = together

    def ask(self, pair: tuple[str, ...]) -> Reply:
        self.num_questions += 1
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            return Reply("different")
        return Reply("equal")

    def kill(self) -> None: ...
    def end(self) -> None: ...


class MeetingChecker(Checker):
    """A checker of such children, that counts them."""

    def __init__(self, num_children: int, together: int, seconds: float = 30.0):
        super().__init__(num_children=num_children)
        self.num_started = 0
        self._together = threading.Barrier(together, timeout=seconds)

    def _start_child(self):
        self.num_started += 1
        return Meeting(self._together)


def ask_together(checker: Checker, pairs: list[tuple[str, str]]) -> list[str]:
    """The verdicts on the pairs, each asked by a thread of its own."""
    verdicts = [""] * len(pairs)

    def ask(place: int) -> None:
        verdicts[place] = checker.compare(*pairs[place])

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return verdicts


def test_two_children_answer_two_questions_at_once():
    checker = MeetingChecker(num_children=2, together=2)
    assert ask_together(checker, [("x", "1"), ("x", "2"), ("x", "3"), ("x", "4")]) == ["equal"] * 4
    assert checker.num_started == 2
    assert checker.counts == {"equal": 4}


def test_threads_that_ask_one_child_take_turns():
    # Two questions would meet within the time if they had their turn together.
    checker = MeetingChecker(num_children=1, together=2, seconds=0.5)
    assert ask_together(checker, [("x", str(n)) for n in range(4)]) == ["different"] * 4
    assert checker.num_started == 1


def test_more_children_start_only_for_threads_that_ask_together():
    checker = MeetingChecker(num_children=4, together=1)
    for n in range(8):
        checker.compare("x", str(n))
    assert checker.num_started == 1


def test_raising_the_number_of_children_lets_a_waiting_thread_go_on():
    # The first question waits for a second; the second has its turn only when there may be two children.
    checker = MeetingChecker(num_children=1, together=2)
    first = threading.Thread(target=checker.compare, args=("x", "1"))
    second = threading.Thread(target=checker.compare, args=("x", "2"))
    first.start()
    second.start()
    checker.set_num_children(2)
    first.join()
    second.join()
    assert checker.counts == {"equal": 2}


def test_lowering_the_number_of_children_ends_those_beyond_it():
    checker = MeetingChecker(num_children=2, together=2)
    ask_together(checker, [("x", "1"), ("x", "2")])
    assert len(checker._idle) == 2
    checker.set_num_children(1)
    assert len(checker._idle) == 1


def test_a_slow_question_is_stopped_while_the_other_child_answers():
    checker = Checker(wall_seconds=1.0, cpu_seconds=0.6, num_children=2)
    slow = hostile.SLOW
    pairs = [(slow, "1"), ("x+1", "1+x"), (f"{slow}+1", "1"), ("x+2", "x+3"), (slow, "2"), (slow, "3")]
    stopped = "unparsable"
    assert ask_together(checker, pairs) == [stopped, "equal", stopped, "different", stopped, stopped]
    assert checker.counts == {"unparsable": 4, "equal": 1, "different": 1}
    assert checker._num_busy == 0
    checker.close()


def test_two_real_children_run_and_both_end_with_the_checker():
    checker = Checker(num_children=2)
    before = set(psutil.Process().children())
    pairs = [(f"x+{n}", f"{n + n % 2}+x") for n in range(40)]
    # Even n are compared with themselves, odd ones with the next number.
    assert ask_together(checker, pairs) == ["different" if n % 2 else "equal" for n in range(40)]
    started = set(psutil.Process().children()) - before
    assert len(started) == 2
    checker.close()
    assert not any(child.is_running() for child in started)


def test_a_question_whose_child_is_closed_meanwhile_is_unparsable():
    checker = Checker(wall_seconds=60.0, cpu_seconds=60.0)
    checker.compare("x", "x+1")
    verdicts: list[str] = []
    asking = threading.Thread(target=lambda: verdicts.append(checker.compare(hostile.SLOW, "1")))
    asking.start()
    while not checker._busy:
        pass
    checker.close()
    asking.join(timeout=30.0)
    assert verdicts == ["unparsable"]
    assert checker.compare("y+1", "1+y") == "equal"
    checker.close()


def test_the_shared_checker_takes_a_number_of_children_of_at_least_one():
    shared = _symbolic.checker()
    _symbolic.set_num_children(3)
    assert shared._num_children == 3
    _symbolic.set_num_children(1)
    with pytest.raises(ValueError, match="num_children must be at least 1, got 0"):
        _symbolic.set_num_children(0)
