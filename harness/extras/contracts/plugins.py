"""Decides whether a plugin keeps what every plugin of its kind must keep: `cohort check` and the tests call this."""

import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ... import plugins
from ...data import UNSET, Batch, GradedGroup, PolicyOutput, Prompt, PromptDraw, SampleRow, Sampling, Split
from ...interfaces import Algorithm, Mirror, MirroredRun, Reward, RolloutEngine, Sampler, StepReward, Task
from ...policy.forward import token_logprobs
from ...policy.text import TextCodec
from ...policy.tiny import tiny_model, tiny_tokenizer
from ...run.grading import problem_rows, score
from ...run.learner import Learner
from ...settings.run import parse_run
from . import hostile

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SAMPLING = Sampling(max_tokens=12)
SLOWEST = 2.0  # seconds of one hostile completion
CHECK_SECONDS = 300.0  # of one check
GROUP_SIZE = 4
PAID = [1.0, 0, 0, 0.5] * 3  # one best answer in each group, since pass@k pays nothing for a tie
CORRECT, WRONG = (True, False, False, True), (False, True, True, False)
TEXTS = ("<think>2+2=4</think><answer>4</answer>", "2+2=5 so #### 5", "", "2+2=4;4*3=12#### 12")
MEANS = {"entropy": (0.1, 0.4, 0.2, 0.3), "uniform_kl": (3.0, 1.0, 2.0, 0.5), "collision": (0.9, 0.6, 0.8, 0.7)}
PROMPTS = [Prompt(f"p{i}", text, "0") for i, text in enumerate(["1+2=", "1+2+3+4=", "9-", "7+7=", "8-3+2="])]


@dataclass(frozen=True)
class PluginCheck:
    """One rule for `kinds` of plugins. `test` raises for a plugin that breaks it; `fix` says what to change."""

    kinds: Sequence[str]
    rule: str
    fix: str
    test: Callable[[Any], None]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check of one plugin: `found` is empty if the plugin passes."""

    kind: plugins.Kind
    name: str
    rule: str
    fix: str
    found: str = ""


CHECKS: list[PluginCheck] = []


def of_kind(kind: plugins.Kind) -> list[PluginCheck]:
    return [check for check in CHECKS if kind in check.kinds]


def check_package(package: str) -> Iterator[CheckResult]:
    """The outcome of each check of each plugin that an installed package declares. ValueError for a package without
    plugins.

    Checks run in a process of their own: one that ends it, or takes more than CHECK_SECONDS, has failed, and those
    after it run in a new one.
    """
    with ExitStack() as after:
        child: _Child | None = None
        for kind, name in plugins.of_package(package):
            for number, check in enumerate(_checks(kind)):
                if child is None or not child.lives:
                    child = _Child()
                    after.callback(child.end)
                found = child.found(kind, name, number)
                yield CheckResult(kind, name, check.rule, check.fix, found)
                if found and number == 0:
                    break


def _checks(kind: plugins.Kind) -> list[PluginCheck]:
    rule = "it loads, and its settings have defaults"
    return [PluginCheck([kind], rule, "see docs/extending.md", lambda plugin: None), *of_kind(kind)]


class _Child:
    """A process that runs checks, one at a time."""

    def __init__(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_answer, args=(theirs,))
        self._process.start()
        theirs.close()
        self.lives = self._pipe.recv()

    def found(self, kind: plugins.Kind, name: str, number: int) -> str:
        """What the check says of the plugin, or how it did not come to its end."""
        try:
            self._pipe.send((kind, name, number))
            if self._pipe.poll(CHECK_SECONDS):
                return self._pipe.recv()
            words = f"it has not ended after {CHECK_SECONDS:.0f} s"
        except (EOFError, OSError):
            self._process.join(10)
            words = f"it ended its process, with status {self._process.exitcode}"
        self.end()
        return words

    def end(self) -> None:
        if self.lives:
            self.lives = False
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)  # with all that it has started
            self._process.join()


def _answer(pipe: Connection) -> None:
    """Run the checks that `pipe` asks for."""
    os.setsid()
    os.dup2(2, 1)  # stdout may be JSON
    pipe.send(True)
    while True:
        kind, name, number = pipe.recv()
        found = ""
        try:
            _checks(kind)[number].test(make(kind, name))
        except Exception as error:  # of foreign code
            words = " ".join(str(error).split())
            found = words if isinstance(error, AssertionError) and words else f"{type(error).__name__}: {words}"
        pipe.send(found)


def make(kind: plugins.Kind, name: str) -> Any:
    """The plugin with its default settings; an algorithm with groups of GROUP_SIZE, an engine with the tiny model."""
    cls: Any = plugins.load(kind, name)
    if issubclass(cls, RolloutEngine):
        return _engine(cls, 0)
    return cls(group_size=GROUP_SIZE) if kind == "algorithm" else cls()


def _engine(cls: Any, seed: int) -> Any:
    return cls(cls.Settings(), tiny_model(seed), TextCodec(tiny_tokenizer()))


def _rule(kinds: str, fix: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a check, whose docstring is the rule."""

    def register(test: Callable[[Any], None]) -> Callable[[Any], None]:
        CHECKS.append(PluginCheck(kinds.split(), " ".join((test.__doc__ or "").split()), fix, test))
        return test

    return register


