"""Defines the plain data of training steps: settings that plugins share, prompts, rollouts, batches.

Axes: P prompts in a step, G samples per prompt, B = P * G rows, T padded token columns. Column t of a `_BT`
tensor always describes token t of the row; `harness.policy.forward` is the one place where logits are shifted to match.
This module never imports torch at run time, so that settings and reports can use it without.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # for the hints of algorithms, whose settings are read without torch

UNSET: Any = None  # of a tensor that is None until, or unless, something fills it

Split = Literal["train", "validation", "test"]
FinishReason = Literal["stop", "length"]
TrialState = Literal["running", "complete", "invalid", "failed", "stopped", "pruned"]
FINAL = ("complete", "invalid", "pruned")  # final results: such a run is never repeated
ENDED = (*FINAL, "failed")  # nothing more happens unless the study is started again


class Section(BaseModel):
    """A frozen, validated group of settings; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


class Sampling(Section):
    """The settings for sampling completions during training.

    A cut (`top_p`) biases training: tokens are drawn from the cut distribution, but log-probs come from the uncut
    one, so neither the ratio nor the gradient allows for the cut.
    """

    temperature: float = Field(default=1.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling; 1: all tokens; less biases training")
    max_tokens: int | None = Field(default=None, ge=1, description="tokens of a completion; by default the task's")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a completion, also in evaluations; the completion keeps them"
    )


class PromptFormat(Section):
    """The form of a prompt with its worked examples: one user message of a chat, or plain text."""

    format: Literal["auto", "chat", "plain"] = Field(
        default="auto", description="chat: through the model's chat template; auto: chat if it has one, else plain"
    )
    system: str | None = Field(default=None, description="system message; by default the template's own")
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="arguments of the chat template, such as enable_thinking: false"
    )

    @property
    def needs_template(self) -> bool:
        """Whether a setting needs a chat template."""
        return self.format == "chat" or self.system is not None or bool(self.template_arguments)

    @model_validator(mode="after")
    def _plain_is_alone(self) -> Self:
        if self.format == "plain" and self.needs_template:
            raise ValueError(
                "prompt.system and prompt.template_arguments need a chat template, got prompt.format=plain; leave "
                "them out or use prompt.format=chat"
            )
        return self


class InvalidRun(Exception):
    """The run's result must not be used (NaN, stale weights, ...). The message is the reason that the report shows."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem as the policy reads it.

    `id` is stable across runs and machines (a hash of the problem), `text` is already in the task's template, and
    `gold` is the reference answer, which only `harness.run.grading` may read. An evaluation is broken down by
    `tags`, which are (name, value) pairs such as ("level", "3"). Problems of one `family`, such as variants of one
    template, do not count as independent; an empty one is not known.
    """

    id: str
    text: str
    gold: str = field(repr=False)
    tags: tuple[tuple[str, str], ...] = ()
    family: str = ""


