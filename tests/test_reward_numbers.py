"""The numbers of every reward, what a run is paid in all, and where in a completion it is earned."""

import math
import re
import warnings

import numpy as np
import pytest
from cohort.harness.data import Group, InvalidRun, Prompt, Rollout, Score
from cohort.harness.interfaces import Reward, StepReward
from cohort.harness.policy.tiny import tiny_tokenizer
from cohort.harness.rewards.accuracy import Accuracy
from cohort.harness.rewards.format import Format
from cohort.harness.rewards.majority_vote import MajorityVote
from cohort.harness.rewards.overlong import Overlong
from cohort.harness.rewards.repetition import Repetition
from cohort.harness.run.grading import MOST_PAID, reward_metrics, score
from cohort.harness.run.loop import train
from cohort.harness.run.rollout import Rollouts, collate, rewarded, token_at
from factories import FEW, make_spec
from fakes import MemoryLog, graded_group


def test_votes_are_counted_over_classes_and_every_tied_class_wins():
    reward = MajorityVote()
    assert reward.score(graded_group([0, 0, 1, None])) == [1.0, 1.0, -0.1, -0.1]
    assert reward.score(graded_group([0, 0, 1, 1, 2])) == [1.0, 1.0, 1.0, 1.0, -0.1]
    assert reward.score(graded_group([None, None, None, 3])) == [-0.1, -0.1, -0.1, 1.0]
    assert reward.score(graded_group([None, None])) == [-0.1, -0.1]  # no answer never wins
    right, wrong = ([0, 0, 1, 2], [None, None, 0]), ([0, 1, 1, None], [None] * 4)
    for classes, expected in (*((c, 1.0) for c in right), ([0, 0, 1, 1], 0.5), *((c, 0.0) for c in wrong)):
        assert graded_group(classes, [c == 0 for c in classes]).majority_correct == expected


def test_the_vote_reports_its_label_its_margin_and_what_it_wrongly_rewards():
    # class 1 wins with 3 of 6 votes against 2 for class 0, which is right; one completion has no answer
    group = graded_group([0, 0, 1, 1, 1, None], [True, True, False, False, False, False])
    metrics = MajorityVote().metrics(group, [])
    # 4 are wrong, 3 of them in the winning class
    assert metrics == {
        "vote/label_accuracy": 0.0, "vote/margin": pytest.approx(1 / 6), "vote/answered": pytest.approx(5 / 6),
        "vote/false_positive_rate": 0.75,
    }  # fmt: skip
    tie = MajorityVote().metrics(graded_group([0, 1], [True, False]), [])
    assert (tie["vote/label_accuracy"], tie["vote/margin"], tie["vote/false_positive_rate"]) == (0.5, 0.0, 1.0)
    for classes, margin in (([0, 0], 1.0), ([0, None], 0.5), ([None, None], 0.0)):  # without a second class
        alone = MajorityVote().metrics(graded_group(classes, [False, False]), [])
        assert alone["vote/margin"] == margin
    silent = MajorityVote().metrics(graded_group([None, None], [False, False]), [])
    assert math.isnan(silent["vote/label_accuracy"])
    assert silent["vote/false_positive_rate"] == 0.0
    assert math.isnan(MajorityVote().metrics(graded_group([0, 0], [True, True]), [])["vote/false_positive_rate"])


def test_the_overlong_penalty_grows_over_the_buffer_and_repetition_counts_ngrams_that_occurred_before():
    # limit 100, buffer 20: nothing up to 80, then -(n - 80) / 20; one that was cut before the limit too
    group = graded_group([0] * 5, max_tokens=100, num_tokens=(1, 80, 90, 100, 85), truncated=(False,) * 4 + (True,))
    assert Overlong().score(group) == pytest.approx([0, 0, -0.5, -1, -1])
    # a b a b a: 2-grams ab ba ab ba, of which 2 of 4 are repeats
    group = graded_group([0] * 4, completions=("a b a b a", "a b c d", "a", ""))
    assert Repetition(ngram=2).score(group) == [-0.5, 0, 0, 0]


