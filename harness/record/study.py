"""The files of a study, and the plain data that reports read: a function of its folder, at any time.

`study.json` is its document, written at each start; `status.json` has the facts that trials cannot know; `search.json`
has the findings of its searches; `looks.json` has the times at which reports were written; `trials/` has the trials'
folders (`run.py`).
"""

import json
import logging
import math
import shlex
import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import extras
from ..base.files import read_json, write_json
from ..base.inputs import NO_INPUTS, Inputs, digest, short
from ..data import FINAL, SampleRow, TrialState
from ..settings.claim import Claim, Weights
from ..settings.effect import identical
from ..settings.errors import did_you_mean
from ..settings.study import StudySpec
from .events import EVENTS, read_history
from .provenance import versions
from .run import INFO, SYSTEM, RunInfo
from .status import StudyStatus

STUDY, STATUS, SEARCH = "study.json", "status.json", "search.json"
LOOKS = "looks.json"
# no settings
_ABOUT = ("id", "digest", "inputs", "command", "versions", "labels", "shown", "amendments", "registered", "references")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrialRecord:
    """One (arm, seed) of a study, as its folder records it.

    history     metric name (`area/quantity`) -> [(step, value), ...], steps rising
    summary     the numbers of results.csv: accuracy_initial, accuracy_final, test_accuracy (fractions), rollouts,
                generated_tokens, optimizer_steps, seconds, peak_memory_bytes, learner_peak_bytes; absent if not reached
    per_problem test prompt id -> fraction of its samples that were correct, at the end (the mean over the last
                `evaluation.test_last` evaluations); empty if not reached
    factors     dotted path -> level of this arm, for every factor of the study
    threads     every number of threads that one of its workers had (`1+1` on two devices); the last bits depend on it
    start_per_problem  the same fractions before the first step; empty unless evaluation.test_at_start
    families    test prompt id -> family, of the problems that have one
    tests       of each other test, `test_NAME` (at the end) and `start_NAME` -> the same fractions
    """

    trial: str
    arm: str
    seed: int
    state: TrialState
    reason: str | None
    spec: Mapping[str, Any]
    factors: Mapping[str, Any]
    history: Mapping[str, Sequence[tuple[int, float]]]
    summary: Mapping[str, float]
    per_problem: Mapping[str, float]
    samples: Sequence[SampleRow]
    threads: Sequence[str] = ()
    start_per_problem: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of its last attempt
    families: Mapping[str, str] = field(default_factory=dict)
    tests: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExploratoryArm:
    """A clone of another arm, made while its study ran. `left_at` has the step at which each seed left its parent's."""

    label: str
    parent: str
    changes: Mapping[str, Any]
    left_at: Mapping[int, int]
    trials: Sequence[TrialRecord]


@dataclass(frozen=True)
class StudyRecord:
    """All data of a report.

    spec      the study as a JSON-like mapping (keys of `harness.settings.study.StudySpec`)
    arms      arm labels in the study's order, the baseline being `baseline`
    expected  number of (arm, seed) pairs that the study asks for
    command   the shell command that reproduces the study
    versions  package -> version, with `python` and `git_commit` among them
    search    findings of a search (`search.json`), None for other designs: importances; arms, each with label,
              parameters, values and state; best, a label. A tuned comparison has `tuning`: arm -> such findings
    any_time  whether its intervals and tests must hold however seeds are added
    added     listed seeds that the study did not ask for when a report was written that could compare seeds
    looks     with how many complete seeds such reports were written
    stopped   labels of the arms that a user has stopped
    exploratory  clones; neither `arms` nor `trials` has them
    strange   folder of a trial that cannot be read, or is not of this study -> why; neither `trials` nor `exploratory`
              has its numbers
    extras    name of an extra -> its plain data on the study
    identical groups of arms that differ in settings without effect alone: their labels, and the reason
    amendments additions to the study after its first start: time (milliseconds since 1970); arms; seeds; digest; and
              `dropped`, the arms and clones that were taken back before they began
    references arm -> the arm that it is compared with; empty if that is the baseline for all
    claims    the study's claims: their settings, contrasts, region, and when (time) under which digest they were fixed
    """

    name: str
    question: str
    metric: str
    baseline: str
    arms: Sequence[str]
    seeds: Sequence[int]
    expected: int
    spec: Mapping[str, Any]
    trials: Sequence[TrialRecord]
    command: str
    versions: Mapping[str, str]
    search: Mapping[str, Any] | None = None
    stopped: Sequence[str] = ()
    exploratory: Sequence[ExploratoryArm] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    any_time: bool = False
    added: Sequence[int] = ()
    looks: Sequence[int] = ()
    strange: Mapping[str, str] = field(default_factory=dict)
    identical: Sequence[tuple[Sequence[str], str]] = ()
    amendments: Sequence[Mapping[str, Any]] = ()
    claims: Sequence[Mapping[str, Any]] = ()
    references: Mapping[str, str] = field(default_factory=dict)


