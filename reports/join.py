"""Decides whether several studies can be joined into one (same task and test problems), and joins them.

Arms keep their trials and are named `study: arm`; they are compared with the first study's baseline. Settings of the
task and of the evaluation must be equal, because they define accuracy. All other settings may differ. Each difference
between the base runs is a warning of the report, because such studies differ in more than their arms.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..harness.record.study import StudyRecord
from .prose.wording import listed, plural

_MEASURED_BY = ("num_test_prompts", "num_samples", "num_test_samples", "temperature", "top_p")
_EACH_RUNS_OWN = ("seed", "algorithm", "rewards", "control")


@dataclass(frozen=True)
class JoinedStudy(StudyRecord):
    """Several studies as one.

    arm_seeds  arm -> the seeds that its own study asks for
    studies    arm -> the name of its study
    warnings   dotted setting -> study -> its values, for each difference between base runs
    claiming   the studies with claims, which are judged in their own reports alone: p is corrected over one study's
    """

    arm_seeds: Mapping[str, Sequence[int]] = field(default_factory=dict)
    studies: Mapping[str, str] = field(default_factory=dict)
    warnings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    claiming: Sequence[str] = ()


def join(records: Sequence[StudyRecord]) -> JoinedStudy:
    """One record of at least two studies; ValueError with the difference that keeps them apart."""
    names = [record.name for record in records]
    if len(records) < 2 or len(set(names)) != len(names):
        raise ValueError(f"a comparison needs at least two different studies, got {', '.join(names) or 'none'}")
    first = records[0]
    for record in records:
        if record.search is not None and "tuning" not in record.search:  # its arms were selected by their results
            raise ValueError(
                f"studies must list their arms to be compared: a search found the arms of '{record.name}'; run "
                "the setting that it chose in a study that lists it, with other seeds"
            )
        if record.spec.get("design") == "imported":  # nothing says how it was measured
            raise ValueError(
                f"studies must be measured here to be compared, got the imported '{record.name}'; import its scores "
                "and the others' scores (Result.problems) as one study"
            )
        if record.metric != first.metric:
            raise ValueError(
                f"studies must share their metric to be compared: '{first.name}' has {first.metric}, '{record.name}' "
                f"{record.metric}; compare studies of one metric"
            )
    _check_settings(records)
    known = {record.name: set(one.per_problem) for record in records for one in record.trials if one.per_problem}
    for other, there in known.items():
        name, here = next(iter(known.items()))
        if here != there:  # a data set may have changed under equal settings
            raise ValueError(
                f"studies must share their test problems to be compared: '{name}' has {len(here)}, '{other}' "
                f"{len(there)}, {len(here & there)} of them in both; the data or the split changed between them"
            )
    questions = dict.fromkeys(record.question for record in records)
    keys = dict.fromkeys(key for record in records for key in record.versions)
    return JoinedStudy(
        name=" + ".join(names),
        question=f"How do the arms of {listed(names, most=len(names))} compare? ({' / '.join(questions)})",
        metric=first.metric,
        baseline=_label(first, first.baseline),
        arms=[_label(record, arm) for record in records for arm in record.arms],
        seeds=sorted({seed for record in records for seed in record.seeds}),
        expected=sum(record.expected for record in records),
        spec={record.name: record.spec for record in records},
        trials=[replace(one, arm=_label(record, one.arm), factors={}) for record in records for one in record.trials],
        command="\n".join([*(record.command for record in records), f"cohort report {' '.join(names)}"]),
        versions={key: " / ".join(dict.fromkeys(one.versions.get(key, "unknown") for one in records)) for key in keys},
        arm_seeds={_label(record, arm): record.seeds for record in records for arm in record.arms},
        studies={_label(r, arm): r.name for r in records for arm in [*r.arms, *(trial.arm for trial in r.trials)]},
        warnings=_warnings(records),
        claiming=[record.name for record in records if record.claims],
        stopped=[_label(record, arm) for record in records for arm in record.stopped],
        search=_tuning(records),
        any_time=any(record.any_time for record in records),
        added=sorted({seed for record in records for seed in record.added}),
        looks=sorted({count for record in records for count in record.looks}),
    )


def _label(record: StudyRecord, arm: str) -> str:
    return f"{record.name}: {arm}"


def _tuning(records: Sequence[StudyRecord]) -> dict[str, Any] | None:
    """The findings of the searches that tuned arms of these studies; None without any."""
    found = {
        _label(record, arm): {
            **search,
            "best": _label(record, search["best"]),
            "arms": [{**one, "label": _label(record, one["label"])} for one in search["arms"]],
        }
        for record in records
        for arm, search in (record.search or {}).get("tuning", {}).items()
    }
    return {"tuning": found} if found else None


def _check_settings(records: Sequence[StudyRecord]) -> None:
    """All trials of all studies must share the task and the way accuracy is measured."""
    settings: dict[str, dict[str, str]] = {}
    for record in records:
        for trial in record.trials:
            found = dict(_flat(trial.spec.get("task", {}), "task"))
            evaluation = trial.spec.get("evaluation", {})
            found |= {f"evaluation.{key}": _text(evaluation[key]) for key in _MEASURED_BY if key in evaluation}
            for key, value in found.items():
                settings.setdefault(key, {})[value] = record.name
    apart = {key: values for key, values in settings.items() if len(values) > 1}
    if apart:
        key, values = next(iter(apart.items()))
        shown = ", ".join(f"{value} in '{name}'" for value, name in values.items())
        more = f" (and {plural(len(apart) - 1, 'more setting')})" if len(apart) > 1 else ""
        raise ValueError(
            f"studies must share the task and how accuracy is measured to be compared: {key} is {shown}{more}; "
            "run one of them again with the other's setting (--set)"
        )


def _warnings(records: Sequence[StudyRecord]) -> dict[str, dict[str, str]]:
    """Settings that differ between the base runs, without the settings that a study varies itself."""
    varied = {path for record in records for trial in record.trials for path in trial.factors}
    values: dict[str, dict[str, dict[str, None]]] = {}  # setting -> study -> its values
    for record in records:
        for trial in record.trials:
            for key, value in _flat({k: v for k, v in trial.spec.items() if k not in _EACH_RUNS_OWN}, ""):
                values.setdefault(key, {}).setdefault(record.name, {})[value] = None
    begun = [record.name for record in records if record.trials]
    others = {key: by_study for key, by_study in values.items() if key not in varied}
    texts = {key: {name: ", ".join(own.get(name, ["not set"])) for name in begun} for key, own in others.items()}
    for key in sorted({key for record in records for key in record.versions}):
        texts[f"version of {key}"] = {record.name: record.versions.get(key, "unknown") for record in records}
    return {key: each for key, each in texts.items() if len(set(each.values())) > 1}


def _flat(settings: Any, prefix: str) -> list[tuple[str, str]]:
    """(dotted path, value as text) of every leaf."""
    if isinstance(settings, Mapping) and settings:
        return [pair for key, value in settings.items() for pair in _flat(value, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, _text(settings))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
