r"""MATH and MATH-500: equality of LaTeX answers on corpora written for these tests, rows, sources and filters."""

import json
import logging
import time
from pathlib import Path

import hostile
import pytest
import yaml
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import parse_run
from cohort.tasks import _algebra, _latex
from cohort.tasks._latex import Checker
from cohort.tasks.math import Math
from cohort.tasks.math500 import Math500
from real_data import real_data

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = yaml.safe_load((Path(__file__).parent / "golden" / "math_equivalence.yaml").read_text("ascii"))

# fmt: off
# Answer -> other spellings of it, beside those of the golden corpus.
EQUAL = {
    r"\frac{5}{7}": [r"\frac57", r"\dfrac{5}{7}", r"\tfrac57", "5/7", r"\frac{10}{14}", r"$\frac{5}{7}$", r"\frac 5 7",
                     r"{5\over 7}"],
    r"-\frac{3}{4}": ["-0.75", r"\frac{-3}{4}", r"\frac{3}{-4}", "-3/4", r"-\left(\frac{3}{4}\right)", "\u22120.75"],
    "2500": ["2,500", r"2{,}500", r"2,\!500", "2500.0", "+2500", r"\$2500", r"2.5 \times 10^3", "50^2"],
    "0.125": ["1/8", r"\frac18", ".125", "2^{-3}", r"12.5 \times 10^{-2}", r"0.125\text{ m}"],
    r"2\frac{1}{3}": [r"\frac73", "7/3", r"2 \tfrac{1}{3}", "2 1/3", r"2.\overline{3}"],
    r"5\sqrt{2}": [r"5\sqrt2", r"\sqrt{50}", r"5 \cdot \sqrt{2}", r"\frac{10}{\sqrt{2}}", r"5\cdot 2^{1/2}", "5\u221a2",
                   "5sqrt(2)"],
    r"\frac{\sqrt{6}}{6}": [r"\frac{1}{\sqrt{6}}", r"\frac{\sqrt6}{6}", r"\sqrt{\frac{1}{6}}", r"6^{-1/2}"],
    r"2+\sqrt{3}": [r"\sqrt{3}+2", r"\frac{1}{2-\sqrt{3}}", r"\frac{4+2\sqrt3}{2}", r"2 + 3^{\frac{1}{2}}"],
    r"2 \pm \sqrt{7}": [r"2+\sqrt7, 2-\sqrt7", r"2-\sqrt{7},2+\sqrt{7}", r"x = 2 \pm \sqrt7"],
    r"6\pi": [r"\pi \cdot 6", r"2\pi\cdot 3", "6pi", "6\u03c0", r"6\pi \text{ cm}", r"\frac{12\pi}{2}", r"6\,\pi"],
    "(2,-3)": ["(2, -3)", r"\left(2,-3\right)", r"(\frac42,-3)", "2,-3", "(2.0,-3)"],
    "(1,2)": ["1,2", "(1, 2)", r"\left(1,\frac42\right)"],
    "(0.5,2]": [r"\left(\frac12,2\right]", "(1/2, 2]", "(.5,2.0]"],
    r"[0,\infty)": [r"\left[0,\infty\right)", r"x \ge 0", r"x\in[0,\infty)", r"[0,+\infty)", "[0,\u221e)", r"0 \le x"],
    r"(-\infty,1)\cup(4,\infty)": [r"(4,\infty)\cup(-\infty,1)", r"(-\infty, 1) \cup (4, +\infty)",
                                   "(-\u221e,1)\u222a(4,\u221e)"],
    r"-1 \le x < 5": [r"[-1,5)", r"x\in[-1,5)", r"-1\leq x<5", "-1 \u2264 x < 5"],
    "1,4,9": ["9,4,1", "1, 4, 9", r"1, 4, \text{ and } 9", r"\{1,4,9\}", r"4, 1\text{ and }9"],
    r"\{2,5\}": [r"\{5,2\}", r"\left\{2,5\right\}", "2,5", "5, 2"],
    r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}": [
        r"\begin{bmatrix} 0.5 \\ -3 \end{bmatrix}", r"\begin{pmatrix}\frac12\\-3\end{pmatrix}",
        r"\left(\begin{matrix} \tfrac{1}{2} \\ -3 \end{matrix}\right)",
    ],
    r"\begin{pmatrix} 0 & 1 \\ 2 & 3 \end{pmatrix}": [
        r"\begin{bmatrix}0&1\\2&3\end{bmatrix}", r"\begin{pmatrix} 0 & 1 \\ 4/2 & 3.0 \end{pmatrix}",
    ],
    r"45^\circ": ["45", r"45^{\circ}", "45\u00b0", r"45 \text{ degrees}", "45 degrees", r"45\degree"],
    r"30\%": ["30", "30%", "30 percent", r"30\text{ percent}", r"30.0\%"],
    r"\text{Friday}": ["Friday", "friday", r"\textbf{Friday}", r"\mathrm{Friday}", r"\text{ Friday }", "Friday."],
    r"\text{(B)}": ["B", "(B)", r"\text{B}", r"\textbf{(B)}", r"\mathrm{B}"],
    r"75\text{ cm}^2": ["75", "75 cm^2", r"75\,\text{cm}^2", r"75 \mbox{ cm}^2", r"75\mathrm{~cm}^2"],
    "x=7": ["7", "x = 7", "x=7.0", r"x=\frac{14}{2}"],
    "y = 3x - 2": ["y=3x-2", "3x-2", "y = -2 + 3x", "y-3x=-2", "3x-y=2"],
    "2x + 3y - 6 = 0": ["2x+3y=6", "3y+2x-6=0", "-2x-3y+6=0", "6=2x+3y"],
    "3 - 4i": ["-4i+3", "3-4 i", r"3 - 4\cdot i"],
    "(x-2)(x+3)": ["x^2+x-6", "(x+3)(x-2)", "x^{2} + x - 6", "x\u00b2+x-6", "-6+x+x^2", r"x\cdot x+x-6"],
    r"\frac{3+5b}{8}": [r"\frac{5b+3}{8}", r"\frac38+\frac{5b}{8}", "(3+5b)/8", r"\frac{1}{8}(5b+3)", "0.375+0.625b"],
    "4n^2+2n": ["2n(2n+1)", "2n + 4n^2", "4n^{2}+2n"],
    r"\tan x": [r"\frac{\sin x}{\cos x}", r"\tan(x)", r"\tan{x}"],
    r"2^{10}": ["1024", "4^5", r"2^{5}\cdot 2^5"],
    r"\binom{6}{2}": ["15", r"\frac{6!}{2!4!}"],
    r"\log_3 81": ["4", r"\log_{3}{81}"],
    "5!": ["120", r"5\cdot 4!"],
    "32_7": ["32_{7}", "32_7.", r"32_{ 7 }"],
    "3:45": ["3:45", "3 : 45"],
    r"\frac{1}{3}": [r"0.\overline{3}", r"0.\bar{3}", r"\frac{1}{3}" + "\n", r"\displaystyle\frac13"],
    r"e^2": ["e^{2}", r"e\cdot e"],
    r"|x|": [r"\left|x\right|", r"\lvert x \rvert"],
}

