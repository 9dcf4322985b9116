"""GSM8K: rows, splits, sources and their errors. How numbers are read is in test_numbers.py."""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import get_args

import datasets
import pandas
import pytest
from cohort.studies import sums
from cohort.tasks._answers import AnswerFormat
from cohort.tasks._answers import write as written
from cohort.tasks.gsm8k import GSM8K
from real_data import ROOT, real_data

FIXTURE = Path(__file__).parent / "fixtures" / "gsm8k"
FORMATS = get_args(AnswerFormat)
ROW = {"question": "How many legs have 3 dogs?", "answer": "3*4 = <<3*4=12>>12 legs.\n#### 12"}


def task(path: Path = FIXTURE, **fields) -> GSM8K:
    return GSM8K(path=str(path), **{"validation_fraction": 0.25, **fields})


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_like(count: int) -> list[dict[str, str]]:
    return [{**ROW, "question": f"{ROW['question']} ({number})"} for number in range(count)]


def test_a_prompt_is_the_question_in_the_template(tmp_path):
    with pytest.raises(ValueError, match=r"template must contain \{question\}"):
        GSM8K(template="Answer:")
    prompt = task(write(tmp_path / "one.jsonl", ROW), template="<q>{question}</q> {braces}").prompts("test")[0]
    assert prompt.text == "<q>How many legs have 3 dogs?</q> {braces}"
    assert prompt.gold == "12"


def test_a_field_of_the_rows_names_the_family_and_a_row_without_it_has_none(tmp_path):
    rows = [{**row, "story": story} for row, story in zip(rows_like(5), [" dogs ", 7, None, "", math.nan], strict=True)]
    file = write(tmp_path / "one.jsonl", *rows, *rows_like(6)[5:])
    prompts = task(file, template="{question}", columns={"family": "story"}).prompts("test")
    families = {prompt.text: prompt.family for prompt in prompts}
    assert [families[row["question"]] for row in rows_like(6)] == ["dogs", "7", "", "", "", ""]
    assert {prompt.family for prompt in task(file).prompts("test")} == {""}
    words = r"columns must name fields of the rows, got 'tale' for family, which none of the 6 rows"
    with pytest.raises(ValueError, match=words):
        task(file, columns={"family": "tale"}).prompts("test")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_columns_of_other_names_are_read_from_tables_of_ones_own(tmp_path, suffix):
    asked = {"prompt": ['Why, \u2028\n"then"?', "How many?"], "target": ["1,200", "#### 3"], "note": ["", "x"]}
    file, columns = tmp_path / f"mine.{suffix}", {"question": "prompt", "answer": "target", "family": "note"}
    frame = pandas.DataFrame(asked)
    frame.to_csv(file, index=False, encoding="utf-8-sig") if suffix == "csv" else frame.to_parquet(file)
    prompts = task(file, columns=columns, template="{question}").prompts("test")
    found = {prompt.text: (prompt.gold, prompt.family) for prompt in prompts}
    assert found == {asked["prompt"][0]: ("1200", ""), "How many?": ("3", "x")}
    with pytest.raises(ValueError, match=r"'goal' for answer, which none .* \(fields: prompt, target, note\)"):
        task(file, columns={**columns, "answer": "goal"}).prompts("test")


def test_gold_is_canonical_and_the_solution_ends_in_it_without_calculator_marks():
    by_gold = {d.completion.rpartition("#### ")[2]: d for d in task(validation_fraction=0.01).demonstrations()}
    # 1,200 in the row
    assert by_gold["1200"].completion.endswith("40*30=1200 pages.\n#### 1200")
    assert "<<" not in by_gold["1200"].completion
    assert GSM8K().parse_row(ROW).solution == "3*4 = 12 legs.\n#### 12"
    assert GSM8K().parse_row({**ROW, "answer": "#### 12"}).solution is None


def test_the_format_alone_changes_the_prompt_and_a_template_of_ones_own_stays():
    templates = {name: GSM8K(answer_format=name).template for name in FORMATS}
    assert templates["hash"] == "Question: {question}\nReason step by step; end with #### and the number.\nAnswer:\n"
    assert r"\boxed{}" in templates["boxed"]
    assert "<answer>" in templates["think_answer"]
    for name, template in templates.items():
        resolved = GSM8K(answer_format=name).model_dump()
        assert resolved["template"] == template
        # The settings of an earlier run with another format: the default follows the format.
        assert GSM8K(**{**resolved, "answer_format": "boxed"}).template == templates["boxed"]
        assert GSM8K(answer_format=name, template="{question}?").template == "{question}?"
    with pytest.raises(ValueError, match=r"answer_format\n.*Input should be 'hash', 'boxed' or 'think_answer'"):
        GSM8K(answer_format="json")


