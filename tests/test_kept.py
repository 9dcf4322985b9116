"""Evaluations with many samples: few completions in memory, all of them on disk, and a kill loses no whole problem."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import factories
import pytest
import torch
from cohort.harness import plugins
from cohort.harness.base.inputs import InputsChanged
from cohort.harness.devices import ranks
from cohort.harness.engines.scripted import ScriptedEngine
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run import evaluate
from cohort.harness.run.evaluate import EndedRows, evaluate_run, kept_problems
from cohort.harness.run.standalone import evaluate_once
from cohort.harness.settings.run import RunSpec
from fakes import tiny_codec
from test_inputs import write_rows
from test_power_cut import Disk, Image, restore


class CountingEngine(ScriptedEngine):
    """Right in every third sample; remembers how much it was asked for at a time, and may be killed at a call."""

    def __init__(self, spec: RunSpec, die_at: int = -1) -> None:
        super().__init__(ScriptedEngine.Settings(), tiny_model(0), tiny_codec())
        gold = {p.id: p.gold for p in spec.task.prompts("validation")}
        self.script: Callable = lambda prompt, sample: f"#### {gold[prompt.id] if sample % 3 == 0 else 1000}"
        self.asked, self.seeds, self.die_at = [], [], die_at

    def generate(self, prompts, group_size, sampling, *, seed, step):
        if len(self.asked) == self.die_at:
            raise KeyboardInterrupt
        self.asked.append((len(prompts), group_size))
        self.seeds.append(seed)
        return super().generate(prompts, group_size, sampling, seed=seed, step=step)


def make_spec(num_prompts: int = 6, **evaluation) -> RunSpec:
    few = {"num_prompts": num_prompts, "num_test_prompts": num_prompts, **evaluation}
    return factories.make_spec(engine="scripted", device="cpu", evaluation=few, sampling={"max_tokens": 8})


def test_rows_after_a_torn_one_are_read_again(tmp_path):
    file = tmp_path / "rows"
    assert EndedRows(file) == {} and not file.exists()
    file.write_text('["a", [1]]\n["b", [2')
    (rows := EndedRows(file))["c"] = [3]
    assert EndedRows(file) == rows == {"a": [1], "c": [3]}
    rows.clear()
    assert not rows and not file.exists()


@pytest.mark.slow
def test_completions_are_held_for_a_few_problems_at_a_time():
    spec = make_spec(16, num_samples=1024)
    engine = CountingEngine(spec)
    engine.script = lambda prompt, sample: "0"
    evaluate_run(spec, engine, "validation", 0)
    assert engine.asked == 2 * [*16 * [(8, 64)], (8, 1)]  # 8 * 1024 completions


def test_parts_are_small_for_a_large_model_on_a_cpu_unless_rows_are_kept_as_they_end(monkeypatch):
    spec = make_spec(70, num_samples=4)  # 5 completions of at most 8 tokens each: 40 tokens of a problem
    few = [20, 20, 20, 10]  # 5e11 / (40 * 625e6) = 8e12 / (40 * 1e10) = 20 problems
    parts = {(167_792, None): [64, 6], (625_000_000, None): few, (10**12, None): 70 * [1], (10**10, ()): few}
    whole = evaluate_run(spec, CountingEngine(spec), "validation", 0)
    for (weights, ended), sizes in parts.items():
        engine = CountingEngine(spec)
        engine.ended = None if ended is None else dict(ended)
        assert evaluate_run(spec, engine, "validation", 0, weights=weights) == whole
        assert engine.asked == [part for size in sizes for part in ((size, 4), (size, 1))]
    monkeypatch.setattr(evaluate, "PART_WEIGHTS", 1000.0)  # 25 problems of one weight
    shown = evaluate_run(spec, engine := CountingEngine(spec), "validation", 0).samples
    assert engine.asked[0] == (64, 4) and len(shown) == 16


@pytest.mark.parametrize(
    ("problems", "text", "looks"), [(70, "0", 1), (70, "#### 0", 0), (64, "0", 0), (50, "0", 1), (40, "0", 0)]
)
def test_the_causes_of_weak_first_samples_are_told_before_more_are_drawn(problems, text, looks):
    spec, told = make_spec(problems, num_samples=1), []
    engine = CountingEngine(spec)
    engine.ended, engine.script = {}, lambda prompt, sample: text
    # One part, but a long one; or one of 40 * 2 * 8 tokens, of which each reads 5e11 / 640 weights: as long as it may.
    weights = {50: 10**10, 40: 781_250_000}.get(problems, 1)
    evaluate_run(spec, engine, "validation", 0, weights=weights, on_look=lambda x: told.append((x, len(engine.asked))))
    assert len(told) == looks and all("mark no answer" in causes and calls == 1 for causes, calls in told)


@pytest.mark.attack("A kill in the middle of an evaluation")
@pytest.mark.parametrize("die_at", [0, 1, 2, 5, 7])
def test_a_killed_evaluation_goes_on_with_the_problems_that_it_lacks(die_at, tmp_path):
    spec = make_spec(200, num_samples=2)  # 64 problems at a time: 4 parts of two calls each
    whole = evaluate_run(spec, CountingEngine(spec), "validation", 0, num_shown=10_000)
    assert len(whole.drawn) == 2 * 200
    kept, told = tmp_path / "new/folder/validation.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        evaluate_run(spec, CountingEngine(spec, die_at), "validation", 0, num_shown=10_000, kept=kept)
    again = CountingEngine(spec)
    found = evaluate_run(spec, again, "validation", 0, lambda *done: told.append(done), num_shown=10_000, kept=kept)
    assert found == whole
    assert len(again.asked) == 8 - die_at // 2 * 2
    assert told == [(done, 200) for done in (0, 64, 128, 192, 200)[die_at // 2 :]]
    done = CountingEngine(spec)
    assert evaluate_run(spec, done, "validation", 0, num_shown=10_000, kept=kept) == whole
    assert done.asked == []


@pytest.mark.attack("A kill in the middle of an evaluation")
@pytest.mark.parametrize("torn", ["", '["0 0 1.0'])
def test_rows_that_ended_before_a_kill_are_not_sampled_again(torn, tmp_path):
    spec, kept = make_spec(8, num_samples=3), tmp_path / "validation.jsonl"  # one part of 24 rows, then 8 greedy ones
    rows = kept.with_suffix(".rows")

    def sampled(most=10**9):
        """The result, and the number of tokens that were sampled before there were too many."""
        engine, told = TransformersEngine(TransformersEngine.Settings(), tiny_model(0), tiny_codec()), []

        def note(count):
            told.append(count)
            if sum(told) > most:
                raise KeyboardInterrupt

        engine.note_tokens, engine.ended = note, EndedRows(rows)
        return evaluate_run(spec, engine, "validation", 0, num_shown=99, kept=kept, weights=1), sum(told)

    whole, all_tokens = sampled()
    kept.unlink()
    with pytest.raises(KeyboardInterrupt):
        sampled(all_tokens * 3 // 4)
    ended = [json.loads(line)[1] for line in rows.read_text().splitlines()]
    assert len(ended) > 3 and not kept.exists()
    with rows.open("a") as file:
        file.write(torn)
    found, tokens = sampled()
    assert found == whole and tokens == all_tokens - sum(len(ids) - 1 for ids in ended)
    assert not rows.exists()


@pytest.mark.slow
@pytest.mark.attack("A kill in the middle of an evaluation")
def test_a_problem_that_was_written_by_half_is_sampled_again(tmp_path, record_property):
    spec = make_spec(num_samples=2)
    kept = tmp_path / "validation.jsonl"
    whole = evaluate_run(spec, CountingEngine(spec), "validation", 0, kept=kept)
    written = kept.read_bytes()
    cuts = range(len(written) - 400, len(written), 7)
    for cut in cuts:
        kept.write_bytes(written[:cut])
        assert evaluate_run(spec, CountingEngine(spec), "validation", 0, kept=kept) == whole
        assert kept.read_bytes() == written
    record_property("tried", len(cuts))


def test_a_line_that_no_evaluation_wrote_is_named(tmp_path):
    kept = tmp_path / "test.jsonl"
    kept.write_text('{"score": {}, "samples": [{}]}\n')
    with pytest.raises(ValueError, match="no problem of an evaluation in line 1"):
        list(kept_problems(kept))


def test_a_part_is_on_disk_before_the_next_is_sampled(tmp_path, monkeypatch):
    kept, told, spec = tmp_path / "test.jsonl", [], make_spec(2, num_samples=1)
    monkeypatch.setattr(evaluate, "PROMPTS_AT_ONCE", 1)
    monkeypatch.setattr(os, "fsync", lambda file: told.append(os.fstat(file).st_size))
    monkeypatch.setattr(evaluate, "sync", told.append)
    engine = CountingEngine(spec)
    evaluate_run(spec, engine, "validation", 0, lambda d, _: d and told.append(len(kept.read_bytes())), kept=kept)
    first, end = len(kept.read_bytes().splitlines(keepends=True)[0]), len(kept.read_bytes())
    assert told == [first, tmp_path, first, end, tmp_path, end]
    assert engine.asked == 4 * [(1, 1)]
    monkeypatch.setattr(evaluate, "ranks", SimpleNamespace(**{**vars(ranks), "world_size": lambda: 2}))
    evaluate_run(spec, engine := CountingEngine(spec), "validation", 0)
    assert engine.asked == [(2, 1), (2, 1)]  # one for each rank
    spec, engine.asked, engine.plans_batches = make_spec(5, num_samples=1), [], True
    evaluate_run(spec, engine, "validation", 0)
    assert engine.asked == [(5, 1), (5, 1)]


@pytest.mark.attack("Two splits, or other data, under the name of one evaluation")
@pytest.mark.parametrize("change", [("test", 2), ("train", 2), ("validation", 77)])
def test_an_evaluation_keeps_what_it_read_though_its_name_is_used_again(change, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("COHORT_MIRROR", "none")
    task = {"name": "gsm8k", "path": str(data := tmp_path / "data"), "validation_fraction": 0.2}
    spec = make_spec(3, num_samples=1).model_copy(update={"task": factories.make_spec(task=task).task})
    write_rows(data)
    first = evaluate_once(spec, "validation", runs, "one")
    before = {file: (runs / "evaluate/one" / file).read_bytes() for file in ("run.json", "validation.jsonl")}
    write_rows(data, first=change[1])
    with pytest.raises(ValueError, match=r"be the evaluation of one split|of a started run cannot change"):
        evaluate_once(spec, change[0], runs, "one")
    assert {file: (runs / "evaluate/one" / file).read_bytes() for file in before} == before
    write_rows(data)
    assert evaluate_once(spec, "validation", runs, "one") == first


def test_every_completion_is_in_the_folder_of_an_evaluation(runs):
    spec = make_spec(3, num_samples=4)
    first = evaluate_once(spec, "test", runs, "kept")["test"]
    lines = [json.loads(line) for line in (runs / "evaluate/kept/test.jsonl").read_text().splitlines()]
    assert [len(line["samples"]) for line in lines] == [4, 4, 4]
    assert all(line["gold"] and isinstance(line["samples"][0][0], str) and line["greedy"] for line in lines)
    assert evaluate_once(spec, "test", runs, "kept")["test"] == first


@pytest.mark.parametrize("plans", [False, True])
def test_an_evaluation_samples_in_its_precision_and_closes_its_engine_even_if_it_fails(plans, runs, monkeypatch):
    seen: list[object] = []

    class Recording(ScriptedEngine):
        plans_batches = plans

        class Settings(ScriptedEngine.Settings):
            dtype: str = "float16"  # of its own weights

        def __init__(self, settings, policy, codec):
            super().__init__(settings, policy, codec)
            seen.append(policy.lm_head.weight.dtype)

        def generate(self, *arguments, **keywords):
            seen.append((torch.is_autocast_enabled("cpu"), self.ended is None))
            if len(seen) > 4:
                raise RuntimeError("out of order")
            return super().generate(*arguments, **keywords)

        def close(self):
            seen.append("closed")

    load, told = plugins.load, []
    monkeypatch.setattr(plugins, "load", lambda kind, name: Recording if kind == "engine" else load(kind, name))
    monkeypatch.setattr(evaluate, "PART_WEIGHTS", 2)  # the part of a model with weights takes long, so it is looked at
    spec = make_spec(2, num_samples=1).model_copy(update={"autocast": True, "engine": Recording.Settings()})
    evaluate_once(spec, "validation", runs, "one", lambda *progress: told.append(progress))
    looked = [] if plans else [("first look at validation", 0, 0)]  # no completion marks an answer
    assert [progress[:3] for progress in told if progress[0] != "validation"] == looked
    # Rows are kept as they end where an engine decodes a batch on a CPU.
    assert seen == [torch.float16, (True, plans), (True, plans), "closed"]  # samples, and greedy
    with pytest.raises(RuntimeError, match="out of order"):
        evaluate_once(spec, "validation", runs, "other")
    assert seen[4:] == [torch.float16, (True, plans), "closed"]


@pytest.mark.slow
@pytest.mark.attack("A power cut at every write of an evaluation, then other data")
def test_an_evaluation_that_loses_power_at_any_write_ends_as_ever_and_on_its_own_data_alone(
    tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("COHORT_MIRROR", "none")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(evaluate, "PROMPTS_AT_ONCE", 2)
    task = {"name": "gsm8k", "path": str(data := tmp_path / "data"), "validation_fraction": 0.2}
    spec = factories.make_spec(**{**factories.FEW, "task": task, "sampling": {"max_tokens": 3}})
    write_rows(data)

    def images_of(runs: Path) -> list[Image]:
        with (disk := Disk(runs)).recorded():
            assert measured(runs) == want
        return list(disk.images.values())

    def measured(runs: Path) -> object:
        return evaluate_once(spec, "validation", runs, "one")["validation"]

    def kept(image: Image) -> bool:
        return any(b"\n" in (image.get(f"evaluate/one/validation{end}") or b"") for end in (".jsonl", evaluate.ROWS))

    want = measured(tmp_path / "first")
    (tmp_path / "whole").mkdir()
    images = images_of(tmp_path / "whole")
    begun = [image for image in images if kept(image)]
    images = begun[::9] + images_of(restore(begun[len(begun) // 2], tmp_path / "begun"))
    for number, image in enumerate(images):
        runs = restore(image, tmp_path / str(number))
        if kept(image):
            write_rows(data, first=77)
            with pytest.raises(InputsChanged, match="the inputs of a started run cannot change"):
                measured(runs)
            write_rows(data)
        assert measured(runs) == want
    record_property("tried", len(images))