# Answer -> near misses.
DIFFERENT = {
    r"\frac{5}{7}": ["0.714285", r"\frac75", r"-\frac57", "5", "7", r"\frac{5}{8}", "0.7142857142857"],
    "2500": ["250", "25000", "2501", "2500x", "2,50", r"2500\pi"],
    r"5\sqrt{2}": ["7.0710678", "5", r"2\sqrt5", r"\sqrt{10}", r"-5\sqrt2", "7.07106781186547524"],
    r"2 \pm \sqrt{7}": [r"2+\sqrt7", r"2", r"\pm\sqrt7", r"-2\pm\sqrt7"],
    r"6\pi": ["6", r"\pi^6", "18.85", r"5\pi", "18.849555921538759"],
    "(2,-3)": ["(-3,2)", "-3,2", "[2,-3]", "2", "(2,3)", r"\{2,-3\}", "(2,-3,0)"],
    "(1,2)": ["2,1", "(2,1)", "1", "[1,2]", r"\{1,2\}"],
    r"(\frac13,5)": ["(0.3333333,5)", "(1,3,5)"],
    "(0.5,2]": ["[0.5,2]", "(0.5,2)", "(5,2]", "(0.5,3]"],
    r"[0,\infty)": [r"(0,\infty)", "0", r"x>0", r"[0,\infty]", r"x \le 0"],
    r"(-\infty,1)\cup(4,\infty)": [r"(-\infty,4)", r"(1,4)", r"(-\infty,1]\cup[4,\infty)"],
    "1,4,9": ["1,4", "1,4,8", "1,4,9,16", "149"],
    r"\{2,5\}": [r"\{2\}", "(2,5)", "[2,5]", "7", "2", r"\{2,5,5,6\}"],
    r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}": [
        r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} -3 \\ 1/2 \end{pmatrix}",
        r"\begin{pmatrix} 1/2 \end{pmatrix}",
    ],
    r"45^\circ": ["54", "45.5", r"\frac{\pi}{4}", "135"],
    r"30\%": ["0.3", "3", "70"],
    r"\text{Friday}": ["Monday", "F", "5", r"\text{Sunday}", "day"],
    r"\text{(B)}": ["A", "(D)", "AB", r"\text{C}", "2"],
    "x=7": ["x=-7", "y=8", "6", "x>7"],
    "y = 3x - 2": ["y=3x+2", "3x+2", "y=2x-3", "-2"],
    "2x + 3y - 6 = 0": ["0", "6", "2x+3y=5", "2x-3y-6=0"],
    "3 - 4i": ["3+4i", "3-4", "-1", "4-3i"],
    "(x-2)(x+3)": ["x^2-x-6", "x^2+x+6", "(y-2)(y+3)", "x-2"],
    "10t": ["10", "10s", "t"],
    "32_7": ["32", "32_8", "23", "32_{17}"],
    "3:45": ["3", "15:3", "1:15", "4:45", "1/15"],
    "2^{-80}": ["2^{-81}", "0", r"\frac{1}{2^{79}}"],
    r"\frac{2^{2000}+1}{2^{2001}}": [r"\frac{1}{2^{2001}}", r"\frac12"],
    r"n=1,2,3": ["n=2,3,4", "3"],
    "18!": ["18", "17!"],
    "(0,2^{-80})": ["(0,2^{-81})", "(0,0)"],
    r"30\text{ and }150": ["30150", "30,150", "30"],
}
# fmt: on


