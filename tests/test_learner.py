"""What an update must not depend on (split, padding, row order), what it holds to (on-policy ratios), its critic."""

import copy
from functools import partial

import factories
import numpy as np
import pytest
import torch
from cohort.harness import plugins
from cohort.harness.checks.memory import estimate
from cohort.harness.data import InvalidRun
from cohort.harness.devices import ranks
from cohort.harness.policy import forward, fused_llama
from cohort.harness.policy.forward import (
    completion_states,
    hidden_states,
    microbatch_tokens,
    prompt_states,
    token_logprobs,
)
from cohort.harness.policy.library import clear_gradients, given_cache
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.model import model_config
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner, explained_variance, left_out, packed
from cohort.harness.run.rollout import older_weights
from cohort.harness.settings.run import CriticStart
from fakes import assert_same_weights, batch_of, changed
from torch.utils._python_dispatch import TorchDispatchMode

# PPO with a value head on the policy's trunk.
SHARED = {"name": "ppo", "group_size": 2, "critic": "shared", "value_loss_weight": 1.0}
SEPARATE = {**SHARED, "critic": "separate"}


def make_spec(algorithm="grpo", **changes):
    algorithm = {"name": algorithm, "group_size": 2} if isinstance(algorithm, str) else algorithm
    return factories.make_spec(algorithm, rollouts_per_step=8, optimizer=changes)


def make_batch(policy=None, extra_columns=0):
    """8 rows of different lengths with mixed rewards; sampler log-probs are the policy's own if one is given."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 7, 12, 6, 12, 8, 5])
    width = int(lengths.max()) + extra_columns
    column = torch.arange(width)
    inside = column < lengths[:, None]
    drawn = torch.randint(3, 100, (8, 12), generator=generator)
    tokens = torch.nn.functional.pad(drawn, (0, extra_columns)) * inside
    mask = inside & (column >= 3)
    greedy = torch.tensor([0.0, 0, 0, 0, 1, 1, 0, 0])
    rewards = [1.0, 0, 0, 1, 1, 1, 0, 1]
    batch = batch_of(mask.tolist(), rewards, 2, tokens_BT=tokens, lengths_B=lengths, greedy_rewards_B=greedy)
    batch = batch.replace(teacher_logprobs_BT=torch.zeros(mask.shape))
    if policy is None:
        return batch
    learner = Learner(make_spec(), policy)
    with torch.no_grad():
        return batch.replace(sampler_logprobs_BT=learner.logprobs(policy, batch))


def learner_for(spec):
    """With a critic that says something."""
    learner = Learner(spec, tiny_model(0).double())
    learner.critic and torch.nn.init.normal_(learner.critic.head.weight, generator=torch.Generator().manual_seed(1))
    return learner


def gradients(spec, batch):
    """One vector: those of the policy, then those of the critic, of which the head's are the last 65."""
    learner = learner_for(spec)
    batch = spec.algorithm.advantages(learner.annotate(batch))
    minibatch = batch.replace(loss_weight_BT=spec.algorithm.loss_weights(batch.completion_mask_BT))
    learner.optimizers = {}  # gradients only
    learner._optimizer_step(minibatch, first=True)
    modules = [learner.policy, *([learner.critic] if learner.critic else [])]
    return torch.cat([p.grad.flatten() for m in modules for p in m.parameters() if p.grad is not None])


def test_gradients_on_a_cpu_lie_in_one_piece_of_memory_and_are_the_same_there():
    learner, batch = learner_for(make_spec()), make_batch()
    optimizer, found = learner.optimizers["policy"], []
    weights = optimizer.param_groups[0]["params"]
    for clear in (optimizer.zero_grad, *2 * [partial(clear_gradients, optimizer)]):
        clear()
        learner.policy(batch.tokens_BT).logits.square().mean().backward()
        found.append([x.grad.clone() for x in weights])
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))
    optimizer.zero_grad()
    learner.update(learner.spec.algorithm.advantages(learner.annotate(batch)), 0)
    assert len({x.grad.untyped_storage().data_ptr() for x in weights}) == 1
    assert all(x.grad.data_ptr() % 64 == 0 for x in weights), "as torch aligns its own"


