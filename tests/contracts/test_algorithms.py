"""What every algorithm must hold to, for each one found."""

import math
from pathlib import Path

import pytest
import torch
from cohort.harness import plugins
from cohort.harness.contracts import plugins as contract
from cohort.harness.contracts.plugins import GROUP_SIZE, PAID, batch_of, make_batch, weighted, without_divergence
from cohort.harness.data import PolicyOutput


@pytest.fixture(params=plugins.names("algorithm"))
def name(request):
    return request.param


@pytest.fixture
def algorithm(name):
    return plugins.load("algorithm", name)(name=name, group_size=GROUP_SIZE)


def for_algorithm(algorithm, batch):
    """The batch as the learner would hand it over: reference log-probs only where they are needed."""
    return batch if algorithm.needs_reference else batch.replace(ref_logprobs_BT=None)


def policy_gradient(algorithm, batch, logprobs):
    """[B, T]: gradient of the loss by the log-probs."""
    leaf = logprobs.clone().requires_grad_()
    algorithm.loss(batch, PolicyOutput(leaf, torch.zeros_like(leaf), batch.values_BT))[0].backward()
    assert leaf.grad is not None
    return leaf.grad


def test_the_name_is_the_file(name, algorithm):
    assert algorithm.name == name


@pytest.mark.parametrize("check", contract.of_kind("algorithm"), ids=lambda check: check.test.__name__)
def test_an_algorithm_keeps_the_contract(algorithm, check):
    check.test(algorithm)


