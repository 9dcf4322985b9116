"""What a user writes becomes a validated, frozen, stably hashed spec, or an error that says how to fix it."""

from typing import Any

import pytest
import yaml
from cohort.harness.base.inputs import digest
from cohort.harness.base.streams import generator
from cohort.harness.checks.preflight import check_runs
from cohort.harness.engines._decoding import uniforms
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.settings import paths
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_run, load_study
from cohort.harness.settings.raw import MAX_INTEGER, parse_overrides, read_yaml, with_overrides
from cohort.harness.settings.run import RunSpec, parse_run
from cohort.harness.settings.study import StudySpec, parse_study
from factories import make_spec
from pydantic import ValidationError
from real_data import golden

RUN: dict[str, Any] = {"task": {"name": "arithmetic"}, "algorithm": {"name": "grpo"}}


def study(**changes: Any) -> dict[str, Any]:
    return {"name": "toy", "question": "Does it?", "run": RUN, "seeds": [0, 1], **changes}


def labels(raw: dict[str, Any]) -> list[str]:
    return [arm.label for arm in parse_study(raw, "toy.yaml").design_arms()]


def error_of(action: Any, *arguments: Any) -> str:
    with pytest.raises(SpecError) as caught:
        action(*arguments)
    return str(caught.value)


@pytest.mark.parametrize("case", golden("refused_runs"), ids=lambda case: case["words"][0])
def test_a_run_that_cannot_be_is_refused_with_file_path_rule_value_and_nearest_name(case):
    message = error_of(parse_run, {**RUN, **case["run"]}, "my_run.yaml")
    assert message.startswith("my_run.yaml: ")
    assert [words for words in case["words"] if words not in message] == []


def test_every_setting_has_a_path_and_a_meaning():
    run, whole = dict(paths.settings(RunSpec)), dict(paths.settings(StudySpec))
    assert {"steps", "optimizer.num_inner_epochs", "lora.rank", "algorithm", "rewards"} <= set(run)
    assert {"seeds", "search.trials", "search.spaces"} <= set(whole)
    assert [path for path, field in {**run, **whole}.items() if not field.description] == []
    grpo = dict(paths.settings(RunSpec, {"algorithm": {"name": "grpo"}}))
    assert "algorithm.kl_beta" in grpo and "algorithm" not in grpo


def test_every_mistake_of_a_file_is_named_at_once_and_an_empty_one_told_what_it_must_have(tmp_path):
    assert error_of(parse_run, {"task": "arithmetic"}, "my_run.yaml") == "my_run.yaml: algorithm: is required"
    message = error_of(parse_run, {**RUN, "steps": -1, "sed": 3}, "my_run.yaml")
    assert [line.split(":")[1].strip() for line in message.splitlines()] == ["steps", "sed"]
    (file := tmp_path / "empty.yaml").touch()
    assert "must be a mapping, got an empty file; write at least question: ..." in error_of(load_study, str(file))
    assert "got an empty file; write at least task: arithmetic and algorithm: grpo" in error_of(load_run, str(file))


def test_budgets_and_limits_follow_from_the_settings():
    raw = {**RUN, "rollouts_per_step": 64, "algorithm": {"name": "grpo", "group_size": 16}}
    spec = parse_run({**raw, "optimizer": {"num_inner_epochs": 4, "num_minibatches": 2}}, "my_run.yaml")
    assert spec.prompts_per_step == 4  # 64 / 16
    assert spec.updates_per_step == 8  # 4 epochs x 2 minibatches
    assert spec.sampling_with_limit().max_tokens == spec.task.max_completion_tokens
    spec = parse_run({**RUN, "sampling": {"max_tokens": 7}}, "my_run.yaml")
    assert spec.sampling_with_limit().max_tokens == 7
    alone = {**RUN, "algorithm": {"name": "ppo", "group_size": 1}, "rollouts_per_step": 32}
    assert parse_run(alone, "my_run.yaml").prompts_per_step == 32  # 32 rollouts / 1 each
    with pytest.raises(ValidationError):
        spec.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_loads_from_yaml_with_overrides_or_from_overrides_alone(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**RUN, "steps": 7}))
    spec = load_run(str(file), ["algorithm.kl_beta=0.5", "seed=3"])
    assert (spec.steps, spec.seed, spec.algorithm.model_dump()["kl_beta"]) == (7, 3, 0.5)
    assert load_run(None, ["task=arithmetic", "algorithm=ppo"]).algorithm.name == "ppo"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("steps", "a setting must be path=value, got 'steps'"),
        (" =3", "a setting must be path=value, got ' =3'"),
        ("steps=[1", "steps: the value is not valid YAML"),
        ("steps.x=1", "'steps.x': 'steps' is 3, which has no keys"),
        ("algorithm.kl_bta=1", "unknown key 'kl_bta'; did you mean 'kl_beta'?"),
    ],
)
def test_an_override_that_sets_nothing_is_refused(item, words):
    assert words in error_of(load_run, None, [item], {**RUN, "steps": 3})


