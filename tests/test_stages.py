"""Stages of a run, each with settings of its own: what is refused, and what all of them share."""

from typing import get_args

import pytest
from cohort.harness.data import Prompt, Split
from cohort.harness.run.build import engine_settings
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.raw import with_overrides
from cohort.reports.prose.notes import _clip_note, budget_note
from factories import FEW, make_spec, make_study
from factories import staged as a_run
from fakes import tiny_codec


def test_an_engine_has_room_for_the_longest_prompt_and_the_longest_completion_of_any_stage():
    first, second = ({"name": name, "steps": 1, "sampling": {"max_tokens": n}} for name, n in (("a", 9), ("b", 30)))
    spec = a_run(first, second, engine="vllm")
    assert spec.max_tokens < 30
    prompts = [Prompt("one", "1+1=", "2"), Prompt("two", "100+1=", "101")]
    assert engine_settings(spec, tiny_codec(), prompts).max_model_len == len(tiny_codec().encode("100+1=")) + 30 + 1
    own = [problem for split in get_args(Split) for problem in spec.task.prompts(split)]
    longest = max(len(tiny_codec().encode(one.text)) for one in own)
    assert engine_settings(spec, tiny_codec()).max_model_len == longest + 30 + 1
    for devices, rows in ((1, 640), (2, 320)):
        large = make_spec(engine="vllm", rollouts_per_step=640, devices=devices)
        assert engine_settings(large, tiny_codec(), prompts).max_batch_rows == rows


def test_an_arm_has_stages_of_its_own_or_none_and_a_path_names_one_that_is_there():
    study = make_study(run={**FEW, "steps": 4, "stages": [{"name": "a", "steps": 2}, {"name": "b", "steps": 3}]},
                       arms={"both": {}, "longer": {"stages.b.steps": 4}, "alone": {"stages": []}})  # fmt: skip
    found = {arm.label: [(s.name, s.spec.steps) for s in arm.spec.staged()] for arm in study.design_arms()}
    assert found == {"both": [("a", 2), ("b", 3)], "longer": [("a", 2), ("b", 4)], "alone": [("", 4)]}
    assert {arm.spec.steps for arm in study.design_arms()} == {4}  # the run's own number ends the stages
    varied = make_study(run={**FEW, "stages": [{"name": "a", "steps": 2}], "steps": 2},
                        factors={"stages.a.steps": [2, 3]})  # fmt: skip
    assert [arm.levels for arm in varied.design_arms()] == [{"stages.a.steps": 2}, {"stages.a.steps": 3}]
    with pytest.raises(SpecError, match=r"'stages.shine.steps': stages has none that is called 'shine'"):
        with_overrides({"stages": [{"name": "a", "steps": 2}]}, {"stages.shine.steps": 2})


def test_a_report_does_not_say_that_arms_with_stages_have_equal_budgets_or_one_optimiser_step():
    plain = make_spec(**{**FEW, "steps": 2}).model_dump(mode="json")
    several = {"name": "a", "steps": 2, "optimizer": {"num_minibatches": 2}}
    specs = {"alone": plain, "stages": a_run(several).model_dump(mode="json")}
    assert budget_note(None, specs) == (  # pyright: ignore
        "Budgets differ", "Arms differ in stages: read the curves against rollouts or tokens, not against steps."
    )  # fmt: skip
    assert _clip_note(specs)[1].startswith("'alone' gives each batch one optimiser step")
