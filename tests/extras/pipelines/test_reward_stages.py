"""Stages that fit a reward model on the run's own rollouts: what they fit, what is paid, costs, kills, refusals."""

import re
import shutil
from pathlib import Path

import pytest
from cohort.harness.base.streams import generator
from cohort.harness.checks.disk import estimate_disk
from cohort.harness.checks.memory import _estimate_stage, _scorer_bytes, estimate_run
from cohort.harness.checks.preflight import check_countable, check_runs
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.extras.pipelines import bradley_terry, reward_fit
from cohort.harness.extras.pipelines.bradley_terry import fit_ranked, load_scorer, split
from cohort.harness.extras.pipelines.stages.reward_model import RewardFit
from cohort.harness.policy import flops
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.checkpoint import fork_run
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_run
from cohort.harness.settings.run import parse_run
from cohort.harness.study.estimates import passes
from factories import FEW, make_spec, staged
from fakes import MemoryLog, assert_same_weights, check_same_run, gone_on, rollout_rows, tiny_codec
from safetensors.torch import load_file

DOCUMENT = Path(__file__).parents[3] / "docs" / "pipelines.md"
# The documented rounds without a cold start: 2 steps, a fit, 1 step, a fit, 2 steps.
SHORT = [
    "task.min_operands=2", "task.max_operands=2", "task.num_train=64", "cold_start.steps=0", "rollouts_per_step=32",
    "evaluation.num_prompts=2", "evaluation.num_test_prompts=2", "evaluation.num_samples=1", "sampling.max_tokens=16",
    "evaluation.every=9", "stages.explore.steps=2", "stages.first.steps=1", "stages.second.steps=2",
    "stages.again.fit.replay=0.5", "stages.again.fit.epochs=2", "gates.answered=null", "gates.stuck_groups=null",
]  # fmt: skip
STAGES = [{"name": "explore", "steps": 2}, {"name": "judge", "kind": "reward_model"}]


def by_length(sources, by):
    """No answer of an untrained model is right: the longer one counts as better."""
    assert by == "correct"
    return bradley_terry.read_ranked(sources, "num_tokens")


@pytest.fixture(autouse=True)
def lengths_rank(monkeypatch):
    monkeypatch.setattr(reward_fit, "read_ranked", by_length)


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    _, block = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.S)
    file = tmp_path_factory.mktemp("documented") / "iterative_grpo.yaml"
    file.write_text(block)
    return load_run(str(file), SHORT)


@pytest.fixture(scope="module")
def undisturbed(spec, tmp_path_factory, cache):
    folder, log, slept = tmp_path_factory.mktemp("undisturbed"), MemoryLog(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_fit, "read_ranked", by_length)
        patch.setattr(TransformersEngine, "sleep", lambda engine: slept.append(engine))
        result = train(spec, folder, log, cache=cache)
    assert result.state == "complete" and len(slept) == spec.steps  # the engine sleeps in each step, and in each fit
    return folder, log, result


def ranked_of(folder, *steps):
    return by_length([folder / f"rollouts/step-{step:06d}.jsonl" for step in steps], "correct")[0]


def model_of(folder, stage):
    return folder / "checkpoints" / f"reward-model-{stage}"


def a_run(*stages, **changes):
    return staged(*stages, **{"checkpoints": {"rollouts_every": 1}, **changes})


@pytest.mark.slow
def test_each_fit_goes_on_from_the_last_one_with_new_rollouts_and_a_share_of_the_old_ones(spec, undisturbed, tmp_path):
    folder, log, _ = undisturbed
    assert [(s.name, s.start, s.end, bool(s.does)) for s in spec.staged()] == [
        ("explore", 0, 2, False), ("judge", 2, 3, True), ("first", 3, 4, False), ("again", 4, 5, True),
        ("second", 5, 7, False),
    ]  # fmt: skip
    assert sorted(file.name[5:11] for file in (folder / "rollouts").iterdir()) == [f"{n:06d}" for n in (1, 2, 4, 6, 7)]
    old, new = ranked_of(folder, 1, 2), ranked_of(folder, 4)
    drawn = sorted(generator("reward model replay", 0, 4).permutation(len(old))[: round(0.5 * len(old))])
    rounds = (("judge", old, "tiny", 3, 0), ("again", [*new, *(old[i] for i in drawn)], model_of(folder, "judge"), 2,
              len(drawn)))  # fmt: skip
    for (name, ranked, start, epochs, replayed), step in zip(rounds, (3, 5), strict=True):
        how = RewardFit(epochs=epochs, learning_rate=1e-3)
        fit = fit_ranked(split(ranked), str(start), tmp_path / name, how, 0, lambda *_: None)
        assert_same_weights(
            load_file(tmp_path / name / "model.safetensors"), load_file(model_of(folder, name) / "model.safetensors")
        )
        logged = {n: dict(log.history(f"reward_model/{n}")).get(step) for n in ("prompts", "pairs", "replayed", "loss")}
        assert logged == {"prompts": fit.num_prompts, "pairs": fit.num_pairs, "replayed": replayed, "loss": fit.loss}
        held = [dict(log.history(f"reward_model/held_out_{n}")).get(step) for n in ("pairs", "accuracy")]
        assert held == [fit.held_out_pairs, fit.held_out_accuracy]
        assert fit.num_pairs > 10
    assert drawn


