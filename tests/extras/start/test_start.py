"""`cohort start`: every set of answers gives a study that loads; bad answers are told and asked again."""

import io
import json
import sys

import pytest
import yaml
from chats import chat_folder

ROWS = {"gsm8k": ["gsm8k", "rows"], "arithmetic": ["arithmetic"], "own": ["mine.csv", "text", "target"]}
COMPARED = ["algorithms", "group size", "kl", "optimizer.learning_rate=1e-5,1e-4"]


@pytest.fixture
def answer(tmp_path, monkeypatch, cohort):
    """Gives these answers to `cohort start`, in a folder with two models and rows; its exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    for split, start in (("train", 0), ("test", 100)):
        rows = [{"question": f"{n} + 3 =", "answer": f"{n + 3}\n#### {n + 3}"} for n in range(start, start + 60)]
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [f"{n},What is {n} + 3?,{n + 3}\n" for n in range(60)]
    (tmp_path / "mine.csv").write_text("".join(["id,text,target\n", *lines]))

    def give(*answers: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{one}\n" for one in answers)))
        return cohort("start")

    return give


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2", "other"])
@pytest.mark.parametrize("task", ROWS)
def test_every_set_of_answers_is_a_study_that_loads(answer, cohort, tmp_path, model, task):
    name = model if model == "tiny" else chat_folder(tmp_path / model)  # of the shape of `make smollm2`'s, and another
    for number, compared in enumerate(COMPARED, start=1):
        assert answer(name, *ROWS[task], compared) == 0, cohort.err
        assert f"$ cohort study run my_study{number}.yaml --dry-run" in cohort.out
        assert "Time: about" in cohort.out
        assert cohort("study", "run", f"my_study{number}.yaml", "--dry-run") == 0


def test_a_bad_answer_is_told_and_asked_again(answer, cohort, tmp_path):
    bad_factors = ["kl=1", "algorithm.group_size=8", "algorithm.group_size=8,7", "nonsense"]
    assert answer("./none", "tiny", "arithmetics", "mine.csv", "id", "text", "mine.csv", "text", "", *bad_factors,
                  "group size", "perhaps", "n") == 0  # fmt: skip
    assert "Nothing was run" in cohort.out
    errors = [line for line in cohort.err.splitlines() if line.startswith("Error")]
    for words in ("got './none'", "did you mean 'arithmetic'", "must be a number", "got 'kl=1'", "two values", "got 7",
                  "got 'nonsense'"):  # fmt: skip
        assert words in errors.pop(0)
    assert yaml.safe_load((tmp_path / "my_study1.yaml").read_text())["run"]["task"] == {
        "name": "gsm8k", "path": "mine.csv", "columns": {"question": "text", "answer": "target"},
        "test_fraction": 0.2, "validation_fraction": 0.1,
    }  # fmt: skip


def test_without_answers_it_says_what_to_write_and_writes_nothing(answer, cohort, tmp_path):
    before = set(tmp_path.iterdir())
    assert answer("tiny") == 2
    assert "before the answer to '2. Which problems?'" in cohort.err
    assert "printf '%s\\n' tiny arithmetic algorithms n | cohort start" in cohort.err
    assert set(tmp_path.iterdir()) == before


def test_yes_runs_the_command_that_it_prints(answer, cohort, monkeypatch):
    ran = []
    monkeypatch.setattr("cohort.harness.api.run_to_report", lambda study, *_, **__: ran.append(study) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer("tiny", *ROWS["own"], "kl", "y")
    assert ran[0].command.startswith("cohort study run my_study1.yaml")