def _must(holds: object, found: str) -> None:
    if not holds:  # no `assert`, which `python -O` leaves out
        raise AssertionError(found)


def graded_group(correct: tuple[bool, ...] = CORRECT, texts: Sequence[str] = TEXTS) -> GradedGroup:
    """A graded group of these completions, four kinds in turn."""
    n = len(texts) // 4
    given: dict[str, Any] = {
        "num_tokens": (3, 5, 8, 6), "truncated": (False, False, True, False), "format_scores": (1.0, 0.5, 0.0, 1.0),
        "correct": correct, "classes": (0, 1, None, 0),
        "answers": ("0", "1", None, "0"),
    }  # fmt: skip
    rows = {name: values * n for name, values in given.items()}
    means = {name: values * n for name, values in MEANS.items()}
    return GradedGroup(prompt_id="p", prompt="p?", completions=tuple(texts), max_tokens=8, token_means=means, **rows)


def make_batch(rewards: Sequence[float]) -> Batch:
    """12 rows, prompts of 2 tokens and completions of 0 to 5; the policy has moved a little since it sampled them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 7, 2, 4, 6, 7, 3, 5, 7, 4, 6, 3])
    column = torch.arange(7)
    mask = (column < lengths[:, None]) & (column >= 2)
    noise = [torch.randn(12, 7, generator=generator) * mask for _ in range(4)]
    rewards_B = torch.tensor(rewards)
    return Batch(
        completion_mask_BT=mask,
        rewards_B=rewards_B,
        group_size=GROUP_SIZE,
        tokens_BT=torch.randint(3, 100, (12, 7), generator=generator) * (column < lengths[:, None]),
        lengths_B=lengths,
        sampler_logprobs_BT=-noise[0].abs(),
        old_logprobs_BT=-noise[0].abs(),
        ref_logprobs_BT=-noise[1].abs(),
        values_BT=0.1 * noise[2],
        collision_BT=(-2 * noise[0].abs()).exp() * mask,
        teacher_logprobs_BT=-noise[3].abs(),
        held_BT=torch.zeros_like(mask),
        greedy_rewards_B=rewards_B[1::GROUP_SIZE].repeat_interleave(GROUP_SIZE),
    )


def weighted(algorithm: Algorithm, batch: Batch) -> Batch:
    return batch.replace(loss_weight_BT=algorithm.loss_weights(batch.completion_mask_BT))


@_rule("algorithm reward task sampler stage", "keep fields frozen, let Section refuse others, give each a description")
def settings_are_told(plugin: Any) -> None:
    """Settings survive JSON, are described, and refuse unknown keys."""
    cls = type(plugin)
    _must(cls.model_validate_json(plugin.model_dump_json()) == plugin, "read back from JSON they differ")
    silent = [key for key, field in cls.model_fields.items() if key != "name" and not field.description]
    _must(not silent, f"no description: {', '.join(silent)}")
    try:
        answer = f"{cls.model_validate({'no_such_field': 1})!r} is made"
    except ValueError as error:
        answer = str(error)
    _must("no_such_field" in answer, f"the answer to no_such_field is: {answer}")


@_rule("algorithm", "give each entry of `objective` ASCII text")
def objective_is_told(algorithm: Algorithm) -> None:
    """The objective is told by five facts, and a run of the algorithm survives JSON."""
    spec = parse_run({"task": "arithmetic", "algorithm": algorithm}, "check")
    _must(type(spec).model_validate_json(spec.model_dump_json()) == spec, "a spec read back from JSON differs")
    told = list(algorithm.objective)
    _must(told == ["advantage", "aggregation", "clip", "kl", "correction"], f"objective has {', '.join(told)}")
    _must(all(t and t.isascii() for t in algorithm.objective.values()), f"objective is {algorithm.objective}")


@_rule("algorithm", "set the class fact sees_gold to what `default_rewards` read")
def default_rewards_see_gold_as_declared(algorithm: Algorithm) -> None:
    """The default rewards see gold only where the algorithm declares it."""
    rewards = parse_run({"task": "arithmetic", "algorithm": algorithm}, "check").rewards
    paid, permuted = (score(rewards, [graded_group(correct)])[0].totals for correct in (CORRECT, WRONG))
    _must(all(map(math.isfinite, paid)), f"paid {paid}")
    _must(any(paid) == algorithm.learns_from_rewards, f"learns_from_rewards is {algorithm.learns_from_rewards}")
    moved = paid != permuted
    _must(moved == algorithm.sees_gold, f"sees_gold is {algorithm.sees_gold}, rewards {'' if moved else 'do not '}move")


@_rule("algorithm", "multiply advantages by completion_mask_BT; fill returns_BT exactly if needs_critic")
def advantages_are_finite(algorithm: Algorithm) -> None:
    """Advantages are finite and zero outside the completions, with rewards of answers and of steps."""
    plain = make_batch(PAID)
    ends = torch.zeros(12, 7, dtype=torch.bool)
    ends[:, 2] = plain.completion_mask_BT[:, 2]  # a step ends at the first completion token of every row
    for batch in (plain, plain.replace(step_rewards_BT=plain.rewards_B[:, None] * ends, step_ends_BT=ends)):
        done = algorithm.credited(batch)
        assert done.advantages_BT is not None
        _must((done.advantages_BT[~batch.completion_mask_BT] == 0).all(), "credit outside the completions")
        _must((done.advantages_BT[:, 2] != 0).any(), "no credit at the first tokens")
        _must((done.returns_BT is not None) == algorithm.needs_critic, f"needs_critic is {algorithm.needs_critic}")


@_rule("algorithm", "make loss and metrics sums over tokens, weighted by loss_weight_BT")
def parts_add_up(algorithm: Algorithm) -> None:
    """Loss and metrics of the parts of a batch add up to the whole batch's loss and metrics."""
    batch = weighted(algorithm, algorithm.advantages(make_batch(PAID)))
    moved = (batch.sampler_logprobs_BT - 0.05) * batch.completion_mask_BT
    whole, metrics = algorithm.loss(batch, PolicyOutput(moved, -moved, 0.5 * moved))
    sums = dict.fromkeys(["loss", *metrics], 0.0)
    for rows in (torch.tensor([0, 5]), torch.tensor([1, 2, 3, 4]), torch.tensor([6, 7, 8, 9, 10, 11])):
        part = batch.rows(rows)
        near = moved[rows, : part.tokens_BT.shape[1]]
        loss, values = algorithm.loss(part, PolicyOutput(near, -near, 0.5 * near))
        for key, value in {"loss": loss, **values}.items():
            sums[key] += float(value)
    for key, value in {"loss": whole, **metrics}.items():
        _must(math.isclose(sums[key], float(value), rel_tol=1e-6, abs_tol=1e-6), f"{key}: {sums[key]}, {float(value)}")
    missing = {"policy/loss", "policy/clip_fraction", "policy/entropy", "kl/old"} - {*metrics}
    _must(not missing, f"no metric {', '.join(sorted(missing))}")


