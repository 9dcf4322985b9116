"""The rows of TRL: real trainers around a tiny model, whose own methods turn our log-probs and rewards into numbers.

A trainer's forward pass and its sampling are replaced by the batch's numbers; credit and loss are TRL's code.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _cases import PART_WEIGHTS, PROMPT, Case, Numbers, cases, our_advantages, our_loss, prepared
from _table import Row
from cohort.algorithms.cispo import CISPO
from cohort.algorithms.dapo import DAPO
from cohort.algorithms.dr_grpo import DrGRPO
from cohort.algorithms.gdpo import GDPO
from cohort.algorithms.gmpo import GMPO
from cohort.algorithms.grpo import GRPO
from cohort.algorithms.gspo import GSPO
from cohort.algorithms.lite_ppo import LitePPO
from cohort.algorithms.luspo import LUSPO
from cohort.algorithms.online_dpo import OnlineDPO
from cohort.algorithms.rloo import RLOO
from cohort.algorithms.sapo import SAPO
from cohort.algorithms.vespo import VESPO
from cohort.harness.data import Batch
from cohort.harness.interfaces import Algorithm
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

TEXT = "1+1="  # every prompt: what it says does not matter here
COMMON = {
    "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
    "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


class Given:
    """A reward function that returns what it was given, in float32 as every reward in TRL is."""

    __name__ = "given"

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, **kwargs: Any) -> list[float]:
        return self.values


TOLD = ("loss_type", "importance_sampling_level", "use_bias_correction_kl", "delta")  # settings that a row names
PLAIN_KL = {"use_bias_correction_kl": False}


@cache
def model_folder() -> str:
    """A tiny model on disk, from where a trainer can also load its reference."""
    folder = Path(tempfile.mkdtemp())
    save_model(folder, tiny_model(0), tiny_tokenizer())
    return str(folder)


@cache
def trainer(kind: type, group_size: int, rows: int, *, accumulate: int = 1, **settings: Any) -> Any:
    """A trainer on batches of `rows` rows in `accumulate` micro-batches."""
    config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig, GMPOTrainer: GMPOConfig}[kind](
        **COMMON, per_device_train_batch_size=rows // accumulate, gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate, num_generations=group_size, **settings,
    )  # fmt: skip
    made = kind(
        model=model_folder(), reward_funcs=[Given() for _ in settings.get("reward_weights", (1.0,))], args=config,
        train_dataset=Dataset.from_list([{"prompt": TEXT}] * 4), processing_class=tiny_tokenizer(),
    )  # fmt: skip
    made.model.train()
    made.current_gradient_accumulation_steps = accumulate  # the training loop sets it
    return made


def fixed_logprobs(*answers: Tensor) -> Callable[..., tuple[Tensor, Tensor, None]]:
    """What stands in for the forward pass: these log-probs [B, R], one after the other."""
    left = iter(answers)

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        logprobs = next(left)
        return logprobs, torch.zeros_like(logprobs), None

    return forward


# Advantages


def advantages(kind: type, case: Case, **settings: Any) -> Numbers:
    """What the trainer makes of the case's rewards, after its own scoring of "sampled" completions."""
    size = case.batch.group_size
    made = trainer(kind, size, len(case.batch), **settings)
    sampled = [[5] * int(count) for count in case.mask.sum(dim=1)]
    made._generate_single_turn = lambda *_: (sampled, None) if kind is GRPOTrainer else sampled
    old, ref = (case.completion(x)[:, : max(map(len, sampled))] for x in (case.batch.old_logprobs_BT,
                                                                           case.batch.ref_logprobs_BT))  # fmt: skip
    made._get_per_token_logps_and_entropies = fixed_logprobs(*((old, ref) if kind is RLOOTrainer else (ref, ref)))
    for function, values in zip(made.reward_funcs, case.batch.reward_parts_BK.T, strict=False):
        function.values = values.tolist()
    scored = made._generate_and_score_completions([{"prompt": TEXT}] * len(case.batch))
    return Numbers(scored["advantages"].double()[:, None] * case.mask)


def advantage_rows() -> list[Row]:
    grpo, rloo = "GRPOTrainer._generate_and_score_completions", "RLOOTrainer._generate_and_score_completions"
    theirs = partial(partial, advantages)
    return [
        Row("grpo: advantage", grpo, cases, partial(our_advantages, GRPO()),
            theirs(GRPOTrainer, scale_rewards="group")),
        Row("dr_grpo: advantage", f"{grpo}(scale_rewards=none)", cases, partial(our_advantages, DrGRPO()),
            theirs(GRPOTrainer, scale_rewards="none")),
        Row("lite_ppo: advantage", f"{grpo}(scale_rewards=batch)", cases, partial(our_advantages, LitePPO()),
            theirs(GRPOTrainer, scale_rewards="batch")),
        Row("gdpo: advantage of two rewards", f"{grpo}(multi_objective_aggregation=normalize_then_sum)", cases,
            partial(our_advantages, GDPO()),
            theirs(GRPOTrainer, multi_objective_aggregation="normalize_then_sum", reward_weights=PART_WEIGHTS)),
        Row("rloo: advantage", rloo, cases, partial(our_advantages, RLOO(kl_beta=0.0)),
            theirs(RLOOTrainer, beta=0.0)),
        Row("rloo: advantage, k1 in the reward", rloo, cases, partial(our_advantages, RLOO(kl_beta=0.05)),
            theirs(RLOOTrainer, beta=0.05)),
    ]  # fmt: skip


