"""What every algorithm must hold to, for each one found."""

import math
import sys
from pathlib import Path

import pytest
import torch
from cohort.harness import plugins
from cohort.harness.data import Batch, PolicyOutput
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.grading import score
from cohort.harness.run.learner import Learner
from cohort.harness.spec.run import parse_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from fakes import batch_of, graded_group

GROUP_SIZE = 4
CLASSES = (0, 0, 1, None, 2, 2, 2, 0, None, None, None, None)
REWARDS = [1.0, 0, 0, 0.5] * 3  # one best answer in each group, since pass@k pays nothing for a tie
CORRECT = (True, True, False, False) + (False,) * 8


@pytest.fixture(params=plugins.names("algorithm"))
def name(request):
    return request.param


@pytest.fixture
def algorithm(name):
    return plugins.load("algorithm", name)(name=name, group_size=GROUP_SIZE)


def graded(correct=CORRECT):
    """Three groups of four."""
    parts = [slice(start, start + GROUP_SIZE) for start in range(0, len(CLASSES), GROUP_SIZE)]
    return [graded_group(CLASSES[p], correct[p], prompt_id=f"p{p.start}", num_tokens=(3,) * 4) for p in parts]


def make_batch(rewards):
    """12 rows, prompts of 2 tokens and completions of 0 to 5; the policy has moved a little since it sampled them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 7, 2, 4, 6, 7, 3, 5, 7, 4, 6, 3])
    column = torch.arange(7)
    mask = (column < lengths[:, None]) & (column >= 2)
    noise = [torch.randn(12, 7, generator=generator) * mask for _ in range(4)]
    return Batch(
        tokens_BT=torch.randint(3, 100, (12, 7), generator=generator) * (column < lengths[:, None]),
        completion_mask_BT=mask,
        lengths_B=lengths,
        sampler_logprobs_BT=-noise[0].abs(),
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        group_size=GROUP_SIZE,
        old_logprobs_BT=-noise[0].abs(),
        ref_logprobs_BT=-noise[1].abs(),
        values_BT=0.1 * noise[2],
        held_BT=torch.zeros_like(mask),
        greedy_rewards_B=torch.tensor(rewards, dtype=torch.float32).view(-1, GROUP_SIZE)[:, 1].repeat_interleave(4),
    )


def without_divergence(algorithm, **changes):
    """The algorithm with no KL term, where it can do without."""
    bound = not algorithm.learns_from_rewards or "implied" in algorithm.objective["kl"]
    free = algorithm if bound else algorithm.model_copy(update={"kl_beta": 0.0})
    return free.model_copy(update=changes)


def for_algorithm(algorithm, batch):
    """The batch as the learner would hand it over: reference log-probs only where they are needed."""
    return batch if algorithm.needs_reference else batch.replace(ref_logprobs_BT=None)


def policy_gradient(algorithm, batch, logprobs):
    """[B, T]: gradient of the loss by the log-probs."""
    leaf = logprobs.clone().requires_grad_()
    algorithm.loss(batch, PolicyOutput(leaf, torch.zeros_like(leaf), batch.values_BT))[0].backward()
    assert leaf.grad is not None
    return leaf.grad


def weighted(algorithm, batch):
    return batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT))


def rewards_of(algorithm, groups):
    """What a run of the algorithm pays by default for these groups."""
    spec = parse_run({"task": "arithmetic", "algorithm": algorithm}, "test")
    return [value for found in score(spec.rewards, groups) for value in found.totals]


def test_the_name_is_the_file_and_settings_round_trip(name, algorithm):
    assert algorithm.name == name
    spec = parse_run({"task": "arithmetic", "algorithm": name}, "test")
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec
    assert all(field.description for key, field in type(algorithm).model_fields.items() if key != "name")


CLIP = {"clip_epsilon": 0.2, "clip_epsilon_high": None, "ratio_bound": None}
LOSS_KL = {"kl_beta": 0.0, "kl_estimator": "k3", "kl_importance_weighted": False}
STANDARDISED = {**LOSS_KL, "std_floor": 1e-4}
GRPO = {**CLIP, **STANDARDISED, "kl_beta": 0.04, "std_over": "group"}
SUMMED = {**LOSS_KL, "loss_denominator": 128.0}
DEFAULTS = {  # as the papers or the docstrings give them
    "grpo": GRPO, "grpo_self_consistency": GRPO, "rgra": {**STANDARDISED, "kl_beta": 0.04},
    **{name: {**CLIP, **SUMMED} for name in ("dr_grpo", "maxrl", "opo", "pass_at_k", "remax")},
    "dapo": {**CLIP, **STANDARDISED, "clip_epsilon_high": 0.28}, "lite_ppo": {**CLIP, **STANDARDISED},
    "gspo": {**CLIP, **STANDARDISED, "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4},
    "cispo": {**STANDARDISED, "clip_epsilon_high": 4.0}, "gmpo": {**STANDARDISED, "clip_log_ratio": 0.4},
    "sapo": {**STANDARDISED, "tau_positive": 1.0, "tau_negative": 1.05},
    "kl_cov": {**STANDARDISED, "covariance_share": 0.002, "penalty": 1.0},
    "dppo": {**SUMMED, "divergence": "tv", "divergence_bound": 0.15, "weight_max": None},
    "ppo": {**CLIP, "kl_beta": 0.01, "gamma": 1.0, "gae_lambda": 1.0, "whiten_advantages": True, "value_clip": 0.2,
            "entropy_bonus": 0.0, "critic": "separate", "value_loss_weight": 1.0},
    "reinforce_plus_plus": {**CLIP, "kl_beta": 0.01, "gamma": 1.0, "baseline": "none"},
    "rloo": {"clip_epsilon": None, "kl_beta": 0.01}, "online_dpo": {"kl_beta": 0.1},
    "distill": {**CLIP, "kl_beta": 1.0},
}  # fmt: skip


def test_the_defaults_are_those_of_the_papers_or_of_the_docstrings(name):
    defaults = plugins.load("algorithm", name)().model_dump()
    assert defaults == {**DEFAULTS[name], "name": name, "group_size": 8}


def test_the_facts_of_a_class_are_those_of_its_objective(name):
    cls = plugins.load("algorithm", name)
    assert cls.min_group_size == (1 if name in ("distill", "ppo", "reinforce_plus_plus", "remax") else 2)
    assert cls.needs_critic == (name == "ppo") and cls.needs_greedy == (name == "remax")
    assert cls.sees_gold == (name not in ("distill", "grpo_self_consistency"))
    assert cls.linear_in_advantages == (name != "online_dpo") and cls.learns_from_rewards == (name != "distill")
    reads_old = ("distill", "kl_cov", "online_dpo", "ppo", "reinforce_plus_plus", "rloo")
    assert cls().needs_old_logprobs == (name in reads_old)


def test_the_default_rewards_see_gold_only_where_the_algorithm_declares_it(algorithm):
    paid = rewards_of(algorithm, graded())
    assert len(paid) == len(CLASSES)
    assert any(paid) == algorithm.learns_from_rewards
    assert torch.isfinite(torch.tensor(paid)).all()
    permuted = rewards_of(algorithm, graded(tuple(not c for c in CORRECT)))
    assert (paid != permuted) == algorithm.sees_gold


@pytest.mark.parametrize("steps", [False, True])
def test_advantages_are_finite_and_zero_outside_the_completions(algorithm, steps):
    batch = make_batch(REWARDS)
    if steps:  # a step ends at the first completion token of every row
        ends = torch.zeros(12, 7, dtype=torch.bool)
        ends[:, 2] = batch.completion_mask_BT[:, 2]
        batch = batch.replace(step_rewards_BT=batch.rewards_B[:, None] * ends, step_ends_BT=ends)
    batch = algorithm.advantages(batch)
    assert batch.advantages_BT is not None
    assert torch.isfinite(batch.advantages_BT).all()
    assert batch.advantages_BT[~batch.completion_mask_BT].abs().sum() == 0
    assert (batch.advantages_BT[:, 2] != 0).any()
    assert (batch.returns_BT is not None) == algorithm.needs_critic


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
    greedy = {"greedy_rewards_B": torch.zeros(2), "values_BT": torch.zeros(2, 3)}
    batch = batch_of([[0, 1, 1]] * 2, [1.0, 0.0], 2, old_logprobs_BT=old, ref_logprobs_BT=reference, **greedy)
    gradient = policy_gradient(heavy, weighted(heavy, heavy.advantages(batch)), old).sum(dim=1)
    if "implied" in heavy.objective["kl"]:
        assert gradient.abs().max() < 1e-6
    else:
        assert gradient[0] > 0 > gradient[1]  # descent makes the first less likely


def test_loss_and_metrics_of_the_parts_add_up_to_the_whole(algorithm):
    batch = weighted(algorithm, algorithm.advantages(make_batch(REWARDS)))
    moved = (batch.sampler_logprobs_BT - 0.05) * batch.completion_mask_BT

    def evaluate(part, logprobs):
        return algorithm.loss(part, PolicyOutput(logprobs, -logprobs, 0.5 * logprobs))

    whole, metrics = evaluate(batch, moved)
    total, sums = 0.0, dict.fromkeys(metrics, 0.0)
    for rows in (torch.tensor([0, 5]), torch.tensor([1, 2, 3, 4]), torch.tensor([6, 7, 8, 9, 10, 11])):
        part = batch.rows(rows)
        loss, values = evaluate(part, moved[rows, : part.tokens_BT.shape[1]])
        total += loss.item()
        for key, value in values.items():
            sums[key] += float(value)
    assert total == pytest.approx(whole.item(), abs=1e-6)
    assert sums == pytest.approx({key: float(value) for key, value in metrics.items()}, abs=1e-6)
    assert {"policy/loss", "policy/clip_fraction", "policy/entropy", "kl/old"} <= set(metrics)


def test_a_step_along_the_gradient_makes_better_answers_likelier(algorithm):
    # two answers to one prompt, the first is right, or the reference likes it by a nat: its log-prob must rise
    plain = without_divergence(algorithm, group_size=2)
    policy = tiny_model(0)
    tokens = torch.tensor([[10, 11, 12, 1], [10, 11, 40, 1]])
    greedy = {"greedy_rewards_B": torch.zeros(2), "values_BT": torch.zeros(2, 4)}
    batch = batch_of([[0, 0, 1, 1]] * 2, [1.0, 0.0], 2, tokens_BT=tokens, **greedy)
    mask = batch.completion_mask_BT
    logprobs, entropy = token_logprobs(policy, tokens, mask, 1.0)
    old = logprobs.detach()
    liked = old if plain.learns_from_rewards else old + torch.tensor([[1.0], [0.0]]) * mask
    batch = plain.advantages(for_algorithm(plain, batch.replace(old_logprobs_BT=old, ref_logprobs_BT=liked)))
    loss, _ = plain.loss(weighted(plain, batch), PolicyOutput(logprobs, entropy, torch.zeros(2, 4)))
    loss.backward()
    before = logprobs[0].sum() - logprobs[1].sum()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.01 * parameter.grad
        after, _ = token_logprobs(policy, tokens, mask, 1.0)
    assert after[0].sum() - after[1].sum() > before


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


def test_the_objective_is_told_by_five_facts(algorithm):
    assert list(algorithm.objective) == ["advantage", "aggregation", "clip", "kl", "correction"]
    assert all(text and text.isascii() for text in algorithm.objective.values())


def test_tokens_weigh_in_the_loss_as_the_objective_says(algorithm):
    plain = without_divergence(algorithm)
    batch = make_batch([0.0] * 12)
    mask, old = batch.completion_mask_BT, batch.old_logprobs_BT
    half = 0.5 * mask
    batch = weighted(plain, for_algorithm(plain, batch).replace(advantages_BT=half, returns_BT=torch.zeros(12, 7)))
    assert batch.loss_weight_BT is not None
    assert batch.loss_weight_BT.sum().item() in (pytest.approx(1), pytest.approx(11 / 12))  # one row has no tokens
    expected = EFFECTIVE_WEIGHTS[plain.objective["aggregation"]](plain, mask.double())
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
    batch = make_batch(REWARDS)
    other = batch.replace(ref_logprobs_BT=batch.ref_logprobs_BT - 0.1 * torch.arange(7) * batch.completion_mask_BT)
    credit = [heavy.advantages(b).advantages_BT for b in (batch, other)]
    assert (not torch.equal(*credit)) == ("reward" in told or "implied" in told or "advantage" in told)
    same = [weighted(heavy, b.replace(advantages_BT=credit[0], returns_BT=credit[0])) for b in (batch, other)]
    gradients = [policy_gradient(heavy, b, batch.old_logprobs_BT) for b in same]
    assert (not torch.equal(*gradients)) == ("in the loss" in told)


def test_without_a_correction_the_samplers_own_logprobs_do_not_matter(algorithm):
    assert algorithm.objective["correction"] == "none"
    batch = make_batch(REWARDS)
    other = batch.replace(sampler_logprobs_BT=batch.sampler_logprobs_BT - 1.0)
    one, two = (weighted(algorithm, algorithm.advantages(b)) for b in (batch, other))
    moved = (batch.old_logprobs_BT - 0.05) * batch.completion_mask_BT
    assert torch.equal(policy_gradient(algorithm, one, moved), policy_gradient(algorithm, two, moved))


def test_a_learner_step_does_not_depend_on_the_split_into_microbatches(name):
    def gradient(budget):
        raw = {
            "task": "arithmetic",
            "algorithm": {"name": name, "group_size": GROUP_SIZE},
            "rollouts_per_step": 12,
            "optimizer": {"tokens_per_microbatch": budget},
        }
        spec = parse_run(raw, "test")
        policy = tiny_model(0).double()
        learner = Learner(spec, policy, None if spec.algorithm.learns_from_rewards else tiny_model(1).double())
        batch = learner.annotate(make_batch(REWARDS))
        batch = weighted(spec.algorithm, spec.algorithm.advantages(batch))
        learner.optimizers = {}  # gradients only
        metrics = learner._optimizer_step(batch, first=True)
        return metrics, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    metrics, whole = gradient(8192)
    assert (metrics["policy/ratio_max"], metrics["policy/clip_fraction"]) == (1.0, 0.0)
    assert whole.norm() > 0
    assert (gradient(13)[1] - whole).norm() <= 1e-6 * whole.norm()
