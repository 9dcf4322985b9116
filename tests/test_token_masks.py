"""What is left out of the loss, and the entropy bonus: value and gradient against smaller batches and written sums."""

import pytest
import torch
from cohort.harness import plugins
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.run.learner import Learner, highest, left_out
from cohort.harness.run.loop import train
from cohort.harness.settings.run import parse_run
from factories import FEW, make_spec
from fakes import MemoryLog, small_batch

PAID = [1.0, 0, 0, 0.5] * 3
CUT = torch.tensor([0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]).bool()  # 3 of 12 rows, with 5, 3 and 4 of their 33 tokens


def a_spec(algorithm, *, budget=1024, **settings):
    algorithm = {"group_size": 4, "kl_beta": 0.05, **({"name": algorithm} if isinstance(algorithm, str) else algorithm)}
    return make_spec(algorithm, rollouts_per_step=12, optimizer={"tokens_per_microbatch": budget}, **settings)


def updated(spec, batch):
    """(metrics, gradient of the policy, batch with advantages) of the first update of a learner in float64."""
    learner = Learner(spec, tiny_model(0).double(), tiny_model(1).double() if spec.kl.reference else None)
    if batch.advantages_BT is None:
        batch = spec.algorithm.advantages(learner.annotate(batch))
    learner.optimizers = {}
    (minibatch,) = learner._minibatches(batch, 0, 0)
    metrics = learner._optimizer_step(minibatch, first=True) | left_out(batch, learner.spec)
    return metrics, torch.cat([p.grad.flatten() for p in learner.policy.parameters() if p.grad is not None]), batch


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "dr_grpo", "rloo", "ppo"])
def test_a_loss_without_cut_completions_is_that_of_a_batch_that_never_had_them(algorithm):
    batch = small_batch(PAID).replace(truncated_B=CUT)
    metrics, gradient, credited = updated(a_spec(algorithm, overlong="mask"), batch)
    rest = credited.rows((~CUT).nonzero()[:, 0])  # with the advantages that they had in their whole groups
    without, expected, _ = updated(a_spec(algorithm), rest)
    assert (gradient - expected).norm() <= 1e-7 * expected.norm()
    shared = metrics.keys() & without.keys() - {"mismatch/max_ratio"}  # the largest, of all rows
    assert {k: metrics[k] for k in shared} == pytest.approx({k: without[k] for k in shared}, abs=1e-6)
    assert metrics["train/masked_tokens"] == pytest.approx(12 / 33)
    counted, plain, _ = updated(a_spec(algorithm), batch)
    assert (plain - expected).norm() > 0.01 * expected.norm() and "train/masked_tokens" not in counted


def test_a_batch_of_cut_completions_alone_teaches_nothing():
    batch = small_batch(PAID).replace(truncated_B=torch.ones(12).bool())
    metrics, gradient, _ = updated(a_spec("grpo", overlong="mask", high_entropy_tokens=0.5), batch)
    assert metrics["train/masked_tokens"] == 1 and metrics["train/gradient_tokens"] == 0
    assert not gradient.any() and metrics["policy/loss"] == 0


def written(batch, share, bonus):
    """(gradient, tokens that learn, mean entropy) of GRPO's loss as written, from logits of whole rows."""
    model, mask = tiny_model(0).double(), batch.completion_mask_BT
    every = torch.nn.functional.pad(model(batch.tokens_BT).logits, (0, 0, 1, 0))[:, :-1].log_softmax(-1)
    logprobs = every.gather(2, batch.tokens_BT[:, :, None])[:, :, 0]
    entropies = -(every.exp() * every).sum(-1)
    order = sorted(entropies[mask].tolist(), reverse=True)
    learns = mask & (entropies >= order[round(share * len(order)) - 1])
    weights = mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    loss = -(weights * batch.advantages_BT * logprobs + bonus * weights * entropies)[learns].sum()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, learns, (weights * entropies).sum().item()