def boxed(answer: str) -> str:
    stated = Math().extract(rf"Hence it is $\boxed{{{answer}}}$.")
    assert stated is not None, answer
    return stated


def judged(answer: str, others: list[str]) -> dict[str, tuple[bool, bool]]:
    """Whether each of the others equals the answer, both ways."""
    gold = boxed(answer)
    return {o: (Math().equivalent(boxed(o), gold), Math().equivalent(gold, boxed(o))) for o in others}


EQUAL_CASES = [*EQUAL.items(), *((case["gold"], case["equal"]) for case in GOLDEN)]
DIFFERENT_CASES = [*DIFFERENT.items(), *((case["gold"], case["different"]) for case in GOLDEN)]


def test_the_corpora_are_large_enough():
    assert sum(len(others) for _, others in EQUAL_CASES) >= 900
    assert sum(len(others) for _, others in DIFFERENT_CASES) >= 600
    assert len({case["kind"] for case in GOLDEN}) == 22


@pytest.mark.parametrize(("answer", "others"), EQUAL_CASES)
def test_equal_spellings_are_equal_both_ways(answer, others):
    assert judged(answer, others) == dict.fromkeys(others, (True, True))


@pytest.mark.parametrize(("answer", "others"), DIFFERENT_CASES)
def test_near_misses_are_different_both_ways(answer, others):
    assert judged(answer, others) == dict.fromkeys(others, (False, False))


@pytest.mark.parametrize("other", ["(0,2)", "[0,2)", "(0,2]", "[0,3]", "(2,0)", r"\{0,2\}"])
def test_the_checker_itself_tells_an_interval_from_another(other):
    assert _latex.checker().compare("[0,2]", other) == "different"
    assert _latex.checker().compare("[0,2]", r"[0,\frac{4}{2}]") == "equal"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1} and then \boxed{\frac{a}{b}}", r"\frac{a}{b}"),
        (r"$\boxed{1}$ and $\boxed{\frac{a}{b}}$", r"1, \frac{a}{b}"),
        (r"\boxed{$\frac{2}{4}$}", "0.5"),
        (r"\boxed{ x  +  1 }", "x + 1"),
        ("so\n#### x+1\nand more", "x+1"),
        (r"\boxed{3} #### 4", "3"),
        (r"\boxed{}", None),
        (r"\boxed{\frac{1}{2", None),
        ("x = 5", None),
        (r"\boxed{" + "1+" * 300 + "1}", None),
    ],
)
def test_the_last_box_states_the_answer_or_else_the_line_after_the_marker(completion, answer):
    assert Math().extract(completion) == answer


