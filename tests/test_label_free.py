"""Rewards without gold: the votes by hand, that gold cannot leak, collapse."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from cohort.harness import plugins
from cohort.harness.data import Group, Prompt, Rollout
from cohort.harness.rewards.accuracy import Accuracy
from cohort.harness.rewards.majority_vote import MajorityVote, winners
from cohort.harness.run.build import prepare
from cohort.harness.run.grading import grade, reward_metrics, score
from cohort.harness.run.step import train_step
from cohort.reports.analysis import analysed
from cohort.reports.findings import collapse_step, collapses
from cohort.reports.prose.notes import notes
from cohort.tasks.arithmetic import Arithmetic
from factories import make_spec
from fake_study import fake_study, with_trials
from fakes import MemoryLog, graded_group
from test_plugins import install


def test_a_vote_below_the_least_share_rewards_nobody_and_gives_no_label():
    reward = MajorityVote(min_share=0.5)
    assert reward.score(graded_group([0, 0, 1, None])) == [1.0, 1.0, -0.1, -0.1]  # 2 of 4
    assert reward.score(graded_group([0, 0, 1, 2, None])) == [-0.1] * 5  # 2 of 5
    assert MajorityVote(min_share=0.5, soft=True).score(graded_group([0, 0, 1, 2, None])) == [-0.1] * 5
    halves = graded_group([0, 0, 1, 2], correct=(True, True, False, False))  # only the first half has a clear winner
    assert MajorityVote(min_share=0.9, held_out=True).metrics(halves, [])["vote/accepted"] == 0.5
    refused = reward.metrics(graded_group([0, 0, 1, 2, None], [True, True, False, False, False]), [])
    assert refused["vote/accepted"] == 0.0
    assert math.isnan(refused["vote/label_accuracy"])
    assert refused["vote/false_positive_rate"] == 0.0
    assert reward.metrics(graded_group([0, 0], [True, True]), [])["vote/accepted"] == 1.0


def test_in_a_held_out_vote_each_half_is_judged_by_the_other_and_a_soft_one_pays_shares():
    # halves 0 0 1 and 1 1 0: the second votes for 1, the first for 0
    group = graded_group([0, 0, 1, 1, 1, 0], [True, True, False, False, False, True])
    reward = MajorityVote(held_out=True)
    assert reward.score(group) == [-0.1, -0.1, 1.0, -0.1, -0.1, 1.0]
    assert MajorityVote().score(group) == [1.0] * 6  # a tie of 3 and 3
    assert MajorityVote(soft=True).score(graded_group([0, 0, 1, None])) == pytest.approx([0.45, 0.45, 0.175, -0.1])
    # from -0.1 to 1: -0.1 + 1.1 * share; shares of the other half: 1/3 for 0, 2/3 for 1, then 2/3 for 0, 1/3 for 1
    soft = MajorityVote(held_out=True, soft=True).score(group)
    assert soft == pytest.approx([-0.1 + 1.1 * share / 3 for share in (1, 1, 2, 1, 1, 2)])
    metrics = reward.metrics(group, [])
    assert metrics["vote/label_accuracy"] == 0.5  # label 1 is wrong, label 0 is right
    assert metrics["vote/false_positive_rate"] == pytest.approx(1 / 3)  # of the three wrong ones the first
    assert MajorityVote(held_out=True).score(graded_group([0])) == [-0.1]  # nobody else votes


@pytest.mark.parametrize(("share", "voters", "least"), [(0.28, 25, 7), (0.14, 50, 7), (0.56, 50, 28), (0.5, 4, 2)])
def test_a_vote_that_has_just_its_least_share_wins(share, voters, least):
    # 0.28 * 25 is 7.000000000000001 in floating point
    others = list(range(1, voters + 1))
    assert winners([0] * least + others[: voters - least], share) == {0}
    assert winners([0] * (least - 1) + others[: voters - least + 1], share) == set()
    assert winners([0, 1, 1, 2]) == {1}  # no share is asked


def confident_run(tmp_path, rewards, **changes):
    algorithm = {"name": "grpo_self_consistency", "group_size": 4}
    spec = make_spec(algorithm, rewards=rewards, rollouts_per_step=16, steps=1, **changes)
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    return run, run.spec.task.prompts("train")


def test_a_run_whose_rewards_ask_for_no_distribution_pays_for_none(tmp_path):
    run, prompts = confident_run(tmp_path, {})
    run.learner.token_means = None  # pyright: ignore
    _, drawn = train_step(run, prompts, 0)
    assert all(group.token_means == {} for group in drawn.graded)


TEXTS = ("2+2=4#### 4", "2+2=5 so #### 5", "no answer", "4*3=12#### 12")


def graded_with(gold, problem):
    """The same four completions of a problem, graded by this gold answer."""
    rollouts = tuple(Rollout(text, (7, 8), (-0.5, -0.5), "stop") for text in TEXTS)
    graded = grade(Arithmetic(), [Group(replace(problem, gold=gold), (5,), rollouts)], max_tokens=8)[0]
    means = {"entropy": (0.1, 0.2, 0.3, 0.4), "uniform_kl": (3.0, 2.0, 1.0, 0.5), "collision": (0.9,) * 4}
    return replace(graded, token_means=means, scores=tuple(0.5 + c / 2 for c in graded.correct))


def assert_never_sees_gold(reward):
    """Its scores are equal whatever gold is, also after its metrics, which are for the reader, have seen gold; and it
    reads the gold of no problem."""
    assert not reward.sees_gold
    problem = Arithmetic().prompts("train")[0]
    worlds = [graded_with(gold, problem) for gold in (problem.gold, "4", "5", "12", "-1")]
    assert all(group.blind() == worlds[0].blind() for group in worlds)
    assert len({tuple(Accuracy().score(group)) for group in worlds}) == 4  # so that there is something to see
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prompt, "gold", property(lambda _: pytest.fail("it reads the gold answer of a problem")))
        scored = [reward.score(seen) for group in worlds for seen in (group.blind(), group)]
        for group in (world for world in worlds for _ in range(2)):
            found = score({"it": reward}, [group])
            scored.append(found[0].parts["it"])
            reward_metrics({"it": reward}, [group], found)
    assert all(values == scored[0] for values in scored), "its scores move with gold"


@pytest.mark.parametrize("name", [name for name in plugins.names("reward") if name != "reward_model"])  # of an extra
def test_a_reward_never_sees_gold_or_says_that_it_does_and_fails_loudly_without_it(name):
    reward = plugins.load("reward", name)()
    if not reward.sees_gold:
        return assert_never_sees_gold(reward)
    with pytest.raises(AssertionError):
        reward.score(graded_group([0, 1, None, 0]))


LEAKS = {
    "honest": "return [0.0 for _ in group.completions]",
    "peeks": "return [float(bool(group.correct) and group.correct[i]) for i in range(len(group.completions))]",
    "remembers": "return [float(seen[-1][i]) if seen else 0.0 for i in range(len(group.completions))]",
    "looks_up": """
        from cohort.tasks.arithmetic import Arithmetic
        gold = next((p.gold for p in Arithmetic().prompts("train") if p.id == group.prompt_id), None)
        return [float(answer == gold) for answer in group.answers]
