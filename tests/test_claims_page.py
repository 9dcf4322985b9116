"""docs/claims.md: made from verified capsules and shipped studies, and nothing on it is typed."""

import runpy
from pathlib import Path
from typing import Any

from cohort.harness.record.study import TrialRecord
from cohort.reports.analysis import analysed
from cohort.reports.claims import check_claims
from fake_study import FakeArm, fake_study, with_claims, with_trials

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "scripts" / "claims.py"))


def test_the_page_is_what_the_findings_and_the_studies_give():
    studies, known = SCRIPT["claiming"](), SCRIPT["findings_here"]()
    assert (ROOT / "docs" / "claims.md").read_text() == SCRIPT["page"](studies, known)
    assert {*known} <= {study.name for study in studies.values()}


def test_another_analysis_that_changes_a_verdict_is_named():
    """b ends 2 points below a in each seed, 20 above it at its best, and 6 above it on the mean of its steps."""
    ends = {"a": [0.50, 0.50, 0.50], "b": [0.50, 0.70, 0.48]}
    record = fake_study(list(map(FakeArm, ends)), seeds=range(4), num_steps=20)

    def curve(trial: TrialRecord) -> dict[str, Any]:
        noise = 0.001 * (trial.seed - 1.5) * (trial.arm == "b")
        series = [(10 * step, value + noise) for step, value in enumerate(ends[trial.arm])]
        return {"history": {"validation/accuracy": series}, "summary": {}, "per_problem": {}}

    def otherwise(**claim: Any) -> list[str]:
        claimed = with_claims(with_trials(record, curve), {"contrast": {"b": 1, "a": -1}, **claim})
        return list(SCRIPT["_otherwise"](claimed, 0, check_claims(analysed(claimed))[0].verdict))

    assert otherwise() == ["supported at the best step instead of the last", "supported by the mean of training"]
    assert otherwise(predicts="not_below", margin=0.03) == ["contradicted with half the margin"]
    assert otherwise(value="mean") == ["contradicted by the last of training"]