@_rule("algorithm", "check the sign of the loss, which is minimised")
def better_answers_become_likelier(algorithm: Algorithm) -> None:
    """A step along the gradient makes the better of two answers likelier."""
    # the first is right, or the reference likes it by a nat: its log-prob must rise
    bound = not algorithm.learns_from_rewards or "implied" in algorithm.objective["kl"]  # it has no meaning without KL
    plain = algorithm.model_copy(update={"group_size": 2} if bound else {"group_size": 2, "kl_beta": 0.0})
    policy = tiny_model(0)
    tokens = torch.tensor([[10, 11, 12, 1], [10, 11, 40, 1]])
    mask = torch.tensor([[False, False, True, True]] * 2)
    logprobs, entropy = token_logprobs(policy, tokens, mask, 1.0)
    old = logprobs.detach()
    liked = old if plain.learns_from_rewards else old + torch.tensor([[1.0], [0.0]]) * mask
    reference = liked if plain.needs_reference else UNSET
    batch = plain.advantages(Batch(
        tokens, mask, torch.tensor([4, 4]), old, torch.tensor([1.0, 0.0]), 2, greedy_rewards_B=torch.zeros(2),
        old_logprobs_BT=old, ref_logprobs_BT=reference, values_BT=torch.zeros(2, 4),
        collision_BT=(2 * old).exp() * mask, teacher_logprobs_BT=old - torch.tensor([[0.0], [1.0]]) * mask,
    ))  # fmt: skip
    loss, _ = plain.loss(weighted(plain, batch), PolicyOutput(logprobs, entropy, torch.zeros(2, 4)))
    loss.backward()
    before = logprobs[0].sum() - logprobs[1].sum()
    torch.optim.SGD(policy.parameters(), lr=0.01).step()
    with torch.no_grad():
        after, _ = token_logprobs(policy, tokens, mask, 1.0)
    _must(after[0].sum() - after[1].sum() > before, "it became less likely")