def test_what_a_model_asks_itself_after_its_answer_is_not_read():
    completion = "It is 12.\n#### 12\n\nQuestion: How many legs have 4 dogs?\nAnswer:\n4*4=16\n#### 16"
    assert task(shots=2).extract(completion) == task().extract(completion) == "12"
    tags = "<think>a</think><answer>12</answer>\n\nQuestion: And?"
    assert [task(shots=n, answer_format="think_answer").format_score(tags) for n in (0, 2)] == [1.0, 1.0]
    # A template that begins with the question has no words to be known by.
    assert task(shots=2, template="{question} ").extract(completion) == "16"


def test_worked_examples_need_a_training_split_with_enough_of_them(tmp_path):
    file = write(tmp_path / "mine.jsonl", *rows_like(3))
    with pytest.raises(ValueError, match=r"task\.shots must be 0 without a training split .* got 1: .*mine\.jsonl"):
        task(file, shots=1).prompts("test")
    num_train = len(task().prompts("train"))
    for shots in (32, num_train):
        words = rf"shots must be below .* \({num_train}\), got {shots}; use {num_train - 1} or less"
        with pytest.raises(ValueError, match=words):
            task(shots=shots).prompts("test")
    assert task(shots=num_train - 1).prompts("test")
    write(tmp_path / "bare" / "train.jsonl", *[{**row, "answer": "#### 12"} for row in rows_like(20)])
    write(tmp_path / "bare" / "test.jsonl", ROW)
    shown = task(tmp_path / "bare", shots=2, template="{question} ", answer_format="boxed").prompts("test")[0].text
    first, second, last = shown.split("\n\n")
    assert {example.rpartition(") ")[2] for example in (first, second)} == {r"\boxed{12}"}
    assert last == f"{ROW['question']} "
    for shots in (-1, 33):
        with pytest.raises(ValueError, match="shots"):
            task(shots=shots)


@pytest.mark.parametrize("suffix", [".json", ".parquet", ".arrow", "saved", "saved one"])
def test_every_format_gives_the_same_problems(tmp_path, suffix):
    rows = rows_like(20)
    if suffix == ".json":
        (tmp_path / "test.json").write_text(json.dumps(rows))
    elif suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    elif suffix == ".arrow":
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        shutil.copy(tmp_path / "saved" / "data-00000-of-00001.arrow", tmp_path / "test.arrow")
        shutil.rmtree(tmp_path / "saved")
    elif suffix == "saved":
        datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path)
    expected = GSM8K(path=str(write(tmp_path.parent / f"{tmp_path.name}.jsonl", *rows)))
    assert task(tmp_path).prompts("test") == expected.prompts("test")
    assert len(expected.prompts("test")) == 20


def test_files_of_a_split_are_found_below_the_folder_and_the_configuration_narrows_it(tmp_path):
    write(tmp_path / "main" / "train-00000-of-00002.jsonl", *rows_like(8)[:5])
    write(tmp_path / "main" / "train-00001-of-00002.jsonl", *rows_like(8)[5:])
    write(tmp_path / "socratic" / "train.jsonl", {**ROW, "question": "Why?"})
    write(tmp_path / "main" / "training_notes.jsonl", {"no": "row"})
    write(tmp_path / ".cache" / "train.jsonl", {"no": "row"})

    def num_train(config: str | None) -> int:
        return sum(len(task(tmp_path, config=config).prompts(split)) for split in ("train", "validation"))

    assert num_train("main") == 8
    assert num_train(None) == 9


def test_a_single_file_is_the_test_split_unless_its_name_says_train(tmp_path):
    file = write(tmp_path / "mine.jsonl", *rows_like(20))
    assert len(task(file).prompts("test")) == 20
    with pytest.raises(ValueError, match=r"mine\.jsonl: there is no train split .*evaluation"):
        task(file).prompts("train")
    train = write(tmp_path / "my_train.jsonl", *rows_like(20))
    assert len(task(train).demonstrations()) == len(task(train).prompts("train"))
    with pytest.raises(ValueError, match=r"my_train\.jsonl: there is no test split .*set task\.test_path"):
        task(train).prompts("test")
    both = task(train, test_path=str(write(tmp_path / "held_out.jsonl", ROW)))
    assert [prompt.gold for prompt in both.prompts("test")] == ["12"]


