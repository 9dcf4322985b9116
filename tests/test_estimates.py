"""Cost, time left and budget of a study, by hand; a dry run checks what a run checks and writes nothing."""

import json
from pathlib import Path

import datasets
import fake_trials
import pytest
from cohort.harness.checks.preflight import check_runs
from cohort.harness.cli.app import app
from cohort.harness.data import Prompt
from cohort.harness.ground.files import write_json
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.load import load_study
from cohort.harness.study.estimates import budget, cost, remaining_seconds
from cohort.harness.study.plan import Plan
from cohort.harness.study.runner import dry_run, run_study
from cohort.tasks.arithmetic import Arithmetic
from factories import status, trial
from fake_trials import a_study
from typer.testing import CliRunner

pytestmark = pytest.mark.usefixtures("plugins")


def test_cost_is_summed_over_all_trials_and_gpu_time_over_those_that_had_one():
    found = status(
        trial("a", "complete", seconds=100.0, generated_tokens=1000.0, on_gpu=True),
        trial("a", "invalid", seconds=20.0, generated_tokens=50.0),
        trial("b", "running", seconds=5.0, on_gpu=True),
        trial("b", "waiting"),
    )
    assert cost(found) == {"trial_seconds": 125.0, "gpu_seconds": 105.0, "generated_tokens": 1050.0}


def test_time_left_takes_each_arms_own_seconds_and_the_workers_alive():
    trials = [
        trial("a", "complete", seconds=100.0),
        trial("b", "complete", seconds=40.0),
        trial("a", "running", seconds=30.0, phase="loading"),  # 100 - 30 = 70 left
        trial("b", "running", seconds=10.0, phase="train", done=2, total=10),  # 10 s x 10 / 2 = 50 in all, 40 left
        trial("a", "waiting"),  # 100
        trial("b", "stopped", seconds=15.0),  # 40 - 15 = 25
        trial("c", "waiting"),  # no complete one of its arm: the mean of 100 and 40, 70
    ]
    for i, one in enumerate(trials):
        object.__setattr__(one, "seed", i)
    # (70 + 40 + 100 + 25 + 70) / 2 workers = 152.5; no single trial needs longer
    assert remaining_seconds(status(*trials)) == pytest.approx(152.5)
    # Two workers, 100 + 5 s left: the longer trial alone takes 100 s, not (100 + 5) / 2.
    long, short = trial("a", "running", "loading", seconds=0.0), trial("b", "running", "loading", seconds=35.0)
    assert remaining_seconds(status(*trials[:2], long, short)) == pytest.approx(100.0)


def test_time_left_is_unknown_where_nothing_runs_or_nothing_was_measured():
    assert remaining_seconds(status(trial("a", "complete", seconds=10.0), trial("a", "waiting"))) is None
    assert remaining_seconds(status(trial("a", "running", seconds=3.0, phase="loading"))) is None


def test_a_budget_counts_trials_steps_rollouts_and_tokens(tmp_path: Path):
    found = budget(Plan(a_study(), tmp_path), workers=3)
    # 2 arms x 2 seeds = 4 trials of 7 steps of 64 rollouts of at most 8 tokens
    assert (found["trials"], found["steps"], found["rollouts"]) == (4, 28, 1792)
    assert found["generated_tokens_bound"] == 14336
    assert found["seconds"] is None and found["measured"] == 0


def test_greedy_answers_are_budgeted(tmp_path: Path):
    run = {**a_study().model_dump()["run"], "algorithm": {"name": "remax", "group_size": 8}, "rollouts_per_step": 64}
    found = budget(Plan(a_study(run=run, factors={}), tmp_path), workers=3)
    # 1 arm x 2 seeds = 2 trials of 7 steps of 64 rollouts and 8 prompts
    assert (found["trials"], found["rollouts"]) == (2, 2 * 7 * 72)


def test_a_search_is_budgeted_with_all_the_arms_that_it_may_run(tmp_path: Path):
    space = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-3, "log": True}}
    changes = {"design": "search", "factors": {}, "search": {"space": space, "trials": 5}}
    found = budget(Plan(a_study(**changes), tmp_path), workers=3)
    # 5 arms x 2 seeds = 10 trials of 7 steps of 64 rollouts
    assert (found["trials"], found["steps"], found["rollouts"]) == (10, 70, 4480)
    assert [arm["arm"] for arm in found["arms"]] == ["search of 5 arms"]


