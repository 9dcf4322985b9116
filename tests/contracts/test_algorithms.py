"""What every algorithm must hold to, for each one found."""

import pytest
import torch

from harness import plugins
from harness.model import tiny_model
from harness.spec import parse_run
from harness.tensors import token_logprobs
from harness.types import Batch, GradedGroup, PolicyOutput

GROUP_SIZE = 4
CLASSES = (0, 0, 1, None, 2, 2, 2, 0, None, None, None, None)
CORRECT = (True, True, False, False) + (False,) * 8


@pytest.fixture(params=plugins.names("algorithm"))
def name(request):
    return request.param


@pytest.fixture
def algorithm(name):
    return plugins.load("algorithm", name)(name=name, group_size=GROUP_SIZE)


def graded(correct=CORRECT):
    """Three groups of four; correctness is withheld with None."""
    groups = []
    for start in range(0, len(CLASSES), GROUP_SIZE):
        part = slice(start, start + GROUP_SIZE)
        classes = CLASSES[part]
        answers = tuple(None if c is None else str(c) for c in classes)
        right = None if correct is None else tuple(correct[part])
        groups.append(GradedGroup(f"p{start}", ("",) * 4, (3,) * 4, (False,) * 4, answers, classes, right))
    return groups


def make_batch(rewards):
    """12 rows, prompts of 2 tokens and completions of 1 to 5; the policy has moved a little since it sampled them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 7, 5, 4, 6, 7, 3, 5, 7, 4, 6, 3])
    column = torch.arange(7)
    mask = (column < lengths[:, None]) & (column >= 2)
    noise = [torch.randn(12, 7, generator=generator) * mask for _ in range(4)]
    return Batch(
        tokens_BT=torch.randint(3, 100, (12, 7), generator=generator) * (column < lengths[:, None]),
        completion_mask_BT=mask,
        lengths_B=lengths,
        truncated_B=torch.zeros(12, dtype=torch.bool),
        sampler_logprobs_BT=-noise[0].abs(),
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        group_size=GROUP_SIZE,
        old_logprobs_BT=-noise[0].abs(),
        ref_logprobs_BT=-noise[1].abs(),
        values_BT=0.1 * noise[2],
    )


def weighted(algorithm, batch):
    return batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT))


def rewards_of(algorithm, groups):
    return [value for group in groups for value in algorithm.rewards(group)]


def test_the_name_is_the_file_and_settings_round_trip(name, algorithm):
    assert algorithm.name == name
    spec = parse_run({"task": "arithmetic", "algorithm": name}, "test")
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec
    assert all(field.description for key, field in type(algorithm).model_fields.items() if key != "name")


def test_rewards_are_one_finite_number_per_completion(algorithm):
    for group in graded(CORRECT if algorithm.sees_gold else None):
        rewards = algorithm.rewards(group)
        assert len(rewards) == GROUP_SIZE
        assert torch.isfinite(torch.tensor(rewards)).all()


def test_gold_reaches_only_the_algorithms_that_declare_it(algorithm):
    if algorithm.sees_gold:
        with pytest.raises(AssertionError):
            rewards_of(algorithm, graded(None))
        assert rewards_of(algorithm, graded()) != rewards_of(algorithm, graded(tuple(not c for c in CORRECT)))
    else:
        blind = rewards_of(algorithm, graded(None))
        assert blind == rewards_of(algorithm, graded()) == rewards_of(algorithm, graded(tuple(not c for c in CORRECT)))


def test_advantages_are_finite_and_zero_outside_the_completions(algorithm):
    batch = algorithm.advantages(make_batch([1.0, 0, 0, 1] * 3))
    assert batch.advantages_BT is not None
    assert torch.isfinite(batch.advantages_BT).all()
    assert batch.advantages_BT[~batch.completion_mask_BT].abs().sum() == 0
    assert batch.advantages_BT.abs().sum() > 0
    assert (batch.returns_BT is not None) == algorithm.needs_critic


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1])
def test_equal_rewards_give_no_policy_gradient_without_a_divergence_term(algorithm, value):
    plain = algorithm.model_copy(update={"kl_beta": 0.0})
    batch = make_batch([value] * 12)
    batch = weighted(plain, plain.advantages(batch.replace(values_BT=torch.zeros(12, 7), ref_logprobs_BT=None)))
    logprobs = batch.sampler_logprobs_BT.clone().requires_grad_()
    plain.loss(batch, PolicyOutput(logprobs, torch.zeros(12, 7), batch.values_BT))[0].backward()
    assert logprobs.grad is not None
    assert logprobs.grad.abs().max() < 1e-6


def test_loss_weights_sum_to_one_on_the_completions(algorithm):
    batch = weighted(algorithm, make_batch([0.0] * 12))
    assert batch.loss_weight_BT is not None
    assert batch.loss_weight_BT.sum().item() == pytest.approx(1, abs=1e-6)
    assert batch.loss_weight_BT[~batch.completion_mask_BT].abs().sum() == 0


def test_loss_and_metrics_of_the_parts_add_up_to_the_whole(algorithm):
    batch = weighted(algorithm, algorithm.advantages(make_batch([1.0, 0, 0, 1] * 3)))
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
    # two answers to one prompt, the first is right: its log-prob must rise against the other's
    plain = algorithm.model_copy(update={"kl_beta": 0.0, "group_size": 2})
    policy = tiny_model(0)
    tokens = torch.tensor([[10, 11, 12, 1], [10, 11, 40, 1]])
    mask = torch.tensor([[False, False, True, True]] * 2)
    batch = Batch(
        tokens_BT=tokens,
        completion_mask_BT=mask,
        lengths_B=torch.tensor([4, 4]),
        truncated_B=torch.zeros(2, dtype=torch.bool),
        sampler_logprobs_BT=torch.zeros(2, 4),
        rewards_B=torch.tensor([1.0, 0.0]),
        group_size=2,
        values_BT=torch.zeros(2, 4),
    )
    logprobs, entropy = token_logprobs(policy, tokens, mask, 1.0)
    batch = plain.advantages(batch.replace(old_logprobs_BT=logprobs.detach()))
    loss, _ = plain.loss(weighted(plain, batch), PolicyOutput(logprobs, entropy, torch.zeros(2, 4)))
    loss.backward()
    before = logprobs[0].sum() - logprobs[1].sum()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.01 * parameter.grad
        after, _ = token_logprobs(policy, tokens, mask, 1.0)
    assert after[0].sum() - after[1].sum() > before
