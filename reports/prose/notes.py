"""Writes the notes on comparability: how intervals are computed, what the runs share, what limits a comparison."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from ...harness.base.words import without_signal
from ..analysis import Analysis
from ..findings import collapses
from ..join import JoinedStudy
from ..statistics import ALPHA, any_time_width, in_clusters
from ..trials import arm_specs, is_imported, is_paired, search_of, setting, share_of_alpha, test_last
from . import wording

LABEL_FREE = {"majority_vote", "answer_entropy", "self_certainty", "token_entropy"}
_Note = tuple[str, str]  # topic, text
_IMPORTED = (
    "Scores from elsewhere",
    "They were imported and taken as they are: nothing was trained or graded here. An accuracy is their mean at the "
    "last step. Not known are the model, budgets, tuning, what was chosen by these scores, and which other runs there "
    "were; a difference may come from any of these. Runs with equal numbers of their seed are pairs: that is valid "
    "whether or not they share a start, if runs with different seeds are independent.",
)
_Specs = Mapping[str, Mapping[str, Any]]  # arm -> settings of its runs


def interval_method(analysis: Analysis) -> str:
    """A sentence or two on the interval that the report states."""
    counts = [len(arm.scores) for arm in analysis.finished_arms]
    most = max(counts, default=0)
    if most < 2:
        return (
            "No arm has two complete seeds, so no interval and no test over seeds is possible; another seed "
            "could give another result."
        )
    reach = "seeds (for these test problems only)"
    if analysis.outcome.per_problem:
        problems = "families of test problems" if analysis.outcome.families else "test problems, taken as independent,"
        reach = f"seeds and {problems}"
    text = f"Each interval by itself covers the mean over {reach} at 95 %"
    text += "; only p is corrected for the number of arms." if analysis.comparisons else "."
    if min(counts) < 2:
        text += " An arm with one complete seed has no interval."
    if any(share_of_alpha(analysis.record, arm.scores) < 1 for arm in analysis.finished_arms):
        text += " Intervals and p are larger than for planned seeds, as their number may follow from results."
    split = [arm.label for arm in analysis.finished_arms if analysis.outcome.is_fraction and in_clusters(arm.values)]
    if split:
        text += f" The seeds of {wording.quoted(split, 8)} lie in two clusters: if some collapsed or were lucky, "
        text += "such intervals cover 46 to 95 %."
    if most < 5:
        seeds = wording.plural(most, "seed")
        text += f" With {seeds} they are wide and assume normality: add seeds before you decide a close comparison."
    return text


def interval_reading(analysis: Analysis) -> str:
    """The method of the stated interval, and its limits."""
    seeds = (
        " All speak of a mean over seeds: arms of equal means whose seeds collapse more or less often are told apart "
        "before one collapses, so look at the single seeds too."
    )
    if (outcome := analysis.outcome).per_problem:
        related = (
            " The task names no families of problems, so problems count as independent: if some are variants of one "
            "template, the intervals are too narrow and p is too small."
        )
        if outcome.families:
            problems, named = sum(map(len, outcome.blocks)), len(outcome.families)
            alone = f"; {problems - named} name none and count as one each" if named < problems else ""
            related = (
                f" Families of the {problems} test problems: {len(set(outcome.families.values()))}{alone}. "
                f"{len(outcome.blocks)} blocks of whole families stand for the problems, so the intervals hold for new "
                "families; Student's interval over the blocks counts too."
            )
        return (
            "The stated interval is the wider of two: the two-way t interval, in which seeds and problems are both "
            "random (Satterthwaite degrees of freedom), and Student's t interval over seeds. It holds for new seeds "
            "and new problems of the same kind, not for other tasks, models or cold starts. Student's interval and "
            "the bootstrap over seeds hold for new seeds on these test problems only."
            f"{related}{seeds}"
        )
    why = "Scores of single problems are not known for this metric, or not of the same problems in all trials"
    if outcome.families:
        why = "More than half of the test problems are of one family"
    return (
        f"The stated interval is Student's t interval over seeds. {why}, so it holds for new seeds on these test "
        f"problems, and is too narrow for new problems.{seeds}"
    )


def accuracies_reading(analysis: Analysis) -> str:
    """The definitions of the accuracies in the table of all accuracies, and of their intervals."""
    own = " The interval of the compared accuracy is the stated one;" if analysis.outcome.per_problem else ""
    return (
        "Greedy: one completion at temperature 0. pass@k: at least one of k samples is right. maj@k: the most frequent "
        f"answer of k is right.{own}{' the others are' if own else ' Intervals are'} Student's over seeds, for these "
        "test problems only, or exact if every seed is at 0 or 100 %."
    )


def notes(analysis: Analysis) -> list[_Note]:
    """(topic, a reason that the comparison is fair or limited), from the settings of the runs."""
    specs = arm_specs(analysis.record.trials)
    if not specs:
        return [("Nothing has run", "The notes on comparability appear with the first trial.")]
    if is_imported(analysis.record):
        found = [
            _IMPORTED,
            _pairing_note(analysis),
            _looks_note(analysis),
            _invalid_note(analysis),
            _selection_note(analysis),
        ]
        return [note for note in found if note is not None]
    paid = {  # arm -> name -> weight of its rewards; empty for one whose record does not name them
        arm: {name: one["weight"] for name, one in (rewards or {}).items() if one.get("weight")}
        for arm, rewards in _values(specs, "rewards", {}).items()
    }
    # the arms that are rewarded for the policy's own votes or confidence instead of gold answers
    blind = [arm for arm, names in paid.items() if LABEL_FREE & names.keys() and "accuracy" not in names]
    least, most, ratio = _extremes(analysis, "generated_tokens", "generated")
    tokens = f"Completions differ in length: {least} tokens per run, {most}."
    strange = "; ".join(analysis.record.strange.values())
    told = [trial.versions for trial in analysis.record.trials if trial.versions]
    seen = {key: sorted({one.get(key, "none") for one in told}) for key in sorted({key for one in told for key in one})}
    mixed = "; ".join(f"{key} {' or '.join(found)}" for key, found in seen.items() if len(found) > 1)
    found = [
        ("Trials whose files were changed or moved are left out", f"{strange}.") if strange else None,
        ("Trials ran with different versions, or on different processors", f"{mixed}.") if mixed else None,
        _join_note(analysis),
        _pairing_note(analysis),
        _looks_note(analysis),
        _invalid_note(analysis),
        _added_note(analysis),
        _clip_note(specs),
        _critic_note(analysis, specs),
        _reward_note(paid, blind),
        _collapse_note(analysis, blind),
        _signal_note(analysis),
        cold_start_note(specs),
        budget_note(analysis, specs),
        ("Equal rollouts are not equal tokens", tokens) if ratio >= 1.1 else None,
        evaluation_note(analysis, specs),
        _selection_note(analysis),
    ]
    return [note for note in found if note is not None]


def _pairing_note(analysis: Analysis) -> _Note | None:
    """Why differences are not taken seed by seed."""
    if is_paired(analysis.record):
        return None
    why = "No two runs share a seed" if is_imported(analysis.record) else "The study says so (`pairing: none`)"
    return "No pairs", (
        f"{why}; this was fixed before any score was looked at. Differences are between means (Welch's test, with the "
        "problems in common). A difference by seed in a table or figure is the arm's run minus the mean of the other's."
    )


def _signal_note(analysis: Analysis) -> _Note | None:
    """The arms whose first steps had nothing to learn from, with the likeliest causes."""
    found: dict[str, str] = {}
    for trial in analysis.record.trials:
        first = {name: dict(series)[1] for name, series in trial.history.items() if 1 in dict(series)}
        told = without_signal(first, setting(trial.spec, "sampling.max_tokens"))
        if told and any(one.get("weight") for one in setting(trial.spec, "rewards", {}).values()):
            found.setdefault(trial.arm, told)
    text = "; ".join(f"'{arm}': {told}" for arm, told in found.items())
    return ("First steps without a signal", f"{text}.") if found else None


def _values(specs: _Specs, dotted: str, default: object = None) -> dict[str, Any]:
    return {arm: setting(spec, dotted, default) for arm, spec in specs.items()}


def _join_note(analysis: Analysis) -> _Note | None:
    """The differences between the studies of a joined page, apart from their arms."""
    record = analysis.record
    if not isinstance(record, JoinedStudy):
        return None
    studies, shown = wording.listed(list(dict.fromkeys(record.studies.values()))), []
    for key, values in list(record.warnings.items())[:6]:
        shown.append(f"{key} ({', '.join(f'{name}: {value}' for name, value in values.items())})")
    more = f", and {len(record.warnings) - 6} more" if len(record.warnings) > 6 else ""
    alone = f" Claims are judged in the report of their study: {', '.join(record.claiming)}." if record.claiming else ""
    if shown:
        also = f"Arms of {studies} also differ in: {'; '.join(shown)}{more}.{alone}"
        return "Base runs differ between the studies", also
    return (
        "Studies that differ only in their arms",
        f"{studies} have the same task, test problems, base run and versions, so their arms differ only as those "
        f"of one study. They were not planned together: p is corrected over all arms of this page.{alone}",
    )


def _added_note(analysis: Analysis) -> _Note | None:
    """The arms and seeds that came after the study had started; of seeds that `_looks_note` speaks of, only arms."""
    shown, told = [], ("arm",) if analysis.record.added else ("arm", "seed")
    for one in analysis.record.amendments:
        day = datetime.fromtimestamp(one["time"] / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        kinds = ((kind, [str(name) for name in one[f"{kind}s"]]) for kind in told)
        what = [f"{kind}{'s' * (len(names) > 1)} {wording.listed(names, len(names))}" for kind, names in kinds if names]
        shown += [f"{' and '.join(what)} ({day})"] if what else []
    text = f"Added: {'; '.join(shown)}. Whoever added them may have seen results: a choice made then is no plan."
    dropped = [arm for one in analysis.record.amendments for arm in one.get("dropped", ())]
    without = f"Taken back before they began: {wording.listed(dropped, len(dropped))}."
    if not shown:
        return ("Some arms were taken back", without) if dropped else None
    return "Some arms or seeds came later", f"{text} {without}" if dropped else text


def _looks_note(analysis: Analysis) -> _Note | None:
    """The cost of a number of seeds that may follow from results; None if it cannot."""
    record = analysis.record
    counts = [len(arm.scores) for arm in analysis.finished_arms if share_of_alpha(record, arm.scores) < 1]
    if not counts:
        return None
    text = (
        "If their number may follow from results, a statement over S seeds may spend 1 / (S (S - 1) / 2) of "
        f"{100 * ALPHA:g} %, none before 3 seeds: it then holds however the number was chosen. P(higher), bootstraps "
        "and fitted curves are for a number fixed beforehand."
    )
    if max(counts) > 2:
        width = any_time_width(max(counts))
        text += f" With {max(counts)} seeds an interval is {width:.1f} times as wide as with a number fixed beforehand."
    if record.any_time:
        return "Read at any time", f"The study says that seeds may be added at any time. {text}"
    if record.added:
        read = wording.listed([str(count) for count in record.looks], len(record.looks))
        return "Seeds were added after results were read", (
            f"Added: {wording.plural(len(record.added), 'seed')} of {len(record.seeds)}. A reading counts if a report "
            f"was written with 2 complete seeds or more and seeds were added later: here with {read} complete seeds. "
            f"{text} As the first reading had spent {100 * ALPHA:g} %, all pages of this study together call equal "
            f"arms different in up to {200 * ALPHA:g} % of studies, in 5 to 6 % of simulated ones; any_time, set "
            f"before the first reading, keeps {100 * ALPHA:g} %."
        )
    return "Seeds are still to come", (
        f"No difference is tested before all planned seeds have ended, because early results may stop a study. {text}"
    )


def _invalid_note(analysis: Analysis) -> _Note | None:
    """The differences again with invalid trials as outcomes: as 0, and as anything between 0 and 1."""
    lost: dict[str, set[int]] = {}
    for gap in analysis.gaps:
        if gap.state in ("invalid", "no value"):
            lost.setdefault(gap.arm, set()).add(gap.seed)
    if not lost:
        return None
    text, shown = "Trials that are invalid because they went badly bias what remains; no interval here covers that.", []
    for one in analysis.comparisons if analysis.outcome.is_fraction else ():
        pair = [(summary.scores, lost.get(summary.label, set())) for summary in (one.summary, one.baseline)]
        seeds = set.intersection(*(scores.keys() | missing for scores, missing in pair))
        if seeds.isdisjoint(pair[0][1] | pair[1][1]):
            continue
        at_0, at_1 = ([fmean(scores.get(seed, end) for seed in seeds) for scores, _ in pair] for end in (0.0, 1.0))
        ends = (at_0[0] - at_0[1], at_0[0] - at_1[1], at_1[0] - at_0[1])
        found = [wording.number(end, analysis.outcome.name, signed=True) for end in ends]
        shown.append(f"{one.name} {found[0]} ({found[1]} to {found[2]})")
    if shown:
        to = "" if analysis.record.references else f" to {analysis.record.baseline}"
        text += (
            f" Differences{to} in points if invalid trials count as 0, and in brackets if they may be anything from 0 "
            f"to 100 %: {', '.join(shown)}."
        )
    return "Invalid trials are outcomes too", text


def _clip_note(specs: _Specs) -> _Note:
    epochs, minibatches = (_values(specs, f"optimizer.{key}", 1) for key in ("num_inner_epochs", "num_minibatches"))
    stale = _values(specs, "staleness", 0)
    stages = {arm: [one for one in spec.get("stages", ()) if one["kind"] == "train"] for arm, spec in specs.items()}
    others = [arm for arm, ones in stages.items() if any("optimizer" in one for one in ones)]
    single = [a for a in specs if int(epochs[a]) * int(minibatches[a]) == 1 and not stale[a] and a not in others]
    if not single:
        why = "Each batch is sampled by older weights or receives several optimiser steps, so ratios leave 1 and"
        return "Clipping is active", f"{why} clipping can bind; see the clip fraction under training dynamics."
    is_every = len(single) == len(specs)
    who = "Every arm" if is_every else wording.quoted(single)
    text = (
        f"{who} {'gives' if is_every or len(single) == 1 else 'give'} each batch one optimiser step "
        "(num_inner_epochs x num_minibatches = 1): the ratio is exactly 1, so clip_epsilon cannot bind."
    )
    return "The clip range has no effect" if is_every else "Clipping in some arms only", text


def _critic_note(analysis: Analysis, specs: _Specs) -> _Note | None:
    """How good critics are when the policy first learns from them."""
    metric, warmups, shown = "critic/explained_variance", _values(specs, "critic.warmup_steps", 0), []
    for arm, warmup in warmups.items():
        series = [dict(trial.history.get(metric, ())) for trial in analysis.record.trials if trial.arm == arm]
        if found := [one[warmup + 1] for one in series if warmup + 1 in one]:
            shown.append(f"'{arm}' {fmean(found):.2f}")
    if not shown:
        return None
    text = f"Share of the returns' variance that it explains then, mean over seeds: {'; '.join(shown)}."
    if waiting := [f"'{arm}' {warmup}" for arm, warmup in warmups.items() if warmup]:
        text += f" Steps that train it alone, so that the policy learns in fewer: {'; '.join(waiting)}."
    return "The critic when the policy begins to learn", text


def _reward_note(paid: Mapping[str, Mapping[str, float]], blind: Sequence[str]) -> _Note | None:
    if blind:
        return "Rewards that are not accuracy", (
            f"{wording.quoted(blind)} {'is' if len(blind) == 1 else 'are'} rewarded for agreement with the group or "
            "for confidence, never for correctness: rising reward with falling accuracy is collapse. Mean reward "
            "cannot be compared between arms with different rewards."
        )
    if len({repr(names) for names in paid.values()}) == 1:
        return None
    each = [f"'{arm}': {', '.join(f'{w:g} {name}' for name, w in own.items()) or 'none'}" for arm, own in paid.items()]
    return "Different rewards", f"Mean reward cannot be compared between arms ({'; '.join(each)}); accuracy can."


def _collapse_note(analysis: Analysis, blind: Sequence[str]) -> _Note | None:
    found = collapses(analysis)
    if not found and not blind:
        return None
    arms: dict[str, list[str]] = {}
    for one in found:
        seeds, at = wording.plural(one.num_seeds, "seed"), wording.listed([str(step) for step in one.steps], most=8)
        arms.setdefault(one.arm, []).append(f"{one.what} in {len(one.steps)} of {seeds}, at step {at}")
    shown = "; ".join(f"'{arm}': {', '.join(parts)}" for arm, parts in arms.items())
    return "Collapse", (
        "Labels (the majority's answer is right) or the policy (validation accuracy) collapse at the first step "
        "from which they stay below half of their best earlier value. "
        + (f"{shown}." if shown else "No arm collapsed.")
    )


def cold_start_note(specs: _Specs) -> _Note:
    starts = _values(specs, "cold_start", {})
    if len({repr(start) for start in starts.values()}) > 1:
        return (
            "Arms start from different cold starts",
            "cold_start differs between arms, and each was made once: its chance variation is part of the "
            "differences, but the intervals do not cover it.",
        )
    first = next(iter(specs.values()))
    steps = setting(first, "cold_start.steps", 0)
    origin = f"one cold start ({wording.plural(steps, 'step')})" if steps else "the same model"
    return (
        "One starting point",
        f"All arms and seeds start from {origin}. Intervals therefore cover the seeds of reinforcement learning only, "
        "not the choice of the starting point.",
    )


def budget_note(analysis: Analysis, specs: _Specs) -> _Note:
    most = set(_values(specs, "max_flops").values())
    if len(most) == 1 and None not in most:
        (limit,) = most
        short = [arm.label for arm in analysis.arms if arm.costs.get("flops_train", limit) < limit]
        text = f"All arms end with the step in which their training reaches {wording.operations(limit)}."
        if short:
            text += f" {wording.quoted(short)} ran out of steps before that limit: give them more steps."
        return "Equal operations", text
    budgets = ("rollouts_per_step", "steps", "algorithm.group_size")
    rollouts, steps, groups = (set(_values(specs, path).values()) for path in budgets)
    staged = any(spec.get("stages") for spec in specs.values())
    if len(rollouts) == len(steps) == 1 and not staged:
        each, length = wording.plural(rollouts.pop(), "rollout"), wording.plural(steps.pop(), "step")
        text = f"All arms draw {each} per step for {length}."
        if len(groups - {None}) > 1:
            text += " A larger group means fewer prompts per step, never more samples."
        least, most, ratio = _extremes(analysis, "rollouts")
        if ratio > 1:
            text += f" Greedy answers and dynamic sampling are extra: {least} completions per run, {most}."
        return "Equal budgets", text
    differing = [name for name, values in (("rollouts_per_step", rollouts), ("steps", steps)) if len(values) > 1]
    differing += ["stages"] if staged else []
    text = f"Arms differ in {' and '.join(differing)}: read the curves against rollouts or tokens, not against steps."
    return "Budgets differ", text


def _extremes(analysis: Analysis, cost: str, verb: str = "drew") -> tuple[str, str, float]:
    """The arms with the least and the most of a cost, in words, and the ratio of the two."""
    costs = {arm.label: arm.costs[cost] for arm in analysis.arms if cost in arm.costs}
    if not costs:
        return "", "", 1.0
    least, most = min(costs, key=costs.__getitem__), max(costs, key=costs.__getitem__)
    first = f"{least} {verb} {wording.quantity(costs[least])}"
    return first, f"{most} {wording.quantity(costs[most])}", costs[most] / costs[least] if costs[least] else 1.0


def evaluation_note(analysis: Analysis, specs: _Specs) -> _Note:
    spec, is_test = next(iter(specs.values())), analysis.outcome.name.startswith("test/")
    samples, temperature = setting(spec, "evaluation.num_samples", "?"), setting(spec, "evaluation.temperature", "?")
    samples = (is_test and setting(spec, "evaluation.num_test_samples")) or samples
    each = f"{wording.plural(samples, 'sample')} each at temperature {temperature}"
    text = f"Accuracy is the mean over problems of {each}."
    if is_test:
        count = next((arm.num_problems for arm in analysis.arms if arm.cells is not None), 0)
        problems = f"the same {count} test problems are" if count else "the test split is"
        when = "once, at the end of each run"
        if (last := test_last(spec)) > 1:
            when = f"at the last {last} evaluations of each run: the mean counts, not the last policy alone"
        text += f" Curves use the validation split; {problems} scored {when}."
    return "What accuracy means", text


def _selection_note(analysis: Analysis) -> _Note | None:
    if len(analysis.finished_arms) < 3 or search_of(analysis.record) is not None:  # a search's answer says it
        return None
    return (
        "The best of several is overestimated",
        f"The highest of {len(analysis.finished_arms)} means is biased upwards. Holm's correction keeps the chance "
        f"of any false difference to the baseline below {100 * ALPHA:g} %, but does not remove this bias from the "
        "highest mean.",
    )