def study_document(
    study: StudySpec, command: str, inputs: Inputs = NO_INPUTS, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of `study.json` at a start of the study; `known` is its content after the start before.

    id        the same at every start and on every host
    command   the command that started the study; an empty one keeps the known one
    labels    labels of the arms, as far as a design names them
    shown     how a mirror shows it: paths of the varied settings, colour of each arm
    amendments  for each start that added any: time (milliseconds since 1970), arms, seeds, the digest before
    references  arm -> the arm that it is compared with, where that is not the baseline for all
    registered  the claims of the first start: `registered`
    The other keys are the settings of the study.
    """
    known = known or {}
    arms, colors = study.checked_arms(), study.arm_colors()
    factors = dict.fromkeys(path for arm in arms for path in (*arm.levels, *arm.overrides) if path != "arm")
    shown = {arm.label: colors[arm.label] for arm in arms if arm.label in colors}
    added = {key: [one for one in values if known and one not in known.get(before, values)] for key, before, values in (
        ("arms", "labels", study.arm_labels()),
        ("seeds", "seeds", study.seeds),
    )}  # fmt: skip
    amendments = known.get("amendments", [])
    if any(added.values()):
        amendments = [*amendments, {"time": round(1000 * time.time()), **added, "digest": known.get("digest")}]
    fixed = known.get("registered") or registered(study.claim, study.claimed())
    return {
        "id": known.get("id") or uuid.uuid4().hex, "digest": study.digest(), "inputs": inputs,
        "command": command or known.get("command") or f"cohort study run {shlex.quote(study.name)}",
        "versions": dict(versions()), "labels": study.arm_labels(), "shown": {"factors": [*factors], "colors": shown},
        "amendments": amendments, **({"registered": fixed} if study.claim else {}),
        **({"references": references} if (references := study.references()) else {}), **study.model_dump(mode="json"),
    }  # fmt: skip


def registered(claims: Sequence[Claim], contrasts: Sequence[Sequence[Weights]]) -> dict[str, Any]:
    """Claims as they are fixed now: time (milliseconds since 1970), digest, for each its contrasts and its region
    (None: no end)."""
    regions = [[end if math.isfinite(end) else None for end in claim.region] for claim in claims]
    return {
        "time": round(1000 * time.time()),
        "digest": digest([claim.model_dump(mode="json") for claim in claims]),
        "claims": [{"contrasts": c, "region": r} for c, r in zip(contrasts, regions, strict=True)],
    }


def with_dropped(document: Mapping[str, Any], dropped: Sequence[str]) -> dict[str, Any]:
    """The document with an amendment for each arm that its queue has dropped; a kill can leave it without one."""
    known = {arm for one in document.get("amendments", ()) for arm in one.get("dropped", ())}
    one = {"time": round(1000 * time.time()), "arms": [], "seeds": [], "digest": document["digest"]}
    more = [{**one, "dropped": [arm]} for arm in dropped if arm not in known]
    return {**document, "amendments": [*document.get("amendments", ()), *more]}


def study_settings(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a study's document."""
    return {key: value for key, value in document.items() if key not in _ABOUT}


def keep_document(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a study's document into its folder here, if it changed: its queue may live elsewhere."""
    folder.mkdir(parents=True, exist_ok=True)
    if document != _optional(folder / STUDY):
        write_json(folder / STUDY, document)


def write_status(folder: Path, status: StudyStatus, failed: Sequence[Mapping[str, Any]], *, ended: bool) -> None:
    """Keep, if they changed, the facts that the trials' own files lack: the state of the study, the arms that a user
    stopped, and the trials (trial, arm, seed, factors, reason) that failed, perhaps without a word of their own."""
    without = [trial for trial in status.trials if trial.state in ("failed", "invalid")]
    state: TrialState = "failed" if without and len(without) == len(status.trials) else "complete"
    document = {
        "state": "running" if not ended else state if status.finished else "stopped",
        "stopped": list(dict.fromkeys(trial.arm for trial in status.trials if trial.held)),
        "failed": list(failed),
    }
    if document != _optional(folder / STATUS):
        write_json(folder / STATUS, document)


def keep_look(folder: Path, record: StudyRecord) -> None:
    """Keep that a report of this record is written: which seeds it asks for, and how many are complete in some arm.

    Before the report is, so that no kill hides that it was read.
    """
    complete = len({trial.seed for trial in record.trials if trial.state == "complete"})
    look, known = {"seeds": list(record.seeds), "complete": complete}, _looks(folder)
    if all(look != {key: one[key] for key in look} for one in known):
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(folder / LOOKS, {"looks": [*known, {"time": now, **look}]})


def read_study(runs: Path, name: str) -> StudyRecord:
    """The record of a study in a runs folder. ValueError for one that is not there."""
    folder = runs / "studies" / name
    if not (folder / STUDY).is_file():
        known = sorted(file.parent.name for file in (runs / "studies").glob(f"*/{STUDY}"))
        there = f"it has: {', '.join(known)}" if known else "run one with: cohort study run NAME"
        raise ValueError(f"the runs folder '{runs}' has no study '{name}'; {did_you_mean(name, known)}{there}")
    return read_folder(folder)


def read_folder(folder: Path, kept: Mapping[str, Any] | None = None) -> StudyRecord:
    """The record of the study in a folder: one trial for each (arm, seed) that has begun.

    `kept` has the extras' data on it, by default from the runs folder around it. ValueError for documents of another
    kind.
    """
    try:
        return _read_folder(folder, kept)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"'{folder}' does not hold the documents of a study ({error!r:.200}); restore them from a "
                         "copy") from None  # fmt: skip


def _read_folder(folder: Path, kept: Mapping[str, Any] | None) -> StudyRecord:
    document = read_json(folder / STUDY)
    spec = study_settings(document)
    status = _optional(folder / STATUS) or {"stopped": [], "failed": []}
    search = _optional(folder / SEARCH)
    looks = [one for one in _looks(folder) if one["complete"] > 1]
    # a seed that a report has shown stays, or else the good ones could be chosen
    seeds = list(dict.fromkeys([*spec["seeds"], *(seed for one in looks for seed in one["seeds"])]))
    looks = [one for one in looks if not set(seeds) <= set(one["seeds"])]
    asked = {**document, "labels": {*document["labels"]}}
    trials, clones, strange = _trials(folder, asked, status["failed"], {*seeds})
    dropped = {arm for one in document.get("amendments", ()) for arm in one.get("dropped", ())}
    labels = [arm for arm in document["labels"] if arm not in dropped]
    arms = labels or sorted({arm for arm, _ in trials})  # the arms of a search are numbered
    own = spec.get("design") == "imported" and spec.get("pairing") == "none"  # each arm has seeds of its own
    wanted = [(arm, seed) for arm in arms for seed in seeds if not own or (arm, seed) in trials]
    found = {key: trials[key] for key in wanted if key in trials}
    pruned = {arm["label"]: arm["reason"] for arm in (search or {}).get("arms", []) if arm["state"] == "pruned"}
    for key, trial in found.items():
        if key[0] in pruned and trial.state == "complete":  # every mean is over the same number of seeds
            found[key] = replace(trial, state="pruned", reason=pruned[key[0]])
    shown = set(seeds).intersection(*(one["seeds"] for one in looks))  # in every look
    references = document.get("references") or {}
    if kept is None:
        runs, all_found = folder.resolve().parents[1], (list(found.values()), document["inputs"])
        kept = {name: one.kept(runs, *all_found) for name, one in extras.modules("record").items()}
    return StudyRecord(
        name=spec["name"], question=spec["question"], metric=spec["metric"],
        baseline=spec["baseline"] if spec["baseline"] in arms else next(iter([*references.values(), *arms]), ""),
        arms=arms, seeds=seeds, expected=sum(key in found or key[0] not in pruned for key in wanted), spec=spec,
        trials=list(found.values()), command=document["command"],
        versions={**document["versions"], **short(document["inputs"])}, search=search, stopped=status["stopped"],
        exploratory=clones, extras={name: one for name, one in kept.items() if one},
        any_time=spec.get("any_time", False), added=[seed for seed in seeds if seed not in shown],
        looks=sorted({one["complete"] for one in looks}), strange=strange, amendments=document.get("amendments", ()),
        claims=_claims(document), references=references,
        identical=identical({trial.arm: trial.spec for trial in found.values()}),
    )  # fmt: skip


def _claims(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The claims with their contrasts; ValueError if they differ from the ones registered before the first trial."""
    claims, registered = document.get("claim") or [], document.get("registered")
    if not claims:
        return []
    if registered is None or digest(claims) != registered["digest"]:
        raise ValueError("its claims differ from the ones that it was started with; restore study.json from a copy")
    fixed = {key: registered[key] for key in ("time", "digest")}
    return [{**fixed, **claim, **own} for claim, own in zip(claims, registered["claims"], strict=True)]


def read_trial(directory: Path) -> TrialRecord | None:
    """A folder's trial; None if it has not begun. ValueError for files that no run has written, or several have."""
    info, history = RunInfo.load(directory), read_history(directory / EVENTS)
    if info is None or not history.attempts:
        return None
    own = info.identity()
    # `settings` of a start without a study is a hash of the tags too, which change with the arms of the study
    known = (own if "study" in start else ("trial", "arm", "seed") for start in history.attempts)
    said = [own | {k: start.get(k) for k in keys} for keys, start in zip(known, history.attempts, strict=True)]
    if own["trial"] != directory.name or any(one != own for one in said):
        other = next((one for one in said if one != own), own)
        raise ValueError(f"'{directory}' must hold its own run, but {INFO} is of {_words(own)} and {EVENTS} of "
                         f"{_words(other)}; restore it from a copy")  # fmt: skip
    end = history.finish[0] if history.finish else {"state": "running", "reason": None, "summary": {}}
    try:
        scores = history.scores
        return TrialRecord(
            trial=directory.name, arm=info.tags["cohort.arm"], seed=int(info.tags["cohort.seed"]), state=end["state"],
            reason=end["reason"], spec=info.spec, factors=json.loads(info.tags["cohort.factors"]),
            history={
                key: sorted((step, value) for step, (value, _) in steps.items())
                for key, steps in sorted(history.history.items())
                if not key.startswith(SYSTEM)
            },
            summary={key: float(value) for key, value in end["summary"].items()}, per_problem=scores.get("test", {}),
            samples=[sample_row(row) for row in history.rows()],
            threads=sorted({attempt.get("threads", "") for attempt in history.attempts} - {""}),
            start_per_problem=scores.get("start", {}),
            tests={area: found for area, found in scores.items() if area not in ("test", "start")},
            versions=info.versions,
            families={str(problem): str(family) for problem, family in history.families.items()},
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"'{directory}' does not hold a trial of a study ({error!r:.200})"
        raise ValueError(f"{what}; restore it from a copy") from None


def _words(identity: Mapping[str, Any]) -> str:
    return "'{trial}' of '{study}' (seed {seed} of '{arm}', settings {settings})".format(**identity)


def sample_row(row: Mapping[str, Any]) -> SampleRow:
    rewards = {name: float(value) for name, value in row["rewards"].items()}
    reward = None if row["reward"] is None else float(row["reward"])
    return SampleRow(**{**row, "reward": reward, "rewards": rewards})


def _trials(
    folder: Path, document: Mapping[str, Any], failed: Sequence[Mapping[str, Any]], seeds: Collection[int]
) -> tuple[dict[tuple[str, int], TrialRecord], list[ExploratoryArm], dict[str, str]]:
    """The trials of the study by arm and seed, its clones with theirs, and what is wrong with other folders of trials.

    `seeds` are the seeds of its arms. A trial that cannot be read counts as failed.
    """
    unknown: dict[str, Any] = {"spec": {}, "history": {}, "summary": {}, "per_problem": {}, "samples": []}
    trials = {(one["arm"], one["seed"]): TrialRecord(**unknown, **one, state="failed") for one in failed}
    clones: dict[str, list[tuple[TrialRecord, dict[str, str]]]] = defaultdict(list)
    strange: dict[str, str] = {}
    for directory in sorted((folder / "trials").glob("[!.]*/")):
        tags = {}
        try:
            trial = read_trial(directory)
            tags = (RunInfo.load(directory) or RunInfo("", "")).tags
            if trial is not None and (lack := _unasked(trial, tags, document, seeds)):
                raise ValueError(f"'{directory}' is no trial of this study: {lack}; restore the one or the other")
        except ValueError as error:
            log.warning("a trial cannot be read: %s", error)
            strange[directory.name] = str(error)
            trial = next((one for one in trials.values() if one.trial == directory.name), None)
        if trial is None:
            continue
        known = trials.get((trial.arm, trial.seed))
        if known is not None and trial.state not in FINAL:
            trial = replace(trial, state="failed", reason=known.reason)
        trials[trial.arm, trial.seed] = trial
        if tags.get("cohort.phase") == "exploratory":
            clones[trial.arm].append((trial, tags))
    exploratory = []
    for label, members in sorted(clones.items()):
        members.sort(key=lambda member: member[0].seed)
        parent, changes = members[0][1]["cohort.parent"], json.loads(members[0][1]["cohort.changes"])
        left_at = {trial.seed: int(tags["cohort.left_at"]) for trial, tags in members}
        exploratory.append(ExploratoryArm(label, parent, changes, left_at, [trial for trial, _ in members]))
    return trials, exploratory, strange


def _unasked(trial: TrialRecord, tags: Mapping[str, str], document: Mapping[str, Any], seeds: Collection[int]) -> str:
    """Why a study does not ask for a trial; empty if it does."""
    designs = [document["digest"], *(one["digest"] for one in document.get("amendments", ()))]
    if tags.get("cohort.study") != document["name"] or tags.get("cohort.design") not in designs:
        return f"it ran for '{tags.get('cohort.study')}', or with other settings than {STUDY} has"
    if any(trial.arm in one.get("dropped", ()) for one in document.get("amendments", ())):
        return f"{STUDY} says that '{trial.arm}' was taken back before it began"
    if tags.get("cohort.phase") != "final":
        return ""
    if document["labels"] and trial.arm not in document["labels"]:
        return f"{STUDY} has no arm '{trial.arm}'"
    return f"{STUDY} has no seed {trial.seed}" if trial.seed not in seeds else ""


def _looks(folder: Path) -> list[dict[str, Any]]:
    return (_optional(folder / LOOKS) or {"looks": []})["looks"]


def _optional(file: Path) -> dict[str, Any] | None:
    return read_json(file) if file.exists() else None