def test_the_digest_is_pinned_and_changes_with_any_setting_and_not_with_how_it_was_written():
    # sha256 of {"label":null,"rate":0.1,"sizes":[1,2]}, first 16 hex digits: old results must stay recognisable.
    assert digest({"rate": 0.1, "sizes": (1, 2), "label": None}) == "54160b3bd5bc24d8"
    base = parse_run(RUN, "a").digest()
    assert parse_run({"algorithm": "grpo", "task": "arithmetic", "steps": 100}, "b").digest() == base
    assert parse_run({**RUN, "seed": 1}, "c").digest() != base
    assert parse_run({**RUN, "algorithm": {"name": "grpo", "kl_beta": 0.05}}, "d").digest() != base
    found = {make_spec(dtype=given).dtype: given for given in ("bf16", "fp32")}  # the names of other libraries
    assert found == {"bfloat16": "bf16", "float32": "fp32"}


def test_overrides_are_read_as_yaml_and_a_number_without_a_decimal_point_may_have_an_exponent():
    items = ["a=1", "b.c=0.5", "d=true", "e=[1, 2]", "f=2026-01-31", "g=", "h=x=y"]
    expected = {"a": 1, "b.c": 0.5, "d": True, "e": [1, 2], "f": "2026-01-31", "g": None, "h": "x=y"}
    assert parse_overrides(items) == expected
    # YAML 1.1 reads 1e-4 as text; the setting's own type makes it a number, so that equal runs hash equally.
    first, second = (make_spec(**parse_overrides([f"optimizer.learning_rate={rate}"])) for rate in ("3e-4", "0.0003"))
    assert first.optimizer.learning_rate == 0.0003 and first.digest() == second.digest()


def test_a_number_for_a_reward_changes_only_its_weight_and_below_dotted_keys_all_is_one_key():
    raw = {"rewards": {"format": 0.5, "repetition": {"weight": 1.0, "ngram": 3}}}
    overrides = {"rewards.format.scale": 2, "rewards.repetition": 0.25, "rewards.overlong": 0.1}
    found = {"format": {"weight": 0.5, "scale": 2}, "repetition": {"weight": 0.25, "ngram": 3}, "overlong": 0.1}
    assert with_overrides(raw, overrides) == {"rewards": found}
    raw, overrides = {"search": None, "factors": {"steps": [1]}}, {"factors.a.b": [2], "search.space.c.d": 3, "e.f": 4}
    changed = with_overrides(raw, overrides, whole=["factors", "search.space"])
    assert changed == {"search": {"space": {"c.d": 3}}, "factors": {"steps": [1], "a.b": [2]}, "e": {"f": 4}}
    message = error_of(with_overrides, {"factors": 3}, {"factors.a.b": 1}, ["factors"])
    assert message == "'factors.a.b': 'factors' is 3, which has no keys"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("a: [1", "not valid YAML"),
        ("- 1\n- 2\n", "must be a mapping, got list"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path, content, words):
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_text(content)
    message = error_of(load_run, str(file))
    assert message.startswith(f"{file}: ")
    assert words in message


