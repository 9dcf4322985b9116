"""The one training loop: every algorithm runs through it, so that the algorithm is the only thing that differs.

A run is a function of its spec: prompts and noise are keyed by (seed, step), and a killed run that resumes from its
last checkpoint ends as an uninterrupted one would.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ..base.files import sha256
from ..base.inputs import expecting
from ..base.words import without_signal
from ..checks.memory import run_sizes
from ..checks.preflight import check_length, check_tokens, run_inputs
from ..data import EvaluationResult, InvalidRun, Prompt, Split
from ..devices import ranks
from ..policy import flops
from ..record.run import CHECKPOINTS, RunLog
from ..settings.run import PART_WEIGHTS, RunSpec
from .build import Run, RunResult, StoppedEarly, first_prompt, prepare, run_facts
from .evaluate import completions_file, evaluate_run, evaluation_metrics, weights_read
from .grading import sample_rows
from .guards.agreement import check_agreement
from .guards.gates import LEARNT, check_gates, check_signal
from .rollout import Rollouts
from .step import merged, train_step

log = logging.getLogger(__name__)


def train(
    spec: RunSpec,
    directory: Path,
    log: RunLog,
    *,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.perf_counter,
) -> RunResult:
    """Run `spec` in `directory`, or resume it from the last checkpoint there.

    It ends "complete", "invalid" with a reason, or "stopped" after the step in which `should_stop()` turned true; an
    unfinished cold start, and an unfinished evaluation before the first step or after the last, begins again next time.
    Cold starts are cached in `cache`. Bad settings, and data or a model that changed since the run began, raise
    ValueError before any model is loaded. `now` is the clock, in seconds.
    """
    inputs = run_inputs([spec], cache)
    found = sorted(folder.name for folder in (directory / CHECKPOINTS).glob("step-*"))
    ranks.check_alike(directory, checkpoints=found, inputs=inputs)
    log.about(inputs=dict(inputs))
    run: Run | None = None
    closes = True
    with expecting(inputs):
        spec.engine.check(spec.sampling_with_limit())
        for stage in spec.staged():
            check_length(stage.spec)
            if stage.spec.kl.reference is not None:
                check_tokens(spec.model, stage.spec.kl.reference)
        log.about(prompt=first_prompt(spec, "train" if spec.steps else "validation"), sizes=run_sizes(spec))
        prompts = spec.task.prompts("train") if spec.steps else []
        if spec.control == "shuffled_gold" and len(prompts) == 1:
            raise ValueError("control shuffled_gold needs at least 2 train problems, got 1; use another control")
        try:
            run, step = prepare(spec, directory, log, cache, should_stop, now)
            run.inputs = inputs
            return _loop(run, prompts, step, should_stop)
        except StoppedEarly:
            return RunResult("stopped", None, run.summary() if run else {})
        except InvalidRun as invalid:
            ranks.tell(invalid)  # most often all know it, and end the engine together
            return RunResult("invalid", str(invalid), run.summary() if run else {})
        except BaseException as error:
            closes = ranks.tell(error)
            raise
        finally:
            if run is not None and closes:
                run.close()


def _loop(run: Run, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> RunResult:
    whole, stages = run.whole, run.whole.staged()
    agreement = check_agreement(run, prompts, step) if step < whole.steps else {}
    if step == 0:
        if facts := run_facts(run) | agreement:
            run.log.metrics(0, facts)
        logged_evaluation(run, "validation", 0, should_stop=should_stop)
        if whole.evaluation.test_at_start and whole.steps:
            _test(run, 0, "start", should_stop)
    saved = run.totals.seconds  # when the last checkpoint was written
    while step < whole.steps and not run.is_spent:
        run.writer.check()
        start, drawn = run.now(), Rollouts()
        if step == run.stage.end:
            run.begin(next(stage for stage in stages if step < stage.end))
        spec, does = run.spec, run.stage.does
        if does is not None:
            metrics, counts = does.step(run, prompts, step, should_stop)
        else:
            metrics, drawn = train_step(run, prompts, step)
            counts = drawn.lengths(spec.prompts_per_step)
        step += 1
        metrics = merged(metrics, charge_step(run, counts, metrics["seconds/step"]))
        run.charge(run.now() - start)
        metrics["seconds/total"] = run.totals.seconds
        run.note_peak()
        metrics["memory/peak_bytes"] = run.totals.peak_memory_bytes
        run.log.metrics(step, metrics)
        told = without_signal(metrics, spec.max_tokens) if step == 1 and spec.algorithm.learns_from_rewards else ""
        if told and ranks.rank() == 0:
            log.warning("%s", told)
        rows = partial(sample_rows, drawn.groups, drawn.graded, drawn.scores, step=step, split="train")
        if step in run.stage.kept and does is None and ranks.rank() == 0:
            run.keep(step, [asdict(row) for row in rows()])
        run.log.progress("train", step, whole.steps)
        gates = spec.gates if spec.control is None else spec.gates.model_copy(update=dict.fromkeys(LEARNT))
        if does is None:  # gates are for metrics of rollouts, which all ranks share
            check_gates(gates, run.gates, metrics, step)
        is_last = step == whole.steps or run.is_spent
        is_due = is_last or step == run.stage.end
        if step % whole.evaluation.every == 0 or is_due:
            if does is not None:
                run.engine.load_weights(run.learner.weights(), step)
            run.log.samples(rows(limit=8))
            if is_due and does is None and spec.algorithm.learns_from_rewards:
                check_signal(gates, run.gates, metrics, step - run.stage.start, spec.max_tokens)
            logged_evaluation(run, "validation", step)
            if step in whole.evaluation.test_steps(whole.steps)[:-1]:
                logged_evaluation(run, "test", step, "test")
        most = 60 * spec.checkpoints.minutes
        stop, is_late = ranks.same(lambda: (should_stop(), run.totals.seconds - saved >= most))  # noqa: B023
        has_sampled = does is not None and step == run.stage.start + 1  # none is sampled again
        if step % spec.checkpoints.every == 0 or is_due or has_sampled or stop or is_late:
            run.save(step, is_last=is_last, waits=is_late)
            saved = run.totals.seconds
        if stop and not is_last:
            return RunResult("stopped", None, run.summary())
    if ranks.same(should_stop):
        return RunResult("stopped", None, run.summary())
    _test(run, step, "test", should_stop)
    return RunResult("complete", None, run.summary())


def charge_step(run: Run, lengths: Sequence[flops.Lengths], seconds: float) -> dict[str, float]:
    """Add the costs of a step, with `lengths` as `Rollouts` has them, to the run's totals: those, as metrics."""
    totals, (sampled, trained, greedy) = run.totals, lengths
    counts = [count for _, completions in (*sampled, *greedy) for count in completions]
    totals.rollouts += len(counts)
    totals.generated_tokens += sum(counts)
    totals.optimizer_steps += run.spec.updates_per_step if trained else 0
    return {
        "train/rollouts": totals.rollouts,
        "train/generated_tokens": totals.generated_tokens,
        "train/optimizer_steps": totals.optimizer_steps,
        **({"throughput/tokens_per_second": sum(counts) / seconds} if counts else {}),
        **run.charge_flops(lambda costs: run.learner.operations(costs, sampled, trained, greedy)),
    }