def test_a_verifier_that_errs_does_so_at_its_rates_and_alike_for_equal_groups():
    correct = tuple(i % 4 == 0 for i in range(8))
    groups = [
        graded_group([0] * 8, correct, prompt_id=f"p{n}", completions=tuple(f"answer {n} {i}" for i in range(8)))
        for n in range(2000)
    ]
    reward = Accuracy(false_positive=0.3, false_negative=0.1)
    paid = [reward.score(group) for group in groups]
    assert paid == [reward.score(group) for group in groups]
    # 4,000 right and 12,000 wrong completions: standard errors 0.0047 and 0.0042
    assert np.mean([row[i] for row in paid for i in (0, 4)]) == pytest.approx(0.9, abs=0.02)
    assert np.mean([row[i] for row in paid for i in (1, 2, 3, 5, 6, 7)]) == pytest.approx(0.3, abs=0.02)
    # errors of completions are independent: two wrong ones of a group are both paid in 0.3^2
    assert np.mean([row[1] * row[2] for row in paid]) == pytest.approx(0.09, abs=0.02)
    found = reward_metrics({"accuracy": reward}, groups, score({"accuracy": reward}, groups))
    assert found["verifier/true_positive_rate"] == pytest.approx(0.9, abs=0.02)
    assert found["verifier/false_positive_rate"] == pytest.approx(0.3, abs=0.02)


def test_a_corrected_verifier_pays_what_a_perfect_one_would_on_average_and_one_that_always_errs_is_inverted():
    # FPR 0.3, FNR 0.1: 1 counts (1 - 0.3) / 0.6, 0 counts -0.3 / 0.6; 0.9 * 7/6 - 0.1 / 2 = 1, 0.3 * 7/6 - 0.7 / 2 = 0
    group = graded_group([0] * 8, (True, False) * 4, completions=tuple(map(str, range(8))))
    noisy, corrected = (Accuracy(false_positive=0.3, false_negative=0.1, corrected=c) for c in (False, True))
    scores = noisy.score(group)
    assert 0 < sum(scores) < 8
    assert corrected.score(group) == pytest.approx([7 / 6 if s else -0.5 for s in scores], abs=1e-12)
    assert corrected.metrics(group, corrected.score(group)) == noisy.metrics(group, scores)
    assert Accuracy(corrected=True).score(group) == [1.0, 0.0] * 4
    group = graded_group([0, 1, 2], (True, False, False))
    assert Accuracy().score(group) == [1.0, 0.0, 0.0] and Accuracy().metrics(group, [1.0, 0.0, 0.0]) == {}
    inverted = Accuracy(false_positive=1.0, false_negative=1.0)
    assert inverted.score(group) == [0.0, 1.0, 1.0]
    assert Accuracy(false_positive=1.0).score(group) == [1.0] * 3
    assert Accuracy(false_negative=1.0).score(group) == [0.0] * 3
    rates = inverted.metrics(graded_group([0, 0], (True, True)), [0.0, 0.0])
    assert rates["verifier/true_positive_rate"] == 0.0 and math.isnan(rates["verifier/false_positive_rate"])


def test_a_total_is_the_weighted_sum_and_metrics_average_over_the_groups_in_which_they_are_defined():
    group = graded_group([0, None], [True, False], format_scores=(0.5, 0.0))
    rewards = {"accuracy": Accuracy(weight=2.0), "format": Format(weight=0.1), "majority_vote": MajorityVote(weight=0)}
    (scores,) = score(rewards, [group])
    assert scores.totals == [pytest.approx(2.05), 0.0]
    assert scores.outcomes == scores.totals
    assert scores.steps is None
    assert scores.parts["majority_vote"] == [1.0, -0.1]
    metrics = reward_metrics(rewards, [group], [scores])
    assert metrics["reward/accuracy"] == 0.5
    assert metrics["reward/format"] == 0.25
    assert metrics["reward/majority_vote"] == pytest.approx(0.45)
    assert metrics["vote/label_accuracy"] == 1.0
    assert score(rewards, [group], [[7.0, 8.0]]) == [Score([7.0, 8.0], [7.0, 8.0], None, scores.parts)]  # a control
    groups = [graded_group([None], [False]), graded_group([0], [True])]
    rewards = {"majority_vote": MajorityVote()}
    metrics = reward_metrics(rewards, groups, score(rewards, groups))
    assert metrics["vote/label_accuracy"] == 1.0  # the group without votes has no label
    assert metrics["vote/answered"] == 0.5
    with warnings.catch_warnings(action="error"):
        assert math.isnan(reward_metrics(rewards, groups[:1], score(rewards, groups[:1]))["vote/label_accuracy"])


def rollout(text: str) -> Rollout:
    ids = (*tiny_tokenizer()(text, add_special_tokens=False)["input_ids"], tiny_tokenizer().eos_token_id)
    return Rollout(text, ids, (0.0,) * len(ids), "stop")


