"""The regression that fits a critic's head: against least squares of numpy, and what it leaves alone."""

import numpy as np
import pytest
import torch
from cohort.harness.policy.forward import hidden_states
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner
from cohort.harness.run.value_head import PENALTIES, Moments, fitted_head
from cohort.harness.settings.run import CriticStart
from test_learner import SEPARATE, SHARED, make_spec, shared_prompts


def ridge(x, y, penalty):
    """Least squares of y on x and a 1, with rows that ask for weights of 0; by the singular values of that system."""
    scale = np.sqrt(penalty * len(x) * x.var(axis=0).mean())
    rows = np.vstack([np.c_[x, np.ones(len(x))], scale * np.eye(x.shape[1], x.shape[1] + 1)])
    return np.linalg.lstsq(rows, np.r_[y, np.zeros(x.shape[1])], rcond=None)[0]


def drawn(count, *, noise, seed):
    random = np.random.default_rng(seed)
    x = random.normal(1.0, 2.0, (count, 5))
    return x, x @ [0.5, -1.0, 0.0, 2.0, 0.25] + 3.0 + noise * random.normal(size=count)


def moments(x, y):
    return Moments.of(torch.from_numpy(x), torch.from_numpy(y))


@pytest.mark.parametrize("penalty", [1e-6, 0.1, 100.0])
def test_a_fit_and_its_error_are_those_of_least_squares(penalty):
    x, y = drawn(40, noise=1.0, seed=0)
    parts = moments(x[:15], y[:15]).plus(moments(x[15:], y[15:]))
    expected = ridge(x, y, penalty)
    assert parts.fit(penalty).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    others, wanted = drawn(30, noise=1.0, seed=1)
    error = ((others @ expected[:-1] + expected[-1] - wanted) ** 2).sum()
    assert float(moments(others, wanted).error(parts.fit(penalty))) == pytest.approx(error, abs=1e-6)


def test_the_penalty_is_the_one_that_predicts_best_across_the_halves():
    few, many = ([drawn(count, noise=3.0, seed=seed) for seed in (2, 3)] for count in (8, 200))
    for one, other in (few, many):
        errors = {}
        for penalty in PENALTIES:
            pairs = [(one, ridge(*other, penalty)), (other, ridge(*one, penalty))]
            errors[penalty] = sum(((x @ w[:-1] + w[-1] - y) ** 2).sum() for (x, y), w in pairs)
        best, every = min(errors, key=errors.__getitem__), np.r_[one[1], other[1]]
        found, explained = fitted_head(moments(*one), moments(*other))
        assert found.tolist() == pytest.approx(ridge(np.r_[one[0], other[0]], every, best).tolist(), abs=1e-6)
        assert explained == pytest.approx(1 - errors[best] / ((every - every.mean()) ** 2).sum(), abs=1e-6)


def test_returns_that_do_not_vary_and_halves_without_tokens_give_a_constant():
    x, _ = drawn(20, noise=0.0, seed=4)
    for value, size in ((0.7, 20), (0.7, 0), (98765.4, 20), (98765.4, 1)):
        found, explained = fitted_head(moments(x, np.full(20, value)), moments(x[:size], np.full(size, value)))
        assert found.tolist() == pytest.approx([0, 0, 0, 0, 0, value], abs=1e-6)
        assert explained == 0.0
    assert moments(x[:1], np.full(1, 0.7)).fit(0.1).tolist() == pytest.approx([0, 0, 0, 0, 0, 0.7])  # of one token
    x, y = drawn(20, noise=1.0, seed=5)  # of one prompt: nothing tells penalties apart, so the largest
    found, explained = fitted_head(moments(x, y), moments(x[:0], y[:0]))
    assert found.tolist() == pytest.approx(ridge(x, y, 100.0).tolist())
    assert explained == pytest.approx(1 - (y**2).sum() / ((y - y.mean()) ** 2).sum())  # of zeros


@pytest.mark.parametrize("critic", [SHARED, SEPARATE], ids=["shared", "separate"])
def test_the_first_update_of_a_run_fits_the_head_to_the_returns_and_no_later_one_does(critic):
    spec = make_spec(critic, tokens_per_microbatch=20, critic_learning_rate=1e-12, learning_rate=1e-12)
    spec = spec.model_copy(update={"critic": CriticStart(head="fitted")})
    learner, policy = Learner(spec, tiny_model(0).double()), tiny_model(0).double()
    batch = learner.algorithm.advantages(learner.annotate(shared_prompts()))
    learner.update(batch, 1)
    assert learner.critic.head.weight.abs().max() < 1e-9
    metrics = learner.update(batch, 0)
    mask, returns = batch.completion_mask_BT, batch.returns_BT
    half = (np.arange(8) // 2 % 2)[:, None].repeat(mask.shape[1], 1)[mask.numpy()]
    x, y = hidden_states(policy, batch.tokens_BT)[:, :-1][mask[:, 1:]].detach().numpy(), returns[mask].numpy()
    fit, explained = fitted_head(moments(x[half == 0], y[half == 0]), moments(x[half == 1], y[half == 1]))
    found = torch.cat([learner.critic.head.weight[0], learner.critic.head.bias])
    assert found.tolist() == pytest.approx(fit.tolist(), abs=1e-6)
    assert found.abs().max() > 1e-3
    assert metrics["critic/fitted_variance"] == pytest.approx(explained, abs=1e-6)
