"""A model that was trained on a benchmark's questions is flagged, a clean one is not, and a report says so."""

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cohort.harness.data import Demonstration
from cohort.harness.extras.contamination import probe as contamination
from cohort.harness.extras.contamination.findings import ProbeResult, judge, verdict
from cohort.harness.extras.contamination.probe import (
    knowledge,
    mean_logprobs,
    parted,
    probe,
    renumbered,
    rouge_l,
    scores,
    words,
)
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import read_study
from cohort.harness.run.cold_start import fit_demonstrations
from cohort.harness.settings.run import ColdStart, parse_run
from cohort.harness.settings.study import StudySpec
from cohort.reports.render import write_report
from factories import make_spec
from fake_study import HOSTILE, fake_study
from fake_trials import begin_study, of_study
from test_report import read_page
from torch import nn

CODEC = TextCodec(tiny_tokenizer())


def unseen(phase: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


def first(split: Any, count: int, start: int = 0) -> dict[str, str]:
    """Questions of a split of `arithmetic`."""
    return dict(itertools.islice(make_spec().task.questions(split).items(), start, start + count))


def p_of(probed: Sequence[float], reference: Sequence[float]) -> float:
    (found,) = judge({"completion": probed}, {"completion": reference}, np.random.default_rng(0))
    return found.p


def test_the_permutation_test_counts_all_divisions_where_there_are_few():
    # Of the 10 ways to choose 2 of 1, 2, 3, 4, 9 the sum 13 of the two seen is the highest.
    assert p_of([4, 9], [1, 2, 3]) == pytest.approx(1 / 10)
    assert p_of([2, 9, math.nan], [1, 3, 4]) == pytest.approx(3 / 10)  # 2 + 9 = 11 is reached by 13, 12, 11
    assert math.isnan(p_of([4, math.nan], [1, 2, 3]))
    assert p_of(range(100, 150), range(50)) == 1 / 10_000  # of 9999 random ones; never 0


def test_a_preference_for_peoples_numbers_flags_nobody_and_a_better_known_reference_is_said():
    rng = np.random.default_rng(0)
    liked = list(rng.normal(2, 1, 80))  # every question is likelier than its variants, to a model that has seen none
    (found,) = judge({"renumbered": liked[:40]}, {"renumbered": liked[40:]}, rng)
    assert not found.is_flagged
    (found,) = judge({"renumbered": liked[:40]}, {"renumbered": [one + 1 for one in liked[40:]]}, rng)
    assert found.p > 0.9 and found.p_reverse < 0.01


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    # Lin 2004, section 3.1: "police killed the gunman" against "police kill the gunman" (3 of 4 words in order) and
    # against "the gunman kill police" (2 of 4).
    reference = words("police killed the gunman")
    assert rouge_l(words("police kill the gunman"), reference) == pytest.approx(3 / 4)
    assert rouge_l(words("the gunman kill police"), reference) == pytest.approx(2 / 4)
    assert rouge_l(words("a b"), words("a x b y")) == pytest.approx(2 * 2 / 6)  # recall 1/2, precision 1
    assert rouge_l([], ["a"]) == 0
    assert math.isnan(rouge_l(["a"], []))
    assert words("It's $3.50, OK?") == ["it", "'", "s", "$", "3", ".", "50", ",", "ok", "?"]


def test_a_question_is_cut_between_words_and_its_variants_have_other_numbers_of_as_many_digits():
    assert parted("Ann has 3 red apples.", 0.55) == ("Ann has 3", " red apples.")  # 12 of 21 characters, in "red"
    assert parted("Ann has 3 red apples.", 0.6) == ("Ann has 3 red", " apples.")  # 13, its end
    assert parted("Ann has 3", 0.8) == ("Ann has", " 3")  # just before a word that would be cut
    assert parted("4+4+5-6=", 0.6) == ("4+4+5", "-6=")
    assert parted("x", 0.6) == ("x", "")
    assert len(words(parted("a " * 1000, 0.1)[1])) == contamination.HELD_BACK_WORDS
    text = "How many of the 12 eggs, 12 cups and 5 jars cost $007?"
    found = {renumbered(text, np.random.default_rng(seed)) for seed in range(50)}
    assert len(found) > 40
    for one in found:
        numbers = [word for word in words(one) if word.isdigit()]
        assert numbers[0] == numbers[1]  # equal ones stay equal
        assert [len(number) for number in numbers] == [2, 2, 1, 3]
        assert (numbers[0][0] != "0", numbers[3][0]) == (True, "0")
        assert [w for w in words(one) if not w.isdigit()] == [w for w in words(text) if not w.isdigit()]


def test_likelihoods_are_those_of_the_model_and_do_not_depend_on_the_batch():
    policy, spec = tiny_model(0), make_spec()
    texts = ["1+2=", "12+3-4=", "7+7+7+7-1="]
    together = mean_logprobs(texts, policy, CODEC, spec, unseen)
    for text in texts:
        ids = torch.tensor([CODEC.encode(text)])
        with torch.no_grad():
            logprobs = policy(ids).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 1:, None]).mean().item()
        assert together[text] == pytest.approx(expected, abs=1e-5)
        assert mean_logprobs([text], policy, CODEC, spec, unseen)[text] == pytest.approx(expected, abs=1e-5)