@pytest.mark.parametrize(("share", "bonus"), [(0.2, 0.0), (1.0, 0.3), (0.4, 0.3)])
def test_only_the_tokens_of_highest_entropy_carry_gradient_that_of_the_bonus_too(share, bonus):
    algorithm = {"name": "grpo", "kl_beta": 0.0, "entropy_bonus": bonus}
    found = [updated(a_spec(algorithm, budget=b, high_entropy_tokens=share), small_batch(PAID)) for b in (1024, 13)]
    for metrics, gradient, batch in found:  # whatever the micro-batches
        expected, learns, entropy = written(batch, share, bonus)
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()
        assert batch.gradient_BT is None if share == 1 else torch.equal(batch.gradient_BT, learns)
        assert metrics.get("train/gradient_tokens", 1) == pytest.approx(int(learns.sum()) / 33)
        # on the policy's own samples every ratio is 1: the loss is minus the mean advantage, less the bonus
        weights = batch.completion_mask_BT / batch.completion_mask_BT.sum(1, keepdim=True).clamp(min=1) / 12
        value = -float((weights * batch.advantages_BT).sum()) - bonus * entropy
        assert metrics["policy/loss"] == pytest.approx(value, abs=1e-6)
        assert metrics["policy/entropy"] == pytest.approx(entropy, abs=1e-6)
    learner = Learner(a_spec(algorithm), tiny_model(0))
    assert learner._output(small_batch(PAID), [None], True).entropy_BT.requires_grad == (bonus > 0)


@pytest.mark.parametrize("name", plugins.names("algorithm"))
def test_every_objective_takes_the_bonus_and_loses_the_gradient_of_tokens_that_do_not_learn(name):
    taught = {"kl": {"reference": "tiny"}, "rewards": {"accuracy": 0}} if name == "distill" else {}
    plain, paid = (a_spec({"name": name, "kl_beta": 0.1, "entropy_bonus": x}, **taught) for x in (0.0, 0.3))
    given = small_batch(PAID)
    values, gradients = [], []
    for spec in (plain, paid):
        metrics, gradient, batch = updated(spec, given)
        values.append(metrics["policy/loss"])
        gradients.append(gradient)
    weights = plain.algorithm.loss_weights(given.completion_mask_BT)
    model = tiny_model(0).double()
    every = torch.nn.functional.pad(model(given.tokens_BT).logits, (0, 0, 1, 0))[:, :-1].log_softmax(-1)
    bonus = 0.3 * (weights * -(every.exp() * every).sum(-1)).sum()
    bonus.backward()
    pull = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert values[0] - values[1] == pytest.approx(float(bonus.detach()), abs=1e-6)
    assert ((gradients[0] - gradients[1])[: len(pull)] - pull).norm() <= 1e-5 * pull.norm()
    none = batch.replace(gradient_BT=torch.zeros_like(batch.completion_mask_BT))
    assert not updated(paid, none)[1].any()


def test_a_share_of_tokens_is_counted_among_those_in_the_loss():
    values = torch.tensor([[5.0, 1.0, 3.0], [4.0, 2.0, 9.0]])
    counted = torch.tensor([[True, True, True], [True, True, False]])
    for share, least in ((0.2, 5.0), (0.4, 4.0), (0.6, 3.0), (0.01, 5.0), (1.0, 1.0)):  # 1, 2, 3, at least 1, all of 5
        assert torch.equal(highest(values, counted, share), counted & (values >= least))
    assert highest(torch.ones(2, 3), counted, 0.2).sum() == 5  # equal values are not told apart


@pytest.mark.slow
def test_a_run_counts_what_it_leaves_out_and_pays_the_penalty_once(tmp_path, cache):
    spec = make_spec(**{**FEW, "overlong": "mask", "high_entropy_tokens": 0.2, "steps": 1, "cold_start": {"steps": 20}})
    log = MemoryLog()
    assert train(spec, tmp_path, log, cache=cache).state == "complete"
    ((_, cut),), ((_, length),), ((_, masked),) = (
        log.history(f"{area}") for area in ("completion/truncated", "completion/length", "train/masked_tokens")
    )
    # each cut one is as long as can be
    assert masked == pytest.approx(cut * spec.max_tokens / length) and 0 < masked < 1
    ((_, learning),) = log.history("train/gradient_tokens")
    assert 0.1 < learning < 0.35
    for algorithm in ("grpo", "dapo"):
        rewards = make_spec(algorithm, overlong="penalise").rewards
        assert {name: reward.weight for name, reward in rewards.items()} == {"accuracy": 1.0, "overlong": 0.5}
    heavier = make_spec(overlong="penalise", rewards={"overlong": 0.8})
    assert heavier.rewards["overlong"].weight == 0.8 and "overlong" not in make_spec(overlong="mask").rewards
    assert parse_run(heavier.model_dump(mode="json"), "again") == heavier
