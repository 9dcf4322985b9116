"""Stages of a run: each begins with the policy of the one before; what is kept and learnt; costs, kills, refusals."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks_at_work
import torch
import yaml
from cohort.harness.base.files import sha256
from cohort.harness.base.streams import generator
from cohort.harness.checks.disk import estimate_disk
from cohort.harness.checks.memory import estimate_run
from cohort.harness.checks.preflight import check_runs
from cohort.harness.data import Demonstration
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.extras.pipelines import fine_tuning as stages
from cohort.harness.extras.pipelines.fine_tuning import as_group, drawn, kept_answers
from cohort.harness.extras.pipelines.supervised import supervised
from cohort.harness.policy import flops
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_config, tiny_model, tiny_tokenizer
from cohort.harness.record.run import RunLog
from cohort.harness.run.cold_start import _batches, fit_demonstrations
from cohort.harness.run.guards.agreement import own_logprobs
from cohort.harness.run.learner import Learner
from cohort.harness.run.loop import train
from cohort.harness.run.rollout import collate
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_run
from cohort.harness.settings.run import ColdStart, get_path, parse_run
from cohort.harness.study.estimates import passes
from cohort.harness.study.preflight import check_claimed
from factories import FEW, make_spec
from factories import staged as a_run
from fakes import MemoryLog, check_same_run, final_weights, gone_on, rollout_rows, tiny_codec
from ranks_at_work import begun, ends
from test_devices import check_equal
from transformers import LlamaForCausalLM

DOCUMENT = Path(__file__).parents[3] / "docs" / "pipelines.md"
# The documented pipeline in seconds, and a last stage with a critic: 3 + 4 + 2 + 2 steps.
SHORT = [
    "task.min_operands=2", "task.max_operands=3", "task.num_train=70", "cold_start.steps=40", "rollouts_per_step=8",
    "algorithm.group_size=4", "sampling.max_tokens=24", "evaluation.num_prompts=4", "evaluation.num_test_prompts=4",
    "evaluation.num_samples=1", "evaluation.every=9", "checkpoints.every=9", "stages.reason.steps=3",
    "stages.polish.steps=2", "stages.distil.steps=4", "stages.distil.rejection.num_prompts=70",
    "stages.distil.rejection.num_samples=2", "optimizer.schedule=linear",
]  # fmt: skip
VALUED = {"name": "value", "steps": 2, "algorithm": "ppo", "rollouts_per_step": 16, "rewards": {"format": 1.0}}
FIT = {"name": "distil", "kind": "rejection_sampling", "steps": 2, "rejection": {"num_prompts": 4, "num_samples": 2}}


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    block, _ = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S)
    raw = yaml.safe_load(block)
    file = tmp_path_factory.mktemp("documented") / "pipeline.yaml"
    file.write_text(yaml.safe_dump({**raw, "stages": [*raw["stages"], VALUED]}))
    return load_run(str(file), SHORT)


@pytest.fixture(scope="module")
def undisturbed(spec, tmp_path_factory, cache):
    """The folder, the log and the result of the documented pipeline; `log.engine` has the versions of the weights that
    its engine got, and when it was sent to sleep."""
    folder, log, load = tmp_path_factory.mktemp("undisturbed"), MemoryLog(), TransformersEngine.load_weights
    log.engine, loads = [], lambda *given: (log.engine.append(given[-1]), load(*given))
    with (
        pytest.MonkeyPatch.context() as patch,
        RunLog(folder.parent, folder, spec, experiment="train", run_name="r1") as record,
    ):
        patch.setattr(TransformersEngine, "load_weights", loads)
        patch.setattr(TransformersEngine, "sleep", lambda engine: log.engine.append("sleep"))
        result = train(spec, folder, Both(log, record), cache=cache)  # pyright: ignore
        record.finish(result.state, result.reason, result.summary)
    return folder, log, result


def lengths_of(rows, samples):
    """(tokens of a prompt, tokens of its completions) of each problem."""
    groups = [rows[start : start + samples] for start in range(0, len(rows), samples)]
    codec = tiny_codec()
    return [(len(codec.encode(group[0]["prompt"])), [row["num_tokens"] for row in group]) for group in groups]


def sampling_cost(log, step):
    """Operations of sampling in a step."""
    so_far = {0: 0.0, **dict(log.history("flops/sampling"))}
    return so_far[step] - so_far[step - 1]


class Both:
    """A log that tells both of two logs."""

    def __init__(self, *logs):
        self._logs = logs

    def __getattr__(self, name):
        return lambda *given, **named: [getattr(log, name)(*given, **named) for log in self._logs][-1]


@pytest.mark.slow
def test_the_documented_stages_are_one_run_and_each_begins_with_the_policy_of_the_one_before(spec, undisturbed):
    folder, log, result = undisturbed
    assert (result.state, spec.steps) == ("complete", 11)
    assert [(s.name, s.start, s.end) for s in spec.staged()] == [
        ("reason", 0, 3), ("distil", 3, 7), ("polish", 7, 9), ("value", 9, 11),
    ]  # fmt: skip
    assert [step for step, _ in log.history("validation/accuracy")] == [0, 3, 7, 9, 11]
    assert [step for step, _ in log.history("test/accuracy")] == [11]
    # Steps of fine-tuning leave the engine asleep; it gets weights for the validation after the last.
    trained = [f"sleep {step}" for step in (1, 2, 3, 8, 9, 10, 11)]
    assert " ".join(map(str, log.engine)) == " ".join([*trained[:3], "sleep sleep sleep sleep 7", *trained[3:]])
    spent = {name: {step for step, _ in log.history(f"seconds/{name}")} for name in ("generate", "annotate", "update")}
    assert spent == {"generate": {*range(1, 12)} - {5, 6, 7}, "annotate": {*range(1, 12)}, "update": {*range(1, 12)}}
    # The reference is the policy as a stage starts: their KL is 0 at its first step, and there alone.
    assert [step for step, value in log.history("kl/reference") if value == 0] == [1, 8, 10]
    assert [step for step, _ in log.history("kl/reference")] == [1, 2, 3, 8, 9, 10, 11]
    assert [step for step, _ in log.history("reward/format")] == [8, 9, 10, 11]  # the rewards of two stages
    assert [step for step, _ in log.history("critic/loss")] == [10, 11]
    assert not {step for step, _ in log.history("mismatch/kl")} & {4, 5, 6, 7}
    # Schedules begin anew: 1e-4, and 1e-3 for the fine-tuning, fall linearly over 3, 4, 2 and 2 steps.
    rates = [1e-4 * (1 - i / 3) for i in range(3)] + [1e-3 * (1 - i / 4) for i in range(4)] + [1e-4, 5e-5] * 2
    assert [value for _, value in log.history("optimizer/learning_rate")] == pytest.approx(rates)
    # Of the answers of the stage, 70 x 2 in the file of its first step, some are kept, for some of the problems.
    answers = rollout_rows(folder, 4)
    kept = kept_answers(answers, 2)
    assert {row["step"] for row in answers} == {4} and 0 < len(kept) < 140
    assert log.history("rejection/acceptance") == [(4, len(kept) / 140)]
    assert log.history("rejection/covered") == [(4, len({one.prompt for one in kept}) / 70)]
    losses = [value for _, value in log.history("policy/loss")][3:7]
    assert losses[-1] < losses[0]
    # Costs add up: 3 x 8, 70 x 2, 2 x 8 and 2 x 16 rollouts, one optimiser step for each step.
    assert result.summary["rollouts"] == spec.num_rollouts == 24 + 140 + 16 + 32
    assert result.summary["optimizer_steps"] == 11
    # What was sampled is kept, graded, and counted as operations of training.
    (step, samples), *more = log.history("rejection/samples")
    assert (step, samples, len(answers), more) == (4, 140, 140, [])
    assert [phase for phase in log.phases if phase[0] == "sample"] == [("sample", 64, 70), ("sample", 70, 70)]
    assert [phase for phase in log.phases if phase[0] == "train"] == [("train", done, 11) for done in range(1, 12)]
    right = sum(row["correct"] for row in answers)
    assert log.history("train/accuracy")[3] == (4, pytest.approx(right / 140)) and right > 0
    assert log.files["rollouts/step-000004.jsonl"] == sha256(folder / "rollouts/step-000004.jsonl")
    tokens = [value for _, value in log.history("train/generated_tokens")]
    assert sampling_cost(log, 4) == pytest.approx(flops.sampled(flops.Costs.of(tiny_model(0)), lengths_of(answers, 2)))
    assert tokens[4] == tokens[3] and sampling_cost(log, 5) == 0  # fine-tuning samples no more
    names = {*result.summary, *(metric for _, values in log.events for metric in values)}
    check_claimed(SimpleNamespace(claim=[SimpleNamespace(metric=one) for one in names]), [spec])  # pyright: ignore


@pytest.mark.slow
@pytest.mark.attack("A kill in every stage of a run")
def test_a_run_that_is_killed_in_every_stage_ends_as_undisturbed(spec, undisturbed, tmp_path, cache, record_property):
    record_property("tried", 5)
    # Stops in the first stage, in the sampling of answers and in the third stage; kills, which save nothing, in the
    # fine-tuning and in the last stage.
    log = gone_on(spec, tmp_path, cache, 2, 2, {"kill": 6}, 4, {"kill": 11})
    # ... from the checkpoint of step 2, of a stage's end, of the sampled answers, of step 8 and of a stage's end.
    assert log.resumed_at == [-1, 2, 3, 4, 8, 9]
    check_same_run((tmp_path, log), undisturbed[:2])


def test_correct_answers_are_kept_once_each_and_never_when_they_were_cut_and_learnt_from_once_in_each_pass():
    rows = [
        {"prompt": prompt, "completion": text, "correct": right, "finish_reason": why}
        for prompt, text, right, why in [
            ("a", "1", True, "stop"), ("a", "no", False, "stop"), ("a", "1", True, "stop"), ("a", "x 1", True, "stop"),
            ("b", "no", False, "stop"),
            ("c", "2   ", True, "length"), ("c", "2", True, "stop"), ("c", "y 2", True, "stop"),
            ("c", "z 2", True, "stop"),
        ]
    ]  # fmt: skip
    kept = [("a", "1"), ("a", "x 1"), ("c", "2"), ("c", "y 2")]
    assert kept_answers(rows, 2) == [Demonstration(*one) for one in kept]
    assert kept_answers(rows, 1) == [Demonstration(*one) for one in kept[::2]]
    # 5 answers, 3 in a step: steps 10 to 14 are 15 places, three passes over all of them.
    places = [place for step in range(10, 15) for place in drawn(5, 3, seed=1, start=10, step=step)]
    passes = [places[:5], places[5:10], places[10:]]
    assert passes[0] == generator("fine-tuning", 1, 10, 0).permutation(5).tolist()
    assert [sorted(one) for one in passes] == [list(range(5))] * 3
    assert passes[0] != passes[1]
    assert drawn(2, 5, seed=1, start=10, step=10)[:2] != [0, 0]  # fewer answers than a step takes: repeated
    assert sorted(drawn(2, 4, seed=1, start=10, step=10)) == [0, 0, 1, 1]


def test_a_step_of_fine_tuning_is_one_of_the_cold_start():
    codec, rate = tiny_codec(), 1e-3
    answers = [Demonstration("1+1=", "#### 2"), Demonstration("2+3=", "2+3=5. #### 5"), Demonstration("4+4=", "#### 8")]
    taught, learnt = tiny_model(3), tiny_model(3)
    settings = ColdStart(steps=1, learning_rate=rate)
    fit_demonstrations(taught, codec, answers, settings, device=torch.device("cpu"))
    spec = supervised(make_spec(**{"optimizer.learning_rate": rate, "sampling.temperature": 0.5}))
    order = [answer for batch in _batches(answers, settings) for answer in batch]  # 32 places, of 3 answers
    batch = collate([as_group(answer, codec) for answer in order])
    nats = -own_logprobs(learnt, batch, 1.0).detach().sum() / batch.completion_mask_BT.sum()
    _, entropy = token_logprobs(learnt, batch.tokens_BT, batch.completion_mask_BT, 1.0)
    mean = entropy[batch.completion_mask_BT].mean().item()
    found = Learner(spec, learnt).update(batch, 0)
    assert [found["policy/loss"], found["policy/entropy"]] == pytest.approx([float(nats), mean], rel=1e-5)
    ours, theirs = (torch.cat([p.grad.ravel() for p in m.parameters() if p.grad is not None]) for m in (learnt, taught))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def keep_all(rows, keep):
    return [Demonstration(row["prompt"], row["completion"]) for row in rows]


def test_a_policy_without_a_correct_answer_makes_the_run_invalid(tmp_path):
    log = MemoryLog()
    result = train(a_run(FIT, engine="scripted"), tmp_path, log, cache=tmp_path)
    assert result.state == "invalid"
    assert "stage 'distil' has kept none of 8 answers" in (result.reason or "")
    assert not log.history("policy/loss")


@pytest.mark.parametrize("restart", [False, True])
def test_fine_tuning_starts_from_the_policy_or_from_the_first_one(restart, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "kept_answers", keep_all)
    still = {"learning_rate": 1e-12}
    fit = {**FIT, "steps": 1, "optimizer": still, "rejection": {**FIT["rejection"], "restart": restart}}
    first = {"name": "first", "kind": "rejection_sampling", "steps": 1, "rejection": FIT["rejection"],
             "optimizer": {"learning_rate": 1e-2}}  # fmt: skip
    assert train(a_run(first, fit), tmp_path, MemoryLog(), cache=tmp_path).state == "complete"
    moved = final_weights(tmp_path)["model.embed_tokens.weight"] - tiny_model(0).model.embed_tokens.weight
    assert bool(moved.abs().max() < 1e-6) == restart


def test_a_teacher_answers_in_place_of_the_policy_and_costs_what_its_size_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "kept_answers", keep_all)
    config = tiny_config()
    config.intermediate_size, config.num_hidden_layers = 2 * config.intermediate_size, 3
    torch.manual_seed(5)
    teacher = LlamaForCausalLM(config).eval()
    save_model(tmp_path / "teacher", teacher, tiny_tokenizer())
    fit = {**FIT, "rejection": {**FIT["rejection"], "teacher": str(tmp_path / "teacher")}}
    spec, log, slept = a_run(fit), MemoryLog(), []
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "sleep", lambda engine: slept.append(engine))
        assert train(spec, tmp_path / "run", log, cache=tmp_path).state == "complete"
    assert len(slept) == 3 and len(set(slept)) == 1  # the policy's engine: while the teacher answers, and in two steps
    rows = rollout_rows(tmp_path / "run", 1)
    engine = TransformersEngine(spec.engine, teacher, tiny_codec())
    prompts = spec.task.prompts("train")[:4]
    groups = engine.generate(prompts, 2, spec.sampling_with_limit(), seed=0, step=0)
    assert [row["completion"] for row in rows] == [one.text for group in groups for one in group.rollouts]
    assert sampling_cost(log, 1) == pytest.approx(flops.sampled(flops.Costs.of(teacher), lengths_of(rows, 2)))
    assert f"model {tmp_path / 'teacher'}" in log.read
    needed, alone = (estimate_run(one)[0] for one in (spec, a_run(FIT)))
    assert needed and alone and needed["teacher"] == sum(2 * 4 * p.numel() for p in teacher.parameters())
    assert "teacher" not in alone
    missing = a_run({**FIT, "rejection": {**FIT["rejection"], "teacher": str(tmp_path / "none")}})
    with pytest.raises(ValueError, match=r"rejection.teacher must be .*none"):
        check_runs([missing], tmp_path)


def test_a_limit_of_operations_ends_the_run_in_any_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "kept_answers", keep_all)
    log = MemoryLog()
    result = train(a_run(FIT, VALUED, max_flops=1.0), tmp_path, log, cache=tmp_path)
    assert (result.state, result.summary["optimizer_steps"]) == ("complete", 1)
    assert [step for step, _ in log.history("test/accuracy")] == [1]
    assert result.summary["flops_train"] == result.summary["flops_sampling"] + result.summary["flops_learning"]


@pytest.mark.slow
def test_a_record_with_stages_is_verified_from_its_completions(undisturbed):
    verify = pytest.importorskip("cohort.harness.extras.verify.verification")
    findings = verify.Findings()
    trial = SimpleNamespace(arm="r1", seed=0, spec={})
    verify.check_trial(undisturbed[0], trial, verify.Scope(findings, "r1", 0))  # pyright: ignore
    assert (findings.mismatches, findings.lacks) == ([], [])
    assert findings.completions > 140
    # 4 in a group until step 3, 2 answers of each problem at step 4, then 4 and 8.
    stages = [
        {"steps": 3}, {"steps": 4, "rejection": {"num_samples": 2}}, {"steps": 2},
        {"steps": 2, "algorithm": {"group_size": 8}},
    ]  # fmt: skip
    spec = {"algorithm": {"group_size": 4}, "stages": stages}
    assert [verify._group_size(spec, step) for step in (1, 3, 4, 7, 8, 10)] == [4, 4, 2, 2, 4, 8]
    assert verify._group_size({"algorithm": {"group_size": 4}}, 5) == 4


def test_stages_are_part_of_the_settings_and_a_run_without_any_has_those_that_it_had(spec):
    assert parse_run(spec.model_dump(mode="json"), "run.json") == spec
    assert "stages" not in make_spec().model_dump()
    assert make_spec(stages=[]).digest() == make_spec().digest()
    assert {stage.spec.seed for stage in spec.model_copy(update={"seed": 7}).staged()} == {7}
    reason, distil, polish, value = (stage.spec for stage in spec.staged())
    assert (distil.optimizer.learning_rate, reason.optimizer.learning_rate) == (1e-3, 1e-4)
    assert (list(reason.rewards), list(polish.rewards)) == (["accuracy"], ["accuracy", "format"])
    assert (value.algorithm.name, value.algorithm.group_size, reason.algorithm.group_size) == ("ppo", 8, 4)
    assert get_path(spec, "stages.polish.steps") == 2 and get_path(spec, "stages.none.steps") is None
    # The rewards of another algorithm are its own.
    blind = a_run({"name": "a", "steps": 1}, {"name": "b", "steps": 1, "algorithm": "grpo_self_consistency"})
    assert [list(stage.spec.rewards) for stage in blind.staged()] == [["accuracy"], ["majority_vote"]]


def test_stages_are_counted_before_the_start():
    one, fit, two = {"name": "a", "steps": 2}, FIT, {"name": "b", "steps": 3, "algorithm": {"kl_beta": 0.1}}
    spec, alone = a_run(one, fit, two), make_spec(**{**FEW, "steps": 5})
    assert spec.num_rollouts == 5 * 8 + 4 * 2
    valued = make_spec(**{**FEW, "steps": 3, "algorithm.kl_beta": 0.1})
    # 8 answers sampled (2 each), 2 x 8 learnt from (3); a reference reads 8 rows in 3 steps; limits of 8 tokens.
    assert passes(spec) - passes(alone) == 8 * (2 * 8 + 3 * 2 * 8 + 3 * 8)
    assert passes(valued) - passes(make_spec(**{**FEW, "steps": 3})) == 8 * 3 * 8
    (plain, _), (read, _) = estimate_run(a_run(one)), estimate_run(spec)
    assert plain and read and (plain["reference"], read["reference"] > 0) == (0, True)
    disks = [estimate_disk(run, "nothing") for run in (alone, spec)]
    assert disks[0] and disks[1] and disks[1].checkpoint - disks[0].checkpoint == read["reference"]


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        ({"kl": {}}, {}, "stage 'distil': kl belongs to stages of kind train, got kind rejection_sampling"),
        ({"kind": "train"}, {}, "unknown key 'rejection'"),
        ({"rejection": {"kep": 2}}, {}, "unknown key 'kep'; did you mean 'keep'"),
        ({"rejection": {"keep": 0}}, {}, "keep.*got 0"),
        ({"rejection": {"teacher": "m"}}, {"engine": "vllm"},
         r"rejection.teacher must be left out with engine=vllm.*use engine=transformers"),
        ({}, {"control": "random"}, "keep or rank correct answers need them, and control random replaces them"),
        ({}, {"algorithm": {"name": "grpo_self_consistency", "group_size": 4}}, "must not see gold answers"),
    ],
)  # fmt: skip
def test_stages_that_cannot_sample_are_refused(stage, changes, message):
    with pytest.raises(SpecError, match=message):
        a_run({"name": "a", "steps": 1}, {**FIT, **stage}, **changes)


@pytest.mark.slow
def test_stages_on_two_devices_learn_what_they_do_on_one_and_go_on_within_a_stage(tmp_path):
    fit = {**FIT, "steps": 2, "rejection": {"num_prompts": 48, "num_samples": 8, "restart": True}}
    valued = {"name": "value", "steps": 1, "algorithm": {"name": "ppo", "group_size": 4, "kl_beta": 0.1}}
    stages = [{"name": "first", "steps": 1}, fit, {"name": "rank", "kind": "reward_model"}, valued]
    changes = {
        "stages": stages, "steps": 5, "task": {"name": "arithmetic", "min_operands": 2, "max_operands": 2},
        "cold_start": {"steps": 60}, "sampling": {"max_tokens": 24}, "gradient_checkpointing": True,
    }  # fmt: skip
    (tmp_path / "cache").mkdir()
    for name, parts in (("whole", [(1, None)]), ("parts", [(2, 3), (2, None)])):
        for size, steps in parts:
            own = [begun(ranks_at_work.attempt, rank, size, tmp_path, name, changes, steps) for rank in range(size)]
            assert ends(*own) == [0] * size
    check_equal("parts", tmp_path / "whole", tmp_path / "parts", since=2)