@pytest.mark.slow
def test_a_stage_is_paid_by_the_fit_that_it_names_and_its_reference_is_the_policy_as_it_starts(undisturbed):
    folder, log, _ = undisturbed
    for step, name in ((4, "judge"), (6, "again"), (7, "again")):
        rows = rollout_rows(folder, step)
        scores = load_scorer(str(model_of(folder, name))).score([(row["prompt"], row["completion"]) for row in rows])
        assert [row["rewards"]["reward_model"] for row in rows] == pytest.approx(scores, abs=1e-5)
        assert [row["reward"] for row in rows] == [row["rewards"]["reward_model"] for row in rows]
    assert "reward_model" not in rollout_rows(folder, 2)[0]["rewards"]
    # Algorithm 1 of DeepSeekMath: the KL to the reference is 0 at a stage's first step (at 2 nothing was right before).
    assert [step for step, value in log.history("kl/reference") if value == 0] == [1, 2, 4, 6]
    assert [step for step, _ in log.history("kl/reference")] == [1, 2, 4, 6, 7]


@pytest.mark.slow
def test_fits_and_passes_of_reward_models_are_operations_of_training_and_no_steps_of_the_policy(undisturbed):
    folder, log, result = undisturbed
    assert (result.summary["rollouts"], result.summary["optimizer_steps"]) == (5 * 32, 5)
    codec, costs = tiny_codec(), flops.Costs.of(tiny_model(0))
    spent = {n: {0: 0.0, **dict(log.history(f"flops/{n}"))} for n in ("sampling", "scoring", "learning")}
    cost = {name: (so_far[3] - so_far[2], so_far[4] - so_far[3]) for name, so_far in spent.items()}
    # The fit at step 3: 3 passes with gradient (3 times a forward pass), and one over all pairs for the accuracies. A
    # row of n tokens takes n times the weights' operations and n^2 of attention; the score's head is left out.
    rows = [
        [len(codec.encode(one.prompt)) + len(codec.encode_completion(text)) for one in part for text in one.ranks]
        for part in split(ranked_of(folder, 1, 2))
    ]
    fitted, held = (sum(n * costs.forward.tokens + n * n * costs.forward.pairs for n in part) for part in rows)
    assert cost["sampling"][0] == 0
    assert cost["learning"][0] == pytest.approx(3 * 3 * fitted)
    assert cost["scoring"][0] == pytest.approx(fitted + held)
    # Step 4 scores all rollouts with the reference, and with the reward model.
    paid = rollout_rows(folder, 4)
    length = [len(codec.encode(row["prompt"])) + row["num_tokens"] for row in paid]
    judged = sum(n * costs.forward.tokens + n * n * costs.forward.pairs for n in length)
    prompts = [paid[start : start + 8] for start in range(0, 32, 8)]
    lengths = [(len(codec.encode(group[0]["prompt"])), [row["num_tokens"] for row in group]) for group in prompts]
    reference = flops.scored(costs, lengths, share=True)
    assert cost["scoring"][1] - judged == pytest.approx(reference, rel=1e-6)


@pytest.mark.slow
@pytest.mark.attack("A kill in every stage of a run")
def test_a_run_that_is_killed_in_its_fits_ends_as_undisturbed(spec, undisturbed, tmp_path, cache, record_property):
    record_property("tried", 5)

    def half_written() -> None:
        shutil.rmtree(model_of(tmp_path, "again"))
        shutil.copytree(model_of(tmp_path, "judge"), tmp_path / "checkpoints/.partial-reward-model-again")

    # Stopped in the first fit; killed when it has written its model and logged nothing; killed in the second fit, in
    # which its model's folder is half written; stopped after it; killed in the last stage.
    log = gone_on(spec, tmp_path, cache, 4, {"kill": 3}, {"kill": 5, "then": half_written}, 3, {"kill": 7})
    assert log.resumed_at == [-1, 2, 2, 4, 5, 5]
    check_same_run((tmp_path, log), undisturbed[:2])
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


@pytest.mark.slow
def test_a_run_whose_reward_model_was_altered_is_refused_and_a_fork_takes_it_along(spec, undisturbed, tmp_path, cache):
    folder, _, _ = undisturbed
    run = shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000007")
    (run / "events.jsonl").write_text("")
    assert fork_run(run, tmp_path / "fork", spec, spec)[0] == 5
    assert (model_of(tmp_path / "fork", "again") / "model.safetensors").exists()
    weights = model_of(run, "again") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    log = MemoryLog()
    log.holds = lambda step, num_events: True
    with pytest.raises(ValueError, match=r"reward-model-again' is torn or altered"):
        train(spec, run, log, cache=cache)
    shutil.rmtree(weights.parent)
    words = r"rewards.reward_model.path must be .*reward-model-again', which is no folder"
    with pytest.raises(ValueError, match=words):
        train(spec, run, log, cache=cache)


