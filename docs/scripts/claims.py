"""Writes docs/claims.md: the claims of the shipped studies with their verdicts. `make claims` runs the studies first.

    python docs/scripts/claims.py [RUNS]

Each finished study of the runs folder, once it is verified, leaves its findings in studies/claims/NAME.json, with the
SHA-256 of its evidence.json, which names all its files. The page is made from these files and the study files alone. A
study whose file was changed since counts as not run; a setting that Cohort got since is off and changes nothing.
"""

import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from cohort.harness.base.files import sha256
from cohort.harness.base.inputs import digest
from cohort.harness.base.words import duration
from cohort.harness.record.evidence import EVIDENCE
from cohort.harness.record.study import StudyRecord, TrialRecord, read_folder
from cohort.harness.settings.load import load_study, shipped_studies
from cohort.harness.settings.study import StudySpec
from cohort.reports.analysis import analysed
from cohort.reports.claims import check_claims
from cohort.reports.prose.wording import operations, p_value, quantity

import cohort

ROOT = Path(__file__).resolve().parents[2]
PAGE, FINDINGS = ROOT / "docs" / "claims.md", ROOT / "studies" / "claims"
DEFINES = ("run", "factors", "arms", "components", "design", "compare", "seeds", "metric", "claim")
INTRO = """\
# Claims

What papers and guides say, held against runs on this project's own tasks. A claim is part of a study file and is fixed
before the first trial ([how](studies.md)); its verdict follows by rule: supported or contradicted if the
contrast is shown to lie where the claim says or elsewhere, by a p below 0.05 (Holm's correction over the claims of the
study), else undecided. A verdict holds for its model (`tiny`, 167 thousand parameters, but in `real_sums` and
`real_costs`), task and steps; it does not say that a paper is wrong at its own scale. Some claims ask for a
size, 2 points or 5 %, because seeds before had left the direction open: contradicted then means not by that much.

`make claims` runs the studies, verifies their records and writes this page; no number or verdict on it is typed. A
record, about 2 MB, is not in the repository: the page names it by the SHA-256 of its archive or of its evidence.
"""


def findings(folder: Path, file: Path) -> dict[str, Any]:
    """What the page says of the study of a file, from its record. ValueError for one that is not verified, or that ran
    with other settings."""
    _, found = cohort.verify(folder)
    if not found.is_verified:
        raise ValueError(f"'{folder}' must be verified to be shown, got {(*found.mismatches, *found.lacks)[0]}")
    record = read_folder(folder)
    now = load_study(str(file)).model_dump(mode="json")
    defined = [key for key in DEFINES if key in now]
    if not _holds({key: now[key] for key in defined}, {key: record.spec[key] for key in defined}):
        raise ValueError(f"'{folder}' must have the settings of {file.name} to be shown; run the study again")
    trials = [trial for trial in record.trials if trial.state == "complete"]

    def spent(name: str) -> float:
        return sum(trial.summary.get(name, 0.0) for trial in trials)

    claims = [
        {
            "sentence": one.sentence, "source": one.source, "predicted": one.predicted, "measured": one.measured,
            "verdict": one.verdict, "p": None if one.verdict == "not tested" else one.p_adjusted,
            "registered": one.registered, "otherwise": list(_otherwise(record, place, one.verdict)),
        }
        for place, one in enumerate(check_claims(analysed(record)))
    ]  # fmt: skip
    return {
        "study": record.name, "settings": settings_digest(file), "command": record.command, "claims": claims,
        "evidence": sha256(folder / EVIDENCE), "trials": f"{len(trials)} of {record.expected}",
        "versions": dict(record.versions), "seconds": spent("seconds"), "tokens": spent("generated_tokens"),
        "operations": spent("flops_train"),
    }  # fmt: skip


def _otherwise(record: StudyRecord, place: int, verdict: str) -> Iterator[str]:
    """`supported with half the margin` for each other analysis that changes the verdict of one claim."""
    claim = record.claims[place]
    metric = claim["metric"] or record.metric
    changed: dict[str, Mapping[str, Any]] = {}
    if claim["value"] in ("last", "gain"):
        changed["at the best step instead of the last"] = {"metric": f"best/{metric}"}
    if claim["value"] in ("last", "mean"):
        value = "mean" if claim["value"] == "last" else "last"
        changed[f"by the {value} of training"] = {"metric": f"all/{metric}", "value": value}
    if claim["margin"]:
        for words, factor in (("half", 0.5), ("twice", 2.0)):
            region = [end if end is None else factor * end for end in claim["region"]]
            changed[f"with {words} the margin"] = {"region": region}
    trials = [dataclasses.replace(one, history={**one.history, **_more(one, metric)}) for one in record.trials]
    for words, change in changed.items():
        claims = [{**one, **change} if number == place else one for number, one in enumerate(record.claims)]
        other = check_claims(analysed(dataclasses.replace(record, trials=trials, claims=claims)))[place].verdict
        if other not in (verdict, "not tested"):
            yield f"{other} {words}"