def test_a_weight_that_lies_in_another_order_gets_a_gradient_in_that_order():
    """torch's fused AdamW reads both in the order they lie in."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=True)
    before, slopes = weight.detach().clone(), torch.tensor([[0.0, 1], [-1, 1], [-1, -1]])
    clear_gradients(optimizer)
    (weight * slopes).sum().backward()
    optimizer.step()
    assert torch.allclose(weight, before - 0.1 * slopes)


def test_an_objective_of_collisions_gets_those_of_the_policys_own_forward_pass():
    spec, batch = make_spec("optimal_token_baseline"), make_batch()
    learner = learner_for(spec)
    with torch.no_grad():
        p = learner.policy(batch.tokens_BT).logits.softmax(-1)
    expected = torch.nn.functional.pad(p.square().sum(-1), (1, 0))[:, :-1] * batch.completion_mask_BT
    found = learner.annotate(batch).collision_BT
    assert torch.allclose(found.double(), expected, atol=1e-6, rtol=0)
    assert learner_for(make_spec()).annotate(batch).collision_BT is None


@pytest.mark.parametrize(("offset", "first"), [(0, 0), (-4, 0), (4, 0), (-400, 0), (400, 0), (0, 800)])
def test_the_effective_share_of_the_completions_is_that_of_whole_importance_weights(offset, first):
    batch = make_batch(tiny_model(0))
    shift_B1 = torch.tensor([first / 2, 0.1, -0.1, 0.2, 0, -0.2, 0.05, 0.1])[:, None]  # of each token, since sampled
    shift_B1 = shift_B1 + offset / batch.completion_mask_BT.sum(dim=1, keepdim=True)  # a factor of all weights
    batch = batch.replace(sampler_logprobs_BT=batch.sampler_logprobs_BT - shift_B1 * batch.completion_mask_BT)

    changes = {"rollouts_per_step": 8, "staleness": 1, "optimizer.tokens_per_microbatch": 24}
    spec = factories.make_spec({"name": "dr_grpo", "group_size": 2}, **changes)
    learner = Learner(spec, tiny_model(0))
    metrics = learner.update(spec.algorithm.advantages(learner.annotate(batch)), 0)
    w = (shift_B1[:, 0].double() * batch.completion_mask_BT.sum(dim=1) - offset - first).exp()
    share = float(w.sum() ** 2 / (w**2).sum() / 8)
    assert share == 1 / 8 if first else 0.2 < share < 0.9
    assert metrics["staleness/effective_samples"] == pytest.approx(share, abs=1e-4)
    assert {"staleness/kl", "staleness/max_ratio"} < metrics.keys() and "mismatch/kl" not in metrics


def test_the_divergences_from_the_sampler_are_those_of_its_own_distribution():
    learner = learner_for(make_spec(num_inner_epochs=2))
    vocabulary = learner.policy.config.vocab_size
    drawn = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)).double()
    sampler = (0.25 * drawn.square()).log_softmax(-1)  # whose most likely tokens are furthest from the policy's
    rows = vocabulary + vocabulary % 2  # every token after one prompt, weighted as the sampler draws it
    drawn = torch.arange(rows) % vocabulary
    tokens = torch.stack([drawn * 0 + 5, drawn * 0 + 9, drawn], 1)
    batch = batch_of([[0, 0, 1]] * rows, [0.0] * rows, 2, tokens_BT=tokens)
    mask = batch.completion_mask_BT
    given = torch.zeros(mask.shape).double().masked_scatter(mask, sampler[drawn])
    once = sampler.exp()[drawn] * (torch.arange(rows) < vocabulary)
    weight = torch.zeros(mask.shape).double().masked_scatter(mask, once)
    own = learner.logprobs(learner.policy, batch)[mask][:vocabulary].detach()
    batch = batch.replace(sampler_logprobs_BT=given, old_logprobs_BT=given, advantages_BT=weight, loss_weight_BT=weight)
    metrics = learner._optimizer_step(batch, first=True)
    divergence = float((sampler.exp() * (sampler - own)).sum())  # KL(sampler || policy), a sum over the vocabulary
    assert (metrics["mismatch/kl"], metrics["kl/old"]) == pytest.approx((divergence, divergence), abs=1e-9)
    largest = (sampler - own).max()
    assert largest > (own - sampler).max()
    assert metrics["mismatch/max_ratio"] == metrics["policy/ratio_max"] == pytest.approx(float(largest.exp()), rel=1e-9)


def test_micro_batches_of_eight_ranks_hold_little_padding_and_are_as_many_for_each():
    random = np.random.default_rng(0)
    for prompt, mean, spread, limit in ((110, 220, 0.45, 400), (130, 550, 0.6, 1024), (130, 3000, 0.8, 8192)):
        prompts = np.repeat(np.maximum(30, random.normal(prompt, 0.3 * prompt, 32)).astype(int), 8)
        drawn = random.lognormal(np.log(mean) - spread**2 / 2, spread, 256)
        lengths = np.sort(prompts + np.minimum(limit, np.maximum(5, drawn)).astype(int))[::-1]
        for world in (1, 8):
            sizes = packed(lengths.tolist(), 8192, world)
            padded = [size * lengths[first] for size, first in zip(sizes, np.cumsum([0, *sizes]), strict=False)]
            assert sum(sizes) == 256 and min(sizes) > 0 and len(sizes) % world == 0
            assert max(padded) <= max(8192, lengths[0])
            assert sum(padded) <= 1.06 * lengths.sum()  # dealt by row, eight ranks read 1.29, 1.18 and 1.04 times it
    assert packed([9, 5, 5, 5, 2], 10) == [1, 2, 2]  # one rank fills every micro-batch
    assert packed([9, 5, 5, 5, 2], 10, 2) == [1, 1, 1, 2]
    assert packed([2, 1, 1], 4, 2) == [1, 2]  # 2 tokens in each; [2, 1] are 4 padded tokens and 1


def test_several_updates_move_the_ratio_away_from_one():
    policy = tiny_model(0)
    spec = make_spec(num_inner_epochs=4, num_minibatches=2, learning_rate=1e-2)
    learner = Learner(spec, policy)
    batch = learner.annotate(make_batch(policy))
    metrics = learner.update(spec.algorithm.advantages(batch), 0)
    assert metrics["policy/ratio_max"] > 1.2
    assert metrics["policy/clip_fraction"] > 0


def test_minibatches_share_out_the_rows_and_weigh_one_each_in_a_new_order_every_pass():
    learner = Learner(make_spec(num_minibatches=2), tiny_model(0))
    batch = make_batch().replace(rewards_B=torch.arange(8.0))  # a reward that tells the rows apart
    passes = [list(learner._minibatches(batch, 3, epoch)) for epoch in range(2)]
    for parts in passes:
        assert sorted(torch.cat([part.rewards_B for part in parts]).tolist()) == list(range(8))
        for part in parts:
            assert part.loss_weight_BT.sum().item() == pytest.approx(1, abs=1e-6)
    assert passes[0][0].rewards_B.tolist() != passes[1][0].rewards_B.tolist()
    (alone,) = Learner(make_spec(), tiny_model(0))._minibatches(batch, 3, 0)
    assert torch.equal(alone.rewards_B, batch.rewards_B)


def test_the_critic_starts_at_zero_and_apart_from_the_policy_or_is_a_head_alone():
    learner = Learner(make_spec("ppo"), tiny_model(0))
    assert learner.annotate(make_batch()).values_BT.abs().max() == 0
    shared = {p.data_ptr() for p in learner.policy.parameters()}
    assert not shared & {p.data_ptr() for p in learner.critic.parameters()}
    learner = Learner(make_spec(SHARED), tiny_model(0))
    assert sorted(learner.state()["critic_parameters"]) == ["head.bias", "head.weight"]
    assert [p.numel() for p in learner.optimizers["critic"].param_groups[0]["params"]] == [64, 1]
    for beta in (0.0, 0.1):  # a reference is kept for a KL weight alone
        spec = factories.make_spec({"name": "grpo", "kl_beta": beta})
        assert (Learner(spec, tiny_model(0)).reference is not None) == (beta > 0)


@pytest.mark.parametrize(("name", "setting"), [("policy", "learning_rate"), ("critic", "critic_learning_rate")])
def test_a_gradient_or_a_loss_that_is_not_finite_ends_the_run_and_names_its_network_and_rate(name, setting):
    learner = learner_for(make_spec("ppo"))
    next(getattr(learner, name).parameters()).register_hook(lambda gradient: gradient / 0)
    batch = learner.spec.algorithm.advantages(learner.annotate(make_batch()))
    with pytest.raises(InvalidRun, match=rf"gradient norm of the {name} is (nan|inf); lower optimizer\.{setting}$"):
        learner.update(batch, 0)
    with torch.no_grad():
        next(learner.policy.parameters()).fill_(float("nan"))
    with pytest.raises(InvalidRun, match="loss is nan"):
        learner.update(batch, 0)


def test_two_updates_are_adamw_on_clipped_gradients_with_a_rate_for_the_policy_and_one_for_the_critic():
    settings = {"learning_rate": 1e-3, "critic_learning_rate": 4e-3, "max_grad_norm": 0.05, "weight_decay": 0.1,
                "beta2": 0.95}  # fmt: skip
    spec = make_spec("ppo", **settings)
    learner, by_hand = (Learner(spec, tiny_model(0).double()) for _ in range(2))
    assert by_hand.critic is not None
    by_hand.optimizers = {}  # gradients only
    rates = [(by_hand.policy, 1e-3), (by_hand.critic, 4e-3)]
    adamw = [torch.optim.AdamW(m.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1) for m, rate in rates]
    for step, scale in enumerate((30.0, 3.0)):  # AdamW forgets the scale of one gradient, not that of the next
        batch, other = (spec.algorithm.advantages(one.annotate(make_batch())) for one in (learner, by_hand))
        scaled = {"advantages_BT": scale * batch.advantages_BT, "returns_BT": scale * batch.returns_BT}
        learner.update(batch.replace(**scaled), step)
        for optimizer in adamw:
            optimizer.zero_grad()
        batch, weights = other.replace(**scaled), spec.algorithm.loss_weights(other.completion_mask_BT)
        by_hand._optimizer_step(batch.replace(loss_weight_BT=weights), first=True)
        for (module, _), optimizer in zip(rates, adamw, strict=True):
            found = [p for p in module.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in found if p.grad is not None]).norm()
            assert norm > 2 * 0.05
            for parameter in found:
                assert parameter.grad is not None
                parameter.grad *= 0.05 / (norm + 1e-6)  # of torch, against a norm of 0
            optimizer.step()
    assert learner.critic is not None and all(one.defaults["fused"] for one in learner.optimizers.values())  # faster
    for module, expected in ((learner.policy, by_hand.policy), (learner.critic, by_hand.critic)):
        for one, two in zip(module.parameters(), expected.parameters(), strict=True):
            assert torch.allclose(one, two, atol=1e-6, rtol=0)  # an update moves a weight by 1e-3 or so


def test_explained_variance_is_one_for_perfect_values_and_zero_for_constant_ones():
    batch = make_batch().replace(returns_BT=torch.randn(8, 12, generator=torch.Generator().manual_seed(0)))
    assert explained_variance(batch.replace(values_BT=batch.returns_BT)) == pytest.approx(1.0)
    assert explained_variance(batch.replace(values_BT=torch.zeros(8, 12))) == pytest.approx(0.0)
    small = batch.replace(returns_BT=0.1 * batch.returns_BT, values_BT=0.05 * batch.returns_BT)
    assert explained_variance(small) == pytest.approx(0.75)  # an error of half the size has a fourth of the variance
    assert explained_variance(batch.replace(returns_BT=torch.ones(8, 12), values_BT=batch.returns_BT)) == 0


def shared_prompts():
    """8 rows of 3 prompts with 4, 6 and 3 tokens; rows of a prompt are not neighbours, completions differ in length."""
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 100, (n,), generator=generator) for n in (4, 6, 3)]
    which, extra = [0, 1, 0, 2, 1, 0, 2, 0], [5, 3, 1, 7, 2, 4, 6, 3]
    rows = [torch.cat([prompts[p], torch.randint(3, 100, (n,), generator=generator)])
            for p, n in zip(which, extra, strict=True)]  # fmt: skip
    width = max(map(len, rows))
    tokens = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    starts = torch.tensor([len(prompts[p]) for p in which])
    column = torch.arange(width)
    return make_batch().replace(
        tokens_BT=tokens,
        lengths_B=lengths,
        completion_mask_BT=(column >= starts[:, None]) & (column < lengths[:, None]),
        sampler_logprobs_BT=torch.zeros(tokens.shape),
    )


def test_passes_take_rows_by_the_lengths_that_they_read():
    learner, batch = Learner(make_spec(tokens_per_microbatch=24), tiny_model(0)), shared_prompts()
    # Whole rows of 9, 9, 5, 10, 8, 8, 9 and 7 tokens; 24 are two of 10, two of 9 or three of 8.
    passes = [([3, 0], 10), ([1, 6], 9), ([4, 5, 7], 8), ([2], 5)]
    assert [(rows.tolist(), width) for rows, width in learner._rows_by_length(batch, None)] == passes
    # Completions of 5, 3, 1, 7, 2, 4, 6 and 3 tokens beside a prompt of 6; 24 are one of 13, two of 12, 11, 10 or 9.
    passes = [([3], 10), ([6, 0], 9), ([5, 1], 9), ([7, 4], 8), ([2], 5)]
    prompts = learner._prompt_states(learner.policy, batch)
    assert [(rows.tolist(), width) for rows, width in learner._rows_by_length(batch, prompts)] == passes


def test_prompts_are_read_in_as_few_parts_as_their_tokens_allow_and_each_process_has_one(monkeypatch):
    row = torch.arange(16)
    tokens = torch.stack([row // 2 + 9, row * 0 + 5, row * 0 + 7, row % 2 + 30], 1)  # 8 prompts of 3 tokens, twice each
    batch = batch_of([[False] * 3 + [True]] * 16, [0.0] * 16, 2, tokens_BT=tokens)
    learner = Learner(make_spec(), tiny_model(0))
    # each of so many processes reads 1 or 2 prompts at once; a single one 8, 7, 3, 2, 2, 1 and 1
    for budget, world, count in (
        (3, 2, 4), (6, 2, 2), (3, 3, 2), (3, 5, 1), (3, 16, 1),
        (24, 1, 1), (23, 1, 2), (9, 1, 3), (8, 1, 4), (6, 1, 4), (3, 1, 8), (2, 1, 8),
    ):  # fmt: skip
        monkeypatch.setattr(ranks, "world_size", lambda world=world: world)
        learner.spec = make_spec(tokens_per_microbatch=budget)
        parts = learner._parts(batch)
        assert len(parts) == count and sorted(torch.cat([places for places, _ in parts]).tolist()) == [*range(16)]
        assert (parts[0][1] is batch) == (count == 1)
    learner.shares_prompts = False
    assert learner._parts(batch)[0][1] is batch


def test_a_large_vocabulary_makes_micro_batches_of_a_processor_small_in_the_run_and_in_its_estimate(monkeypatch):
    def tokens(vocabulary, device="cpu", **settings):
        return microbatch_tokens(make_spec(**settings).optimizer, torch.device(device), vocabulary)

    # 256 MiB are 2**26 logits
    assert [tokens(size) for size in (100, 2**16, 2**16 + 1, 2**17, 2**27)] == [1024, 1024, 1023, 512, 1]
    assert (tokens(2**17, "cuda"), tokens(2**17, tokens_per_microbatch=3000)) == (8192, 3000)

    def found(**settings):
        spec = make_spec(**settings)
        rows = Learner(spec, tiny_model(0))._rows_by_length(shared_prompts(), None)
        kept = estimate(spec, model_config("tiny"), 20, torch.device("cpu"))["activations"]
        return [len(part) for part, _ in rows], kept

    (all_rows, most), (rows, _) = found(), found(tokens_per_microbatch=24)
    monkeypatch.setattr(forward, "PASS_BYTES", 4 * 100 * 24)  # of the tiny model's 100 tokens
    few, least = found()
    assert few == rows != all_rows and least < most / 2


@pytest.mark.parametrize("algorithm", factories.slow_but(("ppo",), ("grpo", "ppo")))
@pytest.mark.parametrize("budget", [1, 20])
def test_prompts_that_rows_share_are_read_once_with_the_same_gradient(algorithm, budget, monkeypatch):
    spec, batch = make_spec(algorithm, tokens_per_microbatch=budget, num_inner_epochs=2), shared_prompts()
    assert prompt_states(tiny_model(0), batch.tokens_BT, batch.completion_mask_BT) is not None
    shared = gradients(spec, batch)
    monkeypatch.setattr("cohort.harness.run.learner.prompt_states", lambda *_: None)
    apart = gradients(spec, batch)
    assert (shared - apart).norm() <= 1e-6 * apart.norm()  # the norms inside the model are in float32
    assert apart.norm() > 0


def test_shared_prompts_cost_one_reading():
    policy, batch = tiny_model(0), shared_prompts()
    read: list[int] = []
    handle = policy.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    states = prompt_states(policy, batch.tokens_BT, batch.completion_mask_BT)
    assert sorted(states.lengths_U.tolist()) == [2, 3, 5]
    arguments = (policy, batch.tokens_BT, batch.completion_mask_BT, 0.7)
    token_logprobs(*arguments, completion_states(*arguments[:3], states))
    token_logprobs(*arguments)
    handle.remove()
    # three prompts of at most 5 tokens besides their last; the longest completion has 7 tokens, the longest row 10
    assert read == [3 * 5, 8 * 7, 8 * 10]


@pytest.mark.parametrize("algorithm", factories.slow_but(("ppo",), ("grpo", "ppo")))
def test_a_common_beginning_is_read_once_and_prompts_in_parts_with_the_same_gradient(algorithm, monkeypatch):
    monkeypatch.setattr(fused_llama, "MAX_PARAMETERS", 0)  # as for a model of real size
    batch, found, passes = shared_prompts(), [], []
    tokens = batch.tokens_BT.clone()
    tokens[:, :2] = tokens[0, :2]  # the shortest of the three prompts has one token more
    batch = batch.replace(tokens_BT=tokens)
    for budget, saved in [(20, 5), (20, 4), (12, 5)]:
        monkeypatch.setattr(forward, "SAVED", saved)
        learner, read = Learner(make_spec(algorithm, tokens_per_microbatch=budget), tiny_model(0).double()), []
        credited = learner.spec.algorithm.advantages(learner.annotate(batch))
        learner.optimizers = {}
        embeddings = learner.policy.model.embed_tokens
        embeddings.register_forward_hook(lambda _, given, __, read=read: read.append(tuple(given[0].shape)))
        weights = learner.spec.algorithm.loss_weights(batch.completion_mask_BT)
        learner._optimizer_step(credited.replace(loss_weight_BT=weights), first=True)
        modules = [learner.policy, *([] if learner.critic is None else [learner.critic.backbone])]
        found.append(torch.cat([p.grad.flatten() for module in modules for p in module.parameters()]))
        passes.append(read)
    whole, *others = found
    assert all((other - whole).norm() <= 1e-6 * whole.norm() for other in others)  # the model's norms are in float32
    # Three prompts of at most 5 tokens besides their last; two tokens and then the others; two prompts and then one.
    assert passes[0][0] == (3, 5) and passes[1][:2] == [(1, 2), (3, 3)]
    assert passes[2][0][0] == 2 and (3, 5) not in passes[2]


@pytest.mark.parametrize("recomputes", [False, True])
def test_autocast_casts_a_weight_once_for_all_micro_batches_or_keeps_no_casts_to_save_memory(recomputes, monkeypatch):
    monkeypatch.setattr(fused_llama, "MAX_PARAMETERS", 0)  # as for a model of real size
    spec = factories.make_spec(rollouts_per_step=8, autocast=True, optimizer={"tokens_per_microbatch": 20})
    learner, batch, casts = Learner(spec, tiny_model(0)), shared_prompts(), []
    weight = learner.policy.model.layers[0].self_attn.k_proj.weight
    if recomputes:
        learner.policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), named=None):
            casts.extend([function] * (function._opname == "_to_copy" and given[0].data_ptr() == weight.data_ptr()))
            return function(*given, **(named or {}))

    minimised = type(spec.algorithm).minimised

    def in_full_precision(*given):
        assert not torch.is_autocast_enabled("cpu")
        return minimised(*given)

    monkeypatch.setattr(type(spec.algorithm), "minimised", in_full_precision)
    credited = spec.algorithm.advantages(learner.annotate(batch))
    weights = spec.algorithm.loss_weights(batch.completion_mask_BT)
    learner.optimizers = {}
    with Watch():
        learner._optimizer_step(credited.replace(loss_weight_BT=weights), first=True)
    assert (len(casts) > 1) == recomputes and weight.grad.abs().sum() > 0 and not learner.policy.training


@pytest.mark.parametrize("algorithm", factories.slow_but(("ppo",), ("grpo", "ppo")))
def test_prompts_that_rows_share_are_read_once_where_activations_are_computed_again(algorithm, monkeypatch):
    monkeypatch.setattr(fused_llama, "MAX_PARAMETERS", 0)  # as for a model of real size
    spec, batch, found, read = make_spec(algorithm, tokens_per_microbatch=20), shared_prompts(), [], []
    for recompute in (None, False, True):
        policy = tiny_model(0).double().eval()
        if recompute:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            inside = policy.model.layers[1].input_layernorm  # which is computed again, hooks of a layer perhaps not
            inside.register_forward_pre_hook(lambda _, given: read.append(given[0].shape[:2].numel()))
        learner = Learner(spec, policy)
        credited = spec.algorithm.advantages(learner.annotate(batch))
        read.clear()
        learner.optimizers, learner.shares_prompts = {}, recompute is not None
        weights = spec.algorithm.loss_weights(batch.completion_mask_BT)
        learner._optimizer_step(credited.replace(loss_weight_BT=weights), first=True)
        modules = [learner.policy, *([] if learner.critic is None else [learner.critic.backbone])]
        found.append(torch.cat([p.grad.flatten() for module in modules for p in module.parameters()]))
    whole, once, again = found
    assert (again - once).norm() <= 1e-12 * once.norm()
    assert (once - whole).norm() <= 1e-6 * whole.norm()  # the norms inside the model are in float32
    # Three prompts of at most 5 tokens besides their last, then 8 rows' completions, each read twice.
    assert read.count(3 * 5) == 2 * len(modules) and sum(read) < 2 * 8 * 10 * len(modules)


def test_rows_that_share_no_prompt_or_whose_model_drops_the_cache_where_it_recomputes_are_read_whole():
    batch, policy = shared_prompts(), tiny_model(0).train()
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    states = prompt_states(policy, batch.tokens_BT, batch.completion_mask_BT)
    assert states is not None and states.lean is None  # that one would keep its activations
    forward = policy.model.forward
    policy.model.forward = lambda **given: forward(**given | given_cache(policy, None))
    assert prompt_states(policy, batch.tokens_BT, batch.completion_mask_BT) is None
    other, empty = make_batch(), batch.completion_mask_BT.clone()
    assert prompt_states(tiny_model(0), other.tokens_BT, other.completion_mask_BT) is None
    empty[0] = False
    assert prompt_states(tiny_model(0), batch.tokens_BT, empty) is None


def test_values_are_a_shared_head_on_the_policys_own_states():
    learner, batch = learner_for(make_spec(SHARED)), shared_prompts()
    found = learner.annotate(batch).values_BT
    with torch.no_grad():  # the state in column t - 1 is the one in which token t was chosen
        values = learner.critic.head(hidden_states(learner.policy, batch.tokens_BT))[:, :-1, 0]
    assert torch.allclose(found[:, 1:], values * batch.completion_mask_BT[:, 1:], atol=1e-6)
    assert found.abs().max() > 0.1


def test_the_value_loss_moves_a_shared_trunk_and_no_separate_policy():
    size = sum(p.numel() for p in tiny_model(0).parameters())
    for critic in (SHARED, SEPARATE):
        one, three = (gradients(make_spec({**critic, "value_loss_weight": w}), make_batch()) for w in (1.0, 3.0))
        assert torch.allclose(3 * one[-65:], three[-65:], atol=1e-5)
        difference = (three - one)[:size].norm() / one[:size].norm()
        assert difference > 0.01 if critic is SHARED else difference == 0


@pytest.mark.parametrize("critic", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_a_warm_up_step_moves_the_critic_as_any_step_does_and_nothing_of_the_policy(critic):
    spec, batch = make_spec(critic), shared_prompts()
    warm, plain = (learner_for(spec.model_copy(update={"critic": CriticStart(warmup_steps=n)})) for n in (1, 0))
    start = [p.detach().clone() for p in warm.policy.parameters()]
    batch = warm.algorithm.advantages(warm.annotate(batch))
    for learner in (warm, plain):
        learner.update(batch, 0)
    assert all(torch.equal(*pair) for pair in zip(start, warm.policy.parameters(), strict=True))
    assert not warm.optimizers["policy"].state_dict()["state"]  # no moments of gradients that a bad critic gave
    assert not all(torch.equal(*pair) for pair in zip(start, plain.policy.parameters(), strict=True))
    for one, two in zip(warm.critic.parameters(), plain.critic.parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-9, rtol=0)
    # d/dw of the mean over tokens of (w h + b - R)^2 / 2 is the mean of (V - R) h, before the clip of the norm
    assert batch.values_BT is not None and batch.returns_BT is not None
    states = hidden_states(tiny_model(0).double(), batch.tokens_BT)[:, :-1].detach()
    error = ((batch.values_BT - batch.returns_BT) * batch.completion_mask_BT)[:, 1:, None]
    expected = (error * states).sum(dim=(0, 1)) / batch.completion_mask_BT.sum()
    found = warm.critic.head.weight.grad
    assert torch.allclose(found[0] / found.norm(), expected / expected.norm(), atol=1e-6)
    moved = warm.policy.parameters()
    warm.update(warm.algorithm.advantages(warm.annotate(batch)), 1)
    assert not all(torch.equal(*pair) for pair in zip(start, moved, strict=True))


SHUFFLED = make_batch().rows(torch.tensor([4, 5, 0, 1, 6, 7, 2, 3]))


@pytest.mark.parametrize(("batch", "same"), [
    (make_batch(), (make_batch(extra_columns=9), SHUFFLED)), (shared_prompts(), ()),
], ids=["apart", "shared"])  # fmt: skip
def test_the_gradient_does_not_depend_on_the_split_on_padding_or_on_the_order_of_groups(batch, same):
    whole = gradients(make_spec(SHARED), batch)
    split = [gradients(make_spec(SHARED, tokens_per_microbatch=budget), batch) for budget in (1, 20)]
    for one in (*split, *(gradients(make_spec(SHARED), other) for other in same)):
        assert (one - whole).norm() <= 1e-6 * whole.norm()


def test_under_an_adapter_the_value_loss_reaches_the_adapter_alone():
    spec, policy = factories.make_spec(SHARED, rollouts_per_step=8, lora={"rank": 4}), tiny_model(0)
    assert spec.lora is not None
    add_adapter(policy, spec.lora, 0)
    learner = Learner(spec, policy)
    batch = spec.algorithm.advantages(learner.annotate(make_batch()))
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for step in range(2):
        learner.update(batch, step)
    moved = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".lora_" in name for name in moved)
    assert learner.critic is not None and learner.critic.head.weight.abs().max() > 0


def test_a_shared_trunk_needs_no_memory_for_a_second_one():
    config, device = model_config("tiny"), torch.device("cpu")
    shared, separate, plain = (estimate(make_spec(a), config, 20, device) for a in (SHARED, SEPARATE, "grpo"))
    assert shared["critic"] == 4 * (64 + 1)
    assert separate["critic"] == 2 * 4 * (166_592 + 64 + 1)  # with rearranged copies
    assert shared["activations"] == plain["activations"] < separate["activations"]
    assert shared["gradients"] == plain["gradients"] + 4 * 65


def everything(learner):
    """Copies of all that an update may move."""
    modules = [learner.policy, *([learner.critic] if learner.critic else [])]
    moments = [m for o in learner.optimizers.values() for state in o.state.values() for m in state.values()]
    return [t.clone() for t in (*(p for module in modules for p in module.parameters()), *moments)]


def differs(one, other):
    return len(one) != len(other) or any(not torch.equal(*pair) for pair in zip(one, other, strict=True))


REWARDED = [name for name in plugins.names("algorithm") if plugins.load("algorithm", name).learns_from_rewards]


@pytest.mark.parametrize("algorithm", REWARDED)
def test_a_batch_without_a_signal_leaves_weights_and_moments_as_they_are(algorithm):
    """Before the first update and after one that has left momentum, with weight decay; rewards are equal."""
    policy = tiny_model(0)
    changes = {"weight_decay": 0.1, "num_minibatches": 2, "learning_rate": 1e-3}
    learner = Learner(make_spec({"name": algorithm, "group_size": 4}, **changes), policy)
    batch = make_batch(policy).replace(group_size=4)
    if learner.reference is not None:  # the reference's log-probs differ by rounding, as an engine's do
        with torch.no_grad():
            next(learner.reference.parameters()).mul_(1 + 1e-7)

    def updated(batch, step):
        batch = learner.annotate(batch)
        if batch.values_BT is not None:  # what a critic expects differs, and is a signal; here it expects nothing
            batch = batch.replace(values_BT=0 * batch.values_BT)
        return learner.update(learner.spec.algorithm.advantages(batch), step)

    equal = batch.replace(rewards_B=torch.zeros(8), greedy_rewards_B=torch.zeros(8))
    before = everything(learner)
    found = updated(equal, 0)
    assert not differs(before, everything(learner)) and found["policy/no_signal"] == 1
    assert found["mismatch/max_ratio"] >= 1
    assert found.get("critic/no_signal", 1) == 1
    assert updated(batch.replace(rewards_B=torch.tensor([1.0, 0, 0, 0.5] * 2)), 1)["policy/no_signal"] < 1
    moved = everything(learner)
    assert differs(before, moved)
    if learner.reference is None and learner.critic is None:  # else the reference and the critic's error pull
        assert updated(equal, 2)["policy/no_signal"] == 1
        assert not differs(moved, everything(learner))


def an_update(spec, batch, *, apart=True):
    """The weights, metrics and operations of an update on rows of given advantages, its learner, and the tokens that
    are read with and without gradient; unless `apart`, rows without advantage are read as the others are."""
    learner, read = Learner(spec, tiny_model(0).double()), {True: 0, False: 0}
    if not apart:
        learner._still = lambda _: None

    def note(_, given):
        read[torch.is_grad_enabled()] += given[0].numel()

    learner.policy.model.embed_tokens.register_forward_pre_hook(note)
    metrics = learner.update(batch, 0)
    return [p.detach().flatten() for p in learner.policy.parameters()], metrics, learner, read


def some_advantages():
    """`shared_prompts` with the sampler's log-probs, where the rows of the first prompt have no advantage."""
    batch = shared_prompts()
    advantages_B = torch.tensor([0.0, 1, 0, 0.5, -1, 0, -0.5, 0])
    return batch.replace(
        advantages_BT=advantages_B[:, None] * batch.completion_mask_BT, old_logprobs_BT=batch.sampler_logprobs_BT
    )