@_rule("algorithm", "let nothing in `loss` depend on how many rows or columns a micro-batch has")
def microbatches_do_not_matter(algorithm: Algorithm) -> None:
    """A learner's step does not depend on the split into micro-batches."""

    def gradient(budget: int) -> tuple[Any, torch.Tensor]:
        raw = {"task": "arithmetic", "algorithm": algorithm, "rollouts_per_step": 12,
               "optimizer": {"tokens_per_microbatch": budget}}  # fmt: skip
        spec = parse_run(raw, "check")
        policy = tiny_model(0).double()
        learner = Learner(spec, policy, None if spec.algorithm.learns_from_rewards else tiny_model(1).double())
        batch = learner.annotate(make_batch(PAID))
        batch = weighted(spec.algorithm, spec.algorithm.advantages(batch))
        learner.optimizers = {}  # gradients only
        metrics = learner._optimizer_step(batch, first=True)
        return metrics, torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    metrics, whole = gradient(8192)
    ratios = metrics["policy/ratio_max"], metrics["policy/clip_fraction"]
    _must(ratios == (1.0, 0.0), f"largest ratio and clipped share of a first update are {ratios}")
    _must(whole.norm() > 0, "no gradient")
    off = float((gradient(13)[1] - whole).norm() / whole.norm())
    _must(off <= 1e-6, f"the gradient moves by {off:.1e} of its length")


