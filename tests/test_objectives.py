"""Every algorithm's advantages, loss and gradient against a second implementation, and what numbers do not show:
rounding in float32, extremes, refusals, and that an algorithm reads what it declares."""

import ast
import math
from pathlib import Path

import objective_references as references
import pytest
import torch
from cohort.algorithms._functional import generalised_advantages, group_centred, group_standardised, to_go
from cohort.algorithms.dppo import _binary_kl
from cohort.algorithms.gdpo import GDPO
from cohort.algorithms.maxrl import MaxRL, _by_the_mean
from cohort.algorithms.online_dpo import OnlineDPO
from cohort.algorithms.optimal_token_baseline import OptimalTokenBaseline
from cohort.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from cohort.algorithms.tpo import TPO
from cohort.harness import plugins
from cohort.harness.base.tensors import pad_right
from cohort.harness.data import Batch, PolicyOutput
from fakes import batch_of, small_batch

NAMES = plugins.names("algorithm")
FILES = sorted((Path(__file__).resolve().parents[1] / "algorithms").glob("[!_]*.py"))
PROMPT = 2  # tokens before each completion
# Values of settings that an algorithm is tried with besides its defaults, each where it has them.
EVERYWHERE = (
    {"kl_beta": 0.1, "entropy_bonus": 0.01},
    {"kl_beta": 0.1, "kl_estimator": "k1"},
    {"kl_beta": 0.1, "kl_estimator": "k2", "clip_epsilon_high": 0.4},
    {"kl_beta": 0.1, "kl_importance_weighted": True},
    {"kl_beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"kl_beta": 0.1, "kl_in": "reward", "loss_denominator": 16.0},
    {"clip_epsilon": 0.1, "ratio_bound": 1.5},
    {"clip_epsilon": 0.25, "ratio_bound": 1.25},  # at the upper clip itself
    {"clip_epsilon": 0.3, "clip_epsilon_high": 0.4, "kl_beta": 0.05},
    {"baseline": "group", "kl_beta": 0.05, "gamma": 0.9},
    {"baseline": "shrinkage", "kl_beta": 0.0},
    {"baseline": "group", "clip_epsilon": 0.2},
    {"positive_weight": 0.3},
    {"clip_epsilon_high": 0.2},
    {"gamma": 0.9, "gae_lambda": 0.8},
    {"gamma": 0.9, "gae_lambda": 0.6, "gae_lambda_critic": 1.0, "ratio_bound": 1.4},
    {"gae_lambda": 0.7, "length_adaptive_alpha": 0.4},
    {"clip_log_ratio": 0.1},
    {"tau_positive": 2.0, "tau_negative": 3.0},
    {"divergence": "kl", "divergence_bound": 0.02, "weight_max": 1.5},
    {"covariance_share": 0.3, "penalty": 0.5},
    {"target_temperature": 0.5, "kl_beta": 0.1},
    {"success_reward": 0.25, "outcome_share": 0.9},
    {"k_positive": 1.0, "lambda_positive": 4.0, "k_negative": 2.0, "lambda_negative": 5.0},
)


def accepts(name, settings):
    """The algorithm with these settings, or None if it has not all of them."""
    cls = plugins.load("algorithm", name)
    try:
        return cls(**settings) if settings.keys() <= cls.model_fields.keys() else None
    except ValueError:  # another value of a setting of this name
        return None


VARIANTS = [made for name in NAMES for settings in ({}, *EVERYWHERE) if (made := accepts(name, settings))]


def column(rows):
    """[B, T] float64 with each row after its prompt."""
    width = PROMPT + max(map(len, rows)) + 1  # one column of padding
    return pad_right([*([0.0] * PROMPT + row for row in rows), [0.0] * width], torch.float64)[:-1]


def made_batch(given, algorithm):
    mask = column([[1.0] * n for n in given["lengths"]]) > 0
    steps = {}
    if given["steps"] is not None:
        rows = list(zip(given["steps"], given["lengths"], strict=True))
        steps["step_rewards_BT"] = column([[row.get(t, 0.0) for t in range(n)] for row, n in rows])
        steps["step_ends_BT"] = column([[float(t in row) for t in range(n)] for row, n in rows]) > 0
    return Batch(
        tokens_BT=torch.zeros(mask.shape, dtype=torch.int64),
        completion_mask_BT=mask,
        lengths_B=torch.tensor([PROMPT + n for n in given["lengths"]]),
        sampler_logprobs_BT=column(given["old"]) - 1.0 * mask,  # which no objective reads
        rewards_B=torch.tensor(given["rewards"], dtype=torch.float64),
        group_size=given["group_size"],
        reward_parts_BK=torch.tensor(given["parts"], dtype=torch.float64),
        reward_weights_BK=torch.tensor([references.PART_WEIGHTS] * len(mask), dtype=torch.float64),
        greedy_rewards_B=torch.tensor(given["greedy"], dtype=torch.float64).repeat_interleave(given["group_size"]),
        old_logprobs_BT=column(given["old"]),
        ref_logprobs_BT=column(given["ref"]) if algorithm.needs_reference else None,
        collision_BT=column(given["collision"]),
        teacher_logprobs_BT=column(given["teacher"]),
        values_BT=column(given["old_values"]) if algorithm.needs_critic else None,
        loss_weight_BT=algorithm.loss_weights(mask.double()),
        **steps,
    )


def test_nothing_outside_of_the_mask_reaches_an_advantage_and_the_last_token_counts():
    mask = torch.tensor([[False, True, True, False, True]])
    rewards, values = torch.arange(1.0, 6)[None] * mask, torch.arange(2.0, 7)[None]
    found = [generalised_advantages(rewards, x, mask, 0.9, 0.8) for x in (values, values * mask)]
    assert torch.equal(*found) and not found[0][~mask].any()
    assert to_go(torch.tensor([[1.0, 2, 4]]), 0.5).tolist() == [[3.0, 4.0, 4.0]]


def flatten(value):
    return [x for part in value for x in flatten(part)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("case", references.BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_an_objective_gives_the_numbers_of_its_reference(name, case):
    given = references.BATCHES[case]
    for algorithm in VARIANTS:
        grouped = algorithm.min_group_size > 1 or getattr(algorithm, "baseline", "") == "group"
        if algorithm.name != name or (grouped and given["group_size"] == 1):
            continue
        algorithm = algorithm.model_copy(update={"group_size": given["group_size"]})
        expected = references.answers(algorithm.model_dump(), algorithm.objective, given)
        found = numbers(algorithm, given)
        assert found.keys() == expected.keys()
        for key, values in found.items():
            assert values == pytest.approx(flatten(expected[key]), abs=1e-6, rel=0), (key, algorithm)


def numbers(algorithm, given):
    batch = algorithm.advantages(made_batch(given, algorithm))
    logprobs = column(given["now"]).requires_grad_()
    values = column(given["values"]).requires_grad_() if algorithm.needs_critic else None
    loss, metrics = algorithm.minimised(batch, PolicyOutput(logprobs, column(given["entropy"]), values))
    loss.backward()

    def on_completions(tensor):
        """The numbers of the completion tokens; everything else must be 0."""
        assert tensor is not None and tensor[~batch.completion_mask_BT].abs().sum() == 0
        return tensor[batch.completion_mask_BT].tolist()

    found = {
        "advantages": on_completions(batch.advantages_BT), "policy_loss": [metrics["policy/loss"].item()],
        "gradient": on_completions(logprobs.grad), "clip_fraction": [metrics["policy/clip_fraction"].item()],
        "entropy": [metrics["policy/entropy"].item()], "kl_old": [metrics["kl/old"].item()],
    }  # fmt: skip
    if values is not None:
        found |= {
            "returns": on_completions(batch.returns_BT),
            "critic_loss": [metrics["critic/loss"].item()],
            "value_gradient": on_completions(values.grad),
        }
    if algorithm.needs_reference:
        found["kl_reference"] = [metrics["kl/reference"].item()]
    return found


INPUTS = {"old_logprobs_BT": "needs_old_logprobs", "ref_logprobs_BT": "needs_reference", "values_BT": "needs_critic",
          "collision_BT": "needs_collision", "greedy_rewards_B": "needs_greedy",
          "teacher_logprobs_BT": "needs_teacher"}  # fmt: skip


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_advantages_read_what_the_algorithm_declares_and_need_it(name, kl_beta):
    for algorithm in (a.model_copy(update={"kl_beta": kl_beta}) for a in VARIANTS if a.name == name):
        if kl_beta == 0 and (not algorithm.learns_from_rewards or "implied" in algorithm.objective["kl"]):
            continue
        declared = {key for key, fact in INPUTS.items() if getattr(algorithm, fact)}
        given = made_batch(references.BATCHES["two_groups"], algorithm)
        lean = given.replace(**dict.fromkeys(INPUTS.keys() - declared), sampler_logprobs_BT=None)
        assert torch.equal(algorithm.advantages(lean).advantages_BT, algorithm.advantages(given).advantages_BT)
        for key in declared - {"ref_logprobs_BT"}:
            with pytest.raises((AttributeError, TypeError)):
                algorithm.advantages(lean.replace(**{key: None}))


def without_divergence(algorithm):
    """The algorithm with no KL term, where it can do without."""
    bound = not algorithm.learns_from_rewards or "implied" in algorithm.objective["kl"]
    return algorithm if bound else algorithm.model_copy(update={"kl_beta": 0.0})


def loss_and_gradient(algorithm, batch, logprobs):
    leaf = logprobs.clone().requires_grad_()
    weighted = batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT))
    loss, _ = algorithm.loss(weighted, PolicyOutput(leaf, torch.zeros_like(leaf), batch.values_BT))
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_teach_nothing_and_what_lies_outside_the_completions_does_not_count(name):
    algorithm = without_divergence(plugins.load("algorithm", name)(group_size=12))
    if not algorithm.learns_from_rewards:
        return  # nothing but a divergence
    batch = small_batch([-0.1] * 12).replace(group_size=12)  # the float32 mean of 12 times -0.1 is not -0.1
    mask, nothing = batch.completion_mask_BT, torch.zeros(12, 7)
    ends = mask & (torch.arange(7) == 2)
    for given in (batch, batch.replace(step_rewards_BT=-0.1 * ends, step_ends_BT=ends)):
        given = given.replace(values_BT=nothing, ref_logprobs_BT=None if not algorithm.needs_reference else nothing)
        done = algorithm.advantages(given)
        exactly = algorithm.min_group_size > 1  # a baseline of the group; whitening the batch leaves its rounding
        if given.step_rewards_BT is None or exactly:
            assert done.advantages_BT.abs().max() <= (0 if exactly else 1e-6)
        for moved in (0.1, -40.0, 40.0):  # nats in all tokens of a row, far outside of what training sees
            now = (batch.old_logprobs_BT + moved / 5) * mask
            done = done.replace(advantages_BT=1.0 * mask, returns_BT=nothing)
            loss, gradient = loss_and_gradient(algorithm, done, now)
            same, other = loss_and_gradient(algorithm, done, now.where(mask, torch.tensor(7.0)))
            assert loss == same and torch.equal(gradient, other) and gradient.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_term_scales_with_advantages_as_declared_and_parts_without_tokens_weigh_nothing(name):
    algorithm = without_divergence(plugins.load("algorithm", name)(group_size=4))
    batch = small_batch([0.0] * 12).replace(returns_BT=torch.zeros(12, 7), log_share_B=torch.full((12,), -1.4))
    mask = batch.completion_mask_BT
    now = (batch.old_logprobs_BT - 0.3) * mask
    one, two = (loss_and_gradient(algorithm, batch.replace(advantages_BT=a * mask), now)[1] for a in (0.25, 0.5))
    assert one.any() and torch.allclose(two, 2 * one, rtol=1e-6) == algorithm.linear_in_advantages
    assert algorithm.loss_weights(torch.zeros(2, 3, dtype=torch.bool)).abs().sum() == 0


def test_groups_of_equal_rewards_have_exact_zeros_whatever_lies_beside_them():
    mask = torch.tensor([[True] * 7 + [False]] * 2)
    for value in (0.1, -0.1):  # the float32 means of sevens are not exact, and what does not count lies beside
        rewards = torch.tensor([[value] * 7 + [0.0], [3 * value] * 7 + [9.0]])
        assert torch.equal(group_centred(rewards, mask), torch.zeros(2, 8))
    assert group_centred(torch.tensor([[1.0, 3.0, 9.0]]), mask[:1, -3:]).tolist() == [[-1, 1, 0]]
    assert group_standardised(torch.ones(1, 1), of_batch=True).tolist() == [[0]]
    (pair,) = group_standardised(torch.tensor([[1.0, 0.0]]), of_batch=True).tolist()  # half by the std of two
    assert pair == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-3)
    equal = batch_of([[1]] * 14, [0.1] * 7 + [0.3] * 7, 7)
    assert not ReinforcePlusPlus(kl_beta=0, baseline="group").advantages(equal).advantages_BT.any()
    parts_BK = torch.tensor([[1.0, 0.1], [0.0, 0.7], [0.2, 0.4], *[[0.3, 0.3]] * 3])
    mixed = batch_of([[1]] * 6, parts_BK.sum(1).tolist(), 3, reward_parts_BK=parts_BK, reward_weights_BK=parts_BK**0)
    assert not GDPO(group_size=3).advantages(mixed).advantages_BT[3:].any()