# Losses


def inputs_of(batch: Batch, case: Case, rows: slice = slice(None)) -> dict[str, Tensor]:
    """A micro-batch as the trainer's own scoring would hand it over."""
    mask = case.mask[rows].double()
    credit = case.completion(batch.advantages_BT)[rows]
    ids = torch.full(mask.shape, 5)
    return {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones_like(ids[:, :PROMPT]), "completion_ids": ids,
        "completion_mask": mask, "advantages": credit[:, 0],
        "old_per_token_logps": case.completion(batch.old_logprobs_BT)[rows],
        "old_logps": (case.completion(batch.old_logprobs_BT)[rows] * mask).sum(dim=1),
        "ref_per_token_logps": case.completion(case.batch.ref_logprobs_BT)[rows],
        "num_items_in_batch": case.mask.sum().double(),
    }  # fmt: skip


def loss(kind: type, algorithm: Algorithm, case: Case, *, accumulate: int = 1, **settings: Any) -> Numbers:
    """The trainer's loss on our advantages, summed over its micro-batches, and the gradient."""
    made = trainer(kind, case.batch.group_size, len(case.batch), accumulate=accumulate, **settings)
    leaf = case.completion(case.logprobs_BT).clone().requires_grad_()
    batch, size = prepared(algorithm, case), len(case.batch) // accumulate
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(case.batch), size):
        part = slice(first, first + size)
        made._get_per_token_logps_and_entropies = fixed_logprobs(leaf[part])
        total = total + made.compute_loss(made.model, inputs_of(batch, case, part))
    total.backward()
    return Numbers(total.detach(), leaf.grad)


def empty_rows() -> list[Case]:
    return list(cases(empty_rows=True))


def even() -> Iterator[Case]:
    """Batches that fall into two micro-batches of whole groups' size."""
    return (case for case in cases() if len(case.batch) % 4 == 0)


