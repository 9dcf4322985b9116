"""Defines the plain data of finished trials and studies, from which reports are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data import SampleRow, TrialState


@dataclass(frozen=True)
class TrialRecord:
    """One (arm, seed) of a study, as read back from the tracking store.

    history     metric name (`area/quantity`) -> [(step, value), ...], steps rising
    summary     the numbers of results.csv: accuracy_initial, accuracy_final, test_accuracy (fractions), rollouts,
                generated_tokens, optimizer_steps, seconds, peak_memory_bytes; absent if not reached
    per_problem test prompt id -> fraction of its samples that were correct, at the end; empty if not reached
    factors     dotted path -> level of this arm, for every factor of the study
    threads     every number of threads that one of its workers had; the last bits depend on it
    start_per_problem  the same fractions before the first step; empty unless evaluation.test_at_start
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
    """All data of a report, from the tracking store and, where they are on this machine, the trials' own files.

    spec      the study as a JSON-like mapping (keys of `harness.spec.study.StudySpec`)
    arms      arm labels in the study's order, the baseline being `baseline`
    expected  number of (arm, seed) pairs that the study asks for
    command   the shell command that reproduces the study
    versions  package -> version, with `python` and `git_commit` among them
    search    findings of a search (`search.json`), None for other designs: objectives; importances; arms, each with
              label, parameters, values and state; pareto, the labels of the arms that no other beats in every
              objective; best, that of a single objective. A tuned comparison has `tuning`: arm -> such findings
    two_stage the rule for the number of seeds, None if they were listed: first (the seeds below it are those of the
              first stage), half_width and at_most, and once it is decided the keys of `seeds.json`: metric; decided;
              comparisons, each with arm, seeds, deviation and asks; asked; seeds
    stopped   labels of the arms that a user has stopped
    exploratory  clones; neither `arms` nor `trials` has them
    probes    results of `cohort probe contamination` for the task and a model that its trials start from: name; model;
              task; split; reference; findings, one for each probe; exact; exact_reference; examples
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
    two_stage: Mapping[str, Any] | None = None
    probes: Sequence[Mapping[str, Any]] = ()