@pytest.mark.parametrize("source", ["mine.jsonl", "mine/train.jsonl"])
@pytest.mark.parametrize("families", [{}, {"family": "kind"}])
def test_a_fraction_divides_one_source_into_train_and_test_and_no_family_is_in_both(tmp_path, caplog, source, families):
    rows = [{**row, "kind": f"{place // 4}"} for place, row in enumerate(rows_like(400))]
    path = write(tmp_path / source, *rows)
    whole = task(path.parent if "train" in source else path, columns=families, test_fraction=0.25)
    found = {split: whole.questions(split).keys() for split in ("train", "validation", "test")}
    assert sum(map(len, found.values())) == len(set().union(*found.values())) == 400
    assert 60 <= len(found["test"]) <= 140
    assert "repeated" not in caplog.text
    kinds = [{prompt.family for prompt in whole.prompts(split)} for split in ("train", "test")]
    assert not families or not set.intersection(*kinds)
    assert whole.inputs("test").keys() != whole.inputs("train").keys()
    for share, split in ((1e-9, "test"), (1 - 1e-9, "train")):
        with pytest.raises(ValueError, match=f"a test_fraction of .* leaves the {split} split empty; take one nearer"):
            task(path, test_fraction=share).prompts(split)
    with pytest.raises(ValueError, match="test_fraction must be null where test_path"):
        task(path, test_fraction=0.2, test_path="other.jsonl")


def test_repeated_questions_count_once_and_those_of_test_leave_train(tmp_path, caplog):
    rows = rows_like(20)
    write(tmp_path / "train.jsonl", *rows, *rows[:3])
    write(tmp_path / "test.jsonl", *rows[:2])
    with caplog.at_level(logging.WARNING):
        ids = {split: {p.id for p in task(tmp_path).prompts(split)} for split in ("train", "validation", "test")}
    # 23 rows, 20 different, 2 of them in test
    assert len(ids["train"]) + len(ids["validation"]) == 18
    assert not (ids["train"] | ids["validation"]) & ids["test"]
    assert "5 repeated problems left out of train" in caplog.text


