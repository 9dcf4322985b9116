"""Decides whether a model knows the problems of a benchmark better than other problems of the same kind.

A probe has several tests; each scores every probed and every reference problem. If the model has seen neither set, or
both equally often, and both are random samples of one source, their scores are exchangeable, whatever the score is:
then the one-sided permutation test of their means is exact, for a weak model and a strong one. A problem and its own
variants are not exchangeable: the numbers that people choose are likelier than others even to a model that has never
seen the problem. Holm's correction covers the tests of a probe.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter
from scipy import stats

from ....reports.prose.wording import listed, p_value
from ....reports.statistics import holm

LEVEL = 0.01  # of a corrected p that flags a model
RESAMPLES = 9999  # random divisions of the problems, where there are more divisions than that
MEANINGS = {
    "completion": "Completion of the rest, ROUGE-L",
    "renumbered": "Likelier than with other numbers, nats per token",
}
HEADERS = ("test", "probed (problems)", "reference (problems)", "p", "p, Holm", "flags")
Scores = Mapping[str, Sequence[float]]  # test -> the score of each problem; NaN without a score


@dataclass(frozen=True)
class ProbeResult:
    """The result of one test of a probe: mean scores, numbers of problems with a score, and p-values.

    The alternative of `p` and `p_adjusted` is that the model knows the probed problems better. `p_reverse`, which is
    uncorrected, tests whether it knows the reference better. NaN without problems, p-values without two of each set.
    """

    probe: str
    probed: float
    reference: float
    num_probed: int
    num_reference: int
    p: float
    p_adjusted: float
    p_reverse: float

    @property
    def is_flagged(self) -> bool:
        return self.p_adjusted < LEVEL


def judge(probed: Scores, reference: Scores, rng: np.random.Generator) -> list[ProbeResult]:
    """The finding of every test, in order; both sides have the same tests."""
    known = [[[x for x in side[name] if not math.isnan(x)] for side in (probed, reference)] for name in probed]
    tests, reverse = ([_p(one, two, way, rng) for one, two in known] for way in ("greater", "less"))
    return [
        ProbeResult(name, fmean(one or [math.nan]), fmean(two or [math.nan]), len(one), len(two), *ps)
        for name, (one, two), *ps in zip(probed, known, tests, holm(tests), reverse, strict=True)
    ]


def _difference(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
    return np.mean(one, axis=axis) - np.mean(other, axis=axis)


def _p(one: list[float], other: list[float], way: Literal["greater", "less"], rng: np.random.Generator) -> float:
    """The p-value of the permutation test that the first mean is higher, or lower; NaN without two scores each."""
    if min(len(one), len(other)) < 2:
        return math.nan
    test = stats.permutation_test(
        (one, other), _difference, vectorized=True, n_resamples=RESAMPLES, batch=1000, alternative=way, rng=rng
    )
    return float(test.pvalue)


def verdict(findings: Sequence[ProbeResult], probed: str, reference: str) -> str:
    """The conclusion from all findings, in a sentence or two; `probed` and `reference` name the two sets."""
    if all(math.isnan(one.p) for one in findings):
        return "Not tested: one of the two sets has fewer than two problems with a score."
    flagged = [f"{one.probe} (p = {one.p_adjusted:.2g})" for one in findings if one.is_flagged]
    if flagged:
        return f"Flagged: the model knows {probed} better than {reference}, by {listed(flagged)}."
    blind = [f"{one.probe} (p = {one.p_reverse:.2g})" for one in findings if one.p_reverse < LEVEL]
    if blind:
        return (
            f"Inconclusive: the model knows {reference} better than {probed}, by {listed(blind)}, which may hide "
            "contamination; use a reference that it cannot have seen."
        )
    return "Not flagged, which does not prove that the model has never seen these problems."


def summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """A probe (`probe.json`) as text: title, headers, rows, exact completions, verdict, examples."""
    probed, reference = f"the {document['split']} problems", f"the problems of {document['reference']}"
    findings = TypeAdapter(list[ProbeResult]).validate_python(document["findings"])  # NaN is text in JSON
    rows = []
    for one in findings:
        sides = ((one.probed, one.num_probed), (one.reference, one.num_reference))
        means = [f"{mean:.3f} ({count})" if count else "n/a" for mean, count in sides]
        ps = [p_value(one.p), p_value(one.p_adjusted)]
        rows.append([MEANINGS.get(one.probe, one.probe), *means, *ps, "yes" if one.is_flagged else "no"])
    exact = [f"{100 * document[key]:.1f} %" for key in ("exact", "exact_reference")]
    return {
        "title": f"{document['model']} on {document['task']}, probe {document['name']}",
        "headers": HEADERS,
        "rows": rows,
        "exact": f"Completed word for word: {exact[0]} of {probed}, {exact[1]} of {reference}.",
        "verdict": verdict(findings, probed, reference),
        "is_flagged": any(one.is_flagged for one in findings),
        "examples": document["examples"],
    }