def trained_on(texts: Sequence[str], start: nn.Module, *, steps: int) -> nn.Module:
    """A copy of a model that has learned texts as pre-training does: every token of them."""
    policy, settings = copy.deepcopy(start), ColdStart(steps=steps, learning_rate=3e-3)
    rows = [Demonstration(text[:1], text[1:]) for text in texts]
    fit_demonstrations(policy, CODEC, rows, settings, device=torch.device("cpu"))
    return policy.eval()


def findings(probed: Mapping[str, str], reference: Mapping[str, str], policy: nn.Module) -> list[ProbeResult]:
    known = knowledge({**probed, **reference}, policy, CODEC, make_spec(), unseen)
    one, other = (scores([known[key] for key in side]) for side in (probed, reference))
    return judge(one, other, np.random.default_rng(0))


@pytest.mark.slow
def test_a_model_that_learned_test_items_is_flagged_and_one_that_learned_others_is_not():
    probed, reference = first("test", 150), first("validation", 150)
    texts = [d.prompt for d in make_spec().task.demonstrations()]
    clean = trained_on(texts[:2000], tiny_model(0), steps=60)  # it knows the form of the problems, from other ones
    dirty = trained_on(list(probed.values())[:75], clean, steps=120)  # learned well: rounding decides nothing
    assert all(found.is_flagged for found in findings(probed, reference, dirty))
    assert not any(found.is_flagged for found in findings(probed, reference, clean))


def finding(p: float, p_reverse: float = 0.5, probe: str = "completion") -> ProbeResult:
    return ProbeResult(probe, 0.5, 0.4, 10, 10, p, p, p_reverse)


def test_the_verdict_names_the_probes_that_flag_and_proves_nothing_else():
    assert verdict([finding(0.004), finding(0.5, probe="renumbered")], "A", "B") == (
        "Flagged: the model knows A better than B, by completion (p = 0.004)."
    )
    assert verdict([finding(0.2)], "A", "B").startswith("Not flagged, which does not prove")
    assert verdict([finding(0.9, 0.001)], "A", "B").startswith("Inconclusive: the model knows B better than A")
    assert verdict([finding(math.nan, math.nan)], "A", "B").startswith("Not tested: one of the two sets")


PROBE = ["contamination", "tiny", "--task", "arithmetic", "--problems", "8"]