class Ends(StepReward):
    """A right step and a wrong one in the first completion, none in the second."""

    def steps(self, group):
        return [[(5, 1.0), (12, 0.0)], []]


def test_step_rewards_are_earned_by_the_token_that_ends_the_step_and_the_outcome_by_the_last():
    def paid(scores: list[Score]) -> list[dict[int, float]]:
        earned = rewarded(batch, Rollouts(sampled, scores=scores), tiny_tokenizer())
        assert earned.step_rewards_BT is not None and earned.step_ends_BT is not None  # after a prompt of one token
        return [
            {t - 1: values[t].item() for t in ends.nonzero()[:, 0].tolist()}
            for values, ends in zip(earned.step_rewards_BT, earned.step_ends_BT, strict=True)
        ]

    texts = ("4+4=8;8+5=14", "no step")
    group = graded_group([0, None], [True, False], completions=texts)
    sampled = [Group(Prompt("p", "p?", "8"), (5,), tuple(rollout(text) for text in texts))]
    batch = collate(sampled)
    both = score({"accuracy": Accuracy(), "ends": Ends(weight=0.5)}, [group])
    # one token per character, so the character before the end; the last token is the end of the sequence
    assert paid(both) == [{4: 0.5, 11: 0.0, 12: 1.0}, {7: 0.0}]
    assert both[0].totals == [1.5, 0.0]
    alone = score({"accuracy": Accuracy(weight=0), "ends": Ends()}, [group])
    assert paid(alone) == [{4: 1.0, 11: 0.0}, {}]
    outcome = score({"accuracy": Accuracy()}, [group])
    found = rewarded(batch, Rollouts(sampled, scores=outcome), tiny_tokenizer())
    assert found.step_rewards_BT is None and found.reward_parts_BK is None


def test_several_rewards_reach_the_batch_apart_and_before_their_weights():
    group = graded_group([0, None], correct=(True, False))  # the format is that of an answer
    rollouts = tuple(Rollout("1", (10,), (0.0,), end) for end in ("stop", "length"))
    sampled = [Group(Prompt("p", "p?", "8"), (5,), rollouts)]
    found = score({"accuracy": Accuracy(), "format": Format(weight=0.5), "seen": Format(weight=0)}, [group])
    batch = rewarded(collate(sampled), Rollouts(sampled, scores=found), tiny_tokenizer())
    assert batch.reward_parts_BK.tolist() == [[1, 1], [0, 0]] and batch.reward_weights_BK.tolist() == [[1, 0.5]] * 2
    assert batch.rewards_B.tolist() == [1.5, 0] and batch.truncated_B.tolist() == [False, True]


class PairTokenizer:
    def decode(self, ids, skip_special_tokens):
        return "".join(f"{i:02d}" for i in ids if i or not skip_special_tokens)


def test_a_token_of_several_characters_earns_the_sum_of_what_ends_inside_it():
    word = Rollout("102030", (10, 20, 30), (0.0,) * 3, "stop")
    places = [token_at(word, end, PairTokenizer()) for end in range(1, 8)]  # pyright: ignore
    assert places == [0, 0, 1, 1, 2, 2, 2]
    special = Rollout("1020", (10, 0, 20), (0.0,) * 3, "stop")
    assert token_at(special, 3, PairTokenizer()) == 2  # pyright: ignore
    # characters 1 and 2 end in token 0: 1 + 2; character 5 in token 2, which is the last and has the outcome too: 4 + 8
    group = Group(Prompt("p", "p?", "8"), (5,), (word,))
    both = Score([15.0], [8.0], [[(1, 1.0), (2, 2.0), (5, 4.0)]], {})
    batch = rewarded(collate([group]), Rollouts([group], scores=[both]), PairTokenizer())  # pyright: ignore
    assert batch.step_rewards_BT is not None and batch.step_rewards_BT.tolist() == [[0, 3, 0, 12]]


def test_a_run_is_paid_by_its_algorithms_reward_and_by_what_the_spec_adds():
    for algorithm, own in (("grpo", "accuracy"), ("grpo_self_consistency", "majority_vote")):
        assert {n: r.weight for n, r in make_spec(algorithm).rewards.items()} == {own: 1.0}
    rewards = make_spec(rewards={"format": 0.2, "overlong": {"buffer_fraction": 0.5}, "accuracy": 0}).rewards
    assert {n: r.weight for n, r in rewards.items()} == {"accuracy": 0.0, "format": 0.2, "overlong": 0.5}
    assert rewards["overlong"].model_dump()["buffer_fraction"] == 0.5