BAD = {
    "missing": ({"question": "Why?"}, r"field 'answer' is missing \(fields: question\)"),
    "null": ({"question": None, "answer": "#### 1"}, "field 'question' is missing"),
    "empty": ({"question": " ", "answer": "#### 1"}, "field 'question' is empty"),
    "no object": (["Why?"], "must be an object with fields, got"),
    "no marker": ({"question": "Why?", "answer": "It is 5."}, "field 'answer' must be a number, or end in '#### ' and"),
    "no number": ({"question": "Why?", "answer": "#### many"}, r"field 'answer' must .* got \.\.\.'#### many'"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.attack("A broken or hostile data file")
def test_a_bad_row_is_an_error_that_names_file_row_and_field(tmp_path, kind):
    row, message = BAD[kind]
    file = write(tmp_path / "test.jsonl", *rows_like(2), row)
    with pytest.raises(ValueError, match=rf"test\.jsonl, row 3: {message}.*; correct the row") as raised:
        task(file).prompts("test")
    assert str(tmp_path) in str(raised.value)


def test_a_split_without_a_usable_row_is_an_error(tmp_path):
    file = write(tmp_path / "test.jsonl")
    with pytest.raises(ValueError, match="the test split has no usable problem among 0 rows"):
        task(file).prompts("test")
    file = write(tmp_path / "train.jsonl", *rows_like(3))
    with pytest.raises(ValueError, match="a validation_fraction of 1e-09 leaves the validation split empty"):
        task(file, validation_fraction=1e-9).prompts("validation")


@pytest.mark.attack("A broken or hostile data file")
@pytest.mark.parametrize(("name", "content", "message"), [
    ("test.jsonl", json.dumps(ROW).encode() + b'\n{"question": "Why?"\n', "line 2: Expecting"),
    ("test.jsonl", rb'{"question": "\ud800"}', "surrogates not allowed"),
    ("test.jsonl", b'{"question": "\xff"}', "can't decode byte"),
    ("test.json", b"[" * 100_000, "recursion"),
    ("test.parquet", b"no parquet", "Parquet"),
    ("test.arrow", b"no arrow", "."),
    ("test.csv", b"question,answer\nWhy, now?,5\n", r"row 1 has more cells than the header \(2\)"),
    ("test.csv", b'question,answer\n"Why?,5\n', "unexpected end of data"),
])  # fmt: skip
def test_a_broken_file_is_an_error_that_names_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read as \{Path(name).suffix}: .*{message}"):
        task(tmp_path / name).prompts("test")


@pytest.mark.parametrize(("path", "message"), [
    *((p, r"no such file or folder; give an existing \.jsonl") for p in (
        "./gsm8k", "/no/such/folder", "~/no_such_folder_here", "gsm8k.jsonl", "a/b/c", "tests/gsm8k"
    )),
    ("README.md", r"must be one of \.jsonl, \.json, \.csv, \.parquet, \.arrow, got '\.md'"),
])  # fmt: skip
@pytest.mark.attack("A broken or hostile data file")
def test_a_path_that_holds_no_data_is_an_error_and_no_hub_id(path, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=message):
        GSM8K(path=path).prompts("test")


def test_a_hub_source_gives_one_configuration_or_all_of_them_or_an_error_that_offers_a_local_path(monkeypatch):
    def load_dataset(path, config):
        if path == "nobody/gsm8k":
            raise ConnectionError("no route")
        test = {"test": [{**ROW, "question": f"{path} {config}?"}]}
        return test if config == "hard" else {**test, "train": rows_like(4)}

    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["easy", "hard"])
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    one, every = GSM8K(path="some/problems", config="hard"), GSM8K(path="some/problems", config=None)
    assert [p.text.splitlines()[0] for p in one.prompts("test")] == ["Question: some/problems hard?"]
    assert {p.text.splitlines()[0][-5:] for p in every.prompts("test")} == {"easy?", "hard?"}
    message = r"some/problems: there is no train split \(splits of configuration hard: test\)"
    with pytest.raises(ValueError, match=message):
        every.prompts("train")
    message = r"nobody/gsm8k: the Hub cannot be reached \(no route\); give a local file or folder"
    with pytest.raises(ValueError, match=message):
        GSM8K(path="nobody/gsm8k").prompts("test")


@pytest.mark.slow
def test_real_gsm8k_loads_in_full_and_every_gold_grades_correct():
    gsm8k = GSM8K(path=str(real_data("gsm8k")))
    splits = {split: gsm8k.prompts(split) for split in ("train", "validation", "test")}
    assert len(splits["train"]) + len(splits["validation"]) == 7473
    assert len(splits["test"]) == 1319
    assert 300 < len(splits["validation"]) < 450
    gold = {prompt.text: prompt.gold for prompts in splits.values() for prompt in prompts}
    assert len(gold) == 7473 + 1319
    for file in ("train.jsonl", "test.jsonl"):
        for line in (Path(gsm8k.path) / file).read_text("utf-8").splitlines():
            row = json.loads(line)
            assert gsm8k.extract(row["answer"]) == gold[gsm8k.fill(row["question"])]
    for name in FORMATS:
        reader = GSM8K(answer_format=name)
        for prompt in splits["test"]:
            completion = written(name, "20-2=18", prompt.gold)
            assert reader.extract(completion) == prompt.gold
            assert reader.format_score(completion) == 1.0
    demonstrations = gsm8k.demonstrations()
    assert len(demonstrations) == len(splits["train"])
    assert all(gsm8k.extract(d.completion) == gold[d.prompt] for d in demonstrations)


def test_the_sums_of_a_shipped_study_have_examples_and_no_pair_is_in_both_parts(tmp_path):
    sums.write(tmp_path)
    read = task(tmp_path, template="{question} ", shots=3)
    parts = [
        {tuple(sorted(question.removesuffix(" =").split(" + "))) for question in read.questions(split).values()}
        for split in ("train", "validation", "test")
    ]
    assert not (parts[0] | parts[1]) & parts[2]
    assert len(parts[2]) / len(set.union(*parts)) == pytest.approx(0.2, abs=0.02)
    shown = read.prompts("test")[0]
    *examples, question = shown.text.split("\n\n")
    total = sum(int(number) for number in question.removesuffix(" = ").split(" + "))
    assert len(examples) == 3 and str(total) == shown.gold == read.extract(f"{total}\n#### {total}")
