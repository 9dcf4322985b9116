"""The contracts of the parts that a user can replace: algorithm, reward, task, sampler, engine, stage and mirror.

A plugin is one file with one public class. Algorithms, rewards, tasks and samplers are frozen values whose fields are
the settings of their section in a spec; an engine has state, so its settings are a separate class (`Settings`). A
mirror's settings are environment variables alone.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, get_args

from pydantic import Field

from .base.inputs import Sources
from .data import (
    Batch,
    Demonstration,
    FinishReason,
    GradedGroup,
    Group,
    InvalidRun,
    PolicyOutput,
    Prompt,
    PromptDraw,
    Rollout,
    Sampling,
    Section,
    Split,
)  # fmt: skip

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

# Of the policy's next token: H(p) and KL(uniform || p) in nats, the sum of p^2.
Distribution = Literal["entropy", "uniform_kl", "collision"]
Precision = Literal["float32", "tf32", "float16", "bfloat16"]  # of products; mantissas of 23, 10, 10 and 7 bits


class Algorithm(Section, ABC):
    """Credit assignment as pure functions of a batch: it never sees the trainer, the engine or the study.

    A subclass declares `name: Literal["..."]` equal to its file's name, its hyper-parameters as fields, and the
    class facts below; with `sees_gold = False` a run refuses every reward that sees gold. A run asks the algorithm
    of the spec what it needs, so a schedule of `kl_beta` changes no answer. An algorithm that needs `kl_beta` above 0
    declares this (`gt=0`); a schedule that ends at 0 is then refused.
    """

    needs_critic: ClassVar[bool] = False
    sees_gold: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1
    learns_from_rewards: ClassVar[bool] = True  # otherwise from the reference alone, which must be a teacher
    needs_greedy: ClassVar[bool] = False  # one greedy completion of each prompt besides, for `greedy_rewards_B`
    needs_collision: ClassVar[bool] = False  # `collision_BT`, which costs a forward pass
    needs_teacher: ClassVar[bool] = False  # `teacher_logprobs_BT`, a pass over longer rows (`shown`)
    needs_old_logprobs: ClassVar[bool] = False  # `old_logprobs_BT`, which several updates per batch have anyway
    replay_weight: ClassVar[float] = 0.0  # of minus the mean log-prob of completions `kept`, in the loss; 0: none is
    default_rewards: ClassVar[Mapping[str, float]] = {"accuracy": 1.0}  # name -> weight; a spec may add or reweigh
    linear_in_advantages: ClassVar[bool] = True  # the policy term scales with them, so importance weights can
    pairs_rows: ClassVar[bool] = False  # the loss needs both completions of a pair, so that neither may be left out
    token_mean: ClassVar[bool] = False  # the loss is the mean over all tokens, not over rows of each row's mean
    shares_trunk: ClassVar[bool] = False  # the critic is a head on the policy's hidden states, no separate network
    _stated: ClassVar[Mapping[str, str]] = {}
    # The formula in words. A class states what differs from its bases; the rest is filled in.
    objective: ClassVar[Mapping[str, str]] = {
        "advantage": "not stated",
        "aggregation": "mean over a row's tokens, then over rows",
        "clip": "none",
        "kl": "none",
        "correction": "none",
    }

    name: str
    group_size: int = Field(default=8, ge=1, description="completions sampled per prompt")
    kl_beta: float = Field(default=0.0, ge=0, description="weight of the KL to the frozen reference; 0: no KL")
    entropy_bonus: float = Field(default=0.0, ge=0, description="weight of the mean token entropy in the objective")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Fill in `objective`; ValueError for a class that changes a method and states nothing there.

        Methods that count: `advantages`, `loss`, `loss_weights` and those that a base class adds, but no properties.
        """
        super().__init_subclass__(**kwargs)
        cls._stated = vars(cls).get("objective", {})
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Algorithm)]
        mean = {"aggregation": "mean over all tokens"} if cls.token_mean else {}
        told = [mean, *(base._stated for base in bases)]
        cls.objective = {**Algorithm.objective, **{key: text for words in told for key, text in words.items()}}
        methods = {name for base in bases[:-1] for name, value in vars(base).items() if inspect.isfunction(value)}
        changed = vars(cls).keys() & methods - set(dir(Section))
        if changed and not cls._stated:
            raise ValueError(
                f"{cls.__module__}.{cls.__name__} must state its own `objective`, because it has its own "
                f"{' and '.join(sorted(changed))}; write objective = {{...}} with what differs"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl_beta > 0

    @abstractmethod
    def advantages(self, batch: Batch) -> Batch:
        """The batch with `advantages_BT` (and `returns_BT` for a critic) filled in; 0 outside the completions."""

    def credited(self, batch: Batch) -> Batch:
        """The batch of `advantages`. ValueError, which names the class, unless they are numbers [B, T], as finite as
        what they were computed from, and the tokens are the same."""
        done, shape = self.advantages(batch), list(batch.completion_mask_BT.shape)
        found = done.advantages_BT
        if found is None or list(found.shape) != shape:
            got = "none" if found is None else f"shape {list(found.shape)}"
        elif done.tokens_BT is not batch.tokens_BT or done.completion_mask_BT is not batch.completion_mask_BT:
            got = "other tokens too"
        elif found.isfinite().all():
            return done
        else:
            read: Iterable[Any] = (getattr(batch, one.name) for one in fields(batch))
            if not all(value.isfinite().all() for value in read if hasattr(value, "isfinite")):
                return done
            got = "numbers that are not finite"
        name, place = type(self).__name__, inspect.getfile(type(self))
        rule = f"{name}.advantages must fill advantages_BT with finite numbers of shape {shape}"
        raise ValueError(f"{rule}, got {got}; correct {name}.advantages in {place}")

    @abstractmethod
    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """A scalar to minimise and metrics (`area/quantity`), each a sum over tokens weighted by `loss_weight_BT`.

        The sums of the micro-batches of a minibatch thus add up to the sum of the minibatch. The loss may weigh rows in
        another way (Dr. GRPO does) if its parts add up too.
        """

    def minimised(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """`loss` less `entropy_bonus` times the mean entropy (`policy/entropy`). Where `gradient_BT` is False, log-prob
        and entropy are constants."""
        if batch.gradient_BT is not None:
            parts = {name: getattr(policy, name) for name in ("logprobs_BT", "entropy_BT")}
            policy = replace(policy, **{k: part.where(batch.gradient_BT, part.detach()) for k, part in parts.items()})
        loss, metrics = self.loss(batch, policy)
        if not self.entropy_bonus:
            return loss, metrics
        assert batch.loss_weight_BT is not None
        bonus = self.entropy_bonus * (batch.loss_weight_BT * policy.entropy_BT).sum()
        return loss - bonus, {**metrics, "policy/loss": metrics["policy/loss"] - bonus.detach()}

    def shown(self, batch: Batch) -> Tensor:
        """[P, G]: the place in the group of the completion that is read before each one by its teacher; -1: none."""
        raise NotImplementedError(f"{self.name} has needs_teacher, so it must define `shown`")

    def kept(self, known: list[list[int]], rollouts: Sequence[Rollout], rewards: Sequence[float]) -> list[list[int]]:
        """Token ids of a prompt's completions to replay, of those known and a step's `rollouts` with their rewards."""
        return known

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        """Weight of each token in the loss of a minibatch, float32, with sum 1: the mean over the tokens of a row, then
        over rows (GRPO, arXiv:2402.03300, eq. 3); with `token_mean` over all (DAPO, arXiv:2503.14476, eq. 12)."""
        if self.token_mean:
            return completion_mask_BT / completion_mask_BT.sum().clamp(min=1)
        tokens_B1 = completion_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return completion_mask_BT / (tokens_B1 * completion_mask_BT.shape[0])


class Reward(Section, ABC):
    """Values of a group's completions, as a pure function of the graded group.

    A subclass lives in the file of its name and declares its settings as fields. A reward without `sees_gold` gets a
    group with `correct` None. One with a `distribution` finds the mean of that quantity over the tokens of each
    completion in `group.token_means`; it costs a forward pass.
    """

    sees_gold: ClassVar[bool] = False
    distribution: ClassVar[Distribution | None] = None
    needs_partial_credit: ClassVar[bool] = False  # it reads `group.scores`, which only a task with `partial_credit` has
    # The name of a sequence classifier of its own that reads every completion: it takes memory and operations.
    scorer: ClassVar[str | None] = None

    weight: float = Field(default=1.0, description="factor in the sum of all rewards; 0: only measured")

    @abstractmethod
    def score(self, group: GradedGroup) -> list[float]:
        """G values, one per completion, before the weight."""

    def metrics(self, group: GradedGroup, scores: Sequence[float]) -> Mapping[str, float]:
        """Further metrics of the group (`area/quantity`, NaN if undefined), averaged over the groups of a step.

        Here, and only here, the group has `correct` even for a reward without `sees_gold`.
        """
        return {}

    def check(self) -> None:
        """ValueError for a setting that this machine cannot use, before any model loads."""

    def inputs(self) -> Sources:
        """The files that it reads, as in `Task.inputs`."""
        return {}

    def placed(self, stage: Any, directory: Path | None) -> Self:
        """The reward as `stage` (a `settings.stages.Stage`) pays it in a run's folder. Without a folder, for estimates,
        the policy stands for a model that an earlier stage fits. ValueError if there is no such stage."""
        return self


class StepReward(Reward):
    """A reward for steps inside a completion: credit goes to the tokens that earned it."""

    @abstractmethod
    def steps(self, group: GradedGroup) -> list[list[tuple[int, float]]]:
        """The steps of each of the G completions, in order: (character at which the step ends, exclusive; value)."""

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

    An answer is correct or not. A task with `partial_credit` also scores it from 0 to 1, and exactly 1 is correct.
    Completions are graded in a thread of their own.
    """

    partial_credit: ClassVar[bool] = False

    name: str

    @property
    @abstractmethod
    def max_completion_tokens(self) -> int:
        """Token limit of a completion if the spec sets none."""

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All problems of the split, in a fixed order; any first part of it is a fair sample.

        ValueError for a missing path, field, split or gold answer.
        """

    def questions(self, split: Split) -> Mapping[str, str]:
        """Prompt id -> the words of the problem, without template and worked examples; in the order of `prompts`."""
        return {prompt.id: prompt.text for prompt in self.prompts(split)}

    def in_words(self, text: str) -> str:
        """The text of one of its prompts as a user asks a chat model; any other text as it is."""
        return text

    @abstractmethod
    def demonstrations(self) -> Iterable[Demonstration]:
        """Worked solutions for the cold start; empty if the task has none. Checks read only the first."""

    @abstractmethod
    def extract(self, completion: str) -> str | None:
        """The final answer that a completion states, in its canonical spelling if it has one, or None.

        Never raises, whatever the text, and takes bounded time and memory.
        """

    def marked(self, completion: str) -> str | None:
        """The answer that a completion marks as its final one, where `extract` takes others too. Bounded like it."""
        return self.extract(completion)

    def ends_in(self, completion: str, gold: str) -> bool:
        """Whether the last number or expression of a completion that marks no answer is the gold answer: measured
        (`lenient_accuracy`), never paid. Bounded like `extract`."""
        return False

    def own_part(self, completion: str) -> str:
        """The part of a completion that is about its problem; all of it, unless it runs on into another one."""
        return completion

    def format_score(self, completion: str) -> float:
        """A score from 0 to 1 for how well the completion follows the answer format of its prompt."""
        return float(self.extract(completion) is not None)

    def inputs(self, split: Split) -> Sources:
        """The sources of the split: source -> name -> file here, or the commit of a Hub repository.

        Part of a run's identity, so the names are the same on every machine. Empty for a task that reads no file.
        """
        return {}

    def num_unparsable(self) -> int | None:
        """Comparisons of this process so far without a verdict; None if every comparison has one."""
        return None

    def is_answered(self, answer: str, question: str, gold: str | None) -> bool:
        """Whether an extracted answer that equals `gold` answers the question (a prompt) instead of restating it.

        An answer that restates it is not correct. Without gold, for a vote: whether the answer may vote. Bounded like
        `extract`.
        """
        return True

    def score(self, answer: str, gold: str) -> float:
        """The score of an extracted answer, from 0 to 1; 1 exactly if `equivalent`. Bounded like `equivalent`."""
        return float(self.equivalent(answer, gold))

    def allow_overruns(self, count: float | None) -> float:
        """Let this many of the thread's next comparisons exceed their time limit; later ones get no verdict.

        A slow comparison within the limit may count as a part. None lifts the bound. Returns how many of the overruns
        allowed last are left; 0 if comparisons have no limit.
        """
        return 0

    @abstractmethod
    def equivalent(self, answer: str, other: str) -> bool:
        """Whether two extracted (or gold) answers are equal as mathematics. Never raises; bounded like `extract`."""


class Sampler(Section, ABC):
    """Decides which training problems a step asks, as a pure function of problems, seed, step and the run's history.

    A subclass declares `name: Literal["..."]` equal to its file's name and its settings as fields. One without
    `sees_gold` is given no pass rates; a run whose algorithm must not see gold refuses the others.
    """

    sees_gold: ClassVar[bool] = False

    name: str

    @abstractmethod
    def order(self, prompts: Sequence[Prompt], draw: PromptDraw) -> Sequence[int]:
        """Places of the problems to draw, the first ones first. Problems that the step has drawn before are passed
        over; if too few are left for its first batch, the order begins again."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """ValueError for training problems that it cannot order, before any model loads."""


class StageKind(Section, ABC):
    """A kind of stage that does something else than learn from rewards; its settings are the `section` of the stage.

    A subclass lives in the file of its name. `stage` is a `settings.stages.Stage`, whose `does` is this value.
    """

    section: ClassVar[str]
    may_change: ClassVar[frozenset[str]] = frozenset()  # settings of a run; without `steps`, the stage is one step
    keeps_rollouts: ClassVar[bool] = False  # it keeps the rollouts of its first step
    fits_scorer: ClassVar[bool] = False  # it fits a classifier of the policy's size, in checkpoints/*-model-STAGE

    @property
    def samplers(self) -> Mapping[str, str]:
        """Models that sample in place of the policy, each by the setting that names it."""
        return {}

    def check(self, stage: Any) -> None:
        """ValueError if the stage cannot stand where it does."""

    def num_rollouts(self) -> int:
        """Completions that the stage samples."""
        return 0

    @abstractmethod
    def passes(self, stage: Any, done: int) -> float:
        """Completions that pass through the model in so many steps, counted as in `study.estimates`."""

    @abstractmethod
    def learner_spec(self, spec: Any) -> Any:
        """The settings (a `RunSpec`) of the stage's learner."""

    @abstractmethod
    def step(self, run: Any, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> tuple[Any, Any]:
        """The metrics of one step of `run` (`run.build.Run`), and its lengths like `Rollouts.lengths`."""


class Codec(Protocol):
    """Encodes text for the policy of a run; the implementation is `harness.policy.text.TextCodec`."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, exactly as the policy reads it."""
        ...

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion, with the token that ends it."""
        ...

    def end_ids(self, policy: nn.Module) -> list[int]:
        """Every token that ends a completion."""
        ...


class RolloutEngine(ABC):
    """Samples groups of completions from the current policy.

    With `exact_logprobs` the sampler's log-probs come from the learner's own module and precision and can serve as old
    log-probs.
    """

    exact_logprobs: ClassVar[bool] = False
    samples_policy: ClassVar[bool] = True  # False for a fake, whose log-probs are compared with nothing
    plans_batches: ClassVar[bool] = False  # whether it is best given all prompts at once, however many
    verifies_weights: bool = False  # whether its `load_weights` finds every weight that did not arrive
    precision: Precision | None = None  # in which its own weights compute; None: in the learner's
    note_tokens: Callable[[int], None] = staticmethod(lambda count: None)  # it may tell how many more are sampled
    ended: MutableMapping[str, list[int]] | None = None  # it may add each row that ends, and take these as they are

    class Settings(Section):
        processes: ClassVar[int] = 1  # of a trial over which it splits its model; they must be given the same prompts

        name: str

        def check(self, sampling: Sampling) -> None:
            """ValueError if the engine cannot sample like this, before any model loads."""

        def check_machine(self) -> None:
            """ValueError if the engine cannot run on this machine, before any model loads."""

        def for_run(self, dtype: str, autocast: bool, row_tokens: Callable[[], int], rows: int) -> Self:
            """These settings with those filled in that follow from the precision of a run, from the most tokens of a
            prompt with its completion and from the completions of a step on a device."""
            return self

    @abstractmethod
    def __init__(self, settings: Settings, policy: nn.Module, codec: Codec): ...

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        """One group per prompt, in order. The devices of a run share its prompts, and a device may get none.

        `sampling.max_tokens` must be set. The noise of a token depends only on (seed, step, prompt id, sample,
        position), so a row does not change with its batch.
        """

    def sample(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        """The groups of `generate`; InvalidRun, which names the class, if no sampling of these prompts gives them."""
        found: Any = self.generate(prompts, group_size, sampling, seed=seed, step=step)
        groups: Any = found if isinstance(found, list | tuple) else []
        wrong = ""
        if len(groups) != len(prompts) or not all(isinstance(group, Group) for group in groups):
            wrong = f"{len(groups)} groups for {len(prompts)} prompts" if groups else f"{found!r:.40}"
        for prompt, group in () if wrong else zip(prompts, groups, strict=True):
            if group.prompt.id != prompt.id or len(group.rollouts) != group_size:
                wrong = f"{len(group.rollouts)} of {group.prompt.id!r:.40} for {group_size} of prompt {prompt.id!r:.40}"
            wrong = wrong or next(filter(None, (_flaw(one, sampling.max_tokens) for one in group.rollouts)), "")
        if not wrong:
            return list(groups)
        name, place = type(self).__name__, inspect.getfile(type(self))
        raise InvalidRun(f"{name}.generate must give a group of completions for each prompt, got {wrong}; see {place}")

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from these weights from now on, after `sleep` too; `version` is the number of training steps that made
        them."""

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[list[float]] | None:
        """Log-probs (nats, temperature 1) under the engine's own weights: for each (token ids, n), one for each token
        after the first n. None if the engine shares the learner's weights, which cannot be stale."""
        return None

    def sleep(self) -> None:  # noqa: B027
        """Give the device's memory back while the learner works; `load_weights` precedes the next use."""

    def close(self) -> None:  # noqa: B027
        """Release everything that the engine holds; it is not used again."""


@dataclass(frozen=True)
class MirroredRun:
    """The facts of a run that a mirror gets.

    id          letters and digits: the same at each opening of the run, and no other run has it
    experiment  the study, or `train`, `evaluate` or `probe`
    tags, spec  of `run.json`: a trial has `cohort.arm`, `cohort.seed` and `cohort.factors` (JSON)
    place       an empty folder of its own, for files
    """

    id: str
    experiment: str
    name: str
    tags: Mapping[str, str]
    spec: Mapping[str, Any]
    place: Path


class Mirror(ABC):
    """Shows one run elsewhere, from the events of its record (docs/record.md).

    A process of its own makes one for each run, so that a mirror which raises, hangs or prints costs a warning. A run
    whose copy was cut off, or which repeats steps, is opened again and hands over all its events again.
    """

    package: ClassVar[str] = ""  # that must be installed, as it is imported; only `open` may import it

    @abstractmethod
    def open(self, run: MirroredRun) -> None:
        """Begin to show a run, in place of what an earlier opening showed."""

    @abstractmethod
    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Show further events, in order; one of type `finish` is the last."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left, and release everything."""

    @staticmethod
    def numbers(event: Mapping[str, Any]) -> dict[str, float]:
        """The numbers of an event: a step's metrics, or the last event's summary as `summary/...`; else empty."""
        given = {f"summary/{key}": value for key, value in event.get("summary", {}).items()} or event.get("values", {})
        return {key: float(value) for key, value in given.items()}


def _flaw(rollout: Rollout, max_tokens: int | None) -> str:
    """The property that no sampled completion can have, such as no tokens; empty if there is none."""
    ids, logprobs = rollout.token_ids, rollout.logprobs
    if not isinstance(rollout.text, str) or rollout.finish_reason not in get_args(FinishReason):
        return f"the text {rollout.text!r:.40} with finish_reason {rollout.finish_reason!r:.40}"
    if not ids or not all(isinstance(one, Integral) and one >= 0 for one in ids) or len(ids) > (max_tokens or len(ids)):
        return f"{len(ids)} token ids {ids!r:.40} (at most {max_tokens})"
    if len(logprobs) != len(ids) or not all(isinstance(one, Real) and math.isfinite(one) for one in logprobs):
        told = f"{len(logprobs)} log-probs {logprobs!r:.40} for {len(ids)} tokens"
        return f"{told} (NaN also where the policy diverged: lower optimizer.learning_rate)"
    return ""
