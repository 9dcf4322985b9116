"""The rows of verl, where TRL has no such objective: functions of `verl.trainer.ppo.core_algos` on the columns of our
completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from _cases import Case, Numbers, cases, our_advantages, our_loss, prepared
from _table import Row
from cohort.algorithms._functional import to_go, token_rewards
from cohort.algorithms.dppo import DPPO
from cohort.algorithms.dr_grpo import DrGRPO
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.kl_cov import KLCov
from cohort.algorithms.opo import OPO
from cohort.algorithms.optimal_token_baseline import OptimalTokenBaseline
from cohort.algorithms.pass_at_k import PassAtK
from cohort.algorithms.ppo import PPO
from cohort.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from cohort.algorithms.remax import ReMax
from cohort.algorithms.rgra import RGRA
from cohort.harness.interfaces import Algorithm
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as verl
from verl.workers.config import ActorConfig, PolicyLossConfig

GAE = PPO(kl_beta=0.05, gamma=0.97, gae_lambda=0.9)
Loss = Callable[..., tuple[Tensor, Any]]


def rows() -> list[Row]:
    return [*advantage_rows(), *loss_rows()]


# Advantages


def on_tokens(case: Case, values_BR: Tensor) -> Numbers:
    """Only the numbers of completion tokens count: a library may leave anything on padding."""
    return Numbers(values_BR * case.mask)


def scores(case: Case, kl_beta: float) -> Tensor:
    """[B, R]: verl's token-level rewards, with its k1 penalty."""
    batch = case.batch
    if kl_beta == 0:
        return case.row_rewards_BT
    old, ref = case.completion(batch.old_logprobs_BT), case.completion(batch.ref_logprobs_BT)
    return verl.compute_rewards(case.row_rewards_BT, old, ref, kl_beta)


def gae(case: Case) -> Numbers:
    values = case.completion(case.batch.values_BT)
    rewards, mask = scores(case, GAE.kl_beta), case.mask.double()
    _, returns = verl.compute_gae_advantage_return(rewards, values, mask, GAE.gamma, GAE.gae_lambda)
    return on_tokens(case, returns - values)


def outcome(function: Callable[..., Any], case: Case, kl_beta: float = 0.0, **settings: Any) -> Numbers:
    mask = case.mask.double()
    return on_tokens(case, function(scores(case, kl_beta), mask, index=case.index, **settings)[0])


def reinforce(case: Case, gamma: float) -> Numbers:
    function = verl.compute_reinforce_plus_plus_outcome_advantage
    return on_tokens(case, function(scores(case, 0.05), case.mask.double(), config=AlgoConfig(gamma=gamma))[0])


def remax(case: Case) -> Numbers:
    rewards, baselines = scores(case, 0.0), case.batch.greedy_rewards_B
    return on_tokens(case, verl.compute_remax_outcome_advantage(rewards, baselines, case.mask.double())[0])


def otb(case: Case) -> Numbers:
    old, collision = case.completion(case.batch.old_logprobs_BT), case.completion(case.batch.collision_BT)
    function = verl.compute_optimal_token_baseline_advantage
    return outcome(function, case, old_log_probs=old, sum_pi_squared=collision, handle_zero_tail=True)


def without_baseline_at_the_end(case: Case) -> Numbers:
    """Ours, with the whole reward where the other answers of the group have ended."""
    size = case.batch.group_size
    alone = (case.mask.view(-1, size, case.mask.shape[1]).sum(dim=1) == 1).repeat_interleave(size, dim=0)
    whole = case.batch.rewards_B[:, None] * case.mask
    return Numbers(whole.where(alone & case.mask, our_advantages(OptimalTokenBaseline(), case).value))


def bessel(raw: Callable[[Case], Tensor]) -> Callable[[Case], Numbers]:
    """Our formula with n - 1 instead of n tokens under the variance."""

    def predicted(case: Case) -> Numbers:
        tokens = raw(case)[case.mask]
        centred = raw(case) - tokens.mean()
        return on_tokens(case, centred / (tokens.var(unbiased=True) + 1e-8).sqrt())

    return predicted


def plain_gae(case: Case) -> Tensor:
    """Before it is whitened."""
    batch = prepared(GAE, case)
    assert batch.returns_BT is not None and batch.values_BT is not None
    return case.completion((batch.returns_BT - batch.values_BT) * batch.completion_mask_BT)