def _test(run: Run, step: int, area: str, should_stop: Callable[[], bool]) -> None:
    """Evaluate on the run's own test problems and on its other tests; StoppedEarly if asked to stop meanwhile."""
    logged_evaluation(run, "test", step, area, should_stop=should_stop)
    for name, spec in run.whole.tests.items():
        logged_evaluation(run, "test", step, f"{area}_{name}", spec, should_stop)


def logged_evaluation(
    run: Run,
    split: Split,
    step: int,
    area: str = "",
    spec: RunSpec | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Evaluate the policy, with the run's own settings or a test's, and store the accuracies of the summary;
    StoppedEarly if asked to stop: of its completions the next attempt needs none.

    Result and cost are logged as metrics of an area: by default the split's name; `start` for test problems before
    training; `test_NAME` and `start_NAME` for another test. For test problems each fraction and family is logged, and
    the run's folder keeps all completions, so that the numbers can be verified.
    """
    start, log, area = run.now(), run.log, area or split
    kept = run.directory / completions_file(area, step) if ranks.rank() == 0 else None
    if kept is not None:
        kept.unlink(missing_ok=True)  # of an attempt that was killed here, whose weights may differ

    def progress(done: int, total: int) -> None:
        log.progress(split, done, total)
        if 0 < done < total and ranks.same(should_stop):
            raise StoppedEarly

    weights, read = weights_read(run.whole, run.engine, run.learner.policy), 0

    def sampled(count: int) -> None:
        """Look for a stop now and then, so that parts may be large: few rows decode slowly."""
        nonlocal read
        read += count * weights
        if read > PART_WEIGHTS:
            read = 0
            if should_stop():
                raise StoppedEarly

    if ranks.world_size() == 1:  # several stop together, and so between parts, which are small then
        run.engine.note_tokens = sampled
    bound = weights if ranks.world_size() > 1 else 0
    result = evaluate_run(spec or run.whole, run.engine, split, step, progress, kept=kept, weights=bound)
    vars(run.engine).pop("note_tokens", None)  # of the evaluation alone
    if kept is not None:
        log.kept(step, completions_file(area, step), sha256(kept))
    cost = run.charge_flops(lambda costs: {"evaluation": flops.sampled(costs, result.drawn)})
    log.metrics(step, {**evaluation_metrics(result, area), **cost})
    accuracy, k = result.metrics["accuracy"], result.metrics["num_samples"]
    if split == "test":
        log.per_problem({prompt: count / k for prompt, count in result.correct_counts.items()}, area, result.families)
    if area == split:
        log.samples(result.samples)
    run.charge(run.now() - start)
    if area == "test":
        tested = run.whole.evaluation.test_steps(run.whole.steps)
        before, number = run.accuracies.get("test_accuracy", 0.0), 1 + sum(one < step for one in tested)
        run.accuracies["test_accuracy"] = before + (accuracy - before) / number  # the mean so far
    elif split == "validation":
        run.accuracies.setdefault("accuracy_initial", accuracy)
        run.accuracies["accuracy_final"] = accuracy
    return result