def loss_rows() -> list[Row]:
    def pair(objective: str, algorithm: Algorithm, where: Callable[[], Any] = cases, **settings: Any) -> Row:
        kind = {"rloo": RLOOTrainer, "gmpo": GMPOTrainer}.get(algorithm.name, GRPOTrainer)
        told = ", ".join(f"{k}={v}" for k, v in settings.items() if k in TOLD)
        name = f"{kind.__name__}.compute_loss" + (f"({told})" if told else "")
        return Row(objective, name, where, partial(our_loss, algorithm), partial(loss, kind, algorithm, **settings))

    sequence = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    return [
        pair("grpo: loss", GRPO(kl_beta=0.1), loss_type="grpo", beta=0.1, **PLAIN_KL),
        pair("grpo: loss, with empty rows", GRPO(kl_beta=0.1), empty_rows, loss_type="grpo", beta=0.1, **PLAIN_KL),
        pair("grpo: loss, KL importance-weighted (their default)", GRPO(kl_beta=0.1, kl_importance_weighted=True),
             loss_type="grpo", beta=0.1, use_bias_correction_kl=True),
        pair("grpo: loss, two-sided clip", GRPO(kl_beta=0.0, ratio_bound=2.0), loss_type="grpo", delta=2.0),
        pair("grpo: loss, clip-higher", GRPO(kl_beta=0.0, clip_epsilon_high=0.28), loss_type="grpo", epsilon_high=0.28),
        pair("dr_grpo: loss", DrGRPO(loss_denominator=32), loss_type="dr_grpo", max_completion_length=32),
        pair("dr_grpo: loss, with KL", DrGRPO(loss_denominator=32, kl_beta=0.1), loss_type="dr_grpo", beta=0.1,
             max_completion_length=32, **PLAIN_KL),
        pair("dapo: loss", DAPO(), loss_type="dapo", epsilon_high=0.28),
        pair("dapo: loss, with empty rows", DAPO(), empty_rows, loss_type="dapo", epsilon_high=0.28),
        pair("gspo: loss, wide clip and KL", GSPO(clip_epsilon=0.1, clip_epsilon_high=0.2, kl_beta=0.05), **sequence,
             epsilon=0.1, epsilon_high=0.2, beta=0.05, **PLAIN_KL),
        pair("luspo: loss, wide clip", LUSPO(clip_epsilon=0.1, clip_epsilon_high=0.2), loss_type="luspo",
             importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.2),
        pair("vespo: loss, other weights", VESPO(k_positive=1.0, lambda_positive=4.0, k_negative=2.0,
             lambda_negative=5.0), loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_pos=4.0, vespo_k_neg=2.0,
             vespo_lambda_neg=5.0),
        # their epsilon_high is the highest weight itself, ours (as the paper's) what it exceeds 1 by
        pair("cispo: loss, highest weight 1.5", CISPO(clip_epsilon_high=0.5), loss_type="cispo", epsilon_high=1.5),
        pair("lite_ppo: loss", LitePPO(), loss_type="dapo"),
        pair("gmpo: loss, narrow clip and KL", GMPO(clip_log_ratio=0.1, kl_beta=0.05), epsilon=0.1, beta=0.05),
        pair("sapo: loss, steep gates and KL", SAPO(tau_positive=2.0, tau_negative=3.0, kl_beta=0.05),
             loss_type="sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=3.0, beta=0.05, **PLAIN_KL),
        pair("rloo: loss, clipped", RLOO(kl_beta=0.0, clip_epsilon=0.2), epsilon=0.2),
        pair("grpo: loss, two micro-batches", GRPO(kl_beta=0.1), even, accumulate=2, loss_type="grpo", beta=0.1,
             **PLAIN_KL),
        pair("dr_grpo: loss, two micro-batches", DrGRPO(loss_denominator=32), even, accumulate=2, loss_type="dr_grpo",
             max_completion_length=32),
        pair("dapo: loss, two micro-batches", DAPO(), even, accumulate=2, loss_type="dapo", epsilon_high=0.28),
        pair("rloo: loss, default (not clipped)", RLOO(kl_beta=0.0), epsilon=1e9, epsilon_high=1e9),
    ]  # fmt: skip


# Online DPO: pairs, at the sampling policy


@cache
def dpo_trainer(beta: float) -> Any:
    return OnlineDPOTrainer(
        model=model_folder(), reward_funcs=Given(),
        args=OnlineDPOConfig(**COMMON, beta=beta, per_device_train_batch_size=1),
        train_dataset=Dataset.from_list([{"prompt": TEXT}] * 4), processing_class=tiny_tokenizer(),
    )  # fmt: skip


def dpo(case: Case, beta: float = 0.3) -> Numbers:
    """TRL's loss and gradient for the pairs of the batch: all first completions, then all second ones."""
    made, ids = dpo_trainer(beta), torch.full(case.mask.shape, 5)
    order = torch.cat([torch.arange(0, len(ids), 2), torch.arange(1, len(ids), 2)])
    leaf = case.completion(case.logprobs_BT).clone().requires_grad_()
    answers = iter([leaf[order], case.completion(case.batch.ref_logprobs_BT)[order]])
    mask = case.mask[order].long()
    made._generate = lambda *_: (ids[:, :1], torch.ones_like(ids[:, :1]), ids, mask, None)
    made._forward = lambda *_: next(answers)
    made.reward_funcs[0].values = case.batch.rewards_B[order].tolist()
    value = made.training_step(made.model, {"prompt": [TEXT] * (len(ids) // 2)})
    return Numbers(value * made.args.gradient_accumulation_steps, leaf.grad)


def pairs(*, ties: bool) -> Iterator[Case]:
    """Batches of groups of two, on policy; without `ties` those in which no pair has equal rewards."""
    for case in cases(moved=0.0, group_size=2):
        if ties or (case.batch.rewards_PG[:, 0] != case.batch.rewards_PG[:, 1]).all():
            yield case


def our_pairs(case: Case) -> Numbers:
    return our_loss(OnlineDPO(kl_beta=0.3), case)


def ties_as_pairs(case: Case) -> Numbers:
    """Ours, and DPO's loss of the first against the second where their rewards are equal."""
    ours, leaf = our_pairs(case), case.completion(case.logprobs_BT).clone().requires_grad_()
    assert ours.gradient is not None
    gain_P2 = ((leaf - case.completion(case.batch.ref_logprobs_BT)) * case.mask).sum(dim=1).view(-1, 2)
    equal = case.batch.rewards_PG[:, 0] == case.batch.rewards_PG[:, 1]
    rest = -(F.logsigmoid(0.3 * (gain_P2[:, 0] - gain_P2[:, 1])) * equal).sum() / len(gain_P2)
    rest.backward()
    assert leaf.grad is not None
    return Numbers(ours.value + rest.detach(), ours.gradient + leaf.grad)


def dpo_rows() -> list[Row]:
    name = "OnlineDPOTrainer.training_step"
    return [
        Row("online_dpo: loss, no ties", name, partial(pairs, ties=False), our_pairs, dpo),
        Row("online_dpo: loss, with ties", name, partial(pairs, ties=True), our_pairs, dpo,
            "of equal rewards they prefer the first answer, we leave the pair out", ties_as_pairs),
    ]  # fmt: skip


def rows() -> list[Row]:
    return [*advantage_rows(), *loss_rows(), *dpo_rows()]