def plain_to_go(case: Case, gamma: float) -> Tensor:
    return case.completion(to_go(token_rewards(case.batch, 0.05), gamma))


def centred(case: Case) -> Tensor:
    return our_advantages(DrGRPO(), case).value


def more_than_one_token() -> list[Case]:
    """verl refuses to whiten a single token."""
    return [case for case in cases() if case.mask.sum() > 1]


def advantage_rows() -> list[Row]:
    grpo_like, passk = verl.compute_grpo_outcome_advantage, verl.compute_grpo_passk_outcome_advantage
    n_minus_1 = "they whiten with n - 1 tokens under the variance, we with n"
    return [
        Row("ppo: GAE, k1 in the reward", "compute_gae_advantage_return", cases,
            lambda case: Numbers(plain_gae(case)), gae),
        Row("grpo: advantage, k1 in the reward", "compute_grpo_outcome_advantage(epsilon=1e-4)", cases,
            partial(our_advantages, GRPO(kl_in="reward", kl_estimator="k1", kl_beta=0.05)),
            partial(outcome, grpo_like, kl_beta=0.05, epsilon=1e-4)),
        Row("reinforce_plus_plus: advantage, gamma 0.9", "compute_reinforce_plus_plus_outcome_advantage",
            more_than_one_token, partial(our_advantages, ReinforcePlusPlus(kl_beta=0.05, gamma=0.9)),
            partial(reinforce, gamma=0.9), n_minus_1, bessel(partial(plain_to_go, gamma=0.9))),
        Row("reinforce_plus_plus: advantage, group baseline",
            "compute_reinforce_plus_plus_baseline_outcome_advantage", more_than_one_token,
            partial(our_advantages, ReinforcePlusPlus(kl_beta=0.0, baseline="group")),
            partial(outcome, verl.compute_reinforce_plus_plus_baseline_outcome_advantage), n_minus_1, bessel(centred)),
        Row("opo: advantage", "compute_opo_outcome_advantage", cases, partial(our_advantages, OPO()),
            partial(outcome, verl.compute_opo_outcome_advantage)),
        Row("optimal_token_baseline: advantage", "compute_optimal_token_baseline_advantage", cases,
            partial(our_advantages, OptimalTokenBaseline()), otb,
            "where one answer is left its baseline is the group's mean here, 0 there", without_baseline_at_the_end),
        Row("pass_at_k: advantage", "compute_grpo_passk_outcome_advantage(norm_adv_by_std_in_grpo=False)", cases,
            partial(our_advantages, PassAtK()),
            partial(outcome, passk, config=AlgoConfig(norm_adv_by_std_in_grpo=False))),
        Row("remax: advantage", "compute_remax_outcome_advantage", cases, partial(our_advantages, ReMax()), remax),
    ]  # fmt: skip


# Losses


def loss(
    function: Loss, algorithm: Algorithm, mode: str, case: Case, *, low: float = 0.2, high: float = 0.2,
    kl: tuple[float, str] = (0.0, "k3"), scale: float | None = None, **settings: Any,
) -> Numbers:  # fmt: skip
    """verl's policy loss on our advantages, plus its KL penalty, aggregated by its `agg_loss`, and the gradient."""
    leaf = case.completion(case.logprobs_BT).clone().requires_grad_()
    batch, mask = prepared(algorithm, case), case.mask.double()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=low, clip_ratio_high=high,
        **settings,
    )  # fmt: skip
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    old, advantages = case.completion(batch.old_logprobs_BT), case.completion(batch.advantages_BT)
    total, _ = function(old, leaf, advantages, mask, loss_agg_mode=mode, config=config)
    beta, estimator = kl
    if beta:
        penalty = verl.kl_penalty(leaf, case.completion(case.batch.ref_logprobs_BT), estimator)
        total = total + beta * verl.agg_loss(penalty, mask, mode, **config.global_batch_info)
    total.backward()
    return Numbers(total.detach(), leaf.grad)


def nothing_dual_clipped() -> list[Case]:
    """Batches in which no token became more than three times likelier: there the dual clip never binds."""
    return [case for case in cases() if (case.logprobs_BT - case.batch.old_logprobs_BT).max() < 1.09]


def proper() -> list[Case]:
    """Batches in which no probability is above 1, which matters where it is not just a ratio."""
    return [Case(case.batch, case.logprobs_BT.clamp(max=-0.01), case.values_BT) for case in cases()]


