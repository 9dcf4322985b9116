"""CMATH: rows, the names of its splits, and answers in Chinese."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
from cohort.harness.extras.cmath.tasks.cmath import CMATH
from cohort.tasks._data import BadRow
from cohort.tasks.gsm8k import GSM8K

FIXTURE = Path(__file__).parent / "fixtures" / "cmath"
ROW = {"grade": 3, "question": "\u4e00\u52a0\u4e00\u662f\u591a\u5c11\uff1f", "golden": "2"}


def task(path: object = FIXTURE, **fields) -> CMATH:
    return CMATH(path=str(path), validation_fraction=0.25, **fields)


def sizes(task: CMATH) -> tuple[int, int]:
    train, held_out, test = (len(task.prompts(split)) for split in ("train", "validation", "test"))
    return train + held_out, test


@pytest.mark.parametrize("word", ["dev", "validation", "train"])
@pytest.mark.parametrize("layout", ["file", "folder"])
def test_the_development_part_is_the_training_source(tmp_path, word, layout):
    for name, source in ((word, "dev"), ("test", "test")):
        file = tmp_path / (f"cmath_{name}.jsonl" if layout == "file" else f"{name}/part.jsonl")
        file.parent.mkdir(exist_ok=True)
        shutil.copy(FIXTURE / f"{source}.jsonl", file)
    assert sizes(task(tmp_path)) == (10, 3)


def test_other_tasks_know_no_development_part_and_the_hub_calls_it_validation(tmp_path, monkeypatch):
    row = {"question": "Why?", "answer": "#### 1"}
    (tmp_path / "dev.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="no folder with one, is called train"):
        GSM8K(path=str(tmp_path)).prompts("train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no folder with one, is called train or dev or validation"):
        task(tmp_path / "empty").prompts("train")
    rows = [{**ROW, "question": f"{ROW['question']} {number}"} for number in range(21)]
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["default"])
    monkeypatch.setattr(datasets, "load_dataset", lambda path, config: {"validation": rows[:20], "test": rows[20:]})
    assert sizes(task("some/cmath")) == (20, 1)


def test_the_prompt_asks_in_chinese_for_the_configured_format_and_the_grade_is_a_tag():
    assert {dict(p.tags)["grade"] for p in task().prompts("test")} == {"2", "3", "5"}
    assert CMATH().parse_row({**ROW, "grade": None}).tags == ()
    assert task().demonstrations() == []
    texts = [task(answer_format=name).prompts("test")[0].text for name in ("hash", "boxed", "think_answer")]
    assert [("####" in t, r"\boxed{}" in t, "<answer>" in t) for t in texts] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip
    assert all(text.endswith("\u89e3\u7b54\uff1a\n") and "{question}" not in text for text in texts)


@pytest.mark.parametrize(("golden", "gold"), [("3/4", "0.75"), ("12.5%", "12.5"), ("450\u5398\u7c73", "450")])
def test_gold_is_a_plain_number_however_it_is_written(golden, gold):
    assert CMATH().parse_row({**ROW, "golden": golden}).answer == gold


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("\u6bcf\u76d2\u5341\u4e8c\u652f\u3002\n#### \u4e5d\u5341\u516d\u652f", "96"),
        ("#### \uff19\uff16\u3002", "96"),
        ("#### \u7b54\u6848\uff1a96\u652f", "96"),
        (r"\boxed{96\text{\u652f}}".replace(r"\u652f", "\u652f"), "96"),
        ("<think>\u4e58\u6cd5</think><answer>96 \u652f</answer>", "96"),
        ("#### 3\u4e07\u5143", "30000"),
        ("#### 450\u5343\u7c73", "450"),
        ("#### 3.5\u5343\u514b", "3.5"),
        ("#### \u4e8c\u5341\u5343\u7c73", "20"),
        ("#### \u8d1f5", "-5"),
        ("#### \u4e94\u5206\u4e4b\u4e09", "0.6"),
        ("#### \u767e\u5206\u4e4b\u4e8c\u5341", "20"),
        ("#### \u4e09\u70b9\u4e94", "3.5"),
        ("#### \u8d1f\u4e94", "-5"),
        ("#### 3\u53c81/2", "3.5"),
        ("#### 5\u5343", "5000"),
        ("#### \u4e8c\u5343\u4e09\u767e\u4e94\u5341", "2350"),
        ("#### 5\u5206\u4e4b3\u5343\u7c73", "0.6"),
    ],
)
def test_answers_with_chinese_numerals_units_signs_and_fractions_are_read(completion, gold):
    assert CMATH().extract(completion) == gold


def test_gold_that_is_no_number_is_refused():
    with pytest.raises(BadRow, match="field 'golden' must be a number"):
        CMATH().parse_row({**ROW, "golden": "\u5f88\u591a"})