def _more(trial: TrialRecord, metric: str) -> dict[str, Any]:
    """A metric's series under a name of its own, and with its largest value at the end."""
    series = trial.history.get(metric, [])
    best = [*series[:1], (series[-1][0], max(value for _, value in series))] if series else []
    return {f"all/{metric}": series, f"best/{metric}": best}


def settings_digest(file: Path) -> str:
    """Of what a study file says itself."""
    said = yaml.safe_load(file.read_text("utf-8"))
    return digest({key: said.get(key) for key in DEFINES})


def _holds(now: Any, then: Any) -> bool:
    """Whether all settings of then are what they are now; now may have more of them."""
    if isinstance(now, dict) and isinstance(then, dict):
        return all(key in now and _holds(now[key], value) for key, value in then.items())
    return now == then


def page(studies: Mapping[Path, StudySpec], known: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from the studies (file -> study) and the findings by name."""
    rows, sections = [], []
    for file, study in studies.items():
        found = known.get(study.name)
        if found is not None and found["settings"] != settings_digest(file):
            found = None
        verdicts = ["not run"] * len(study.claim) if found is None else [one["verdict"] for one in found["claims"]]
        rows += [
            f"| {_cell(claim.sentence)} | {_cell(claim.source)} | [{study.name}](#{study.name}) | {verdict} |"
            for claim, verdict in zip(study.claim, verdicts, strict=True)
        ]
        sections += _section(file, study, found)
    table = ["| claim | source | study | verdict |", "| --- | --- | --- | --- |", *rows]
    return "\n".join([INTRO, *table, *sections, ""])


def _section(file: Path, study: StudySpec, found: Mapping[str, Any] | None) -> Iterator[str]:
    about = [line.removeprefix("#").strip() for line in file.read_text("utf-8").splitlines() if line[:1] == "#"]
    command = f"cohort study run {study.name}" if found is None else found["command"]
    yield f"\n## {study.name}\n\n{textwrap.fill(' '.join(about), 120)}\n\n```console\n$ {command}\n```\n"
    if found is None:
        yield "Not run with these settings."
        return
    yield "| predicted | measured | p (Holm) | verdict |\n| --- | --- | --: | --- |"
    for one in found["claims"]:
        p = "" if one["p"] is None else p_value(one["p"])
        yield f"| {_cell(one['predicted'])} | {_cell(one['measured'])} | {p} | {one['verdict']} |"
    changed = [
        f"- {one['sentence'].rstrip('.')}: {'; '.join(one['otherwise'])}."
        for one in found["claims"]
        if one["otherwise"]
    ]
    if changed:
        yield "\n".join(["\nOther analyses that change a verdict:\n", *changed])
    stated, sha = ("Evidence", found["evidence"]) if "evidence" in found else ("Archive", found["capsule"])
    yield (
        f"\nCost: {found['trials']} trials, {duration(found['seconds'])} of their time, {quantity(found['tokens'])} "
        f"generated tokens, {operations(found['operations'])}. The claims were {found['claims'][0]['registered']}; "
        f"torch {found['versions'].get('torch')}. {stated}: SHA-256 `{sha}`."
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def claiming() -> dict[Path, StudySpec]:
    """The shipped studies with claims, by their files."""
    files = {name: file for name, file in shipped_studies().items() if "\nclaim:" in file.read_text("utf-8")}
    return {file: load_study(name) for name, file in files.items()}


def findings_here() -> dict[str, Any]:
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(FINDINGS.glob("*.json"))}


def keep_findings(runs: Path, file: Path) -> bool:
    """Whether the study of a file is complete in the runs folder; if so, its findings are written."""
    name = file.stem
    status = runs / "studies" / name / "status.json"
    if not status.is_file() or json.loads(status.read_text("utf-8"))["state"] != "complete":
        return False
    FINDINGS.mkdir(exist_ok=True)
    (FINDINGS / f"{name}.json").write_text(json.dumps(findings(status.parent, file), indent=1) + "\n", "utf-8")
    return True


if __name__ == "__main__":
    studies = claiming()
    for file in studies if len(sys.argv) > 1 else []:
        is_kept = keep_findings(Path(sys.argv[1]), file)
        print(f"{file.stem}: {'verified, its findings are kept' if is_kept else 'not complete in this runs folder'}")
    PAGE.write_text(page(studies, findings_here()), "utf-8")