def test_rows_are_read_apart_by_advantage_if_each_process_gets_one_of_either_kind(monkeypatch):
    learner, batch = Learner(make_spec("dr_grpo"), tiny_model(0)), make_batch()
    for world, still, parts in (
        (1, 0, (0, 8)), (1, 1, (1, 7)), (1, 7, (7, 1)), (1, 8, (8, 0)),
        (2, 1, (0, 8)), (2, 2, (2, 6)), (2, 6, (6, 2)), (2, 7, (0, 8)), (2, 8, (8, 0)),
    ):  # fmt: skip
        monkeypatch.setattr(ranks, "world_size", lambda world=world: world)
        advantages_BT = (torch.arange(8) >= still)[:, None] * batch.completion_mask_BT.float()
        found = learner._by_gradient(batch.replace(advantages_BT=advantages_BT))
        assert tuple(0 if part is None else len(part) for part in found) == parts


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("changes", [{}, {"num_minibatches": 2, "num_inner_epochs": 2, "tokens_per_microbatch": 20}])
def test_rows_without_advantage_are_read_without_gradient_and_change_nothing(changes):
    spec = make_spec({"name": "dr_grpo", "group_size": 2}, **changes)
    (one, metrics, learner, read), (other, expected, _, whole) = (
        an_update(spec, some_advantages(), apart=apart) for apart in (True, False)
    )
    moved = torch.cat(other) - torch.cat([p.flatten() for p in tiny_model(0).double().parameters()])
    assert (torch.cat(one) - torch.cat(other)).norm() <= 1e-6 * moved.norm()
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert learner.still == [True, False, True, False, False, True, False, True]
    if not changes:  # the first prompt and its 4 completions of at most 5 tokens; two prompts and 4 of at most 7
        assert (read, whole) == ({False: 3 + 4 * 5, True: 2 * 5 + 4 * 7}, {False: 0, True: 3 * 5 + 8 * 7})