def test_tpo_has_the_gradient_of_a_groups_cross_entropy_where_it_was_sampled_and_none_at_its_target():
    old = torch.tensor([[-1.0, -2.0], [-0.5, -0.5], [-2.0, -0.25]], dtype=torch.float64)
    batch = TPO().advantages(batch_of([[1, 1]] * 3, [1.0, 0.0, 0.0], 3, old_logprobs_BT=old))
    own = old.sum(1).requires_grad_()  # u is (1 - 1/3) / (sqrt(2) / 3) = sqrt(2), and -sqrt(1/2) twice
    target = (own.detach() + torch.tensor([2**0.5, -(0.5**0.5), -(0.5**0.5)])).softmax(0)
    expected = -(target * own.log_softmax(0)).sum()
    expected.backward()
    loss, gradient = loss_and_gradient(TPO(), batch, old)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradient, own.grad[:, None].expand(-1, 2), atol=1e-5, rtol=0)
    moved = target.logit() - own.detach().softmax(0).logit()  # its odds alone are those of q
    assert loss_and_gradient(TPO(), batch, old + moved[:, None] / 2)[1].abs().max() < 1e-5


@pytest.mark.parametrize("moved", [-40.0, 0.0, 40.0])
def test_tpo_stays_finite_where_one_answer_holds_all_of_the_probability(moved):
    old = torch.tensor([[0.0, 0.0], [0.0, -400.0]])
    batch = TPO().advantages(batch_of([[1, 1]] * 2, [0.0, 1.0], 2, old_logprobs_BT=old))
    loss, gradient = loss_and_gradient(TPO(), batch, old + moved)
    assert math.isfinite(loss) and gradient.isfinite().all()


