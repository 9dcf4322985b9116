"""What a user replaces: the algorithm, the rewards, the task and the rollout engine.

A plugin is one file with one public class. Algorithms, rewards and tasks are frozen values whose fields are the
settings of their section in a spec; an engine has state, so its settings are a class of their own (`Settings`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import Field

from harness.types import Batch, Demonstration, GradedGroup, Group, PolicyOutput, Prompt, SampleRow, Section, Split

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from harness.types import Sampling


class Algorithm(Section, ABC):
    """Credit assignment as pure functions of a batch: it never sees the trainer, the engine or the study.

    A subclass declares `name: Literal["..."]` equal to its file's name, its hyper-parameters as fields, and the
    class facts below; with `sees_gold = False` a run refuses every reward that sees gold.
    """

    needs_critic: ClassVar[bool] = False
    sees_gold: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1
    default_rewards: ClassVar[Mapping[str, float]] = {"accuracy": 1.0}  # name -> weight; a spec may add or reweigh
    linear_in_advantages: ClassVar[bool] = True  # the policy term scales with them, so importance weights can
    objective: ClassVar[Mapping[str, str]] = {}  # its formula in words: advantage, aggregation, clip, kl, ...

    name: str
    group_size: int = Field(default=8, ge=1, description="completions sampled per prompt")
    kl_beta: float = Field(default=0.0, ge=0, description="weight of the KL to the frozen reference; 0: none")

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl_beta > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether `advantages` reads `old_logprobs_BT`; with several updates per batch the learner sets them anyway."""
        return False

    @property
    def entropy_needs_gradient(self) -> bool:
        return False

    @property
    def shares_trunk(self) -> bool:
        """Whether the critic is a head on the policy's own hidden states; else it is a network of its own."""
        return False

    @abstractmethod
    def advantages(self, batch: Batch) -> Batch:
        """The batch with `advantages_BT` (and `returns_BT` for a critic) filled in; 0 outside the completions."""

    @abstractmethod
    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """A scalar to minimise and metrics (`area/quantity`), each a sum over tokens weighted by `loss_weight_BT`.

        Being weighted sums, the values of the micro-batches of a minibatch add up to the minibatch's own. The loss may
        weigh rows otherwise (Dr. GRPO does), as long as its parts add up too.
        """

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        """Weight of each token in the loss of a minibatch, float32, summing to 1: here the mean over a row's tokens,
        then over rows (GRPO, arXiv:2402.03300, eq. 3)."""
        tokens_B1 = completion_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return completion_mask_BT / (tokens_B1 * completion_mask_BT.shape[0])


class Reward(Section, ABC):
    """What completions of a group are worth, as a pure function of the graded group.

    A subclass lives in the file of its name and declares its settings as fields. A reward that does not see gold gets
    a group whose `correct` is None.
    """

    sees_gold: ClassVar[bool] = False

    weight: float = Field(default=1.0, description="factor in the sum of all rewards; 0: measured, never rewarded")

    @abstractmethod
    def score(self, group: GradedGroup) -> list[float]:
        """G values, one per completion, before the weight."""

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """More about the group for the reader (`area/quantity`, NaN where undefined), averaged over a step's groups.

        Here, and only here, the group has `correct` whatever the reward may see.
        """
        return {}

    def check(self) -> None:
        """ValueError for a setting that cannot be used on this machine, before any model loads."""


class StepReward(Reward):
    """A reward for steps inside a completion, so that credit goes to the tokens that earned it."""

    @abstractmethod
    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        """For each of the G completions its steps, in order: (character at which the step ends, exclusive; value)."""

    def score(self, group: GradedGroup) -> list[float]:
        """The mean value of a completion's steps, 0 without any."""
        values = [[value for _, value in steps] for steps in self.steps(group)]
        return [sum(row) / len(row) if row else 0.0 for row in values]