def log_prob_valued(algorithm: DPPO, case: Case) -> Numbers:
    """Our loss with each token's weight times its log-prob, which has the same gradient."""
    gradient = our_loss(algorithm, case).gradient
    assert gradient is not None
    return Numbers((gradient * case.completion(case.logprobs_BT)).sum(), gradient)


def on_policy() -> list[Case]:
    return list(cases(moved=0.0))


def loss_rows() -> list[Row]:
    vanilla, row_mean = verl.compute_policy_loss_vanilla, "seq-mean-token-mean"
    ppo, grpo = PPO(kl_beta=0.05), GRPO(kl_beta=0.1)

    def pair(
        objective: str, function: Loss, algorithm: Algorithm, mode: str, where: Callable[[], Any] = cases,
        **settings: Any,
    ) -> Row:  # fmt: skip
        told = f"{function.__name__}({mode})" + (f" + kl_penalty({settings['kl'][1]})" if "kl" in settings else "")
        theirs = partial(loss, function, algorithm, mode, **settings)
        return Row(objective, told, where, partial(our_loss, algorithm), theirs)

    def explained(row: Row, reason: str, predicted: Callable[[Case], Numbers]) -> Row:
        return replace(row, reason=reason, predicted=predicted)

    dppo = DPPO(loss_denominator=40, weight_max=3.0)
    dppo_kl = dppo.model_copy(update={"divergence": "kl", "divergence_bound": 0.05})
    kl_cov = KLCov(covariance_share=0.2, penalty=0.5)
    cov = {"policy_loss": PolicyLossConfig(kl_cov_ratio=0.2, ppo_kl_coef=0.5)}
    valued = "their value is weight * A * log-prob, ours (as the paper's) weight * A; the gradient is the same"
    return [
        pair("ppo: loss, no ratio above 3", vanilla, ppo, "token-mean", nothing_dual_clipped),
        Row("ppo: critic's loss", "compute_value_loss(token-mean)", cases,
            partial(our_loss, ppo, network="critic"), partial(critic_loss, ppo)),
        *(pair(f"grpo: loss, KL by {k}", vanilla, grpo.model_copy(update={"kl_estimator": k}), row_mean,
               nothing_dual_clipped, kl=(0.1, k)) for k in ("k1", "k2")),
        pair("ppo: loss, dual clip", vanilla, PPO(kl_beta=0.05, ratio_bound=3.0), "token-mean"),
        pair("opo: loss", vanilla, OPO(loss_denominator=40, ratio_bound=3.0), "seq-mean-token-sum-norm", scale=40),
        pair("pass_at_k: loss", vanilla, PassAtK(loss_denominator=40, ratio_bound=3.0), "seq-mean-token-sum-norm",
             scale=40),
        pair("remax: loss", vanilla, ReMax(loss_denominator=40, ratio_bound=3.0), "seq-mean-token-sum-norm", scale=40),
        pair("rgra: loss", verl.compute_policy_loss_gpg, RGRA(kl_beta=0.1), row_mean, nothing_dual_clipped,
             kl=(0.1, "k3")),
        explained(pair("dppo: loss, TV", verl.compute_policy_loss_dppo_tv, dppo, "seq-mean-token-sum-norm", proper,
                       low=0.15, high=0.15, scale=40), valued, partial(log_prob_valued, dppo)),
        explained(pair("dppo: loss, KL", verl.compute_policy_loss_dppo_kl, dppo_kl, "seq-mean-token-sum-norm", proper,
                       low=0.05, high=0.05, scale=40), valued, partial(log_prob_valued, dppo_kl)),
        pair("kl_cov: loss, on policy", verl.compute_policy_loss_kl_cov, kl_cov, "token-mean", on_policy, **cov),
        # off policy they choose tokens by the log-probs of each minibatch as it is, we once by the sampling policy's
        pair("reinforce_plus_plus: loss, no ratio above 3", vanilla, ReinforcePlusPlus(kl_beta=0.05), "token-mean",
             nothing_dual_clipped),
    ]  # fmt: skip


def critic_loss(algorithm: PPO, case: Case) -> Numbers:
    leaf = case.completion(case.values_BT).clone().requires_grad_()
    batch = prepared(algorithm, case)
    old, returns = case.completion(batch.values_BT), case.completion(batch.returns_BT)
    total, _ = verl.compute_value_loss(leaf, returns, old, case.mask.double(), algorithm.value_clip)
    total.backward()
    return Numbers(total.detach(), leaf.grad)