@_rule("reward", "set the class fact sees_gold = True, or read nothing of `correct`")
def gold_as_declared(reward: Reward) -> None:
    """A reward depends on gold only where it says so."""
    first, second = graded_group(), graded_group(WRONG)
    if reward.sees_gold:
        _must(reward.score(first) != reward.score(second), "sees_gold is True, and the scores do not move with gold")
    else:
        _must(reward.score(first.blind()) == reward.score(first) == reward.score(second), "the scores move with gold")


@_rule("reward", "score each completion by what it is, not by its place in the group")
def order_does_not_matter(reward: Reward) -> None:
    """Scores do not depend on the order of the completions."""
    given, order = graded_group(), (2, 0, 3, 1)
    rows = {f.name: row for f in fields(given) if isinstance(row := getattr(given, f.name), tuple)}
    turned, means = ({name: tuple(row[i] for i in order) for name, row in part.items()} for part in (rows, MEANS))
    scores, other = reward.score(given), reward.score(replace(given, **turned, token_means=means))
    _must(other == [scores[i] for i in order], f"{scores} turned into {other}")


@_rule("reward", "name metrics area/quantity with numbers")
def metrics_are_told(reward: Reward) -> None:
    """Metrics are numbers with an area and a quantity."""
    metrics = reward.metrics(graded_group(), reward.score(graded_group()))
    bad = [k for k, v in metrics.items() if k.count("/") != 1 or not isinstance(v, float | int)]
    _must(not bad, f"metrics {', '.join(bad)}")