def test_a_grid_takes_every_combination_in_order_and_named_arms_are_labelled_by_their_name():
    raw = study(factors={"algorithm.group_size": [4, 8], "algorithm.kl_beta": [0.0, 0.1]})
    assert labels(raw) == [f"group_size={size}, kl_beta={beta}" for size in (4, 8) for beta in (0, 0.1)]
    arms = {"plain": {"algorithm.name": "grpo"}, "critic": {"algorithm.name": "ppo", "optimizer.learning_rate": 1e-4}}
    assert labels(study(arms=arms)) == ["plain", "critic"]
    assert labels(study(arms=arms, factors={"steps": [1, 2]})) == [
        "plain, steps=1", "plain, steps=2", "critic, steps=1", "critic, steps=2",
    ]  # fmt: skip


def test_one_at_a_time_takes_the_base_run_and_each_other_level_also_where_an_algorithm_lacks_it():
    # The base has group_size 8 (the default), which is therefore no arm of its own.
    factors = {"algorithm.group_size": [4, 8, 16], "algorithm.kl_beta": [0.5]}
    found = labels(study(factors=factors, design="one_at_a_time"))
    assert found == ["base", "group_size=4", "group_size=16", "kl_beta=0.5"]
    # PPO has no positive_weight: that arm has no level of the factor, and the study is still valid.
    factors = {"algorithm.name": ["grpo", "ppo"], "algorithm.positive_weight": [0.5]}
    parsed = parse_study(study(factors=factors, design="one_at_a_time"), "toy.yaml")
    assert [arm.label for arm in parsed.design_arms()] == ["base", "ppo", "positive_weight=0.5"]
    assert parsed.design_arms()[1].levels == {"algorithm.name": "ppo", "algorithm.positive_weight": None}


CLIP = "algorithm.clip_epsilon_high"
INERT = f"{CLIP} has an effect only if a batch gets several updates or is older than the policy, otherwise the ratio"
BATCHES = {"optimizer.num_minibatches": [1, 4]}


@pytest.mark.parametrize("case", golden("refused_studies"), ids=lambda case: case["words"])
def test_a_study_that_cannot_be_run_is_refused(case):
    assert case["words"] in error_of(parse_study, study(**case["study"]), "toy.yaml")


def test_a_grid_in_which_a_level_matters_in_part_of_the_arms_names_the_identical_ones():
    grid = parse_study(study(factors={CLIP: [0.2, 0.3], **BATCHES}), "toy.yaml")
    ((arms, reason),) = grid.identical_arms()  # with four minibatches the ratio leaves 1
    assert arms == ["clip_epsilon_high=0.2, num_minibatches=1", "clip_epsilon_high=0.3, num_minibatches=1"]
    assert reason.startswith(INERT)


@pytest.mark.parametrize("path", ["algorithm", "algorithm.kl_beta"])
def test_an_override_that_every_arm_replaces_is_refused(tmp_path, path):
    file = tmp_path / "toy.yaml"
    arms = {name: {"algorithm.name": name, "algorithm.kl_beta": 0.1} for name in ("grpo", "ppo")}
    file.write_text(yaml.safe_dump(study(arms=arms)))
    words = f"{path}: every arm of the study sets it, so nothing would change; change the arms"
    assert words in error_of(load_study, str(file), [f"{path}={0.2 if '.' in path else 'dapo'}"])
    file.write_text(yaml.safe_dump(study(arms={**arms, "other": {"steps": 3}})))
    assert load_study(str(file), ["algorithm.kl_beta=0.2"]).design_arms()[1].spec.algorithm.kl_beta == 0.2


def test_a_study_is_its_arms_of_which_the_baseline_is_one_and_not_its_seeds():
    raw = study(factors={"algorithm.group_size": [4, 8]})
    assert parse_study({**raw, "baseline": "group_size=8"}, "toy.yaml").baseline == "group_size=8"
    message = error_of(parse_study, {**raw, "baseline": "group_size=9"}, "toy.yaml")
    assert "baseline must be an arm's label, got 'group_size=9'; did you mean 'group_size=" in message
    others = {"seeds": [0, 1, 2]}, {"factors": {"algorithm.group_size": [4, 16]}}
    base, more, other = (parse_study(raw | change, "toy.yaml").digest() for change in ({}, *others))
    assert more == base != other


