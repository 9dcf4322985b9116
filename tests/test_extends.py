"""`extends:` in a study file, and settings from a file after `--set @FILE`."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_run, load_study, runs_of
from cohort.harness.settings.raw import parse_overrides

BASE = {
    "question": "Which?",
    "run": {
        "task": {"name": "arithmetic", "min_operands": 3}, "algorithm": "grpo", "steps": 5, "optimizer": {"beta2": 0.9},
    },
    "factors": {"algorithm.group_size": [4, 8]},
    "seeds": [0, 1],
}  # fmt: skip


def write(folder: Path, name: str, content: Any) -> str:
    file = folder / name
    file.write_text(yaml.safe_dump(content))
    return str(file)


def test_a_study_that_extends_another_is_the_study_with_all_settings_written_out(tmp_path):
    write(tmp_path, "base.yaml", BASE)
    own = {
        "extends": "base.yaml", "question": "And larger?",
        "run": {"task": {"max_operands": 6}, "algorithm": {"kl_beta": 0.1}, "optimizer": {"learning_rate": 0.001}},
        "factors": None, "arms": {"a": {"steps": 1}, "b": {"steps": 2}},
    }  # fmt: skip
    run = {
        "task": {"name": "arithmetic", "min_operands": 3, "max_operands": 6},
        "algorithm": {"name": "grpo", "kl_beta": 0.1}, "steps": 5, "optimizer": {"beta2": 0.9, "learning_rate": 0.001},
    }  # fmt: skip
    whole = {"question": "And larger?", "run": run, "arms": own["arms"], "seeds": [0, 1], "name": "own"}
    extended, written = (load_study(write(tmp_path, f"{n}.yaml", c)) for n, c in (("own", own), ("whole", whole)))
    assert extended == written and extended.digest() == written.digest()
    assert runs_of(str(tmp_path / "own.yaml")).keys() == {"a", "b"}  # a study, though it has no `run` of its own
    assert len(runs_of(write(tmp_path, "least.yaml", {"extends": "base.yaml"}))) == 2
    file = write(tmp_path, "task.yaml", {"extends": "base.yaml", "run": {"task": {"name": "gsm8k"}}})
    assert load_study(file).run["task"] == {"name": "gsm8k"}  # with nothing of the plugin in its place


def test_a_shipped_study_is_extended_by_its_name_from_any_folder(tmp_path, monkeypatch):
    file = write(tmp_path, "own.yaml", {"extends": "group_size", "run": {"steps": 3}})
    monkeypatch.chdir("/")
    found, shipped = load_study(file), load_study("group_size")
    assert (found.name, found.factors) == ("own", shipped.factors)
    assert found.run == {**shipped.run, "steps": 3}


@pytest.mark.parametrize(("files", "words"), [
    ({"own": {"extends": "nope"}}, "unknown study 'nope'; "),
    ({"own": {"extends": "nope.yaml"}}, "nope.yaml: no such study file"),
    ({"own": {"extends": ["a", "b"]}}, r"extends must be one study, a shipped name or a file, got \['a', 'b'\]"),
    ({"own": {"extends": "b.yaml"}, "b": {"extends": "own.yaml"}},
     "own.yaml: extends goes one level, and '.*b.yaml' itself"),
    ({"own": {"extends": "own.yaml"}}, "extends goes one level"),
    ({"own": {"extends": "b.yaml", "qestion": "?"}, "b": BASE}, "unknown key 'qestion'; did you mean 'question'"),
])  # fmt: skip
def test_a_study_that_extends_what_it_cannot_is_refused(tmp_path, files, words):
    for name, content in files.items():
        write(tmp_path, f"{name}.yaml", content)
    with pytest.raises(SpecError, match=words):
        load_study(str(tmp_path / "own.yaml"))


def test_show_prints_what_a_file_changes(tmp_path, cohort):
    write(tmp_path, "base.yaml", BASE)
    file = write(tmp_path, "own.yaml", {"extends": "base.yaml", "run": {"steps": 7}, "seeds": None})
    assert cohort("study", "show", file, "--diff", "--json") == 0
    rows = {row["path"]: (row["extended"], row["here"]) for row in cohort.json()}
    assert rows == {"run.steps": ("5", "7"), "seeds": ("[0, 1]", "absent")}
    assert cohort("study", "show", tmp_path / "base.yaml", "--diff") == 2
    assert "extends none" in cohort.err


def test_a_file_of_settings_is_the_same_as_its_settings_one_by_one_and_later_ones_win(tmp_path):
    raw = {"dtype": "bfloat16", "optimizer": {"beta2": 0.95}, "evaluation.num_samples": 2}
    file = write(tmp_path, "a100.yaml", raw)
    given = ["task=arithmetic", "algorithm=grpo", "dtype=float32", f"@{file}", "optimizer.beta2=0.9"]
    assert parse_overrides(given)["evaluation.num_samples"] == 2
    run = load_run(None, given)
    assert (run.dtype, run.optimizer.beta2, run.evaluation.num_samples) == ("bfloat16", 0.9, 2)


@pytest.mark.parametrize(
    ("content", "words"), [("- 1\n", "must hold settings, such as engine: vllm, got list"), (None, "cannot be read"),
                           ("dtyp: bfloat16\n", "unknown key 'dtyp'; did you mean 'dtype'")],
)  # fmt: skip
def test_a_file_that_holds_no_settings_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(SpecError, match=words):
        load_run(None, ["task=arithmetic", "algorithm=grpo", f"@{tmp_path / 'a.yaml'}"])