def as_graded(prompt: str, completion: str) -> str:
    """What a grader reads: the completion, after the `<think>` with which its prompt ends, if it does."""
    return f"<think>{completion}" if prompt.rstrip().endswith("<think>") else completion


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A worked solution for the supervised cold start: the policy learns `completion` (and then EOS) after `prompt`."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A training step's request to a prompt sampler: `count` prompts for its batch number `batch` (above 0 only with
    dynamic sampling), `progress` from 0 to 1 into the run's steps.

    `pass_rates` is the history of the run: prompt id -> running share of right answers (the mean of the last group's
    and the rate before), of the prompts drawn in earlier steps; empty for a sampler that does not see gold.
    """

    count: int
    seed: int
    step: int
    batch: int
    progress: float
    pass_rates: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled completion.

    `token_ids` includes the end-of-sequence token, or the tokens of a stop text, when `finish_reason` is "stop";
    `logprobs` (nats, one per token) are the policy's at the sampling temperature, before any top-p or top-k cut; `text`
    excludes special tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions that one prompt received."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class GradedGroup:
    """A group as a reward may see it: everything but the gold answer.

    All tuples have length G. `answers[i]` is the extracted answer or None; `classes[i]` numbers the equivalence class
    of that answer under the task's own equality (None without an answer that counts). `correct` is None for a reward
    that must not see the gold answer, so that label leakage fails loudly; so are `lenient`, which takes the last number
    or expression where no answer is marked, `marked`, which never does, and `scores`, from 0 to 1, which are None for a
    task without partial credit too. `run_on[i]` tells whether the completion goes on with another problem.
    `format_scores[i]` in [0, 1] is the score of the answer format, `max_tokens` the limit of a completion.
    `token_means` has, for each `Reward.distribution` of the run's rewards, the mean of that quantity over the tokens of
    each completion, under the policy at the sampling temperature.
    """

    prompt_id: str
    prompt: str
    completions: tuple[str, ...]
    num_tokens: tuple[int, ...]
    max_tokens: int
    truncated: tuple[bool, ...]
    answers: tuple[str | None, ...]
    classes: tuple[int | None, ...]
    format_scores: tuple[float, ...]
    correct: tuple[bool, ...] | None
    scores: tuple[float, ...] | None = None
    lenient: tuple[bool, ...] | None = None
    marked: tuple[bool, ...] | None = None
    token_means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    run_on: tuple[bool, ...] | None = None

    def blind(self) -> GradedGroup:
        """The same group without correctness and scores."""
        return dataclasses.replace(self, correct=None, scores=None, lenient=None, marked=None)

    @property
    def majority_correct(self) -> float:
        """The probability that a majority vote over the answers is correct: the share of the winning classes that are,
        as chance breaks ties; 0 without a vote."""
        assert self.correct is not None
        counts = Counter(c for c in self.classes if c is not None)
        won = {c for c, count in counts.items() if count == max(counts.values())}
        right = {c for c, correct in zip(self.classes, self.correct, strict=True) if correct}
        return len(won & right) / len(won) if won else 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """Rewards of a group of G completions.

    totals    [G] sum of all weighted rewards, rewarded steps included
    outcomes  [G] the part that the whole completion earned; None if no outcome is rewarded
    steps     [G] (character, weighted value) of each rewarded step; None if no steps are rewarded
    parts     reward name -> [G] values before the weight
    paid      (weight, [G] values before it) of each reward that is paid; none in a control arm
    """

    totals: list[float]
    outcomes: list[float] | None
    steps: list[list[tuple[int, float]]] | None
    parts: dict[str, list[float]]
    paid: list[tuple[float, list[float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of tokens with all inputs of a loss; a row is prompt, completion, padding.

    tokens_BT            int64, 0 where padded
    completion_mask_BT   bool, True on completion tokens (EOS included)
    lengths_B            int64, prompt plus completion tokens of each row
    sampler_logprobs_BT  float32 nats, the engine's; 0 outside the completion
    truncated_B          bool, completions that the token limit has cut, or None where nothing asks
    rewards_B            float32, the sum of each row's rewards; `rewards_PG` is the group view of a whole batch
    reward_parts_BK, reward_weights_BK   float32, each reward of a row before its weight (of steps their total), and
                         its weight; None if there is only `rewards_B`
    greedy_rewards_B     float32, the reward of the greedy completion of each row's prompt, or None if none is drawn
    step_rewards_BT, step_ends_BT      float32 and bool: every reward of a row at the token that earned it, and the
                         outcome's reward at the last token; None if only the outcome is rewarded
    group_size           G; rows p*G .. p*G+G-1 belong to prompt p (only until rows are selected)
    old_logprobs_BT, ref_logprobs_BT   float32 nats, 0 outside the completion; None where the objective needs none
    values_BT            float32, the critic's value of the state in which token t was chosen, or None
    advantages_BT, returns_BT          float32, or None before `Algorithm.advantages`
    collision_BT         float32, the sum of p^2 of the distribution that token t was drawn from, or None where the
                         objective needs none
    log_share_B          float32 nats, the log of a row's share of its group's probability when sampled (TPO), or None
    teacher_logprobs_BT  float32 nats after another completion of the group (`Algorithm.shown`), or 0, or None as above
    held_BT              bool, tokens whose moves an objective penalises (KL-Cov), or None
    gradient_BT          bool, tokens that carry gradient (`high_entropy_tokens`), or None: all
    loss_weight_BT       float32, weight of each token in the loss; sums to 1 over a minibatch, so that the loss does
                         not depend on how the minibatch is split, sorted or padded
    """

    tokens_BT: Tensor
    completion_mask_BT: Tensor
    lengths_B: Tensor
    sampler_logprobs_BT: Tensor
    rewards_B: Tensor
    group_size: int
    reward_parts_BK: Tensor = UNSET
    reward_weights_BK: Tensor = UNSET
    truncated_B: Tensor = UNSET
    greedy_rewards_B: Tensor = UNSET
    step_rewards_BT: Tensor = UNSET
    step_ends_BT: Tensor = UNSET
    old_logprobs_BT: Tensor = UNSET
    ref_logprobs_BT: Tensor = UNSET
    values_BT: Tensor = UNSET
    advantages_BT: Tensor = UNSET
    returns_BT: Tensor = UNSET
    collision_BT: Tensor = UNSET
    log_share_B: Tensor = UNSET
    teacher_logprobs_BT: Tensor = UNSET
    held_BT: Tensor = UNSET
    gradient_BT: Tensor = UNSET
    loss_weight_BT: Tensor = UNSET

    def __len__(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def rewards_PG(self) -> Tensor:
        return self.rewards_B.view(-1, self.group_size)

    def replace(self, **changes: Any) -> Batch:
        return dataclasses.replace(self, **changes)

    def rows(self, index: Tensor, width: int | None = None) -> Batch:
        """The rows at `index` (int64), trimmed to their longest row, which a caller that knows its `width` tells."""
        width, own = int(self.lengths_B[index].max()) if width is None else width, self._tensors()
        return self.replace(**{k: x[index, :width] if k.endswith("_BT") else x[index] for k, x in own.items()})

    def to(self, device: Any) -> Batch:
        """The same batch on `device`."""
        return self.replace(**{name: value.to(device) for name, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        names = [item.name for item in dataclasses.fields(self) if item.name != "group_size"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """The current parameters' scores of a (micro-)batch, with gradients; 0 outside the completion.

    logprobs_BT  float32 nats of the tokens in the batch, at the sampling temperature
    entropy_BT   float32 nats of the distribution that each token was drawn from; carries a gradient only with
                 an entropy bonus
    values_BT    float32, the critic's values, or None for an algorithm without critic
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor
    values_BT: Tensor = UNSET


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One rollout as shown to a reader (traces, report).

    `reward` is the weighted sum of all rewards, `rewards` each of them before its weight; None and empty if none was
    assigned (an evaluation).
    """

    step: int
    split: Split
    prompt_id: str
    prompt: str
    completion: str
    gold: str
    answer: str | None
    correct: bool
    reward: float | None
    num_tokens: int
    finish_reason: FinishReason
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Accuracy of one policy on one split.

    metrics         names without area, values as fractions in [0, 1] or tokens: `accuracy` (mean over prompts and
                    n samples at the evaluation temperature), `greedy_accuracy`, `pass_at_<k>` for several k <= n,
                    `maj_at_<n>`, `score` (mean, of a task with partial credit), `answered`, `lenient_accuracy`,
                    `marked_accuracy`, `truncated`, `format` (mean score), `num_tokens` (mean), `num_prompts`,
                    `num_samples` (n)
    correct_counts  prompt id -> number of the n samples that are correct
    samples         rollouts for the reader
    breakdown       tag name -> tag value -> accuracy, greedy_accuracy and num_prompts; empty for a task without tags
    families        prompt id -> family, of the problems that have one
    drawn           tokens of each prompt and of its completions, k samples and the greedy one apart; without problems
                    that were read back
    """

    split: Split
    metrics: Mapping[str, float]
    correct_counts: Mapping[str, int]
    samples: Sequence[SampleRow]
    breakdown: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    families: Mapping[str, str] = field(default_factory=dict)
    drawn: Sequence[tuple[int, Sequence[int]]] = field(default=(), compare=False)