def test_a_budgets_time_comes_from_complete_runs_of_the_same_shape(tmp_path: Path):
    plan = Plan(a_study(), tmp_path)
    for size, seconds in ((2, 14.0), (2, 28.0), (4, 7.0)):  # 2, 4 and 1 s a step
        folder = tmp_path / "studies" / "earlier" / "trials" / f"{size}-{seconds}"
        folder.mkdir(parents=True)
        spec = plan.spec((f"group_size={size}", 0)).model_dump(mode="json")
        write_json(folder / "run.json", {"spec": spec})
        write_json(folder / "result.json", {"state": "complete", "summary": {"seconds": seconds}})
    found = budget(plan, workers=2)
    # group_size 2: mean 3 s x 7 steps = 21 s, 4: 7 s; (21 + 7) x 2 seeds = 56 s of trials, 28 s with 2 workers
    assert [arm["seconds"] for arm in found["arms"]] == pytest.approx([21.0, 7.0])
    assert (found["trial_seconds"], found["seconds"], found["measured"]) == pytest.approx((56.0, 28.0, 3))


def test_a_dry_run_writes_nothing_and_refuses_what_a_run_refuses(tmp_path: Path):
    found = dry_run(a_study(), tmp_path / "new", workers=2, execute=fake_trials.EXECUTE)
    assert (found["trials"], found["not_checked"], found["workers"]) == (4, [], 2)
    assert not (tmp_path / "new").exists()
    empty = a_study(run=fake_trials.run_settings(task={"name": "fake", "empty_split": "test"}))
    with pytest.raises(SpecError, match="in its test split"):
        dry_run(empty, tmp_path / "new", workers=1, execute=fake_trials.EXECUTE)
    for metric in ("validation/acuracy", "accuracy"):  # a study may look at the validation split alone
        with pytest.raises(SpecError, match="did you mean 'validation/accuracy'"):
            dry_run(load_study("quickstart", [f"metric={metric}"]), tmp_path / "new", workers=1)


def test_a_dry_run_says_what_this_machine_cannot_check(tmp_path: Path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    study = load_study("quickstart", ["model=nobody/no-such-model-1B", "task.path=nobody/g8k", "task.name=gsm8k"])
    words = "\n".join(dry_run(study, tmp_path / "new", workers=1)["not_checked"])
    assert "model 'nobody/no-such-model-1B': not on this machine" in words
    assert "data of task 'gsm8k'" in words


@pytest.mark.parametrize("model", ["tiny", "nobody/no-such-model-1B"])
@pytest.mark.parametrize(
    ("there", "path", "message"),
    [
        ([], "nowhere", r"nowhere: no such file or folder; give an existing .*; '.*' has notes\.txt$"),
        (["train.jsonl"], "", r"there is no test split \(no .* called test; '.*' has notes\.txt, train\.jsonl\)"),
        (["test.jsonl"], "", r"there is no train split \(no .* called train; '.*' has notes\.txt, test\.jsonl\)"),
    ],
)
def test_a_dry_run_and_a_start_refuse_missing_data_and_say_what_is_there(tmp_path: Path, model, there, path, message):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("notes.txt", *there):
        (folder / name).write_text("".join(f'{{"question": "{i}?", "answer": "#### {i}"}}\n' for i in range(40)))
    study = load_study("quickstart", [f"task.path={folder / path}", "task.name=gsm8k", f"model={model}"])
    with pytest.raises(ValueError, match=message):
        dry_run(study, tmp_path / "new", workers=1)
    if model == "tiny":
        with pytest.raises(ValueError, match=message):
            run_study(study, tmp_path / "new", workers=1, command="")
    assert not (tmp_path / "new").exists()


def test_the_command_line_shows_a_dry_run_and_refuses_bad_options(tmp_path: Path):
    run = CliRunner().invoke
    shown = run(app, ["study", "run", "quickstart", "--dry-run", "--json", "--runs", str(tmp_path / "new")])
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert (document["trials"], document["steps"]) == (12, 720)
    assert all(arm["peak_bytes"] > 0 for arm in document["memory"].values())
    assert not (tmp_path / "new").exists()
    for options, message in (
        (["--workers", "-1"], "--workers must be a number of at least 1, or auto"),
        (["--launcher", "pbs"], "--launcher must be local, ray or slurm"),
        (["--launcher-set", "cpus=2"], "is for the workers of --launcher ray or slurm"),
        (["--storage", "mysql://me:s3cret@db/x"], "--storage must be a URL as postgresql://"),
    ):
        refused = run(app, ["study", "run", "quickstart", *options, "--runs", str(tmp_path / "new")])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.split())
        assert "s3cret" not in refused.output


def test_splits_that_share_a_problem_are_refused_by_its_id(tmp_path: Path):
    class Overlapping(Arithmetic):
        def prompts(self, split):
            return (
                [*super().prompts(split), Prompt("twice", "1+1=", "2")] if split != "train" else super().prompts(split)
            )

    spec = load_study("quickstart").design_arms()[0].spec.model_copy(update={"task": Overlapping()})
    with pytest.raises(SpecError, match=r"share no problem.*id 'twice' in validation and in test; correct Overlapping"):
        check_runs([spec], tmp_path / "new")