""",
}
PACKAGE = """
from cohort.harness.interfaces import Reward

seen = []

class Planted(Reward):
    def score(self, group):
        {body}

    def metrics(self, group, scores):
        seen.append(group.correct)
        return {{}}
"""


@pytest.mark.attack("A reward that looks at gold")
def test_the_contract_of_rewards_finds_those_of_a_package_and_fails_the_ones_that_look_at_gold(
    tmp_path, monkeypatch, record_property
):
    for name, body in LEAKS.items():
        install(tmp_path, monkeypatch, name, PACKAGE.format(body=body.strip()), "Planted", kind="reward")
    for name in LEAKS:
        assert name in plugins.names("reward")  # over which the contract tests are parametrised
        with nullcontext() if name == "honest" else pytest.raises((AssertionError, pytest.fail.Exception)):
            assert_never_sees_gold(plugins.load("reward", name)())
    record_property("tried", len(LEAKS) - 1)


def series(*values):
    return list(enumerate(values, start=1))


def test_a_series_has_collapsed_at_the_first_step_from_which_it_stays_below_half_of_its_best():
    assert collapse_step(series(0.4, 0.8, 0.5, 0.39, 0.3)) == 4
    assert collapse_step(series(0.8, 0.3, 0.5, 0.3)) == 4  # it came back in between
    assert collapse_step(series(0.8, 0.3, 0.3, 0.45)) is None
    assert collapse_step(series(0.2, 0.4, 0.8)) is None
    assert collapse_step(series(0.8, math.nan, 0.3, math.nan)) == 3
    assert collapse_step([]) is None
    # means of two: 0.8, 0.4, 0.2; the dip to 0 alone is none
    assert collapse_step(series(0.8, 0.8, 0.0, 0.4), window=2) == 4
    assert collapse_step(series(0.8, 0.8, 0.0, 0.8), window=2) is None


def test_a_report_says_in_how_many_seeds_labels_and_policy_collapsed_and_when():
    study = fake_study()
    falls = [[(0, 0.8), (10, 0.8), (20 + 10 * seed, 0.1)] for seed in range(3)]
    trials = [
        replace(trial, history={**trial.history, "validation/accuracy": falls.pop(0)})
        if trial.arm == "grpo_self_consistency"
        else trial
        for trial in study.trials
    ]
    analysis = analysed(replace(study, trials=trials))
    (found,) = collapses(analysis)
    assert (found.arm, found.what, found.steps, found.num_seeds) == ("grpo_self_consistency", "policy", (20, 30, 40), 3)
    text = dict(notes(analysis))["Collapse"]
    assert "'grpo_self_consistency': policy in 3 of 3 seeds, at step 20, 30 and 40." in text
    assert dict(notes(analysed(study)))["Collapse"].endswith("No arm collapsed.")
    # labels are means of ten steps: 1 at step 9, and 0.4 at step 15
    labels = {"train/majority_accuracy": list(enumerate([1.0] * 10 + [0.0] * 7))}
    assert {one.steps for one in collapses(analysed(with_trials(study, lambda _: {"history": labels})))} == {(15,) * 3}
