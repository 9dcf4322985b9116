"""The results of a study or an evaluation: pandas frames, figures, LaTeX and the report's page.

Every number is the report's own. Text of models and files is as the report shows it: characters that cannot be
printed are written as escapes, so that no frame harms a terminal. Clones made while a study ran are not in the frames.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ...reports.analysis import Analysis
from ...reports.capability import capabilities, curves_of_counts, pass_table
from ...reports.claims import check_claims
from ...reports.figures.style import Drawing
from ...reports.page import page_drawings
from ...reports.prose.answer import answer
from ...reports.render import analysed, comparison_latex, comparison_table, results_table, visible
from ...reports.section import sections
from ...reports.statistics import flip_tests, fraction_interval, in_blocks, wilson_interval
from ...reports.trials import blocks_of, families_of, search_of
from ..base.words import first_look, quoted
from ..data import EvaluationResult, SampleRow
from ..record.study import StudyRecord
from ..settings.errors import SpecError, did_you_mean
from ..settings.run import RunSpec
from .reporting import keep_report


class Result:
    """The result of a study, finished or not. `folder` has its files."""

    def __init__(self, record: StudyRecord, folder: Path, runs: Path | None) -> None:
        """`runs` is the runs folder of its MLflow store; None if only the files of the study are here."""
        self.folder = folder
        self._written, self._record, self._runs = record, visible(record), runs

    def __repr__(self) -> str:
        complete = sum(trial.state == "complete" for trial in self._record.trials)
        return f"<Result of study '{self.name}': {complete} of {self._record.expected} trials complete>"

    @property
    def name(self) -> str:
        return self._record.name

    @property
    def question(self) -> str:
        return self._record.question

    @property
    def answer(self) -> str:
        """The report's answer, in one or a few sentences."""
        return answer(self._analysis, check_claims(self._analysis))

    @cached_property
    def trials(self) -> pd.DataFrame:
        """A row for each trial, whatever its state: the columns of the report's results.csv.

            study, trial                 names of the study and of the trial's folder
            arm, seed                    label of the arm, and the seed
            state                        complete, running, stopped, invalid, failed or pruned
            algorithm, task              by name
            accuracy_initial, accuracy_final   validation accuracy before the first and after the last step (fraction)
            test_accuracy                on the test split, at the end (fraction)
            rollouts, generated_tokens, optimizer_steps   spent on training (counts)
            seconds                      time of the run (seconds)
            peak_memory_bytes, learner_peak_bytes   of all, and while the learner works and vLLM sleeps (bytes)
            flops_train, flops_sampling, flops_scoring, flops_learning, flops_evaluation, flops_cold_start
                                         operations, where they were counted
            core_seconds, gpu_seconds    time on all cores and GPUs (seconds), where it was measured
            one column per factor        full path of the setting -> level of the arm
            test/accuracy, test/greedy_accuracy, test/pass_at_K, test/maj_at_K   at the end (fractions), where measured

        A number that a trial has not reached is NaN.
        """
        return frame_of(*results_table(self._record))

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row for each value that a trial has logged, in the order of its steps.

        The columns:

            arm, seed   of the trial
            metric      `area/quantity`, such as validation/accuracy, reward/mean, kl/reference, completion/length
            step        training step; 0 is before the first one
            value       in the unit of the metric: fractions, nats per token, tokens, seconds
        """
        logged = [((t.arm, t.seed, name), series) for t in self._record.trials for name, series in t.history.items()]
        rows = [(*whose, step, value) for whose, series in logged for step, value in series]
        return frame_of(["arm", "seed", "metric", "step", "value"], rows)

    @cached_property
    def problems(self) -> pd.DataFrame:
        """A row for each test problem of each trial that reached the test.

        The columns:

            arm, seed          of the trial
            prompt_id          of the problem: the same in all arms, seeds and machines
            family             of the problem; None if it has none
            accuracy           samples that were right at the end (fraction)
            accuracy_initial   the same before the first step; NaN unless evaluation.test_at_start was set
        """
        known = [(t, prompt, accuracy) for t in self._record.trials for prompt, accuracy in t.per_problem.items()]
        rows = [(t.arm, t.seed, p, t.families.get(p), accuracy, t.start_per_problem.get(p)) for t, p, accuracy in known]
        return frame_of(["arm", "seed", "prompt_id", "family", "accuracy", "accuracy_initial"], rows)

    def compare_problems(self, a: str, b: str) -> pd.DataFrame:
        """A row for each test problem of two arms, over the seeds that both completed.

        prompt_id, family                    as in `problems`
        accuracy_a, accuracy_b, difference   means over seeds and samples; a minus b (fractions)
        solved_by                            a, b, both or neither, by at least half of an arm's samples
        p, p_holm                            of no difference: the seeds' differences change signs (all ways up to 13
                                             seeds); Holm's correction covers the problems with any difference
        seeds_needed                         of both arms, for p_holm < 0.05 if the differences go on like these
        """
        pairs = {(t.arm, t.seed): t for t in self._record.trials if t.state == "complete" and t.per_problem}
        seeds = [seed for arm, seed in pairs if arm == a and (b, seed) in pairs]
        both = [[pairs[arm, seed].per_problem for seed in seeds] for arm in (a, b)]
        if not (names := sorted(set[str]().union(*both[0]).intersection(*both[0], *both[1]))):
            known = quoted(list(dict.fromkeys(arm for arm, _ in pairs)))
            rule = "two arms must have test problems and a seed in common"
            raise SpecError(f"{rule}, got '{a}' and '{b}'; arms: {known}")
        scores_2SN = np.array([[[one[name] for name in names] for one in arm] for arm in both])
        families = families_of(pairs[arm, seed] for arm in (a, b) for seed in seeds)
        means, tests = scores_2SN.mean(axis=1), flip_tests(scores_2SN[0] - scores_2SN[1])
        halves = [("neither", "b", "a", "both")[2 * (x >= 0.5) + (y >= 0.5)] for x, y in means.T]
        rows = zip(names, map(families.get, names), *means, means[0] - means[1], halves, *tests, strict=True)
        compared = ["accuracy_a", "accuracy_b", "difference", "solved_by", "p", "p_holm", "seeds_needed"]
        return frame_of(["prompt_id", "family", *compared], list(rows))

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """A row for each completion that the trials have logged for the reader; a few of each step, not all.

        The columns:

            arm, seed          of the trial
            step, split        training step, and train, validation or test
            prompt_id, prompt  of the problem, as the policy reads it
            completion         its text
            gold, answer       the reference answer, and the one found in the completion, if there is one
            correct            True or False
            reward             sum of all rewards with their weights; NaN in an evaluation
            num_tokens         length of the completion (tokens)
            finish_reason      stop, or length if the token limit cut it
            reward/NAME        each reward before its weight
        """
        return samples_frame([((trial.arm, trial.seed), row) for trial in self._record.trials for row in trial.samples])

    def compare(self, baseline: str | None = None) -> pd.DataFrame:
        """A row for each arm: the report's main table, unrounded.

            arm                     label
            complete_seeds, seeds   seeds with a result, and seeds that the study asks for
            M, M_low, M_high        mean over seeds of the outcome and its 95 % interval; M is a metric, such as
                                    test/accuracy (fraction)
            difference, difference_low, difference_high   to the baseline, seed by seed, with its 95 % interval, in the
                                    unit of M; NaN for the baseline
            p, p_holm               of no difference, before and after Holm's correction over all that the report tests
            accuracy_initial, accuracy_final, generated_tokens, seconds   means over seeds, as in `trials`
            peak_memory_bytes       the largest

        `baseline` names another arm than the study's. The p-values hold for one chosen before the results were seen.
        """
        return frame_of(*comparison_table(self._analysed(baseline)))

    def report(self) -> "Report":
        """The study's page, which a notebook shows inline; it is written again first, as by `cohort report`.

        A folder that was copied without its MLflow store is left as it is: its page is shown.
        """
        page = self.folder / "report" / "index.html"
        if self._runs is not None:
            page = keep_report(self._written, self._runs).html
        elif not page.is_file():
            raise SpecError(f"'{self.folder}' has no report/index.html; copy it, or the whole runs folder")
        return Report(page)

    def to_latex(self, baseline: str | None = None) -> str:
        """`compare` as a LaTeX tabular for a paper, rounded as in the report; it needs the package booktabs."""
        return comparison_latex(self._analysed(baseline))

    def figure(self, name: str = "final") -> Figure:
        """A figure of the report by its name, to be saved: `result.figure("differences").savefig("figure.pdf")`.

        `final` has the outcome of each arm, `differences` each arm minus the baseline, `learning_steps` the metric
        against training steps. The error for an unknown name lists all figures, which are the files in report/figures.
        """
        if name not in self._drawings:
            known = list(self._drawings)
            near = did_you_mean(name, known)
            raise SpecError(f"study '{self.name}' has no figure '{name}'; {near}it has: {', '.join(known)}")
        figure = self._drawings[name].figure
        figure.set_layout_engine("constrained")  # for other sizes and texts
        return figure

    @cached_property
    def _analysis(self) -> Analysis:
        return analysed(self._record)

    def _analysed(self, baseline: str | None) -> Analysis:
        if baseline is None or (baseline == self._record.baseline and not self._record.references):
            return self._analysis
        if search_of(self._record) is not None:
            raise SpecError(f"study '{self.name}' is a search, whose arms have no baseline; leave baseline out")
        labels = [arm.label for arm in self._analysis.arms]
        if baseline not in labels:
            fix = f"{did_you_mean(baseline, labels)}arms: {quoted(labels)}"
            raise SpecError(f"baseline must be an arm of study '{self.name}', got '{baseline}'; {fix}")
        return analysed(dataclasses.replace(self._record, baseline=baseline, references={}))

    @cached_property
    def _drawings(self) -> dict[str, Drawing]:
        analysis = self._analysis
        parts = page_drawings(analysis, capabilities(analysis), sections(analysis), check_claims(analysis))
        return {drawing.name: drawing for drawings in parts.values() for drawing in drawings}


@dataclasses.dataclass(frozen=True)
class Report:
    """A page on disk; in a notebook it is shown in a frame that runs no script and reaches nothing around it.

    Its links to tables within the page work; those to files beside it need the page itself.
    """

    path: Path

    def _repr_html_(self) -> str:
        page, style = escape(self.path.read_text(encoding="utf-8")), "width: 100%; height: 45em; border: 0"
        return f'<iframe sandbox="allow-downloads" srcdoc="{page}" style="{style}"></iframe>'


class Evaluation:
    """The accuracy of one model on one split. `folder` has every completion, `tests` the accuracy on other tests."""

    def __init__(self, spec: RunSpec, result: EvaluationResult, folder: Path, tests: Mapping[str, Self] = {}) -> None:
        self.folder, self.result, self.tests, self._spec = folder, result, tests, spec

    def __repr__(self) -> str:
        accuracy, count = (self.result.metrics[key] for key in ("accuracy", "num_prompts"))
        return f"<Evaluation: accuracy {100 * accuracy:.1f} % of {count:.0f} {self.result.split} problems>"

    @property
    def causes(self) -> list[str]:
        """The likeliest causes of a weak accuracy, with the setting for each."""
        return first_look(self.result.metrics, self._spec.max_tokens)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """A row for each metric, as `cohort evaluate` states them.

        The columns:

            metric      accuracy (mean over problems and samples), greedy_accuracy, pass_at_K, maj_at_K, answered,
                        truncated, ...: fractions; num_tokens (mean, tokens), num_prompts, num_samples
            value       in that unit
            low, high   95 % interval over problems; NaN for a metric without one
        """
        limits = intervals(self.result)
        rows = [(name, value, *limits.get(name, (None, None))) for name, value in self.result.metrics.items()]
        return frame_of(["metric", "value", "low", "high"], rows)

    @cached_property
    def problems(self) -> pd.DataFrame:
        """A row for each problem: prompt_id, and accuracy, the fraction of its samples that were right."""
        num_samples = self.result.metrics["num_samples"]
        rows = [(prompt, count / num_samples) for prompt, count in self.result.correct_counts.items()]
        return frame_of(["prompt_id", "accuracy"], rows)

    @cached_property
    def rollouts(self) -> pd.DataFrame:
        """A row for each completion, with the columns of `Result.rollouts` but arm and seed."""
        return samples_frame([((), row) for row in visible(self.result.samples)])

    def document(self) -> dict[str, Any]:
        """Everything: metrics, intervals, pass@k and Cover@tau curves, scores by problem, a few completions."""
        result = self.result
        curves = curves_of_counts(list(result.correct_counts.values()), int(result.metrics["num_samples"]))
        return {
            "spec": self._spec.model_dump(mode="json"), "metrics": result.metrics, "intervals": intervals(result),
            "breakdown": result.breakdown, "curves": curves, "correct_counts": result.correct_counts,
            "samples": result.samples[:16], "directory": self.folder,
            **({"tests": {name: one.document() for name, one in self.tests.items()}} if self.tests else {}),
        }  # fmt: skip


def intervals(result: EvaluationResult) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each accuracy of an evaluation over its problems, or over blocks of whole families.

    Wilson's (1927), which counts blocks as problems: wider than needed. Where families are named and the scores of
    single problems are known (accuracy, pass@k), it is the interval of a report.
    """
    blocks, metrics = blocks_of(list(result.correct_counts), result.families), result.metrics
    keys = ["greedy_accuracy", "accuracy", *(key for key in metrics if "_at_" in key)]
    found = {key: wilson_interval(metrics[key], len(blocks)) for key in keys}
    if len(blocks) < len(result.correct_counts):
        counts = np.array(list(result.correct_counts.values()))
        table = pass_table(int(metrics["num_samples"]))
        for key in (key for key in keys if key == "accuracy" or key.startswith("pass_at_")):
            scores = table[counts, 0 if key == "accuracy" else int(key.rpartition("_")[2]) - 1]
            cells = in_blocks(scores[None], blocks)
            if (one := fraction_interval(cells, num_problems=len(counts))) is not None:
                found[key] = (one.low, one.high)
    return found


def samples_frame(rows: Sequence[tuple[tuple[Any, ...], SampleRow]]) -> pd.DataFrame:
    """Completions, each after the keys of its trial."""
    fields = [field.name for field in dataclasses.fields(SampleRow) if field.name != "rewards"]
    rewards = list(dict.fromkeys(name for _, row in rows for name in row.rewards))
    keys = ["arm", "seed"] if any(key for key, _ in rows) else []
    cells = [(*key, *(getattr(row, name) for name in fields), *map(row.rewards.get, rewards)) for key, row in rows]
    return frame_of([*keys, *fields, *(f"reward/{name}" for name in rewards)], cells)


def frame_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """A frame with numeric columns as numbers: a column without any value is NaN, except the column of answers."""
    frame = pd.DataFrame(list(map(tuple, rows)), columns=list(columns))
    unknown = set(columns if rows else ()).intersection(frame.columns[frame.isna().all()]) - {"answer"}
    return frame.astype(dict.fromkeys(unknown, float))
