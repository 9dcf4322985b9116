"""Rewards for confidence: their numbers by hand, and by the model's own forward pass."""

import math

import pytest
import torch
from cohort.harness.extras.confidence.rewards.answer_entropy import AnswerEntropy
from cohort.harness.run.rollout import Rollouts, earned, generate
from fakes import graded_group
from test_label_free import confident_run


def test_the_entropy_of_the_answers_is_paid_in_parts_whose_mean_is_minus_the_entropy():
    # shares 1/2, 1/2, 1/4; no answer is a class of its own, 1/4: H = (2 ln 2 + 2 ln 4) / 4 = 1.5 ln 2
    group = graded_group([0, 0, 1, None], [True, True, False, False])
    scores = AnswerEntropy().score(group)
    assert scores == pytest.approx([-math.log(2), -math.log(2), -math.log(4), -math.log(4)])
    assert sum(scores) / 4 == pytest.approx(-1.5 * math.log(2))
    assert AnswerEntropy().metrics(group, scores) == {"vote/entropy": pytest.approx(1.5 * math.log(2))}
    assert AnswerEntropy(min_entropy=1.1).score(group) == [0.0] * 4  # 1.5 ln 2 = 1.04
    assert AnswerEntropy(max_entropy=1.0).score(group) == [0.0] * 4
    assert AnswerEntropy(min_entropy=1.0, max_entropy=1.1).score(group) == scores
    assert AnswerEntropy().score(graded_group([0, 0])) == [0.0, 0.0]
    unpaid = AnswerEntropy(min_entropy=1.1)  # whose metric is still the entropy
    assert unpaid.metrics(group, unpaid.score(group)) == {"vote/entropy": pytest.approx(1.5 * math.log(2))}


@pytest.mark.parametrize("size", [2, 6, 7, 11])
def test_a_bound_of_the_entropy_includes_groups_that_reach_it_exactly(size):
    # all answers differ, H = ln G: rounding puts it below ln 6, above ln 7 and ln 11
    group, paid = graded_group(list(range(size))), [-math.log(size)] * size
    for bound in (AnswerEntropy(min_entropy=math.log(size)), AnswerEntropy(max_entropy=math.log(size))):
        assert bound.score(group) == pytest.approx(paid)
    assert AnswerEntropy(min_entropy=math.log(size) + 1e-6).score(group) == [0.0] * size
    assert AnswerEntropy(max_entropy=math.log(size) - 1e-6).score(group) == [0.0] * size


@pytest.mark.parametrize("changes", [{}, {"sampling": {"temperature": 0.7}}, {"engine": "scripted"}])
def test_a_completion_has_the_means_over_its_tokens_that_the_models_own_forward_pass_gives(tmp_path, changes):
    run, prompts = confident_run(tmp_path, {"self_certainty": 1, "token_entropy": 1, "majority_vote": 0}, **changes)
    drawn = earned(run, prompts, generate(run, prompts, 0, Rollouts()), 0)
    temperature = run.spec.sampling.temperature
    for group, graded, paid in zip(drawn.groups, drawn.graded, drawn.scores, strict=True):
        rows = [paid.parts[name] for name in ("self_certainty", "token_entropy")]
        for i, rollout in enumerate(group.rollouts):
            tokens = torch.tensor([*group.prompt_token_ids, *rollout.token_ids])
            with torch.no_grad():
                logits = run.learner.policy(tokens[None]).logits[0, len(group.prompt_token_ids) - 1 : -1]
            p_TV = torch.softmax(logits.double() / temperature, dim=-1)
            uniform = 1 / p_TV.shape[-1]
            certainty = (uniform * (uniform / p_TV).log()).sum(-1).mean()
            entropy = -(p_TV * p_TV.log()).sum(-1).mean()
            assert rows[0][i] == graded.token_means["uniform_kl"][i] == pytest.approx(float(certainty), abs=1e-4)
            assert rows[1][i] == -graded.token_means["entropy"][i] == pytest.approx(-float(entropy), abs=1e-4)
