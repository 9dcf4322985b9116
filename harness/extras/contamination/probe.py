"""Probes a model for the exact words of a benchmark's questions, a sign that it was trained on the benchmark.

Two tests of each question, as plain text without a prompt or chat template:
- Completion: the policy reads the first part and continues greedily for as many words as were held back (partial
  prompts, arXiv:2507.10532, which holds back 40 %). Exact match and ROUGE-L (Lin 2004) compare the two.
- Likelihood: the mean log-prob per token, minus the mean over variants with other numbers.
No single score proves that a policy has seen a question: numbers that people choose are likelier than random ones, and
common phrases are easy to complete. So scores are compared with the scores of other questions of the same kind.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from ...api.runs import checked_name, evaluated_spec
from ...api.settings import Settings, as_texts, checked_split, runs_folder
from ...base.files import write_json
from ...base.inputs import digest
from ...base.streams import generator
from ...base.tensors import pad_right
from ...checks.preflight import check_runs, run_inputs
from ...console.progress import phase_bar
from ...data import Prompt, PromptFormat, SampleRow, Sampling, Split
from ...devices.device import mixed_precision, resolve_device
from ...policy.forward import microbatch_tokens, token_logprobs
from ...policy.model import length_limit
from ...policy.text import TextCodec
from ...run.build import build_engine, placed
from ...run.cold_start import start_policy
from ...run.evaluate import PROMPTS_AT_ONCE
from ...run.standalone import OnProgress, measured
from ...settings.errors import SpecError
from ...settings.run import RunSpec
from .findings import judge, summary
from .record import PROBE

PREFIX_FRACTION = 0.6  # of a question's characters, which the model reads
NUM_VARIANTS = 4  # of a question, with other numbers
HELD_BACK_WORDS = 200  # at most; the rest of a longer question is not tested
EXAMPLES = 3
_WORD = re.compile(r"\w+|[^\w\s]")
_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Knowledge:
    """The scores of one question.

    `renumbered` is a difference of mean log-probs in nats per token, above 0 if the question itself is the likelier
    text; NaN without a number. `rouge_l` is NaN if nothing could be held back.
    """

    prompt_id: str
    start: str
    held_back: str
    continuation: str
    exact: bool
    rouge_l: float
    renumbered: float


def probe(
    model: str | Path,
    task: str,
    *,
    split: str = "test",
    reference: str = "validation",
    num_problems: int = 500,
    settings: Settings = (),
    name: str | None = None,
    runs: str | Path | None = None,
) -> dict[str, Any]:
    """The result of probing whether a model knows a benchmark's questions better than `num_problems` of `reference`.

    The reference is another split of the task, or a source whose test split has fresh problems. Shows progress. The
    result goes to `probe.json` in RUNS/probes/NAME and to MLflow's experiment `probe`; `said` is it in words.
    ValueError, before a model loads, for settings that probe nothing, and for unusable problems or folders.
    """
    spec, folder = evaluated_spec(model, task, as_texts(settings)), runs_folder(runs)
    probed_split, name = checked_split(split), name and checked_name(name)
    if reference == split:
        rule, fix = "other problems than those probed", "name another split, or a file of fresh problems"
        raise SpecError(f"`reference` must be {rule}, got '{split}' for both; {fix}")
    other, part = spec, checked_split(reference if reference in get_args(Split) else "test")
    if reference != part:
        if "test_path" not in type(spec.task).model_fields:
            rule = f"one of {', '.join(get_args(Split))} for task '{spec.task.name}', which reads no data"
            raise SpecError(f"`reference` must be {rule}, got '{reference}'")
        other = spec.model_copy(update={"task": spec.task.model_copy(update={"test_path": reference})})
    check_runs([spec], folder, (probed_split,), trained=())
    check_runs([other], folder, (part,), trained=(), models=False)
    probed = spec.task.questions(probed_split)
    fresh = {key: text for key, text in other.task.questions(part).items() if key not in probed}
    sets = [dict(list(one.items())[:num_problems]) for one in (probed, fresh)]
    if not sets[1]:
        raise SpecError(f"`reference` must have problems that are not in {split}; '{reference}' has none")
    facts = {"split": split, "reference": reference, "num_problems": num_problems, "prefix_fraction": PREFIX_FRACTION}
    name = name or f"{spec.task.name}-{split}-{digest([spec.digest(), facts])[:8]}"
    directory, cache = folder / "probes" / name, folder / "cache"
    inputs = {**run_inputs([other], cache, (part,)), **run_inputs([spec], cache, (probed_split,))}
    with (
        phase_bar(f"{spec.model} on {spec.task.name}") as show,
        measured(spec, probed_split, folder, directory, inputs, "probe") as log,
    ):
        policy, codec = start_policy(spec, cache, show)
        found = knowledge({**sets[0], **sets[1]}, placed(policy, spec), codec, spec, show)
        known = [[found[key] for key in one if key in found] for one in sets]
        random = generator("contamination test", spec.seed)
        findings = [asdict(one) for one in judge(scores(known[0]), scores(known[1]), random)]
        exact = [float(np.mean([one.exact for one in rows])) for rows in known]
        best = sorted(known[0], key=lambda one: (one.exact, len(words(one.held_back))), reverse=True)
        document = {
            **facts, "name": name, "model": spec.model, "task": spec.task.name, "exact": exact[0],
            "exact_reference": exact[1], "findings": findings,
            "examples": [asdict(one) for one in best[:EXAMPLES] if one.exact],
            "spec": spec.model_dump(mode="json"), "inputs": inputs,
        }  # fmt: skip
        metrics = {"probe/exact": exact[0], "probe/exact_reference": exact[1]}
        for one in findings:
            values = {f"probe/{one['probe']}_{key}": value for key, value in one.items() if key != "probe"}
            metrics |= {key: value for key, value in values.items() if not math.isnan(value)}
        log.metrics(0, metrics)
        log.samples([
            SampleRow(  # what was held back stands as gold, ROUGE-L as reward
                step=0, split=probed_split, prompt_id=one.prompt_id, prompt=one.start, completion=one.continuation,
                gold=one.held_back, answer=None, correct=one.exact, num_tokens=len(words(one.continuation)),
                reward=None if math.isnan(one.rouge_l) else one.rouge_l, finish_reason="length",
            )
            for one in known[0]
        ])  # fmt: skip
        rows = [[asdict(one) for one in side] for side in known]
        write_json(directory / PROBE, {**document, "probed": rows[0], "reference_problems": rows[1]})
        log.finish("complete", None, {})
    return document | {"said": summary(document)}


def scores(known: Sequence[Knowledge]) -> Mapping[str, list[float]]:
    """Probe -> the score of each question."""
    return {"completion": [one.rouge_l for one in known], "renumbered": [one.renumbered for one in known]}


def knowledge(
    questions: Mapping[str, str], policy: nn.Module, codec: TextCodec, spec: RunSpec, on_progress: OnProgress
) -> dict[str, Knowledge]:
    """The scores of every question (id -> text) that is not too long for the policy, on the spec's device.

    Variants depend on seed and id alone, and may be up to twice as long as the question.
    """
    codec, limit = TextCodec(codec.tokenizer, PromptFormat(format="plain")), length_limit(policy.config)
    sizes = {key: len(codec.encode(text)) for key, text in questions.items()}
    fits = [key for key, size in sizes.items() if size > 1 and (limit is None or 2 * size < limit)]
    parts = {key: parted(questions[key]) for key in fits}
    said = _continued(parts, policy, codec, spec, on_progress)
    variants = {}
    for key in fits:
        text, random = questions[key], generator("contamination", spec.seed, key)
        variants[key] = [other for _ in range(NUM_VARIANTS) if (other := renumbered(text, random)) != text]
    texts = dict.fromkeys([*(questions[key] for key in fits), *(text for key in fits for text in variants[key])])
    likely = mean_logprobs(list(texts), policy, codec, spec, on_progress)
    found = {}
    for key, (start, held_back) in parts.items():
        own, wanted, others = words(said[key]), words(held_back), [likely[other] for other in variants[key]]
        preferred = likely[questions[key]] - fmean(others) if others else math.nan
        exact = bool(wanted) and own == wanted
        found[key] = Knowledge(key, start, held_back, said[key], exact, rouge_l(own, wanted), preferred)
    return found


def _continued(
    parts: Mapping[str, tuple[str, str]], policy: nn.Module, codec: TextCodec, spec: RunSpec, on_progress: OnProgress
) -> dict[str, str]:
    """The policy's greedy continuation of the first part of each question, of as many words as are held back."""
    sizes = {key: len(codec.encode(held_back)) for key, (_, held_back) in parts.items()}
    order, found = sorted(parts, key=sizes.__getitem__), {}
    prompts = {key: Prompt(key, parts[key][0], "") for key in parts}
    most = spec.sampling.model_copy(update={"max_tokens": max(sizes.values(), default=0) + 1})
    spec = spec.model_copy(update={"sampling": most})
    with closing(build_engine(spec, policy, codec, list(prompts.values()))) as engine:
        for begin in range(0, len(order), PROMPTS_AT_ONCE):
            some = order[begin : begin + PROMPTS_AT_ONCE]
            sampling = Sampling(temperature=0.0, max_tokens=sizes[some[-1]] + 1)
            with mixed_precision(resolve_device(spec.device), spec.autocast):
                groups = engine.sample([prompts[key] for key in some], 1, sampling, seed=spec.seed, step=0)
            for key, group in zip(some, groups, strict=True):
                found[key] = _first_words(group.rollouts[0].text, len(words(parts[key][1])))
            on_progress("completion", len(found), len(order))
    return found