BAD_NUMBERS = (math.nan, math.inf, -math.inf, 1e39, 10**400, "1.0", None, np.float16(1), 1j, [1.0])


@pytest.mark.attack("A reward that gives no finite number")
@pytest.mark.parametrize(
    "values",
    [[1.0, 0.0, 0.5], [0.0] * 5, {0: 1.0}, "1234", None, iter([]), *([0.0, 1.0, 0.0, bad] for bad in BAD_NUMBERS)],
    ids=lambda values: repr(values).split(" at ")[0][:30],  # the same in each process
)
def test_a_reward_that_does_not_pay_each_completion_a_finite_number_is_named_with_step_and_problem(values):
    class Half(Reward):
        def score(self, group):
            return values

    with pytest.raises(InvalidRun, match=r"^reward 'half' must give a list .* for problem p in step 7; ") as error:
        score({"half": Half(weight=0.0)}, [graded_group([0, 0, 1, 1], [True, True, False, False])], step=7)
    assert str(error.value).endswith(f"correct Half in {__file__}")


@pytest.mark.attack("A reward that gives no finite number")
@pytest.mark.parametrize(
    "rows",
    [None, [[]], [[], [], []], [[], [1.0]], [[], None], [[], [("1", 1.0)]], [[], [(-5, 1.0)]], [[], [(0.5, 1.0)]],
     *([[], [(0, bad)]] for bad in BAD_NUMBERS)],
    ids=lambda rows: f"{rows!r:.30}",
)  # fmt: skip
def test_a_reward_of_steps_that_are_no_places_with_finite_numbers_is_named_with_step_and_problem(rows):
    class Steps(StepReward):
        def steps(self, group):
            return rows

    with pytest.raises(InvalidRun, match=r"^reward 'dense' must give a list .* for problem p in step 7; "):
        score({"dense": Steps()}, [graded_group([0, 1], [True, False])], step=7)


@pytest.mark.parametrize(
    ("values", "told"),
    [([1.0, 0.5], "2 values"), ("12", "'12'"), ([math.nan], "nan"), (["1.0"], "'1.0'"),
     ([10**5000], "a number of too many digits")],
)  # fmt: skip
def test_the_value_that_a_reward_must_not_give_is_told(values, told):
    class Odd(Reward):
        def score(self, group):
            return values

    with pytest.raises(InvalidRun, match=rf"for steps, got {told} for problem p in step 0; correct Odd in "):
        score({"odd": Odd()}, [graded_group([0], [True])])


def test_dense_rewards_are_added_by_their_weights_and_one_without_weight_is_only_measured():
    class Steps(StepReward):
        value: float
        end: int = 2

        def steps(self, group):
            assert group.correct is None  # it does not see gold
            return [[(self.end, self.value)], []]

    # a step may end before the first character
    rewards = {"a": Steps(value=1, weight=2.0), "b": Steps(value=3, end=0), "c": Steps(value=5, weight=0)}
    (found,) = score(rewards, [graded_group([0, 1], [True, False])])
    assert found.steps == [[(2, 2.0), (0, 3.0)], []] and found.totals == [5.0, 0] and found.outcomes is None
    assert found.parts == {"a": [1, 0], "b": [3, 0], "c": [5, 0]}


@pytest.mark.attack("A reward that gives no finite number")
def test_a_run_with_a_reward_that_is_not_a_number_is_invalid(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(Accuracy, "score", lambda self, group: [math.nan] + [0.0] * (len(group.completions) - 1))
    result = train(make_spec(**{**FEW, "cold_start": {"steps": 0}}), tmp_path, MemoryLog(), cache=cache)
    assert result.state == "invalid"
    assert re.search("reward 'accuracy' .* got nan for problem [0-9a-f]{16} in step 1; ", str(result.reason))


@pytest.mark.parametrize(("weight", "value"), [(0.0, 1.01 * MOST_PAID), (10.0, 0.11 * MOST_PAID), (1.0, MOST_PAID)])
def test_the_largest_value_is_paid_and_one_whose_square_may_overflow_float32_refused(weight, value):
    class Large(Reward):
        def score(self, group):
            return [value, -value]

    rewards, groups = {"large": Large(weight=weight)}, [graded_group([0, 1], [True, False])]
    if value == MOST_PAID:
        assert score(rewards, groups)[0].totals == [1e12, -1e12]
        return
    with pytest.raises(InvalidRun, match="reward 'large' must give"):
        score(rewards, groups)