CLIP = {"clip_epsilon": 0.2, "clip_epsilon_high": None, "ratio_bound": None}
LOSS_KL = {"kl_beta": 0.0, "kl_estimator": "k3", "kl_importance_weighted": False}
STANDARDISED = {**LOSS_KL, "std_floor": 1e-4}
GRPO = {
    **CLIP,
    **STANDARDISED,
    "kl_beta": 0.04,
    "kl_in": "loss",
    "std_over": "group",
    "positive_weight": 1.0,
    "loss_denominator": None,
}
SUMMED = {**LOSS_KL, "loss_denominator": 128.0}
DEFAULTS = {  # as the papers or the docstrings give them
    "grpo": GRPO, "grpo_self_consistency": GRPO, "rgra": {**STANDARDISED, "kl_beta": 0.04},
    **{name: {**CLIP, **SUMMED} for name in ("maxrl", "opo", "optimal_token_baseline", "pass_at_k", "remax")},
    "dr_grpo": {**CLIP, **SUMMED, "kl_in": "loss"},
    "dapo": {**CLIP, **STANDARDISED, "clip_epsilon_high": 0.28}, "lite_ppo": {**CLIP, **STANDARDISED},
    "gspo": {**CLIP, **STANDARDISED, "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4},
    "cispo": {**STANDARDISED, "clip_epsilon_high": 4.0}, "gmpo": {**STANDARDISED, "clip_log_ratio": 0.4},
    "sapo": {**STANDARDISED, "tau_positive": 1.0, "tau_negative": 1.05},
    "kl_cov": {**STANDARDISED, "covariance_share": 0.002, "penalty": 1.0},
    "dppo": {**SUMMED, "divergence": "tv", "divergence_bound": 0.15, "weight_max": None},
    "ppo": {**CLIP, "kl_beta": 0.01, "gamma": 1.0, "gae_lambda": 1.0, "gae_lambda_critic": None,
            "length_adaptive_alpha": None, "whiten_advantages": True, "value_clip": 0.2, "critic": "separate",
            "value_loss_weight": 1.0},
    "reinforce_plus_plus": {**CLIP, "kl_beta": 0.01, "gamma": 1.0, "baseline": "none"},
    "rloo": {"clip_epsilon": None, "kl_beta": 0.01, "baseline": "group"}, "online_dpo": {"kl_beta": 0.1},
    "distill": {**CLIP, "kl_beta": 1.0}, "gdpo": {**CLIP, **STANDARDISED},
    "luspo": {**CLIP, **STANDARDISED, "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4, "loss_denominator": 1.0},
    "vespo": {**STANDARDISED, "k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
}  # fmt: skip


def test_the_defaults_are_those_of_the_papers_or_of_the_docstrings(name):
    defaults = plugins.load("algorithm", name)().model_dump()
    assert defaults == {**DEFAULTS[name], "name": name, "group_size": 8, "entropy_bonus": 0.0}


def test_the_facts_of_a_class_are_those_of_its_objective(name):
    cls = plugins.load("algorithm", name)
    assert cls.min_group_size == (1 if name in ("distill", "ppo", "reinforce_plus_plus", "remax") else 2)
    assert cls.needs_critic == (name == "ppo") and cls.needs_greedy == (name == "remax")
    assert cls.sees_gold == (name not in ("distill", "grpo_self_consistency"))
    assert cls.linear_in_advantages == (name != "online_dpo") and cls.learns_from_rewards == (name != "distill")
    assert cls.needs_collision == (name == "optimal_token_baseline")
    reads_old = ("distill", "kl_cov", "online_dpo", "optimal_token_baseline", "ppo", "reinforce_plus_plus", "rloo")
    assert cls().needs_old_logprobs == (name in reads_old)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1])
def test_equal_rewards_give_no_policy_gradient_without_a_divergence_term(algorithm, value):
    if not algorithm.learns_from_rewards:
        pytest.skip("nothing but a divergence")
    plain = without_divergence(algorithm)
    one_group = make_batch([value] * 12).replace(group_size=12)  # the float32 mean of 12 times -0.1 is not -0.1
    batch = for_algorithm(plain, one_group.replace(values_BT=torch.zeros(12, 7)))
    batch = weighted(plain, plain.advantages(batch))
    gradient = policy_gradient(plain, batch, batch.sampler_logprobs_BT)
    exactly = plain.min_group_size > 1  # a baseline of the group; whitening the batch leaves its rounding
    assert gradient.abs().max() <= (0 if exactly else 1e-6)


def test_a_large_divergence_weight_outweighs_the_reward(algorithm):
    # Two answers to one prompt. The better one is already 2 nats likelier than in the reference, the other 2 nats less
    # likely: with a large kl_beta the step goes back to the reference, or (in the margin of a pair) no further.
    heavy = algorithm.model_copy(update={"kl_beta": 100.0})
    old = torch.tensor([[0.0, -1.0, -1.0]] * 2)
    reference = old - torch.tensor([[0.0, 1, 1], [0, -1, -1]])
    greedy = {"greedy_rewards_B": torch.zeros(2), "values_BT": torch.zeros(2, 3), "collision_BT": (2 * old).exp()}
    batch = batch_of([[0, 1, 1]] * 2, [1.0, 0.0], 2, old_logprobs_BT=old, ref_logprobs_BT=reference, **greedy)
    gradient = policy_gradient(heavy, weighted(heavy, heavy.advantages(batch)), old).sum(dim=1)
    if "implied" in heavy.objective["kl"]:
        assert gradient.abs().max() < 1e-6
    else:
        assert gradient[0] > 0 > gradient[1]  # descent makes the first less likely


# What the strings of `objective` claim, as formulas that the loss must follow.

EFFECTIVE_WEIGHTS = {
    "mean over a row's tokens, then over rows": lambda a, mask: mask / mask.sum(1, keepdim=True).clamp(1) / len(mask),
    "mean over all tokens": lambda a, mask: mask / mask.sum(),
    "sum over all tokens / (rows * loss_denominator)": lambda a, mask: mask / (len(mask) * a.loss_denominator),
    "sum over a row's tokens, then mean over rows": lambda a, mask: mask / len(mask),
    # an advantage of 1/2 on every row, which is the push of a pair whose margin is 0
    "sum over a row's tokens, one pair per group, mean over groups": lambda a, mask: (
        a.kl_beta * GROUP_SIZE / len(mask) * mask
    ),
}


def test_an_algorithm_is_a_file_that_fits_on_two_screens():
    folder = Path(__file__).resolve().parents[2] / "algorithms"
    lines = {file.name: len(file.read_text().splitlines()) for file in folder.glob("[!_]*.py")}
    assert {name: count for name, count in lines.items() if count > 80} == {}


def test_tokens_weigh_in_the_loss_as_the_objective_says(algorithm):
    plain = without_divergence(algorithm)
    batch = make_batch([0.0] * 12)
    mask, old = batch.completion_mask_BT, batch.old_logprobs_BT
    half = 0.5 * mask
    batch = weighted(plain, for_algorithm(plain, batch).replace(advantages_BT=half, returns_BT=torch.zeros(12, 7)))
    assert batch.loss_weight_BT.sum().item() in (pytest.approx(1), pytest.approx(11 / 12))  # one row has no tokens
    told = plain.objective["aggregation"].replace(" (their sum / loss_denominator, if set)", "")
    expected = EFFECTIVE_WEIGHTS[told](plain, mask.double())
    assert torch.allclose(-policy_gradient(plain, batch, old).double(), 0.5 * expected, atol=1e-6, rtol=0)


def test_a_token_that_moved_far_is_clipped_as_the_objective_says(algorithm):
    # the first of a row's three tokens became a hundred times likelier, its advantage is positive
    plain = without_divergence(algorithm)
    mask = torch.tensor([[0, 1, 1, 1]])
    old, nothing = -1.0 * mask, torch.zeros(1, 4)
    learned = {"advantages_BT": 0.5 * mask, "returns_BT": nothing, "values_BT": nothing, "held_BT": nothing.bool()}
    batch = batch_of(mask.tolist(), [0.0], 1, old_logprobs_BT=old, ref_logprobs_BT=old, **learned)
    batch = for_algorithm(plain, batch)
    moved = old + math.log(100) * torch.tensor([[0, 1, 0, 0]])
    clip = plain.objective["clip"]
    kinds = {
        "ratio of each token, ": [0, 1, 1],
        "ratio of each row (geometric mean": [0, 0, 0],
        "weight of each token, ": [1, 1, 1],
        "weight of each row, ": [0, 0, 0],
        "gate on the ratio of each token, ": [0, 1, 1],
        "probability of each token, ": [0, 1, 1],
        "ratio of each row (product": [1, 1, 1],
        "none": [1, 1, 1],
    }
    (expected,) = [pattern for start, pattern in kinds.items() if clip.startswith(start)]

    def learned_from(variant):
        return (policy_gradient(variant, weighted(variant, batch), moved)[0, 1:] != 0).int().tolist()

    assert learned_from(plain) == expected
    if clip.endswith("none by default"):
        assert learned_from(plain.model_copy(update={"clip_epsilon": 0.2})) == [0, 0, 0]


def test_the_divergence_acts_where_the_objective_says(algorithm):
    told = algorithm.objective["kl"]
    heavy = algorithm.model_copy(update={"kl_beta": 0.5})
    assert heavy.needs_reference
    if "implied" not in told and algorithm.learns_from_rewards:
        assert not algorithm.model_copy(update={"kl_beta": 0.0}).needs_reference
    batch = make_batch(PAID)
    other = batch.replace(ref_logprobs_BT=batch.ref_logprobs_BT - 0.1 * torch.arange(7) * batch.completion_mask_BT)
    credit = [heavy.advantages(b).advantages_BT for b in (batch, other)]
    assert (not torch.equal(*credit)) == ("reward" in told or "implied" in told or "advantage" in told)
    same = [weighted(heavy, b.replace(advantages_BT=credit[0], returns_BT=credit[0])) for b in (batch, other)]
    gradients = [policy_gradient(heavy, b, batch.old_logprobs_BT) for b in same]
    assert (not torch.equal(*gradients)) == ("in the loss" in told)


def test_without_a_correction_the_samplers_own_logprobs_do_not_matter(algorithm):
    assert algorithm.objective["correction"] == "none"
    batch = make_batch(PAID)
    other = batch.replace(sampler_logprobs_BT=batch.sampler_logprobs_BT - 1.0)
    one, two = (weighted(algorithm, algorithm.advantages(b)) for b in (batch, other))
    moved = (batch.old_logprobs_BT - 0.05) * batch.completion_mask_BT
    assert torch.equal(policy_gradient(algorithm, one, moved), policy_gradient(algorithm, two, moved))


def test_the_rewards_that_algorithms_bring():
    brought = {name: plugins.load("algorithm", name).default_rewards for name in plugins.names("algorithm")}
    special = {"dapo": {"accuracy": 1.0, "overlong": 0.5}, "distill": {"accuracy": 0.0},
               "grpo_self_consistency": {"majority_vote": 1.0}}  # fmt: skip
    assert {name: own for name, own in brought.items() if own != {"accuracy": 1.0}} == special