@pytest.mark.parametrize(
    ("gold", "completion", "is_right"),
    [
        ("1,2", r"$\boxed{2}$ and $\boxed{1}$", True),
        (r"\{1,2,3\}", r"\{\boxed{1}, \boxed{2}, \boxed{3}\}", True),
        ("(1,5),(2,3)", r"\boxed{(1,5)}, \boxed{(2,3)}", True),
        (r"2\pm\sqrt3", r"\boxed{2+\sqrt3} or \boxed{2-\sqrt3}", True),
        ("1,2", r"\boxed{1}, \boxed{2}, \boxed{3}", False),
        ("1,2", r"\boxed{1} is wrong, \boxed{2}", False),
        # No list of candidates is right, wherever the right one stands.
        ("5", r"\boxed{7} or \boxed{5}", False),
        ("5", r"\boxed{5} or \boxed{7}", False),
        ("5", r"\boxed 7 or \boxed 5", False),
        ("x", r"\boxed{x}, \boxed{x+1}", False),
        ("x>3", r"\boxed{x>3} or \boxed{x>5}", False),
        ("x>3", r"\boxed{x>3 or x>5}", False),
        (r"\text{(B)}", r"\boxed{\text{(A)}} or \boxed{\text{(B)}}", False),
        ("1234", r"\boxed{1}, \boxed{234}", False),
        (r"\frac13", r"\boxed{0.333333333333333} or \boxed{\frac14}", False),
    ],
)
@pytest.mark.attack("Hedges, lists and abused units for an answer")
def test_boxes_of_one_statement_are_a_list_that_no_candidate_equals(gold, completion, is_right):
    stated = Math().extract(completion)
    assert stated is not None
    assert Math().equivalent(stated, gold) is Math().equivalent(gold, stated) is is_right


def test_the_warm_up_is_a_question_that_the_checker_can_read():
    assert _latex.checker().compare(*_algebra.WARM_UP) == "different"


@pytest.mark.attack("Hostile text in a completion")
def test_hostile_answers_stay_within_the_bounds(record_property):
    # None of them equals 7. A question has three stages of at most 0.25 s; without limits some would take hours.
    checker = Checker(cpu_seconds=0.25)
    record_property("tried", len(hostile.ANSWERS))
    for number, text in enumerate(hostile.ANSWERS):
        checker.compare("x", f"x+{number}")
        start = time.monotonic()
        assert checker.compare(text[: _latex.MAX_CHARS], "7") != "equal"
        assert time.monotonic() - start < 60.0
    assert checker.counts["unparsable"] > 0


def test_comparisons_without_a_verdict_are_counted():
    task = Math()
    before = task.num_unparsable()
    assert not task.equivalent(r"\frac{1}{", r"x+\notacommand{2")  # broken braces are told apart before the checker
    assert task.num_unparsable() == before
    assert not task.equivalent("9^{9^{9^9}}", "x+1")
    assert task.num_unparsable() == before + 1


def task(path: Path = FIXTURES / "math", **fields) -> Math:
    return Math(path=str(path), **{"validation_fraction": 0.25, **fields})


def task500(**fields) -> Math500:
    paths = {"path": str(FIXTURES / "math500"), "train_path": str(FIXTURES / "math")}
    return Math500(**{**paths, "validation_fraction": 0.25, **fields})


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_schemas_give_the_same_answers(tmp_path):
    solved = {"problem": "What is $1/2+1/4$?", "solution": r"It is $\boxed{\frac{3}{4}}$.", "level": "Level 1"}
    stated = {"problem": "What is $1/2+1/4$?", "answer": r"\frac{3}{4}", "level": 1}
    golds = [
        task(write(tmp_path / f"{n}.jsonl", row)).prompts("test")[0].gold for n, row in enumerate((solved, stated))
    ]
    assert golds == ["0.75", "0.75"]


def test_rows_without_worked_solutions_give_no_demonstrations(tmp_path):
    write(tmp_path / "train.jsonl", {"problem": "What is $2+2$?", "answer": "4"})
    assert task(tmp_path, validation_fraction=1e-9).demonstrations() == []


def test_a_source_with_a_test_split_alone_serves_evaluation():
    answers = task(FIXTURES / "math_answers")
    assert len(answers.prompts("test")) == 3
    for call in (lambda: answers.prompts("train"), lambda: answers.prompts("validation"), answers.demonstrations):
        with pytest.raises(ValueError, match=r"math_answers: there is no train split .*evaluation"):
            call()