@pytest.mark.parametrize("gap", [-400.0, 400.0])
def test_online_dpo_stays_finite_for_a_hopeless_or_a_settled_pair(gap):
    # margins of -+400 nats: the push is 1 or 0 in float32, and the loss is bounded by its smallest probability
    algorithm, old = OnlineDPO(kl_beta=1.0), torch.tensor([[0.0, gap], [0.0, 0.0]])
    batch = batch_of([[0, 1], [0, 1]], [1.0, 0.0], 2, old_logprobs_BT=old, ref_logprobs_BT=torch.zeros(2, 2))
    loss, gradient = loss_and_gradient(algorithm, algorithm.advantages(batch), old)
    assert math.isfinite(loss)
    assert gradient[:, 1].tolist() == pytest.approx([-1.0, 1.0] if gap < 0 else [0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # the mean is 0 but for rounding: the largest counts as the only one that is right, so A = (r - 0) / (1 / 6)
        ([1.0] + [-0.2] * 5, [6.0] + [-1.2] * 5),
        ([1.0] + [-0.225] * 4, [4.9] + [-1.225] * 4),  # mean 0.02 below 1 / 5: (1 - 0.02) * 5
        ([5.6e-17, -0.5, -1.0], [0.0] * 3),  # nothing is right but for the rounding of 0.1 + 0.2 - 0.3
        ([1e-8, 0.0], [1.0, -1.0]),  # rewards over their mean have no scale
    ],
)
def test_maxrl_divides_by_the_mean_and_never_by_its_rounding(rewards, expected):
    advantages = MaxRL().advantages(batch_of([[1]] * len(rewards), rewards, len(rewards))).advantages_BT
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    beside = _by_the_mean(torch.tensor([[*rewards, 9.0]]), torch.tensor([[True] * len(rewards) + [False]]))
    assert beside[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-5)