@pytest.mark.parametrize("algorithm", [
    {"name": "kl_cov", "penalty": 1.0, "covariance_share": 1.0}, {"name": "dr_grpo", "kl_beta": 0.1},
    {"name": "dr_grpo", "entropy_bonus": 0.1}, {"name": "ppo", "kl_beta": 0.0},
], ids=["penalty", "divergence", "entropy", "critic"])  # fmt: skip
def test_rows_without_advantage_keep_what_else_teaches_them(algorithm):
    one_by_one = {"tokens_per_microbatch": 1} if "penalty" in algorithm else {}
    spec = make_spec({"group_size": 2, **algorithm}, num_inner_epochs=2, **one_by_one)
    batch = some_advantages()
    batch = batch.replace(
        held_BT=batch.completion_mask_BT & (torch.arange(8) == 5)[:, None], returns_BT=batch.advantages_BT,
        ref_logprobs_BT=batch.sampler_logprobs_BT, values_BT=0 * batch.advantages_BT,
    )  # fmt: skip
    (one, metrics, learner, read), (other, expected, _, whole) = (
        an_update(spec, batch, apart=apart) for apart in (True, False)
    )
    assert all(map(torch.equal, one, other)) and metrics == expected and not learner.still
    assert (read == whole) == ("penalty" not in algorithm)  # which alone is seen only as they are read