def mean_logprobs(
    texts: Sequence[str], policy: nn.Module, codec: TextCodec, spec: RunSpec, on_progress: OnProgress
) -> dict[str, float]:
    """Text -> mean log-prob (nats) of its tokens after the first; NaN for a text of one token."""
    device = resolve_device(spec.device)
    rows = sorted(((text, codec.encode(text)) for text in texts), key=lambda row: len(row[1]))
    at_once = max(1, microbatch_tokens(spec.optimizer, device) // max((len(row) for _, row in rows), default=1))
    found: dict[str, float] = {}
    for start in range(0, len(rows), at_once):
        some, ids = zip(*rows[start : start + at_once], strict=True)
        tokens = pad_right(ids, torch.int64).to(device)
        mask = pad_right([[0] + [1] * (len(row) - 1) for row in ids], torch.bool).to(device)
        with torch.no_grad(), mixed_precision(device, spec.autocast):
            sums = token_logprobs(policy, tokens, mask, 1.0)[0].sum(dim=1)
        found |= dict(zip(some, (sums / mask.sum(dim=1)).tolist(), strict=True))
        on_progress("likelihood", len(found), len(texts))
    return found


def parted(question: str, fraction: float = PREFIX_FRACTION) -> tuple[str, str]:
    """The first `fraction` of the characters, cut back to the end of a word if possible, and the rest, held back."""
    cut = max(1, round(fraction * len(question)))
    start = question[:cut]
    if question[cut : cut + 1].strip():  # inside a word, or before one
        start = re.sub(r"\s+\S*$", "", start)
    return start, _first_words(question[len(start) :], HELD_BACK_WORDS)


def words(text: str) -> list[str]:
    """Words, numbers and other single characters, in lower case."""
    return _WORD.findall(text.lower())


def _first_words(text: str, count: int) -> str:
    """The text up to the end of its first `count` words."""
    ends = [match.end() for _, match in zip(range(count), _WORD.finditer(text), strict=False)]
    return text[: ends[-1]] if ends else ""


def rouge_l(found: Sequence[str], wanted: Sequence[str]) -> float:
    """The F1 of the longest common subsequence of two lists (Lin 2004, section 3); NaN if the second is empty."""
    if not wanted:
        return math.nan
    lengths = [0] * (len(wanted) + 1)
    for word in found:
        diagonal = 0
        for place, other in enumerate(wanted, start=1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == other else max(above, lengths[place - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(found) + len(wanted))


def renumbered(text: str, random: np.random.Generator) -> str:
    """The text with every number replaced by another with as many digits; equal numbers get equal replacements."""
    others: dict[str, str] = {}
    for number in _NUMBER.findall(text):
        if number not in others:
            first = "0" if number[0] == "0" and len(number) > 1 else str(random.integers(1, 10))
            others[number] = first + "".join(map(str, random.integers(0, 10, len(number) - 1)))
    return _NUMBER.sub(lambda match: others[match[0]], text)
