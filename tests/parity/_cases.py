"""Random batches on which both sides are evaluated, and our side's numbers on them, all in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cohort.harness.data import Batch, PolicyOutput
from cohort.harness.interfaces import Algorithm
from torch import Tensor

PROMPT = 2  # columns before each completion, which the libraries do not get to see
SHAPES = ((2, 4, 7), (3, 2, 1), (1, 8, 16), (4, 3, 5))  # prompts, samples of each, longest completion in tokens
MOVED = (0.0, 0.1, 0.5, 2.0, 0.3)  # nats by which a token's log-prob typically changed since it was sampled
SEEDS = range(len(MOVED))
PART_WEIGHTS = (1.0, 0.5)  # of the two rewards that an objective of several takes apart


@dataclass(frozen=True)
class Numbers:
    """What one side says about a batch: a value (any shape) and, for a loss, its gradient [B, R] by the log-probs."""

    value: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A batch of B rows with R columns of completion behind PROMPT columns, and what the moved policy says of it."""

    batch: Batch
    logprobs_BT: Tensor
    values_BT: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, R] bool."""
        return self.batch.completion_mask_BT[:, PROMPT:]

    @property
    def index(self) -> Any:
        """The prompt's number of every row, as verl wants its groups."""
        return (torch.arange(len(self.batch)) // self.batch.group_size).numpy()

    @property
    def row_rewards_BT(self) -> Tensor:
        """[B, R]: the reward of each row on its last token, as the libraries' token-level scores."""
        last = self.mask & (self.mask.flip(1).cumsum(1).flip(1) == 1)
        return last * self.batch.rewards_B[:, None]

    def completion(self, tensor_BT: Tensor | None) -> Tensor:
        """The completion columns [B, R] of a `_BT` tensor."""
        return tensor_BT[:, PROMPT:]


def cases(*, empty_rows: bool = False, moved: float | None = None, group_size: int | None = None) -> Iterator[Case]:
    """Every shape with every seed; `moved`, `group_size` overrule theirs, and `empty_rows` adds one without tokens."""
    for prompts, size, tokens in SHAPES:
        for seed in SEEDS:
            shift = MOVED[seed] if moved is None else moved
            yield _case(prompts, group_size or size, tokens, seed, shift, empty_rows)


def _case(prompts: int, size: int, tokens: int, seed: int, moved: float, empty_rows: bool) -> Case:
    draw = torch.Generator().manual_seed(1000 * seed + 100 * prompts + 10 * size + tokens)
    rows, width = prompts * size, PROMPT + tokens + 1  # one column of padding at least
    lengths = torch.randint(1, tokens + 1, (rows,), generator=draw)
    if seed == 0:
        lengths.fill_(tokens)
    if empty_rows:
        lengths[seed % rows] = 0
    column = torch.arange(width)
    mask = (column >= PROMPT) & (column < PROMPT + lengths[:, None])

    def noise(spread: float) -> Tensor:
        return spread * torch.randn(rows, width, generator=draw, dtype=torch.float64) * mask

    rewards = torch.randn(rows, generator=draw)
    if seed % 2:  # right or wrong: whole groups of equal rewards among them
        rewards = (rewards > 0).float()
    old = -noise(1.0).abs() - 0.1 * mask
    style = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    batch = Batch(
        tokens_BT=torch.zeros(rows, width, dtype=torch.int64), completion_mask_BT=mask, lengths_B=PROMPT + lengths,
        sampler_logprobs_BT=old, rewards_B=rewards.double(), group_size=size,
        reward_parts_BK=torch.stack([rewards, style], dim=1).double(),
        reward_weights_BK=torch.tensor([PART_WEIGHTS] * rows, dtype=torch.float64),
        greedy_rewards_B=rewards.double().view(-1, size)[:, :1].expand(-1, size).flatten(), old_logprobs_BT=old,
        ref_logprobs_BT=old + noise(0.5), values_BT=noise(0.5),
        collision_BT=((2 * old).exp() + style.double()[:, None] * (1 - old.exp()) ** 2) * mask,
    )  # fmt: skip
    return Case(batch, old + noise(moved), batch.values_BT + noise(0.4))


def prepared(algorithm: Algorithm, case: Case) -> Batch:
    """The batch as our learner would hand it to the loss."""
    batch = case.batch if algorithm.needs_reference else case.batch.replace(ref_logprobs_BT=None)
    weight = algorithm.loss_weights(batch.completion_mask_BT.double())
    return algorithm.advantages(batch.replace(loss_weight_BT=weight))


def our_advantages(algorithm: Algorithm, case: Case) -> Numbers:
    return Numbers(case.completion(prepared(algorithm, case).advantages_BT))


def our_loss(algorithm: Algorithm, case: Case, network: str = "policy") -> Numbers:
    """A network's part of our loss, and its gradient."""
    logprobs, values = (x.clone().requires_grad_() for x in (case.logprobs_BT, case.values_BT))
    output = PolicyOutput(logprobs, torch.zeros_like(logprobs), values)
    loss, metrics = algorithm.loss(prepared(algorithm, case), output)
    loss.backward()
    return Numbers(metrics[f"{network}/loss"], case.completion((logprobs if network == "policy" else values).grad))