def test_a_divergence_an_entropy_bonus_and_a_value_error_are_signals():
    equal = make_batch().replace(rewards_B=torch.zeros(8))
    apart = equal.replace(sampler_logprobs_BT=make_batch(tiny_model(0)).sampler_logprobs_BT)
    for algorithm, seen, critic in (
        ({"name": "grpo", "kl_beta": 0.04}, True, None),  # beside a reference that has moved
        ({"name": "ppo", "kl_beta": 0.01}, True, 0),  # whose divergence is also an error of the critic
        ({"name": "ppo", "kl_beta": 0, "entropy_bonus": 0.01}, True, 1),
        ({"name": "ppo", "kl_beta": 0}, False, 1),
    ):
        learner = Learner(make_spec({"group_size": 2, **algorithm}), tiny_model(0))
        if learner.reference is not None:
            changed(learner.reference, lambda weights: 1.02 * weights)
        found = learner.update(learner.spec.algorithm.advantages(learner.annotate(apart)), 0)
        assert (found["policy/no_signal"] == 0) == seen, algorithm
        assert found.get("critic/no_signal") == critic, algorithm
    # a return of 1 where 0 was expected is an error of the critic; through a shared head the policy's trunk sees it too
    for critic, unseen in ((SEPARATE, 1), (SHARED, 0)):
        learner = learner_for(make_spec({**critic, "kl_beta": 0}))
        batch = learner.annotate(equal)
        paid = batch.completion_mask_BT.double()
        found = learner.update(batch.replace(advantages_BT=0 * paid, returns_BT=paid), 0)
        assert (found["policy/no_signal"], found["critic/no_signal"]) == (unseen, 0)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_learner_goes_on_from_the_state_of_another(critic):
    changes = {"kl": {"refresh_reference_every": 2}, "staleness": 2, "optimizer": {"learning_rate": 1e-2}}
    spec = factories.make_spec({**SHARED, "critic": critic, "kl_beta": 0.1}, rollouts_per_step=8, **changes)

    def trained(learner, *steps):
        for step in steps:
            learner.begin_step(step)
            learner.update(spec.algorithm.advantages(learner.annotate(make_batch(learner.policy))), step)

    def everything(learner):
        with older_weights(learner.policy, learner.older[0]):
            older = {f"older.{name}": value.clone() for name, value in learner.policy.state_dict().items()}
        parts = {"policy": learner.policy, "reference": learner.reference, "critic": learner.critic}
        own = {f"{key}.{name}": value for key, part in parts.items() for name, value in part.state_dict().items()}
        return copy.deepcopy({**older, **own})

    one, other = (Learner(spec, tiny_model(seed)) for seed in (0, 1))
    trained(one, 0)
    after_one = {f"older.{name}": value.clone() for name, value in one.policy.state_dict().items()}
    trained(one, 1, 2)  # the reference is the policy after two steps, and older weights are those after one
    assert_same_weights({key: value for key, value in everything(one).items() if key in after_one}, after_one)
    assert one.state().keys() == {"policy", "critic", "critic_parameters", "reference", "older"}
    other.load_state(*copy.deepcopy((one.policy.state_dict(), one.state())))
    assert_same_weights(everything(other), everything(one))
    before = everything(one)
    trained(one, 3)
    trained(other, 3)
    assert_same_weights(everything(other), everything(one))
    moved = {key.partition(".")[0] for key, value in everything(one).items() if not torch.equal(value, before[key])}
    assert moved == {"older", "policy", "critic"}