def test_certain_tokens_have_a_finite_divergence_and_no_weight_in_the_baseline_of_least_variance():
    # 0.5 ln(0.5 / 1) + 0.5 ln((0.5 + 1e-8) / (0 + 1e-8)) = -0.346574 + 8.863761
    assert _binary_kl(torch.tensor(0.5).log(), torch.tensor(0.0)).item() == pytest.approx(8.517187, abs=1e-4)
    assert _binary_kl(torch.tensor(0.0), torch.tensor(-0.1)).item() == pytest.approx(0.1)  # that was: 1 * (0 + 0.1)
    # 1 - 2 p + (sum of p^2) at p = 1 is 0, and may be -1e-6 by rounding: the baseline is 0
    tokens, collision = [[True, True]] * 2, torch.tensor([[1 - 1e-6, 1.0], [1.0, 1.0]])
    batch = batch_of(tokens, [1.0, 0.0], 2, old_logprobs_BT=torch.zeros(2, 2), collision_BT=collision)
    assert OptimalTokenBaseline().advantages(batch).advantages_BT.tolist() == [[0.5, 0.5], [-0.5, -0.5]]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_algorithm_fits_on_two_screens_and_its_reader_opens_one_other_file(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 80
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert len({node.module or alias.name for node in nodes for alias in node.names}) == 1


def test_the_rewards_that_algorithms_bring_and_the_losses_that_are_a_mean_over_all_tokens():
    brought = {name: plugins.load("algorithm", name).default_rewards for name in plugins.names("algorithm")}
    special = {"dapo": {"accuracy": 1.0, "overlong": 0.5}, "distill": {"accuracy": 0.0},
               "grpo_self_consistency": {"majority_vote": 1.0}}  # fmt: skip
    assert {name: own for name, own in brought.items() if own != {"accuracy": 1.0}} == special
    found = {name for name in plugins.names("algorithm") if plugins.load("algorithm", name).token_mean}
    named = {"cispo", "dapo", "distill", "kl_cov", "lite_ppo", "ppo", "reinforce_plus_plus", "sdpo", "vespo"}
    assert found == named & {
        *plugins.names("algorithm")
    }  # the words of `objective` follow this fact, so that no reference sees another one