def test_a_study_file_takes_its_name_from_the_file_and_overrides_from_the_command(tmp_path):
    file = tmp_path / "my_study.yaml"
    file.write_text(yaml.safe_dump({"question": "Does it?", "run": RUN, "factors": {"algorithm.group_size": [4, 8]}}))
    loaded = load_study(str(file), ["steps=3", "seeds=[5]", "task.max_operands=4", "metric=train/accuracy"])
    assert (loaded.name, loaded.seeds, loaded.metric) == ("my_study", [5], "train/accuracy")
    run = loaded.design_arms()[0].run_spec(5)
    assert (run.steps, run.seed, run.task.model_dump()["max_operands"]) == (3, 5, 4)
    levels = load_study(str(file), ["factors.algorithm.group_size=[16, 32]"]).design_arms()
    assert [arm.label for arm in levels] == ["group_size=16", "group_size=32"]
    # overriding what the study varies is refused with the way to do it
    message = error_of(load_study, str(file), ["algorithm.group_size=4"])
    assert message.startswith("algorithm.group_size: the study varies it; override the levels: ")
    assert message.endswith("'factors.algorithm.group_size=[...]'")


def test_an_unknown_study_is_refused_with_what_there_is():
    assert "unknown study 'no_such_thing'; " in error_of(load_study, "no_such_thing")
    assert error_of(load_study, "missing.yaml") == "missing.yaml: no such study file"


@pytest.mark.parametrize(
    ("changes", "warned"),
    [({"sampling": {"top_p": 0.9}}, True), ({}, False), ({"sampling": {"top_p": 0.9}, "steps": 0}, False)],
)
def test_training_on_a_cut_distribution_is_warned_of_before_the_run(changes, warned, tmp_path, caplog):
    spec = parse_run({"task": "arithmetic", "algorithm": "grpo", **changes}, "test")
    check_runs([spec, spec], tmp_path)
    found = [record.getMessage() for record in caplog.records if record.name == "cohort.harness.checks.preflight"]
    assert len(found) == warned
    assert all(text.startswith("sampling.top_p below 1 biases training: ") for text in found)


TOO_LONG, TOO_DEEP = "must have at most 100,000 bytes, got more", "must be nested at most 50 deep, got more"
ALIAS = "an alias (*) is not read; write out the value"
HOSTILE_YAML = {
    "laughs": ("a: &a [lol, lol]\nb: &b [*a, *a]\nc: [*b, *b]\n", f"line 2: {ALIAS}"),
    "merged laughs": ("a: &a {k: 1}\nb: {<<: *a}\n", f"line 2: {ALIAS}"),
    "brackets": ("run: " + "[" * 3000 + "]" * 3000, f"line 1: {TOO_DEEP}"),
    "open brackets": ("[" * 100_000, TOO_DEEP),
    "JSON": ('{"run": ' * 3000 + "1" + "}" * 3000, TOO_DEEP),
    "blocks": ("".join(f"{' ' * i}a:\n" for i in range(400)), TOO_DEEP),
    "a list in itself": ("run: &r [*r]", ALIAS),
    "size": ("#" + "x" * 100_000, TOO_LONG),
    "digits": ("steps: 1" + "0" * 5000, "line 1: a whole number must be from -2^53 to 2^53 (9007199254740992)"),
    "hex digits": ("steps: 0x" + "f" * 20_000, "(20,002 characters); use a smaller one"),
    "base 60": ("steps: " + "1:" * 9000 + "1", "(18,001 characters); use a smaller one"),
    "base 60 with a point": ("kl: " + "1:" * 9000 + "1.5", "must match its YAML tag, got 1:1:1"),
    "an untrue tag": ("steps: !!int many", "line 1: must match its YAML tag, got many"),
    "an empty tag": ("steps: !!int ''", "must match its YAML tag"),
    "a tag of truth": ("a: 1\nautocast: !!bool maybe", "line 2: must match its YAML tag, got maybe"),
    "bytes": ("model: !!binary aGk=", "could not determine a constructor for the tag 'tag:yaml.org,2002:binary'"),
    "a set": ("model: !!set {a, b}", "could not determine a constructor"),
    "code": ("model: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "a list as key": ("run: {[1]: 2}", "line 1: found unhashable key"),
    "NUL": ("question: a\0b", "special characters are not allowed"),
    "a key twice": ("run:\n  steps: 1\n  # more\n  steps: 2\n", "line 4: key 'steps' is already in line 2; remove one"),
    "a key twice in JSON": ('{"a": 1,\n "a": 2}', "line 2: key 'a' is already in line 1; remove one"),
    "two documents": ("a: 1\n---\nb: 2", "line 2: but found another document"),
}


@pytest.mark.attack("YAML or JSON that is huge when read")
@pytest.mark.parametrize("what", HOSTILE_YAML)
def test_a_file_of_hostile_yaml_ends_in_one_sentence(what, tmp_path):
    text, words = HOSTILE_YAML[what]
    (tmp_path / "file").write_text(text)
    message = error_of(read_yaml, tmp_path / "file")
    assert message.startswith(f"{tmp_path / 'file'}: ")
    assert words in message
    assert len(message.splitlines()) == 1
    assert len(message) < 400


@pytest.mark.attack("YAML or JSON that is huge when read")
@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("model=" + "[" * 3000, "model: the value is not valid YAML: line 1: must be nested at most 50 deep"),
        ("a." * 3000 + "b=1", "a path must have at most 50 keys, got 3001: 'a.a."),
        (f"seed={MAX_INTEGER + 1}",
         "from -2^53 to 2^53 (9007199254740992), because doubles round others, got 9007199254740993"),
        (f"seed=-{MAX_INTEGER + 1}", "got -9007199254740993; use a smaller one"),
    ],
)  # fmt: skip
def test_a_hostile_override_ends_in_one_sentence(item, words):
    assert words in error_of(lambda: with_overrides(RUN, parse_overrides([item])))