def test_old_log_probs_are_read_if_the_sampler_differs_and_are_the_samplers_if_it_is_exact():
    batch = make_batch()
    truncated = {"mismatch": {"correction": "truncated"}}
    for changes, exact, reads, corrects in (
        ({}, False, False, False), ({"optimizer": {"num_inner_epochs": 2}}, True, True, False),
        ({"staleness": 1}, True, True, False), (truncated, False, True, True), (truncated, True, False, False),
    ):  # fmt: skip
        learner = Learner(factories.make_spec(rollouts_per_step=8, **changes), tiny_model(0))
        assert not learner.sampler_is_exact and learner.shares_prompts
        learner.sampler_is_exact = exact
        assert (learner.reads_old, learner.corrects) == (reads, corrects)
        old = learner.annotate(batch).old_logprobs_BT
        assert (old is None) != reads and (old is batch.sampler_logprobs_BT) == (reads and exact)


def test_the_critic_of_a_stage_warms_up_from_the_stages_start_and_is_fitted_once():
    spec = factories.make_spec(SHARED, rollouts_per_step=8, critic={"warmup_steps": 2, "head": "fitted"}, steps=9)
    learner, batch, found = Learner(spec, tiny_model(0)), make_batch(), []
    learner.start = 7
    for step in (7, 8, 9):
        metrics = learner.update(spec.algorithm.advantages(learner.annotate(batch)), step)
        found.append((learner.warms_critic, learner.fits_head, any("fit" in name for name in metrics)))
    assert found == [(True, True, True), (True, False, False), (False, False, False)]


def test_the_share_of_tokens_with_gradient_is_of_those_in_the_loss():
    spec = factories.make_spec(rollouts_per_step=8, overlong="mask")
    cut = torch.tensor([True, False])
    one = batch_of([[True, True], [True, False]], [1.0, 0.0], 2, truncated_B=cut)
    found = left_out(one.replace(gradient_BT=torch.tensor([[False, False], [True, False]])), spec)
    assert found == {"train/masked_tokens": pytest.approx(2 / 3), "train/gradient_tokens": 1.0}
