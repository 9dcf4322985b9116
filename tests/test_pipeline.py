"""Stages run in order, each from the policy of the one before; what is kept and fine-tuned on; stops and refusals."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cohort.harness.data import Demonstration
from cohort.harness.engines.scripted import ScriptedEngine
from cohort.harness.mirror.store import connect
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import pipeline
from cohort.harness.run.cold_start import start_policy
from cohort.harness.run.pipeline import (
    Rejection,
    Stage,
    kept_answers,
    load_pipeline,
    rejection_sampling,
    train_pipeline,
)
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import ColdStart, parse_run
from fakes import MemoryLog, StopAfter, assert_same_weights, final_weights, tiny_codec
from safetensors.torch import load_file

DOCUMENT = Path(__file__).parents[1] / "docs" / "pipelines.md"
# The documented pipeline in seconds: fewer steps, rollouts and problems, on easier sums.
SHORT = [
    "task.min_operands=2", "task.max_operands=3", "task.num_train=70", "cold_start.steps=40", "rollouts_per_step=8",
    "algorithm.group_size=4", "sampling.max_tokens=24", "evaluation.num_prompts=4", "evaluation.num_test_prompts=4",
    "evaluation.num_samples=1", "evaluation.every=9", "checkpoints.every=9", "stages.reason.steps=3",
    "stages.polish.steps=2", "stages.distil.fit.steps=4", "stages.distil.rejection.num_prompts=70",
    "stages.distil.rejection.num_samples=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    file = tmp_path_factory.mktemp("documented") / "pipeline.yaml"
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S)
    file.write_text(block)
    return file


def folder_of_runs(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.fixture(scope="module")
def undisturbed(documented, tmp_path_factory, empty_store):
    """The runs folder of the documented pipeline, its result and those of its stages."""
    runs = folder_of_runs(tmp_path_factory, empty_store)
    return runs, *train_pipeline(load_pipeline(documented, SHORT), runs, "r1")


def write(tmp_path, stages, **changes):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump({"task": "arithmetic", "algorithm": "grpo", "stages": stages, **changes}))
    return file


def scripted(answers):
    """An engine that gives each prompt its list of texts, by sample."""
    engine = ScriptedEngine(ScriptedEngine.Settings(), tiny_model(0), tiny_codec())
    engine.script = lambda prompt, sample: answers[prompt.id][sample]
    return engine


def logged(folder, name):
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {e["step"]: e["values"][name] for e in events if e["type"] == "metrics" and name in e["values"]}


def test_the_documented_pipeline_runs_with_its_stages_as_children_in_mlflow(documented, undisturbed):
    stages, (runs, result, ended) = load_pipeline(documented, SHORT), undisturbed
    assert (result.state, [s["state"] for s in ended]) == ("complete", ["complete"] * 3)
    reason, distil, polish = (runs / "train" / "r1" / "stages" / n for n in ("1-reason", "2-distil", "3-polish"))
    assert [s["directory"] for s in ended] == [reason, distil, polish]
    # Each stage begins where the one before ended: same policy, same problems, same noise at step 0 but other weights.
    specs = [json.loads((folder / "run.json").read_text())["spec"] for folder in (reason, distil, polish)]
    assert specs[0]["model"] == "tiny"
    assert specs[1]["model"] == str(stages[0].policy(reason).resolve())
    assert specs[2]["model"] == str((distil / "policy").resolve())
    assert [spec["cold_start"]["steps"] for spec in specs] == [40, 0, 0]
    assert list(specs[2]["rewards"]) == ["accuracy", "format"] and list(specs[0]["rewards"]) == ["accuracy"]
    # 70 prompts x 2 samples; the counts agree with the file of kept answers.
    head, *rows = map(json.loads, (distil / "kept.jsonl").read_text().splitlines())
    assert head["rejection/samples"] == 140
    assert len(rows) == head["rejection/kept"] == pytest.approx(head["rejection/acceptance"] * 140)
    assert 0 < len(rows) <= 2 * 70
    assert head == {name: logged(distil, name)[0] for name in head}
    assert sorted(logged(distil, "fit/loss")) == [1, 2, 3, 4]
    assert sorted(logged(distil, "validation/accuracy")) == [0, 4]
    # Costs add up: 3 x 8 and 2 x 8 rollouts of training, 140 of rejection sampling.
    assert result.summary["rollouts"] == 24 + 140 + 16
    assert result.summary["optimizer_steps"] == 3 + 4 + 2
    of_stages = [stage["summary"] for stage in ended]
    for key in ("seconds", "generated_tokens"):
        assert result.summary[key] == pytest.approx(sum(one[key] for one in of_stages))
    assert result.summary["peak_memory_bytes"] == max(one["peak_memory_bytes"] for one in of_stages) > 0
    first, last = (
        {key: one[key] for key in result.summary if "accuracy" in key} for one in (of_stages[0], of_stages[2])
    )
    assert {key: result.summary[key] for key in last} == {**last, "accuracy_initial": first["accuracy_initial"]}
    assert set(last) == {"accuracy_initial", "accuracy_final", "test_accuracy"}
    for key, metric in pipeline.METRICS.items():
        assert logged(runs / "train" / "r1", metric) == {n: one[key] for n, one in enumerate(of_stages, start=1)}
    told = json.loads((runs / "train" / "r1" / "pipeline.json").read_text())
    assert told["stages"] == [stage.document() for stage in stages] and told["inputs"] == {}
    assert stages[1].document().keys() - stages[0].document().keys() == {"rejection", "fit"}
    client = connect(runs)
    found = client.search_runs([client.get_experiment_by_name("train").experiment_id])
    (parent,) = [run for run in found if "mlflow.parentRunId" not in run.data.tags]
    children = {run.info.run_name: run.data.tags for run in found if run is not parent}
    assert sorted(children) == ["r1/distil", "r1/polish", "r1/reason"]
    assert {tags["mlflow.parentRunId"] for tags in children.values()} == {parent.info.run_id}
    assert {tags["cohort.state"] for tags in children.values()} == {"complete"}
    own = {name: {k: v for k, v in tags.items() if k.startswith("cohort.stage")} for name, tags in children.items()}
    kinds = {"reason": "train", "distil": "rejection_sampling", "polish": "train"}
    assert own == {f"r1/{k}": {"cohort.stage": k, "cohort.stage_kind": kind} for k, kind in kinds.items()}
    assert {tags["cohort.pipeline"] for tags in (*children.values(), parent.data.tags)} == {"r1"}
    for key in ("rejection", "fit"):
        (tag,) = [tags[f"cohort.{key}"] for tags in children.values() if f"cohort.{key}" in tags]
        assert json.loads(tag) == stages[1].document()[key]
    # A run with the same cold start takes the pipeline's, and trains none.
    told: list[Any] = []
    start_policy(stages[0].spec, runs / "cache", lambda *said: told.append(said))
    assert told == []
    # The same command again runs nothing.
    before = (polish / "events.jsonl").read_bytes()
    again, _ = train_pipeline(stages, runs, "r1")
    assert again == result
    assert (polish / "events.jsonl").read_bytes() == before
    # Other settings are refused.
    with pytest.raises(SpecError, match="holds a pipeline with other stages"):
        train_pipeline(load_pipeline(documented, [*SHORT, "stages.distil.rejection.keep=1"]), runs, "r1")


def test_a_pipeline_that_is_stopped_in_every_stage_ends_as_an_undisturbed_one(
    documented, undisturbed, tmp_path_factory, empty_store, monkeypatch
):
    stages, whole = load_pipeline(documented, SHORT), undisturbed[0]
    parts = folder_of_runs(tmp_path_factory, empty_store)
    # Asked after every cold-start, training and fitting step, after every 64 prompts, and after a stage.
    # Stops: after 2 training steps; in the sampling; in the fit; in the last stage.
    for times in (42, 3, 4, 6):
        stop = StopAfter(times)
        monkeypatch.setattr(pipeline, "stop_on_signals", lambda stop=stop: nullcontext(stop))
        result, _ = train_pipeline(stages, parts, "r1")
        assert result.state == "stopped"
    monkeypatch.undo()
    result, _ = train_pipeline(stages, parts, "r1")
    assert result.state == "complete"
    for name in ("1-reason", "3-polish"):
        ends = [final_weights(runs / "train" / "r1" / "stages" / name) for runs in (whole, parts)]
        assert_same_weights(*ends)
    fitted = [
        load_file(r / "train" / "r1" / "stages" / "2-distil" / "policy" / "model.safetensors") for r in (whole, parts)
    ]
    assert_same_weights(*fitted)


def test_correct_answers_are_kept_once_each_and_never_when_they_were_cut(tmp_path):
    spec = parse_run({"task": "arithmetic", "algorithm": "grpo", "sampling": {"max_tokens": 12}}, "test")
    prompts = spec.task.prompts("train")[:3]
    gold = {p.id: p.gold for p in prompts}
    first, second, third = (p.id for p in prompts)
    right = {key: f"#### {value}" for key, value in gold.items()}
    answers = {
        first: [right[first], "no", right[first], "a " + right[first]],  # 3 correct, 2 texts
        second: ["no", "no", "no", "no"],
        third: [right[third] + "          ", right[third], "no", "b " + right[third]],  # the first is cut at 12 tokens
    }
    kept, counts = kept_answers(spec, tmp_path, scripted(answers), Rejection(num_prompts=3, num_samples=4, keep=2))
    texts = {p.text: p.id for p in prompts}
    assert [(texts[d.prompt], d.completion) for d in kept] == [
        (first, right[first]), (first, "a " + right[first]), (third, right[third]), (third, "b " + right[third]),
    ]  # fmt: skip
    expected = {"prompts": 3, "samples": 12, "correct": 5, "duplicates": 1, "kept": 4}
    assert {key: counts[f"rejection/{key}"] for key in expected} == expected
    assert counts["rejection/acceptance"] == pytest.approx(4 / 12)
    assert counts["rejection/covered"] == pytest.approx(2 / 3)
    assert counts["train/rollouts"] == 12
    # A later attempt reads what was kept and samples nothing.
    again, same = kept_answers(spec, tmp_path, scripted({}), Rejection(num_prompts=3, num_samples=4, keep=2))
    assert (again, same) == (kept, counts)


def test_a_policy_without_a_correct_answer_makes_the_stage_invalid(tmp_path):
    file = write(tmp_path, [{"name": "distil", "kind": "rejection_sampling", "fit": {"steps": 2},
                             "rejection": {"num_prompts": 4, "num_samples": 2}}],
                 evaluation={"num_prompts": 4, "num_test_prompts": 4, "num_samples": 1},
                 sampling={"max_tokens": 4}, engine="scripted")  # fmt: skip
    (stage,) = load_pipeline(file)
    log = MemoryLog()
    result = rejection_sampling(stage.spec, tmp_path, log, stage=stage, start=stage.spec, cache=tmp_path)
    assert result.state == "invalid"
    assert "kept none of 8 completions" in (result.reason or "")
    assert not (tmp_path / "policy").exists()


def test_fine_tuning_starts_from_the_sampling_policy_or_from_the_beginning(tmp_path, monkeypatch):
    few = {"num_prompts": 4, "num_test_prompts": 4, "num_samples": 1}
    raw = {"task": "arithmetic", "algorithm": "grpo", "evaluation": few, "sampling": {"max_tokens": 4}}
    spec = parse_run(raw, "test")
    own, start = spec.model_copy(update={"seed": 1}), spec
    begun = []

    def remember(given, cache):
        begun.append(given.seed)
        return tiny_model(given.seed), tiny_codec()

    monkeypatch.setattr(pipeline, "start_policy", remember)
    monkeypatch.setattr(pipeline, "kept_answers", lambda *_: ([Demonstration("1+1=", "#### 2")], COUNTS))
    for restart in (False, True):
        folder = tmp_path / str(restart)
        folder.mkdir()
        fit = ColdStart(steps=1, learning_rate=1e-9)
        stage = Stage("distil", "rejection_sampling", own, Rejection(restart=restart), fit)
        result = rejection_sampling(own, folder, MemoryLog(), stage=stage, start=start, cache=tmp_path)
        assert result.state == "complete"
        embedding = load_file(folder / "policy" / "model.safetensors")["model.embed_tokens.weight"]
        expected = tiny_model(0 if restart else 1).model.embed_tokens.weight
        assert torch.allclose(embedding, expected, atol=1e-6)
    assert begun == [1, 1, 1, 0]


COUNTS = {"rejection/samples": 1.0, "train/rollouts": 1.0, "train/generated_tokens": 1.0}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages must be a list of mappings with a name"),
        ([{"steps": 3}], "stages must be a list of mappings with a name"),
        ([{"name": "a", "steps": 3}, {"name": "a", "steps": 3}], "must be distinct words, got a, a"),
        ([{"name": "../a", "steps": 3}], r"must be distinct words, got \.\./a"),
        ([{"name": "a", "kind": "sft"}], "stage 'a': kind must be one of train, rejection_sampling, got 'sft'"),
        ([{"name": "a", "steps": 0}], "stage 'a': steps must be at least 1, got 0"),
        ([{"name": "a", "stps": 1}], "unknown key 'stps'; did you mean 'steps'"),
        ([{"name": "a", "fit": {"steps": 1}}], "'fit' belongs to kind: rejection_sampling, got kind: train"),
        ([{"name": "a", "kind": "rejection_sampling"}], "fit.steps must be at least 1, got 0"),
        ([{"name": "a", "kind": "rejection_sampling", "fit": {"steps": 1}, "rejection": {"kep": 2}}],
         "unknown key 'kep'; did you mean 'keep'"),
        ([{"name": "a", "kind": "rejection_sampling", "fit": {"steps": 1}, "rejection": {"keep": 0}}], "keep.*got 0"),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_run_is_refused_with_the_stage_and_the_rule(stages, message, tmp_path):
    with pytest.raises(SpecError, match=message):
        load_pipeline(write(tmp_path, stages))


def test_an_override_of_an_unknown_stage_is_refused(documented):
    with pytest.raises(SpecError, match=r"stages.shine.steps: must be stages.<name>.<path> with a name of reason,"):
        load_pipeline(documented, ["stages.shine.steps=2"])