def test_the_test_split_may_come_from_elsewhere():
    both = task(test_path=str(FIXTURES / "math_answers"))
    assert len(both.prompts("test")) == 3
    assert len(both.prompts("train")) + len(both.prompts("validation")) == 12


def test_levels_and_subjects_filter_every_split():
    assert {p.gold for p in task(levels=[1]).prompts("test")} == {"12"}
    assert {p.gold for p in task(levels=[2, 3]).prompts("test")} == {r"\sqrt{5}", "5", "42"}
    kept = task(subjects=["Counting & Probability", "number_theory"], test_path=str(FIXTURES / "math_answers"))
    assert {p.gold for p in kept.prompts("test")} == {"23_5"}
    assert len(kept.prompts("train")) + len(kept.prompts("validation")) == 3


def test_filters_that_keep_nothing_are_an_error():
    with pytest.raises(ValueError, match="the test split has no usable problem among 4 rows; loosen its filters"):
        task(levels=[5], subjects=["geometry"]).prompts("test")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"subjects": ["geometri"]}, "unknown subject 'geometri'; did you mean 'geometry'?"),
        ({"levels": [6]}, r"task\.levels\.0: Input should be less than or equal to 5, got 6"),
    ],
)
def test_an_unknown_subject_or_level_is_an_error_of_the_spec(fields, message):
    with pytest.raises(SpecError, match=message.replace("?", r"\?")):
        parse_run({"task": {"name": "math", **fields}, "algorithm": "grpo"}, where="here")


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        ({"problem": "Why?"}, {}, "field 'answer' or 'solution' is missing"),
        ({"answer": "4"}, {}, "field 'problem' or 'question' is missing"),
        ({"problem": "Why?", "solution": "It is 4."}, {}, r"field 'solution' has no \\boxed"),
        ({"problem": "Why?", "solution": r"\boxed{\frac{1}{2}"}, {}, r"field 'solution' has no \\boxed"),
        ({"problem": "Why?", "answer": " "}, {}, "field 'answer' is empty"),
        ({"problem": "Why?", "answer": "1+" * 300}, {}, "the answer must have at most 500 characters, got 600"),
        ({"problem": "Why?", "answer": "4"}, {"levels": [1]}, "field 'level' is missing"),
        ({"problem": "Why?", "answer": "4", "level": "hard"}, {"levels": [1]}, "field 'level' must be a number"),
        ({"problem": "Why?", "answer": "4"}, {"subjects": ["algebra"]}, "field 'subject' or 'type' is missing"),
    ],
)
def test_a_bad_row_is_an_error_or_skipped_and_counted(tmp_path, caplog, row, fields, message):
    good = {"problem": "What is $2+2$?", "answer": "4", "solution": r"\boxed{4}", "level": "Level 1", "type": "Algebra"}
    file = write(tmp_path / "test.jsonl", good, row)
    with pytest.raises(ValueError, match=rf"test\.jsonl, row 2: {message}"):
        task(file, **fields).prompts("test")
    with caplog.at_level(logging.WARNING):
        assert len(task(file, on_bad_row="skip", **fields).prompts("test")) == 1
    assert "skipped 1 of 2 rows" in caplog.text


def test_a_row_of_unknown_level_is_no_bad_row(tmp_path):
    row = {"problem": "Why?", "answer": "4", "level": "Level ?"}
    file = write(tmp_path / "test.jsonl", row, {**row, "problem": "How?", "level": "Level 3"})
    assert len(task(file).prompts("test")) == 2
    assert len(task(file, levels=[3]).prompts("test")) == 1


def test_train_comes_from_the_training_path_without_the_questions_of_the_test():
    assert {p.gold for p in task500().prompts("test")} == {"0.75", "101_4", r"\sqrt{11}", "(x-5)(x+4)"}
    train = [*task500().prompts("train"), *task500().prompts("validation")]
    # 12 training rows, and one of them is a test question.
    assert len(train) == 11
    assert not any("Factor $x^2-x-20$" in p.text for p in train)


def test_an_evaluation_never_touches_the_training_path(tmp_path):
    alone = task500(train_path=str(tmp_path / "nowhere"))
    assert len(alone.prompts("test")) == 4
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        alone.prompts("train")
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        task500(train_path=str(tmp_path / "nowhere"), shots=2).prompts("test")