@_rule("reward", "let no text raise; return one finite number for each completion, and step ends inside it")
def hostile_text_gets_a_number(reward: Reward) -> None:
    """No completion makes a reward raise, and steps lie inside their completion in order."""
    texts = hostile.COMPLETIONS[: len(hostile.COMPLETIONS) // 4 * 4]
    scores = reward.score(graded_group(texts=texts))
    _must(len(scores) == len(texts) and all(map(math.isfinite, scores)), f"{len(scores)} scores for {len(texts)}")
    found = reward.steps(graded_group()) if isinstance(reward, StepReward) else [[]] * 4
    for text, steps in zip(TEXTS, found, strict=True):
        ends = [end for end, _ in steps]
        _must(ends == sorted(ends) and all(0 < end <= len(text) for end in ends), f"{text!r}: steps end at {ends}")


@_rule("task", "give every problem an id of its own, text and gold; let a hash of the problem choose its split")
def splits_are_whole_and_disjoint(task: Task) -> None:
    """Every split has problems with ids of their own; splits are disjoint, demonstrations too."""
    every: dict[Split, list[Prompt]] = {split: list(task.prompts(split)) for split in SPLITS}
    again = type(task).model_validate(task.model_dump())
    for split, prompts in every.items():
        _must(prompts, f"{split} is empty")
        _must(len({p.id for p in prompts}) == len(prompts), f"ids repeat in {split}")
        whole = all(row["id"] and row["prompt"] and row["gold"] for row in problem_rows(prompts))
        _must(whole, f"a problem of {split} lacks id, text or gold")
        _must(list(again.prompts(split)) == prompts, f"{split} read again differs")
        for key, value in (tag for p in prompts for tag in p.tags):
            _must(key and value and value == value.strip(), f"tag {key!r}: {value!r}")
        _must(all(len(dict(p.tags)) == len(p.tags) for p in prompts), f"a problem of {split} has a tag twice")
    train, validation, test = ({p.text for p in every[split]} for split in SPLITS)
    shared = train & validation | train & test | validation & test
    _must(not shared, f"in two splits: {len(shared)} problems")
    shown = {d.prompt for d in task.demonstrations()} & (validation | test)
    _must(not shown, f"demonstrated and held out: {len(shown)} problems")


@_rule("task", "make worked solutions that `extract` reads, that are right, and that fit max_completion_tokens")
def demonstrations_are_right(task: Task) -> None:
    """Demonstrations state their gold answer in the format and within the token limit."""
    gold = {row["prompt"]: row["gold"] for row in problem_rows(task.prompts("train"))}
    for demonstration in islice(task.demonstrations(), 500):
        text = demonstration.completion
        # One token per character is the built-in tokenizer, the longest there is; one more ends the sequence.
        _must(len(text) + 1 <= task.max_completion_tokens, f"{len(text) + 1} tokens: {text[:60]!r}")
        stated = task.extract(text)
        _must(stated is not None and task.format_score(text) == 1.0, f"no answer in the format: {text[:60]!r}")
        right = demonstration.prompt not in gold or task.equivalent(str(stated), gold[demonstration.prompt])
        _must(right, f"wrong: {demonstration.prompt[:60]!r} is answered {stated!r}")


@_rule("task", "compare both answers alike in `equivalent`")
def equality_is_one(task: Task) -> None:
    """Equality is reflexive and symmetric and tells answers apart."""
    golds = sorted({row["gold"] for row in problem_rows(task.prompts("test"))})[:8]
    pairs = [(a, b) for a in golds for b in golds if a < b]
    _must(all(task.equivalent(gold, gold) for gold in golds), "an answer differs from itself")
    _must(all(task.equivalent(a, b) == task.equivalent(b, a) for a, b in pairs), "the order of two answers matters")
    _must(any(not task.equivalent(a, b) for a, b in pairs), "all answers are equal")


@_rule("task", "bound what `extract`, `format_score` and `equivalent` read, and let them raise nothing")
def hostile_text_is_graded(task: Task) -> None:
    """No completion makes grading raise or take long."""
    gold = problem_rows(task.prompts("test")[:1])[0]["gold"]
    for text in hostile.COMPLETIONS:
        start = time.process_time()
        answer, form = task.extract(text), task.format_score(text)
        _must(time.process_time() - start < SLOWEST, f"more than {SLOWEST:.0f} s for {text[:60]!r}")
        _must(answer is None or (isinstance(answer, str) and answer), f"{text[:60]!r}")
        _must(0.0 <= form <= 1.0, f"{text[:60]!r}: format score {form}")
    for text in ("", "\0", "9" * 10**6, "{" * 10**5, "9^{9^9}", r"\frac{1}{0}", "__import__('os')", "\ud800"):
        start = time.monotonic()
        _must(not task.equivalent(text, gold) and not task.equivalent(gold, text), f"{text[:60]!r} equals {gold!r}")
        _must(time.monotonic() - start < 60.0, f"more than 60 s to compare {text[:60]!r}")


@_rule("sampler", "return places from 0 on, enough to fill a step; key the generator of all numbers by all of `draw`")
def draws_are_keyed(sampler: Sampler) -> None:
    """The order is a function of problems, seed, step, batch and history, not of gold, and fills any step."""
    sampler.check(PROMPTS)
    other = [replace(prompt, gold="9") for prompt in PROMPTS]
    known = {p.id: i / 4 for i, p in enumerate(PROMPTS)} if sampler.sees_gold else {}
    seen = set()
    for count, seed, step, batch in product((1, 5), (0, 1), (0, 7), (0, 1)):
        draw = PromptDraw(count, seed, step, batch, progress=step / 8, pass_rates=known)
        order = list(sampler.order(PROMPTS, draw))
        _must(set(order) <= set(range(5)) and len(set(order)) >= draw.count, f"places {order} for {draw}")
        again = list(sampler.order(other, replace(draw, pass_rates=dict(reversed(known.items())))))
        _must(order == again, f"{order}, then {again} for {draw}")
        seen.add(tuple(order[:5]))
    _must(len(seen) > 4, f"orders do not depend on seed and step: {seen}")


@_rule("engine", "return one group for each prompt, in order, with a log-prob for each token, up to max_tokens")
def groups_are_in_order(engine: RolloutEngine) -> None:
    """One group per prompt in order, whose rollouts respect the limit and say how they ended."""
    groups = engine.generate(PROMPTS, 4, SAMPLING, seed=0, step=0)
    _must([g.prompt for g in groups] == PROMPTS and [len(g.rollouts) for g in groups] == [4] * 5, "other groups")
    end = tiny_tokenizer().eos_token_id
    for r in (r for group in groups for r in group.rollouts):
        _must(1 <= len(r.token_ids) <= 12 and len(r.logprobs) == len(r.token_ids), f"{len(r.token_ids)} tokens")
        _must(all(value <= 0 for value in r.logprobs), f"log-probs {r.logprobs}")
        _must((r.finish_reason == "stop") == (r.token_ids[-1] == end), f"'{r.finish_reason}' at {r.token_ids[-1]}")
        _must("<eos>" not in r.text, f"text {r.text!r}")


@_rule("engine", "key all noise by seed, step, prompt and sample, with a generator of its own")
def noise_is_keyed(engine: RolloutEngine) -> None:
    """The same key repeats the same rollouts, whatever the batch, and no random state is touched."""
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    first, again = (engine.generate(PROMPTS, 4, SAMPLING, seed=4, step=2) for _ in range(2))
    _must(first == again, "the second call differs")
    _must(torch.equal(before, torch.random.get_rng_state()), "torch's random state moved")
    for i, prompt in enumerate(PROMPTS):
        (alone,) = engine.generate([prompt], 2, SAMPLING, seed=4, step=2)
        same = [r.token_ids for r in alone.rollouts] == [r.token_ids for r in first[i].rollouts[:2]]
        _must(same, f"{prompt.text} alone differs")


@_rule("engine", "sample from the weights that load_weights was given last")
def weights_take_effect(engine: RolloutEngine) -> None:
    """Loaded weights take effect."""
    if not engine.samples_policy:
        return
    before = engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    engine.load_weights(tiny_model(1).state_dict(), 1)
    after = engine.generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    fresh = _engine(type(engine), 1).generate(PROMPTS, 2, SAMPLING, seed=0, step=0)
    _must(before != after, "the rollouts stay as they were")
    _must(after == fresh, "a fresh engine of these weights differs")


@_rule("mirror", "let `open` begin anew, and `add` take each event of docs/record.md and any text as data")
def a_run_is_shown(mirror: Mirror) -> None:
    """A run with odd numbers and hostile text is shown, beside another, and after an opening that was cut off."""
    text = "".join(map(chr, range(1, 160))) + "<script>alert(1)</script>\u202e\ud800"
    row = asdict(SampleRow(1, "train", "p", text, text, "0", None, False, None, 1, "stop"))
    events = [
        {"type": "start", "host": "h", "pid": 1, "threads": "1"},
        {"type": "metrics", "step": 1, "values": {"policy/loss": "nan", "policy/kl": "inf", "reward/mean": 1e308}},
        {"type": "samples", "step": 1, "rows": [row]},
        {"type": "per_problem", "step": 1, "area": "test", "fractions": {"p": 0.5}},
        {"type": "finish", "state": "invalid", "reason": text, "summary": {"test_accuracy": 0.5}},
    ]
    events = [{**event, "time": 1_700_000_000_000} for event in events]
    with tempfile.TemporaryDirectory() as folder:
        run, other = (MirroredRun(f"{i}f", "study", f"arm | seed {i}", {}, {}, Path(folder, str(i))) for i in (0, 1))
        beside, cut = type(mirror)(), type(mirror)()
        for one, facts in ((beside, other), (cut, run)):
            facts.place.mkdir()
            one.open(facts)
            one.add(events[:2])
        cut.close()
        shutil.rmtree(run.place)
        run.place.mkdir()
        mirror.open(run)
        for event in events:
            mirror.add([event])
        mirror.close()
        beside.close()