def test_a_probe_is_kept_and_read_with_a_study_of_that_model_and_task(cohort, runs):
    assert cohort(*PROBE, "--runs", str(runs), "--name", "one", "--json") == 0
    found = cohort.json()
    assert [one["probe"] for one in found["findings"]] == ["completion", "renumbered"]
    assert found["verdict"].startswith("Not")
    kept = json.loads((runs / "probes" / "one" / "probe.json").read_text())
    assert (len(kept["probed"]), len(kept["reference_problems"])) == (8, 8)
    assert {"start", "held_back", "continuation", "rouge_l", "renumbered"} <= set(kept["probed"][0])

    def probes_of(name: str, **changes: Any) -> list[Any]:
        raw = {"task": "arithmetic", "algorithm": "grpo", **changes}
        study = StudySpec(name=name, question="?", run=raw, seeds=[0])
        begin_study(runs, study)
        tags = of_study(runs, name, "one", arm=next(iter(study.arm_labels())))
        folder = runs / "studies" / name / "trials" / "one"
        with RunLog(runs, folder, parse_run(raw, "test"), experiment=name, run_name="one", tags=tags) as log:
            log.resume(-1)
            log.finish("complete", None, {})
        return list(read_study(runs, name).extras.get("contamination", ()))

    (one,) = probes_of("same")
    assert (one["name"], one["model"], one["task"], one["split"]) == ("one", "tiny", "arithmetic", "test")
    assert probes_of("seed", cold_start={"steps": 1}) == []  # other initial weights
    assert probes_of("task", task="gsm8k") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--reference", "test"], "--reference must be other problems than those probed, got 'test' for both"),
        (["--reference", "fresh.jsonl"], "--reference must be one of train, validation, test for task 'arithmetic'"),
        (["--split", "dev"], "--split must be one of train, validation, test, got 'dev'"),
        (["--task", "arithmetics"], "arithmetic"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(changes, message, cohort, tmp_path):
    runs = tmp_path / "new"
    assert cohort(*PROBE, "--runs", str(runs), *changes) == 2
    *_, error = cohort.err.strip().splitlines()
    assert message in error
    assert not runs.exists()


def test_a_reference_of_fresh_problems_comes_from_a_file(tmp_path, runs):
    rows = [
        {"question": f"Ann has {n} eggs and buys {n + 3}. How many?", "answer": f"#### {2 * n + 3}"} for n in range(24)
    ]
    for name, part in (("test.jsonl", rows[:12]), ("fresh.jsonl", rows[8:])):  # 4 are in both
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    settings, fresh = {"task.path": tmp_path / "test.jsonl"}, str(tmp_path / "fresh.jsonl")
    found = probe("tiny", "gsm8k", reference=fresh, settings=settings, name="one", runs=runs)
    assert [(one["num_probed"], one["num_reference"]) for one in found["findings"]] == [(12, 12)] * 2
    start = json.loads((runs / "probes/one/probe.json").read_text())["probed"][0]["start"]
    assert start.startswith("Ann has")  # the words of the problem, not its template


@pytest.mark.slow
@pytest.mark.attack("Hostile text on a page or in a file")
def test_probed_text_and_names_are_harmless_on_the_page(tmp_path):
    example = {"start": HOSTILE, "held_back": HOSTILE, "continuation": HOSTILE}
    probe = {
        "name": HOSTILE, "model": HOSTILE, "task": "arithmetic", "split": "test", "reference": HOSTILE,
        "exact": 1.0, "exact_reference": 0.0, "examples": [example],
        "findings": [dataclasses.asdict(finding(0.001)), dataclasses.asdict(finding(math.nan, math.nan, "renumbered"))],
    }  # fmt: skip
    files = write_report(dataclasses.replace(fake_study(), extras={"contamination": [probe]}), tmp_path, formats=())
    page = read_page(files.html.read_text(encoding="utf-8"))
    assert "Flagged: the model knows" in "".join(page.text)
    assert not {"script", "img"} & set(page.tags)
    assert not [value for name, value in page.attributes if name.startswith("on") or "javascript:" in value]