def test_a_train_split_beside_the_test_is_left_alone(tmp_path):
    row = {"problem": "What is $1$?", "answer": "1"}
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "problem": f"{name}: what is $1$?"}) + "\n")
    both = task500(path=str(tmp_path))
    assert len(both.prompts("test")) == 1
    assert len(both.prompts("train")) + len(both.prompts("validation")) == 12


def test_worked_examples_are_those_of_the_training_path():
    prompt = task500(shots=3).prompts("test")[0]
    assert prompt.text.count("\nSolution:\n") == 4
    assert prompt.text.count(r"\boxed{") == 3 + 4  # the instruction names the empty box


def test_tags_are_level_and_subject_in_both_schemas():
    assert {p.tags for p in task500().prompts("test")} == {
        (("level", "1"), ("subject", "prealgebra")),
        (("level", "2"), ("subject", "number theory")),
        (("level", "3"), ("subject", "algebra")),
    }
    tags = {dict(p.tags)["subject"] for p in task500(validation_fraction=0.01).prompts("train")}
    assert "counting and probability" in tags
    assert Math500().parse_row({"problem": "Why?", "answer": "4"}).tags == ()
    assert Math500().parse_row({"problem": "Why?", "answer": "4", "level": "Level ?"}).tags == ()
    assert Math500().parse_row({"problem": "Why?", "answer": "4", "type": "Algebra"}).tags == (("subject", "algebra"),)


SOLVED = {"problem": "Add $1/2$ and $1/4$.", "solution": r"It is $\boxed{\frac{3}{4}}$."}


@pytest.mark.parametrize(
    ("answer_format", "row", "solution"),
    [
        ("boxed", SOLVED, r"It is $\boxed{\frac{3}{4}}$."),
        ("hash", SOLVED, "It is $\\boxed{\\frac{3}{4}}$.\n#### \\frac{3}{4}"),
        (
            "think_answer",
            SOLVED,
            "<think>\nIt is $\\boxed{\\frac{3}{4}}$.\n</think>\n<answer>\\frac{3}{4}</answer>",
        ),
        ("boxed", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n\\boxed{0.75}"),
        ("hash", {**SOLVED, "solution": "Add.", "answer": "3/4"}, "Add.\n#### 3/4"),
    ],
)
def test_a_worked_solution_states_the_answer_as_written_where_the_format_wants_it(answer_format, row, solution):
    problem = Math(answer_format=answer_format).parse_row(row)
    assert problem.solution == solution
    assert problem.answer == "0.75"


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so the answer is $\frac{5}{7}$.", r"5/7"),
        ("So the answer is 2500. It took 3 steps.", "2500"),
        (r"Therefore $x = \sqrt{5}$ is all.", r"x = \sqrt{5}"),
        (r"The answer is 3 but \boxed{4}", "4"),
        ("we get 17", "17"),
        ("nothing", None),
    ],
)
def test_lenient_extraction_reads_the_last_sentence_or_formula(completion, answer):
    assert Math500().extract_lenient(completion) == answer


def test_every_gold_of_real_math500_equals_itself_in_every_format_and_through_the_checker():
    path = real_data("math500")
    written = [json.loads(line)["answer"] for line in (path / "test.jsonl").read_text("utf-8").splitlines()]
    golds = [prompt.gold for prompt in Math500(path=str(path)).prompts("test")]
    assert len(golds) == 500
    assert sorted(golds) == sorted(map(_latex.canonical, written))
    for answer_format, write in (
        ("hash", "so\n#### {}"),
        ("boxed", "so \\boxed{{{}}}"),
        ("think_answer", "<think>so</think><answer>{}</answer>"),
    ):
        math500 = Math500(path=str(path), answer_format=answer_format)
        completions = [write.format(gold) for gold in written]
        read = [math500.extract(completion) for completion in completions]
        golds = map(_latex.canonical, written)
        assert [g for g, r in zip(golds, read, strict=True) if r is None or not math500.equivalent(r, g)] == []
        assert all(math500.format_score(completion) == 1.0 for completion in completions)
        assert [math500.extract_lenient(completion) for completion in completions] == read
    # And as the checker itself judges what the cheap rules would have decided.
    texts = [_latex._exact(_latex._tidy(gold)) for gold in written if not _latex._is_literal(_latex._tidy(gold))]
    assert [text for text in texts if _latex.checker().compare(text, f"{text} ") != "equal"] == []