class Task(Section, ABC):
    """Problems, worked solutions and the equality of answers.

    A subclass declares `name: Literal["..."]` equal to its file's name and its settings as fields. Splits are
    disjoint, deterministic and independent of the machine: `train` for reinforcement learning, `validation` (carved
    from the training data by a stable hash) for tuning and curves, `test`, scored once at the end; demonstrations
    are disjoint from validation and test.
    """

    name: str

    @property
    @abstractmethod
    def max_completion_tokens(self) -> int:
        """Token limit of a completion where the spec sets none."""

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All problems of the split, in a fixed order of which any first part is a fair sample.

        ValueError for a missing path, field, split or gold answer.
        """

    @abstractmethod
    def demonstrations(self) -> Sequence[Demonstration]:
        """Worked solutions for the cold start; empty where the task has none."""

    @abstractmethod
    def extract(self, completion: str) -> str | None:
        """The final answer that a completion states, in canonical spelling where there is one, or None.

        Never raises, whatever the text, in bounded time and memory.
        """

    def extract_lenient(self, completion: str) -> str | None:
        """Like `extract`, but an answer that is not marked as final counts too. For regrading, not for rewards."""
        return self.extract(completion)

    def format_score(self, completion: str) -> float:
        """How far the completion keeps the answer format that the prompt asks for, from 0 to 1."""
        return float(self.extract(completion) is not None)

    def reasoning(self, completion: str) -> str:
        """The part of the completion that comes before its answer."""
        return completion

    def num_skipped_rows(self, split: Split) -> int:
        """Rows of the split's source that are no problem and were left out because the settings allow it."""
        return 0

    def num_unparsable(self) -> int | None:
        """Comparisons of this process so far that ended without a verdict; None where none can."""
        return None

    def use_processes(self, count: int) -> None:
        """Let that many threads compare answers at once, where comparisons run in processes of their own."""

    def peer_graders(self) -> Mapping[str, Callable[[str, str], tuple[str | None, bool]]]:
        """Graders of other libraries, for comparison: name -> (completion, gold) -> (answer, whether it is right)."""
        return {}

    @abstractmethod
    def equivalent(self, answer: str, other: str) -> bool:
        """Whether two extracted (or gold) answers are equal as mathematics. Never raises; bounded like `extract`."""


class RolloutEngine(ABC):
    """Samples groups of completions from the current policy.

    `exact_logprobs` says that the sampler's log-probs come from the learner's own module and precision, so that they
    can serve as old log-probs.
    """

    exact_logprobs: ClassVar[bool] = False

    class Settings(Section):
        name: str

        def check(self, sampling: Sampling) -> None:
            """ValueError where the engine cannot run on this machine or sample like this, before any model loads."""

    @abstractmethod
    def __init__(self, settings: Settings, policy: nn.Module, tokenizer: PreTrainedTokenizerBase): ...

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        """One group per prompt, in order.

        `sampling.max_tokens` must be set. The noise of a token depends on (seed, step, prompt id, sample, position)
        and on nothing else, so that a row does not change with the batch that it is in.
        """

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights from now on; `version` is the number of training steps that made them."""

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[list[float]] | None:
        """Log-probs (nats, temperature 1) under the engine's own weights: for each (token ids, n) those of the tokens
        after the first n. None where the engine shares the learner's weights, which cannot be stale."""
        return None

    def sleep(self) -> None:  # noqa: B027
        """Give the device's memory back while the learner works; `wake` comes before the next use."""

    def wake(self) -> None:  # noqa: B027
        """Be ready to load weights and generate again."""

    def close(self) -> None:  # noqa: B027
        """Release what the engine holds; it is not used again."""


class RunLogger(Protocol):
    """Where a training run reports to; `harness.tracking.run_log.RunLog` is the real one."""

    def resume(self, step: int) -> None:
        """Forget what was logged for training steps after `step`: the run continues from there."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Tell a watching user how far a phase ("cold start", "train", "validation", "test") has come."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics (`area/quantity`, finite or NaN) of a training step."""
        ...

    def samples(self, rows: Sequence[SampleRow]) -> None:
        """Append rollouts to the samples table."""
        ...

    def per_problem(self, fractions: Mapping[str, float]) -> None:
        """Record, once at the end, the fraction of correct samples of every test problem."""
        ...