@pytest.mark.parametrize("seed", [-1, MAX_INTEGER + 1, 2**64, 1e16, float("inf"), float("nan")])
def test_a_seed_that_doubles_would_round_is_refused_everywhere(seed):
    compare = {"algorithms": ["grpo"], "tasks": ["arithmetic"]}
    tuning = {"space": {"optimizer.learning_rate": {"choices": [1, 2]}}, "trials": 1, "seeds": [seed]}
    for raw, name in (
        (study(seeds=[0, seed]), "seeds"),
        (study(run={**RUN, "seed": seed}), "seed"),
        (study(design="compare", compare=compare, search=tuning), "search.seeds.0"),
    ):  # fmt: skip
        message = error_of(parse_study, raw, "toy.yaml")
        assert f": {name}" in message
        assert "9007199254740992" in message or "0" in message or "finite" in message


def test_the_largest_seed_runs_through_every_generator():
    largest = parse_run({**RUN, "seed": MAX_INTEGER}, "run").seed
    assert tiny_model(largest).state_dict()
    assert generator("any", largest).random() < 1
    assert (uniforms(largest, 0, ["p"], 2, 3) != uniforms(largest - 1, 0, ["p"], 2, 3)).all()


@pytest.mark.attack("Study of more arms than memory holds")
def test_a_grid_of_too_many_arms_is_refused_before_it_is_made():
    paths = ("steps", "evaluation.every", "optimizer.warmup_steps")
    raw = study(factors={path: list(range(1, 301)) for path in paths})
    assert "a grid must have at most 10,000 arms, got 27,000,000; take fewer levels" in error_of(parse_study, raw, "x")
    message = error_of(parse_study, study(run={**RUN, "rollouts_per_step": 10**12 + 1}), "x")
    assert "rollouts_per_step: Input should be less than or equal to 1000000" in message


@pytest.mark.attack("Study of more arms than memory holds")
def test_a_wide_range_of_a_search_is_never_listed():
    space = {"steps": {"low": 1, "high": 10**15}, "optimizer.learning_rate": {"low": 0.1, "high": 0.2}}
    (plan,) = parse_study(study(design="search", search={"space": space, "trials": 2}), "x").searches()
    assert plan.search.space["steps"].size == 10**15
    assert plan.search.space["steps"].probes() == [1, 10**15]