@pytest.mark.parametrize("parts", [None, ([], ["a prompt that is held out"])])
def test_rollouts_that_rank_nothing_to_fit_make_the_run_invalid(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(reward_fit, "read_ranked", bradley_terry.read_ranked)
    if parts is not None:
        monkeypatch.setattr(reward_fit, "split", lambda ranked: parts)
    result = train(a_run(*STAGES), tmp_path, MemoryLog(), cache=tmp_path)
    assert result.state == "invalid" and "stage 'judge' has nothing to rank" in (result.reason or "")


def test_fits_are_part_of_the_settings_and_are_counted_before_the_start(spec):
    assert parse_run(spec.model_dump(mode="json"), "run.json") == spec
    assert spec.num_rollouts == 5 * 32
    alone, fitted = a_run(STAGES[0]), a_run(*STAGES)
    assert passes(fitted) - passes(alone) == 8 * 3 * 3 * 2 * 8  # 3 epochs on 2 batches of 8
    (before, _), (after, _) = estimate_run(alone), estimate_run(fitted)
    assert before and after and after["rewards"] == 4 * _scorer_bytes("tiny") > before["rewards"] == 0
    whole = a_run(*STAGES, {"name": "b", "steps": 1, "rewards": JUDGED})
    assert estimate_run(whole)[0] == after  # the fit needs more than the stage that is paid its score
    (judged, _) = _estimate_stage(whole.staged()[-1])
    assert judged and judged["rewards"] == _scorer_bytes("tiny")
    less, more = (estimate_disk(run, "nothing") for run in (alone, fitted))
    assert less and more and more.running - less.running >= 4 * sum(p.numel() for p in tiny_model(0).parameters())
    check_countable(a_run(*STAGES, {"name": "b", "steps": 1, "rewards": JUDGED}, max_flops=1e9))


JUDGED = {"accuracy": 0, "reward_model": {"path": "stage:judge"}}
PAID = {"name": "paid", "steps": 1, "rewards": JUDGED}


@pytest.mark.parametrize(
    ("stages", "changes", "message"),
    [
        ([PAID, *STAGES], {}, r"stage 'paid': rewards must read an earlier .* \(there is none\), got 'judge'; add it"),
        ([*STAGES, {**PAID, "rewards": {"reward_model": {"path": "stage:jury"}}}], {}, r"\(judge\), got 'jury'"),
        (STAGES, {"rewards": JUDGED}, r"stage 'explore': rewards must read .*got 'judge'"),
        (STAGES, {"checkpoints": {"rollouts_every": 0}}, "stage 'judge' must have rollouts.*rollouts_every=0; set it"),
        ([*STAGES, {"name": "b", "kind": "reward_model"}], {}, "stage 'b' must have rollouts to fit"),
        ([{**STAGES[0], "steps": 3}, STAGES[1], {"name": "b", "steps": 2}, {"name": "c", "kind": "reward_model"}],
         {"checkpoints": {"rollouts_every": 9}}, "stage 'c' must have rollouts.*rollouts_every=9"),
        ([STAGES[0], {**STAGES[1], "steps": 2}], {}, "stage 'judge': steps belongs to stages of kind train"),
        ([STAGES[0], {**STAGES[1], "fit": {"replay": 2}}], {}, "replay.*got 2"),
        ([{**STAGES[0], "fit": {}}], {}, "unknown key 'fit'"),
        (STAGES, {"control": "random"}, "keep or rank correct answers need them, and control random replaces them"),
        (STAGES, {"algorithm": {"name": "grpo_self_consistency", "group_size": 4}}, "must not see gold"),
    ],
)  # fmt: skip
def test_fits_that_cannot_be_are_refused_with_the_rule(stages, changes, message):
    with pytest.raises(SpecError, match=message):
        a_run(*stages, **changes)


def test_a_run_without_stages_cannot_read_a_stage_and_a_fit_may_follow_a_warm_up_of_the_critic(tmp_path):
    alone = make_spec(**{**FEW, "rewards": JUDGED})
    with pytest.raises(ValueError, match=r"^rewards must read an earlier stage .*\(there is none\), got 'judge'"):
        check_runs([alone], tmp_path)
    value = {"algorithm": {"name": "ppo"}, "critic": {"warmup_steps": 1}}
    fitted = a_run({**STAGES[0], "steps": 2}, STAGES[1], {"name": "b", "steps": 2}, **value)
    assert [stage.spec.critic.warmup_steps for stage in fitted.staged()] == [1, 0, 1]
