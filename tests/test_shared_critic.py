"""A value head on the policy's trunk: whose gradient goes where, on which states, what is saved, what it costs."""

import pytest
import torch
from cohort.harness.checks.memory import estimate
from cohort.harness.data import Batch
from cohort.harness.policy.forward import hidden_states
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.model import model_config
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner
from cohort.harness.spec.run import parse_run


def make_spec(critic="shared", weight=1.0, **changes):
    algorithm = {"name": "ppo", "group_size": 2, "critic": critic, "value_loss_weight": weight}
    base = {"task": "arithmetic", "algorithm": algorithm, "rollouts_per_step": 8}
    return parse_run({**base, **changes}, "test")


def make_batch(share_prompts=True):
    """8 rows of 4 prompts with 3 tokens, completions of 2 to 6 tokens; prompts of a pair are equal where asked."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 7, 8, 6, 9, 8, 5])
    column = torch.arange(9)
    tokens = torch.randint(3, 100, (8, 9), generator=generator) * (column < lengths[:, None])
    if share_prompts:
        tokens[1::2, :3] = tokens[::2, :3]
    mask = (column < lengths[:, None]) & (column >= 3)
    return Batch(
        tokens_BT=tokens,
        completion_mask_BT=mask,
        lengths_B=lengths,
        sampler_logprobs_BT=torch.zeros(mask.shape),
        rewards_B=torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 1]),
        group_size=2,
    )


def learner_for(spec):
    policy = tiny_model(0).double()
    learner = Learner(spec, policy)
    assert learner.critic is not None
    torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(1))
    return learner


def gradients(spec, batch):
    """(gradient of the policy's parameters, of the critic's head), one vector each."""
    learner = learner_for(spec)
    batch = spec.algorithm.advantages(learner.annotate(batch))
    learner.optimizers = {}  # gradients only
    weights = spec.algorithm.loss_weights(batch.completion_mask_BT)
    learner._optimizer_step(batch.replace(loss_weight_BT=weights), first=True)
    assert learner.critic is not None
    trunk = torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None])
    head = learner.critic.head.weight.grad
    assert head is not None
    return trunk, head.flatten()


def test_values_are_the_head_on_the_policys_own_states():
    learner, batch = learner_for(make_spec()), make_batch()
    found = learner.annotate(batch).values_BT
    assert found is not None and learner.critic is not None
    with torch.no_grad():  # the state in column t - 1 is the one in which token t was chosen
        values = learner.critic.head(hidden_states(learner.policy, batch.tokens_BT))[:, :-1, 0]
    assert torch.allclose(found[:, 1:], values * batch.completion_mask_BT[:, 1:], atol=1e-6)
    assert found.abs().max() > 0.1


def test_the_value_loss_moves_a_shared_trunk_and_no_separate_policy():
    for critic in ("shared", "separate"):
        (one, head), (three, steeper) = (gradients(make_spec(critic, w), make_batch()) for w in (1.0, 3.0))
        assert torch.allclose(3 * head, steeper, rtol=1e-6)
        difference = (three - one).norm() / one.norm()
        assert difference > 0.01 if critic == "shared" else difference == 0


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_gradient_does_not_depend_on_the_split_into_microbatches(share_prompts):
    whole = torch.cat(gradients(make_spec(), make_batch(share_prompts)))
    for budget in (1, 20):
        spec = make_spec(optimizer={"tokens_per_microbatch": budget})
        split = torch.cat(gradients(spec, make_batch(share_prompts)))
        assert (split - whole).norm() <= 1e-6 * whole.norm()


def test_the_head_is_all_that_is_saved_and_optimised_besides_the_policy():
    learner = Learner(make_spec(), tiny_model(0))
    assert learner.critic is not None
    assert sorted(learner.state()["critic_parameters"]) == ["head.bias", "head.weight"]
    assert [p.numel() for p in learner.optimizers["critic"].param_groups[0]["params"]] == [64, 1]


def test_under_an_adapter_the_value_loss_reaches_the_adapter_alone():
    spec, policy = make_spec(lora={"rank": 4}), tiny_model(0)
    assert spec.lora is not None
    add_adapter(policy, spec.lora, 0)
    learner = Learner(spec, policy)
    batch = spec.algorithm.advantages(learner.annotate(make_batch()))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    learner.update(batch, 0)
    learner.update(batch, 1)
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert learner.critic is not None
    assert learner.critic.head.weight.abs().max() > 0


def test_a_shared_trunk_needs_no_memory_for_a_second_one():
    shared, separate = (
        estimate(make_spec(kind), model_config("tiny"), 20, torch.device("cpu")) for kind in ("shared", "separate")
    )
    assert shared["critic"] == 4 * (64 + 1)
    assert separate["critic"] == 2 * 4 * (166_592 + 64 + 1)  # with rearranged copies
    grpo = parse_run(
        {"task": "arithmetic", "algorithm": {"name": "grpo", "group_size": 2}, "rollouts_per_step": 8}, "t"
    )
    plain = estimate(grpo, model_config("tiny"), 20, torch.device("cpu"))
    assert shared["activations"] == plain["activations"] < separate["activations"]
    assert shared["gradients"] == plain["gradients"] + 4 * 65
