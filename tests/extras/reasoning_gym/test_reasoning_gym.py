"""Problems and scores of the package reasoning-gym: its verifier decides, within bounds, and no answer runs as code."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from cohort.harness.data import Group, Rollout
from cohort.harness.extras.reasoning_gym.tasks import reasoning_gym
from cohort.harness.extras.reasoning_gym.tasks.reasoning_gym import ReasoningGym
from cohort.harness.run.grading import grade
from cohort.harness.settings.run import parse_run
from cohort.tasks._child import Children

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the extra [gym] is not installed")

COUNTDOWN = ReasoningGym(
    dataset="countdown",
    settings={"min_numbers": 3, "max_numbers": 3, "max_value": 9, "min_target": 1, "max_target": 30},
    template="{numbers} -> {target}", answer_format="hash", num_demonstrations=10, num_train=10, num_validation=10,
    num_test=10,
)  # fmt: skip
PROGRAMS = [
    "__import__('os').mkdir({marker!r})",
    "[c for c in ().__class__.__base__.__subclasses__()][0] or open({marker!r}, 'w')",
    "exec('import os; os.mkdir(' + repr({marker!r}) + ')')", "(lambda: __import__('os').mkdir({marker!r}))()",
    "6 + __import__('pathlib').Path({marker!r}).mkdir()", "().__class__.__mro__[1].__subclasses__().__len__()",
    "6 .__class__", "9**9**9**9", "9 ** 9 ** 9", "[9]*9*9*9*9*9*9*9*9*9", "[" * 100 + "]" * 100,
    "(" * 100 + "6" + ")" * 100, "(" * 2000 + "6" + ")" * 2000, "9*" * 2000 + "9", "factorial(99999999)",
    "99999999!", "6\u0660", "\ud800", "\0",
]  # fmt: skip


def gold_of(task: ReasoningGym) -> tuple[str, str]:
    """The generator's own answer to the first test problem, and its gold answer."""
    gold = task.prompts("test")[0].gold
    return gold.partition(" [")[0], gold


@needs_gym
def test_the_verifier_scores_an_answer_and_only_a_score_of_one_is_correct():
    own, gold = gold_of(COUNTDOWN)
    prompt = COUNTDOWN.prompts("test")[0]
    numbers, target = prompt.text.split(" -> ")
    wrong = numbers.replace(" ", "+")
    # The generator's own expression, also in brackets; two that miss; what is no plain arithmetic, which it never sees.
    texts = [f"#### {answer}" for answer in (own, f"({own})", wrong, target, "six")]
    rollouts = tuple(Rollout(text, (1,), (0.0,), "stop") for text in [*texts, "no answer"])
    graded = grade(COUNTDOWN, [Group(prompt, (1,), rollouts)], max_tokens=8)[0]
    assert graded.scores == (1.0, 1.0, 0.05, 0.05, 0.0, 0.0)
    assert graded.correct == (True, True, False, False, False, False)
    assert graded.blind().scores is None
    assert COUNTDOWN.equivalent(own, gold)
    assert COUNTDOWN.equivalent(gold, own)
    assert not COUNTDOWN.equivalent(wrong, gold)


@needs_gym
def test_only_the_demonstrations_that_are_asked_for_are_made(monkeypatch):
    made, ask = [], Children.ask
    monkeypatch.setattr(Children, "ask", lambda self, *question: made.append(question) or ask(self, *question))
    task = COUNTDOWN.model_copy(update={"num_demonstrations": 1000})
    first = next(iter(task.demonstrations()))
    asked = [last for _, part, _, last, *_ in made if part == task._part("demonstrations")]
    assert first.completion and asked == [reasoning_gym.MAKE_AT_ONCE]


@needs_gym
def test_a_split_leaves_out_the_problems_of_test_and_one_without_others_left_is_refused():
    # 2 digits with a sign between have 9 * 9 * 2 = 162 problems at most (and as many with a 0), so streams overlap.
    small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym(settings=small, num_test=40, num_validation=40, num_train=200)
    test, validation, train = ([p.text for p in task.prompts(s)] for s in ("test", "validation", "train"))
    shown = [demonstration.prompt for demonstration in task.demonstrations()]
    assert len(train) == len(set(train)) < 200
    assert not set(test) & {*validation, *train, *shown}
    assert not set(validation) & {*train, *shown}
    crowded = ReasoningGym(settings=small, num_test=5000)
    with pytest.raises(ValueError, match="too few distinct problems for a validation split; widen their ranges"):
        crowded.prompts("validation")


@needs_gym
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dataset": "countdwon"}, r"unknown task\.dataset 'countdwon'; did you mean 'countdown'"),
        ({"dataset": "composite"}, r"unknown task\.dataset 'composite'"),
        ({"settings": {"min_terms": 9, "max_terms": 2}},
         "it says: max_terms must be >= min_terms; its settings are min_"),
        ({"settings": {"seed": 3}}, "multiple values for keyword argument 'seed'; its settings are min_terms"),
        ({"settings": {"terms": 9}}, "unexpected keyword argument 'terms'; its settings are min_terms"),
        ({"settings": {"min_terms": "many"}}, "task.settings must let the generator 'chain_sum' make problems"),
        ({"dataset": "countdown", "settings": {"max_value": 1, "min_target": 900}},
         "it says: Failed to generate valid expression after 100 attempts"),
        ({"template": "{problem}"}, r"must name parts of a problem of 'chain_sum', got \{problem\}; it has question"),
        ({"dataset": "n_queens"}, r"n_queens uses eval, .* its own answers are more than plain arithmetic, such as"),
        ({"dataset": "simple_integration"}, "simple_integration uses parse_expr, which may evaluate an answer as code"),
    ],
)  # fmt: skip
def test_a_generator_that_makes_no_problems_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence) as raised:
        ReasoningGym(**settings).prompts("test")
    assert "\n" not in str(raised.value)


