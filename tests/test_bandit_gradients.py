"""The expected gradient of estimators that claim a true one, enumerated on a problem small enough to list all groups.

The policy is a table of logits, one row for each prefix. All groups of G completions are enumerated with their
probabilities, so that an expectation is a finite sum in float64. True gradients come from autograd of the enumerated
expected reward.
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from cohort.algorithms._functional import leave_one_out
from cohort.algorithms.dr_grpo import DrGRPO
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.maxrl import MaxRL
from cohort.algorithms.pass_at_k import PassAtK
from cohort.algorithms.ppo import PPO
from cohort.algorithms.remax import ReMax
from cohort.algorithms.rloo import RLOO
from cohort.harness.data import Batch, PolicyOutput

STOP = 2


class Bandit:
    """Completions over the tokens 0 and 1 and, if they may differ in length, STOP; rewards are drawn, or 0 1 0 ..."""

    def __init__(self, length, *, stops=True, binary=False):
        self.vocabulary = 3 if stops else 2
        self.completions = [
            y
            for n in range(1, length + 1)
            for y in itertools.product(range(self.vocabulary), repeat=n)
            if STOP not in y[:-1] and (n == length or y[-1] == STOP)
        ]
        prefixes = sorted({y[:t] for y in self.completions for t in range(len(y))})
        self.row_of = {prefix: i for i, prefix in enumerate(prefixes)}
        draw = torch.Generator().manual_seed(0)
        tables = torch.randn(3, len(prefixes), self.vocabulary, generator=draw, dtype=torch.float64)
        self.logits, self.other_logits, self.ref_logits = tables[0].requires_grad_(), tables[1], tables[2]
        drawn = torch.rand(len(self.completions), generator=draw, dtype=torch.float64)
        self.rewards = torch.arange(len(drawn)).remainder(2).double() if binary else drawn

    def token_logprobs(self, logits, y):
        logp = F.log_softmax(logits, dim=-1)
        return torch.stack([logp[self.row_of[y[:t]], y[t]] for t in range(len(y))])

    def logprobs(self, logits):
        """Log-prob of every completion."""
        return torch.stack([self.token_logprobs(logits, y).sum() for y in self.completions])

    def gradient(self, objective):
        return torch.autograd.grad(objective, self.logits, retain_graph=True)[0]

    def expected_reward(self, kl_beta=0.0):
        """E[r] - kl_beta * KL(policy, reference), with its gradient."""
        logp = self.logprobs(self.logits)
        return (logp.exp() * (self.rewards - kl_beta * (logp - self.logprobs(self.ref_logits)))).sum()

    def greedy(self):
        """The number of the completion that takes the likeliest token every time."""
        y = ()
        while y not in self.completions:
            y = (*y, int(self.logits[self.row_of[y]].argmax()))
        return self.completions.index(y)

    def padded(self, logits, chosen):
        """[G, T] token log-probs; column 0 is the prompt."""
        width = 1 + max(map(len, self.completions))
        rows = [self.token_logprobs(logits, self.completions[i]) for i in chosen]
        return torch.stack([F.pad(row, (1, width - 1 - len(row))) for row in rows])

    def batch(self, chosen, old, algorithm, group_size):
        lengths = torch.tensor([1 + len(self.completions[i]) for i in chosen])
        column = torch.arange(1 + max(map(len, self.completions)))
        mask = (column >= 1) & (column < lengths[:, None])
        batch = Batch(
            tokens_BT=torch.zeros(mask.shape, dtype=torch.int64),
            completion_mask_BT=mask,
            lengths_B=lengths,
            sampler_logprobs_BT=old,
            rewards_B=self.rewards[chosen],
            group_size=group_size,
            greedy_rewards_B=self.rewards[self.greedy()].expand(len(chosen)) if algorithm.needs_greedy else None,
            old_logprobs_BT=old,
            ref_logprobs_BT=self.padded(self.ref_logits, chosen) if algorithm.needs_reference else None,
            values_BT=torch.zeros(mask.shape, dtype=torch.float64) if algorithm.needs_critic else None,
        )
        done = algorithm.advantages(batch)
        if algorithm.needs_critic:  # what the advantages are before they are whitened, since the values are 0
            done = done.replace(advantages_BT=done.returns_BT)
        return done.replace(loss_weight_BT=algorithm.loss_weights(mask.double()))

    def expected_update(self, algorithm, size, sampled_from=None, group_size=None):
        """Minus the expected gradient of the algorithm's loss over all batches of `size` completions: where a small
        step goes on average; and the mean of how far advantages are from leave-one-out."""
        total, apart = torch.zeros(()), 0.0
        every = range(len(self.completions))
        now_BT, old_BT = (self.padded(self.logits if x is None else x, every) for x in (None, sampled_from))
        p = old_BT.sum(dim=1).exp().tolist()
        for chosen in map(list, itertools.product(every, repeat=size)):
            logprobs = now_BT[chosen]
            batch = self.batch(chosen, old_BT[chosen].detach(), algorithm, group_size or size)
            loss, _ = algorithm.loss(batch, PolicyOutput(logprobs, torch.zeros_like(logprobs), batch.values_BT))
            weight = math.prod(p[i] for i in chosen)
            total = total - weight * loss
            if group_size is not None:
                apart += weight * (batch.advantages_BT - leave_one_out(batch.rewards_PG).reshape(-1, 1)).abs().max()
        return self.gradient(total), apart


def close(one, other, tolerance=1e-9):
    return torch.allclose(one, other, rtol=0, atol=tolerance)


# (algorithm, group size, weight of the divergence in what it climbs, factor on the true gradient)
CLIMBS = [
    (RLOO(kl_beta=0.0), 3, 0.0, 1.0),
    (RLOO(kl_beta=0.3), 2, 0.3, 1.0),
    # a reward is part of the mean it is compared with: (G - 1) / G; the sum over tokens is divided by 16
    (DrGRPO(loss_denominator=16), 2, 0.0, 1 / 2 / 16),
    (DrGRPO(loss_denominator=16, kl_beta=0.3, kl_in="reward", kl_estimator="k1"), 2, 0.3, 1 / 2 / 16),
    (ReMax(loss_denominator=16), 2, 0.0, 1 / 16),
]


@pytest.mark.parametrize(("algorithm", "size", "kl_beta", "factor"), CLIMBS)
def test_an_estimator_climbs_the_expected_reward_whatever_the_lengths(algorithm, size, kl_beta, factor):
    bandit = Bandit(2)
    truth = bandit.gradient(bandit.expected_reward(kl_beta))
    assert truth.norm() > 0.01
    assert close(bandit.expected_update(algorithm, size)[0], factor * truth)


def test_a_baseline_that_is_shrunk_towards_other_groups_leaves_the_gradient_as_it_is():
    # Groups of 2, and three prompts: what the baseline of a group takes from the others does not depend on it.
    bandit, algorithm = Bandit(1, stops=False), RLOO(kl_beta=0.0, baseline="shrinkage")
    update, shrunk = bandit.expected_update(algorithm, 6, group_size=2)
    assert shrunk > 0.05
    assert close(update, bandit.gradient(bandit.expected_reward()))


def test_rloo_stays_unbiased_when_another_policy_sampled():
    bandit = Bandit(2)
    truth = bandit.gradient(bandit.expected_reward())
    assert close(bandit.expected_update(RLOO(kl_beta=0.0), 2, sampled_from=bandit.other_logits)[0], truth)


def test_the_per_token_divergence_in_the_reward_climbs_reward_minus_divergence():
    bandit = Bandit(2, stops=False)  # of equal length, since PPO means over tokens
    truth = bandit.gradient(bandit.expected_reward(kl_beta=0.3))
    assert close(bandit.expected_update(PPO(kl_beta=0.3), 1)[0], truth / 2)


@pytest.mark.parametrize(
    ("estimator", "weighted", "has"),
    [("k1", False, None), ("k2", False, "reverse"), ("k3", False, "forward"), ("k1", True, "reverse"),
     ("k3", True, "reverse")],
)  # fmt: skip
def test_a_divergence_in_the_loss_has_the_gradient_that_its_estimator_claims(estimator, weighted, has):
    # Equal rewards, single tokens: what is left is KL(policy, reference), or the other way round. Weighed by the ratio
    # it is true off policy too.
    bandit = Bandit(1, stops=False)
    bandit.rewards = torch.ones_like(bandit.rewards)
    logp, ref = F.log_softmax(bandit.logits, dim=-1), F.log_softmax(bandit.ref_logits, dim=-1)
    terms = {"reverse": logp.exp() * (logp - ref), "forward": ref.exp() * (ref - logp)}
    gradients = {name: -bandit.gradient(term.sum()) for name, term in terms.items()}
    assert not close(*gradients.values(), 1e-3)
    algorithm = GRPO(kl_beta=1.0, kl_estimator=estimator, kl_importance_weighted=weighted)
    for sampled_from in (None, bandit.other_logits) if weighted else (None,):
        update, _ = bandit.expected_update(algorithm, 2, sampled_from=sampled_from)
        assert close(update, gradients.get(has, torch.zeros_like(update)))


@pytest.mark.parametrize("size", [2, 4])
def test_maxrl_climbs_the_first_terms_of_the_log_likelihood(size):
    # sum over k < G of (1 - p)^(k - 1) * gradient of p, which is the gradient of the sum of pass@k / k
    bandit = Bandit(2 if size < 4 else 1, binary=True)
    p = bandit.expected_reward()
    truth = bandit.gradient(sum(((1 - (1 - p) ** k) / k for k in range(1, size)), torch.zeros(())))
    assert truth.norm() > 0.01
    assert close(bandit.expected_update(MaxRL(loss_denominator=16), size)[0], truth / 16)


def test_pass_at_k_climbs_the_expected_best_of_the_group():
    bandit, size = Bandit(2), 2
    logp = bandit.logprobs(bandit.logits)
    groups = itertools.product(range(len(logp)), repeat=size)
    best = torch.stack([logp[list(g)].sum().exp() * bandit.rewards[list(g)].max() for g in groups]).sum()
    truth = bandit.gradient(best)
    assert truth.norm() > 0.01
    assert close(bandit.expected_update(PassAtK(loss_denominator=16), size)[0], truth / size / 16)
