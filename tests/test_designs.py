"""What a study file may ask for: every design becomes the arms that it says, or an error that says what is wrong;
`extends:`, and settings from a file after `--set @FILE`."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from cohort.harness.api.study import comparison
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_run, load_study, runs_of
from cohort.harness.settings.raw import parse_overrides
from cohort.harness.settings.study import parse_study
from test_spec import error_of, study

RATE = {"low": 1e-5, "high": 1e-3, "log": True}
SEARCH = {"space": {"optimizer.learning_rate": RATE, "algorithm.group_size": {"choices": [4, 8]}}, "trials": 5}
TUNING = {"space": {"optimizer.learning_rate": RATE}, "trials": 3, "seeds": [7]}


def search(**changes: Any) -> dict[str, Any]:
    return study(design="search", search={**SEARCH, **changes})


def compare(**changes: Any) -> dict[str, Any]:
    return study(
        run={"algorithm": {"group_size": 4}},
        design="compare",
        compare={"algorithms": ["ppo", {"name": "grpo", "kl_beta": 0.5}], "tasks": ["arithmetic"], **changes},
    )


def tuned(**changes: Any) -> dict[str, Any]:
    return {**compare(), "search": {**TUNING, **changes}}


def test_a_comparison_has_every_algorithm_on_every_task_with_its_own_settings_and_the_common_ones():
    tasks = ["arithmetic", {"name": "gsm8k", "path": "somewhere/gsm8k"}]
    parsed = parse_study(compare(tasks=tasks), "toy.yaml")
    runs = {arm.label: arm.run_spec(0) for arm in parsed.design_arms()}
    assert list(runs) == ["ppo, arithmetic", "ppo, gsm8k", "grpo, arithmetic", "grpo, gsm8k"]
    assert {run.algorithm.group_size for run in runs.values()} == {4}
    assert runs["grpo, gsm8k"].algorithm.model_dump()["kl_beta"] == 0.5
    assert runs["ppo, gsm8k"].task.model_dump()["path"] == "somewhere/gsm8k"
    assert parsed.design_arms()[1].levels == {"algorithm.name": "ppo", "task.name": "gsm8k"}
    # what all arms share is no part of their names
    for changes, labels in (({}, ["ppo", "grpo"]), ({"algorithms": ["grpo"]}, ["grpo"]),
                            ({"algorithms": ["grpo"], "tasks": tasks}, ["arithmetic", "gsm8k"])):  # fmt: skip
        assert parse_study(compare(**changes), "toy.yaml").arm_labels() == labels


def test_a_tuned_comparison_gives_every_algorithm_the_same_number_of_trials_on_seeds_of_their_own():
    spaces = {"ppo": {"optimizer.critic_learning_rate": RATE}}
    parsed = parse_study({**tuned(spaces=spaces), "baseline": "grpo"}, "toy.yaml")
    assert (parsed.design_arms(), parsed.arm_labels()) == ([], ["ppo", "grpo"])
    plans = {plan.name: plan for plan in parsed.searches()}
    assert {(p.search.trials, p.seeds, p.final_seeds) for p in plans.values()} == {(3, (7,), (0, 1))}
    assert list(plans["ppo"].search.space) == ["optimizer.learning_rate", "optimizer.critic_learning_rate"]
    assert list(plans["grpo"].search.space) == ["optimizer.learning_rate"]


def test_a_search_is_checked_at_its_base_at_both_ends_and_at_every_choice():
    parsed = parse_study(search(), "toy.yaml")
    ends = ["base", "learning_rate=1e-05", "learning_rate=0.001", "group_size=4", "group_size=8"]
    assert [arm.label for arm in parsed.checked_arms()] == ends
    assert (parsed.design_arms(), parsed.arm_labels()) == ([], [])


@pytest.mark.parametrize(("raw", "words"), [
    (study(design="search"), "design search must have a section 'search', got none"),
    (study(search=SEARCH), "section 'search' must have design search or compare, got grid"),
    (study(design="compare"), "design compare must have a section 'compare', got none"),
    (tuned(seeds=[]), "search.seeds must list seeds"),
    (search(seeds=[7]), "search.spaces and search.seeds belong to design compare"),
    ({**search(), "factors": {"steps": [1, 2]}}, "design search takes neither factors nor arms"),
    ({**search(), "baseline": "base"}, "a search has no arm names beforehand"),
    ({**search(), "metric": "test/accuracy"}, "a search must not see the test split, got test/accuracy"),
    (search(pruner="median", space={"steps": {"low": 5, "high": 9}}), "compares arms at equal steps"),
    (search(space={}), "search.space"),
    (search(space={"seed": {"low": 0, "high": 9}}), "'seed' cannot be searched, because seeds are replicates"),
    (search(space={"steps": {"choices": [1, 2, 3]}}), "at most the points of the space (3), got 5"),
    (search(space={"algorithm.kl_bta": RATE}), "did you mean 'kl_beta'?"),
    (search(space={"algorithm.group_size": {"low": 8, "high": 16}}, trials=2), "got 9; use 8 or 16"),
    (search(space={"steps": {"low": 5, "hihg": 9}}), "did you mean 'high'?"),
    (search(space={"steps": {"low": 9, "high": 5}}), "low must be below high, got 9 and 5"),
    (search(space={"steps": {"low": 5}}), "must have low and high, or choices"),
    (search(space={"steps": {"low": 5, "high": 9, "choices": [1]}}), "choices cannot be combined with low"),
    (search(space={"steps": {"choices": [1, 1]}}), "choices must be distinct, got [1, 1]"),
    (search(space={"algorithm.kl_beta": {"low": 0.0, "high": 1.0, "log": True}}), "log must have low above 0"),
    (compare(algorithms=["ppo", "ppo"]), "compare.algorithms must be distinct, got ppo, ppo"),
    (compare(algorithms=["ppoo"]), "did you mean 'ppo'?"),
    (compare(tasks=[{"path": "x"}]), "compare.tasks must be names, or mappings with a 'name'"),
    (tuned(seeds=[1, 2]), "must differ from the study's seeds [0, 1], got [1] in both"),
    (tuned(seeds=[-1]), "search.seeds.0: Input should be greater than"),
    (tuned(spaces={"rloo": {}}), "must name compared algorithms, got 'rloo'"),
    (tuned(space={}), "search.space must have a setting to search for ppo"),
    (tuned(space={"algorithm.positive_weight": RATE}), "positive_weight"),  # PPO has none
    ({**compare(), "baseline": "gpro"}, "did you mean 'grpo'?"),
    ({**tuned(), "baseline": "gpro"}, "did you mean 'grpo'?"),
])  # fmt: skip
def test_a_design_that_cannot_be_run_is_refused(raw, words):
    assert words in error_of(parse_study, raw, "toy.yaml")


def test_a_started_search_may_gain_trials_and_a_tuned_comparison_seeds_and_nothing_else():
    for raw in (search(), tuned()):
        parsed = parse_study(raw, "toy.yaml")
        assert parse_study(parsed.model_dump(mode="json"), "study.json").digest() == parsed.digest()
    digest = parse_study(search(), "toy.yaml").digest()
    assert parse_study(search(trials=9), "toy.yaml").digest() == digest
    other = {"optimizer.weight_decay": {"low": 0.1, "high": 0.9}}
    for changed in ({**search(), "seeds": [0, 1, 2]}, search(sampler="gp"), search(space=other)):
        assert parse_study(changed, "toy.yaml").digest() != digest
    digest = parse_study(tuned(), "toy.yaml").digest()
    assert parse_study({**tuned(), "seeds": [0, 1, 2]}, "toy.yaml").digest() == digest
    assert parse_study(tuned(trials=4), "toy.yaml").digest() != digest


def test_a_search_can_be_overridden_and_what_it_searches_cannot(tmp_path):
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(search()))
    changed = load_study(str(file), ["search.trials=7", "search.space.optimizer.learning_rate={choices: [1, 2, 3, 4]}"])
    assert (changed.search.trials, changed.search.space["optimizer.learning_rate"].choices) == (7, [1, 2, 3, 4])
    with pytest.raises(SpecError, match=r"the study searches it; change the range: 'search.space.optimizer"):
        load_study(str(file), ["optimizer.learning_rate=0.1"])


def test_every_example_of_the_documentation_is_a_valid_study(tmp_path):
    text = (Path(__file__).resolve().parents[1] / "docs" / "studies.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    for number, example in enumerate(examples):
        (tmp_path / f"example-{number}.yaml").write_text(example)
    parsed = [load_study(str(tmp_path / f"example-{number}.yaml")) for number in range(len(examples))]
    designs = {"grid", "one_at_a_time", "leave_one_out", "ladder", "search", "compare"}
    assert {found.design for found in parsed} == designs
    assert sum(bool(found.searches()) for found in parsed) == 2


def test_the_command_compares_several_tasks_and_tunes_on_another_seed():
    settings = ["optimizer.learning_rate=1e-4", "steps=7", "task.path=x/y"]
    several = comparison(["ppo", "grpo"], ["gsm8k", "math"], "some/model", seeds=[0, 4], settings=settings).spec
    assert (several.name, several.design) == ("compare-gsm8k-math", "compare")
    assert several.arm_labels() == ["ppo, gsm8k", "ppo, math", "grpo, gsm8k", "grpo, math"]
    first, _, second, _ = (arm.run_spec(0) for arm in several.design_arms())
    assert first.model_dump(exclude={"algorithm"}) == second.model_dump(exclude={"algorithm"})
    assert (first.steps, first.optimizer.learning_rate, first.cold_start.steps) == (7, 1e-4, 0)
    tuned = comparison(["ppo", "grpo"], ["arithmetic"], seeds=[0, 4], settings=settings[:2], tune=6)
    assert tuned.spec.run["cold_start"] == {"steps": 400}  # of the built-in model
    (plan, _) = tuned.spec.searches()
    assert (plan.search.trials, plan.seeds, plan.final_seeds) == (6, (5,), (0, 4))
    rate = plan.search.space["optimizer.learning_rate"]
    assert (rate.low, rate.high, rate.log) == (pytest.approx(2e-5), pytest.approx(5e-4), True)


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