def test_a_template_without_a_part_of_a_problem_is_refused_and_partial_credit_is_a_setting():
    message = r"template must contain \{question\}, or another part of a problem, got 'solve"
    with pytest.raises(ValueError, match=message):
        ReasoningGym(template="solve it")
    run = {"task": "reasoning_gym", "algorithm": "grpo", "rewards": {"accuracy": {"partial": True}}}
    assert parse_run(run, "test").digest()


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="the extra [gym] is installed")
def test_without_the_package_the_error_names_the_extra():
    with pytest.raises(ValueError, match=r"needs the package reasoning-gym: pip install 'cohort-rl\[gym\]'"):
        ReasoningGym().prompts("test")


@needs_gym
def test_the_package_and_its_version_are_part_of_what_a_run_reads():
    assert ReasoningGym().inputs("test") == {"package reasoning-gym": {"revision": version("reasoning-gym")}}


@needs_gym
@pytest.mark.attack("An answer that a verifier would run as code")
def test_no_answer_runs_as_code_in_a_verifier_that_would_evaluate_it(tmp_path, record_property):
    gold = gold_of(COUNTDOWN)[1]
    record_property("tried", len(PROGRAMS))
    for number, program in enumerate(PROGRAMS):
        marker = tmp_path / f"ran {number}"
        answer = program.replace("{marker!r}", repr(str(marker)))
        assert COUNTDOWN.score(answer, gold) < 1.0, program
        assert not marker.exists(), program


@needs_gym
def test_a_verifier_whose_imports_evaluate_text_gets_no_words_either():
    # `gsm_symbolic` itself evaluates nothing; a module that it imports does. A wrong answer that it sees scores 0.01.
    task = COUNTDOWN.model_copy(update={"dataset": "gsm_symbolic", "settings": {}, "template": "{question}"})
    gold = task.prompts("test")[0].gold
    assert task.score("-98765", gold) == 0.01
    assert task.score("-98765 units", gold) == 0.0


@pytest.mark.attack("An answer that a verifier would run as code")
def test_arithmetic_and_lists_of_numbers_are_plain_and_nothing_else_is(record_property):
    plain = ["(25*4)+3", "8/(3 - 1.5)", "-7", "1, 2", "1 0\n0 1", "[[1, 2], [-3.5]]", "['1', '2']", ""]
    others = ["2**9", "x", "f(1)", "[1]*9", "'a'", "0x3", "1e9", "1_000", "{1}", "1;2", "1\\2", "1:2", "\u0661"]
    assert [reasoning_gym.is_plain(text) for text in plain] == [True] * len(plain)
    assert [reasoning_gym.is_plain(text) for text in [*others, "1" * 201]] == [False] * (len(others) + 1)
    record_property("tried", len(others) + 1)


@needs_gym
@pytest.mark.attack("An answer that names another problem's gold answer")
def test_an_answer_never_names_a_problem(record_property):
    first, second = (p.gold for p in COUNTDOWN.prompts("test")[:2])
    own = first.partition(" [")[0]
    forged = [f"{own} [test 1]", f"{own} [test 0] [test 1]", f"{own}[train 5]", f"{own}\n [validation 3] "]
    record_property("tried", len(forged) + 1)
    assert [COUNTDOWN.read(text) for text in forged] == [own] * len(forged)
    assert COUNTDOWN.read("[test 1]") is None
    assert not COUNTDOWN.equivalent(first, second)


@pytest.mark.slow
@needs_gym
@pytest.mark.attack("An answer that a verifier takes too long over")
def test_an_answer_that_overruns_scores_nothing_and_the_next_one_is_scored():
    gym, task = reasoning_gym.gym(), COUNTDOWN
    own, gold = gold_of(task)
    seconds = gym.cpu_seconds
    try:
        gym.cpu_seconds = 1e-5
        task.allow_overruns(1)
        assert task.score(f"((({own})))", gold) == 0.0
        gym.cpu_seconds = seconds
        assert task.score(f"(((({own}))))", gold) == 0.0  # the one that was allowed is spent: the verifier is not asked
        assert task.allow_overruns(None) == 0
        assert task.score(f"(((({own}))))", gold) == 1.0
    finally:
        gym.cpu_seconds = seconds
        task.allow_overruns(None)


@needs_gym
def test_a_generator_without_answers_of_its_own_has_no_demonstrations_and_its_verifier_still_decides():
    task = COUNTDOWN.model_copy(update={"dataset": "rush_hour", "settings": {}, "template": "{question}"})
    prompt = task.prompts("test")[0]
    assert prompt.gold.strip() == "[test 0]"
    assert list(task.demonstrations()) == []
    assert task.extract(f"#### {prompt.gold}") is None
    assert task.score("F+1 F-1", prompt.gold) < 1.0
