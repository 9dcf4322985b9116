"""Every completion that the record of a study or of a run keeps, with its verdict, run by run and step by step.

Files of evaluations hold texts, which their task grades again here; rollouts of training were graded when drawn.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ... import plugins
from ...api.settings import runs_folder
from ...data import as_graded
from ...interfaces import Task
from ...record.events import EVENTS, read_history
from ...record.run import INFO, RunInfo
from ...run.evaluate import NO_LIMIT
from ...run.grading import grade, groups_of
from ...settings.errors import SpecError, did_you_mean, parsed
from .condition import condition

_FILE = re.compile(r"(rollouts|completions)/([\w-]+)-\d+\.jsonl", re.ASCII)


def samples(
    study: str | Path, *arms: str, where: str = "", grep: str = "", runs: str | Path | None = None
) -> Iterator[dict[str, Any]]:
    """The samples of a study, or of the folder of a study or run, as plain rows: `pandas.DataFrame(samples(...))`.

        arm, seed, step, area   of the run, of training; train, validation, test, start, or test_TASK of another test
        problem, family, prompt, gold, and one key for each tag of the problem (level, subject, operands, ...)
        sample, greedy          number of the completion; whether it is the greedy one
        completion, answer, correct, reward (None in an evaluation)
        tokens, cut, run_on     length, whether the limit cut it, whether it goes on with another problem

    `where` is a condition on these (`correct and tokens > 200`), `grep` a text in prompt or completion, in any case.
    """
    meets, names = condition(where or "True")
    own = runs_folder(runs) / "studies" / study
    place = own if own.is_dir() else Path(study)
    folders = [place] if (place / INFO).is_file() else sorted(place.glob("trials/[!.]*"))
    infos = [(folder, info) for folder in folders if (info := RunInfo.load(folder)) and "task" in info.spec]
    known = list(dict.fromkeys(_arm(info) for _, info in infos))
    if not infos:
        raise SpecError(f"'{study}' must be a study or run with completions, in '{runs_folder(runs)}' or by its folder")
    if wrong := [arm for arm in arms if arm not in known]:
        fix = f"{did_you_mean(wrong[0], known)}it has: {', '.join(known)}"
        raise SpecError(f"`arms` must be of '{study}', got '{wrong[0]}'; {fix}")
    seen, sought = set[str](), grep.casefold()
    for folder, info in sorted(infos, key=lambda one: (_arm(one[1]), int(one[1].spec["seed"]))):
        for row in _of_run(folder, info) if not arms or _arm(info) in arms else ():
            seen |= row.keys()
            if meets(row) and (not sought or sought in f"{row['prompt']}\n{row['completion']}".casefold()):
                yield row
    if seen and (unknown := sorted(names - seen)):
        fix = f"{did_you_mean(unknown[0], sorted(seen))}names: {', '.join(sorted(seen))}"
        raise SpecError(f"`where` must name parts of a sample, got '{unknown[0]}'; {fix}")


def _arm(info: RunInfo) -> str:
    return info.tags.get("cohort.arm", info.name)


def _of_run(folder: Path, info: RunInfo) -> Iterator[dict[str, Any]]:
    history, about = read_history(folder / EVENTS), {"arm": _arm(info), "seed": int(info.spec["seed"])}
    named = [info.spec["task"], *info.spec.get("evaluation", {}).get("tests", ())]
    first, *others = [parsed(cast(type[Task], plugins.load("task", str(one["name"]))), one, "task") for one in named]
    tasks, whole = {other.name: other for other in others}, set[int]()
    for file, (step, _) in sorted(history.kept.items(), key=lambda kept: (kept[1][0], kept[0])):
        if not (name := _FILE.fullmatch(file)):
            continue
        if name[1] == "completions":
            task = tasks.get(name[2].partition("_")[2], first)
            yield from _evaluated(folder / file, task, {**about, "step": step, "area": name[2]})
        else:
            whole.add(step)
            yield from _drawn(_lines(folder / file), first, about)
    shown = [row for row in history.rows() if row["split"] == "train" and row["step"] not in whole]
    yield from _drawn(shown, first, about)


def _evaluated(file: Path, task: Task, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for line in _lines(file):
        for group, greedy in zip(groups_of(line), (False, True), strict=True):
            graded, prompt = grade(task, [group], NO_LIMIT)[0], group.prompt
            of = {"problem": prompt.id, "family": prompt.family, "prompt": prompt.text, "gold": line["gold"]}
            for i, rollout in enumerate(group.rollouts):
                yield {
                    **dict(prompt.tags), **about, **of, "sample": i, "greedy": greedy, "completion": rollout.text,
                    "answer": graded.answers[i], "correct": (graded.correct or ())[i], "reward": None,
                    "tokens": len(rollout.token_ids), "cut": rollout.finish_reason == "length",
                    "run_on": (graded.run_on or ())[i],
                }  # fmt: skip


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def _drawn(rows: Sequence[dict[str, Any]], task: Task, about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    counts: dict[Any, int] = {}
    for row in rows:
        key = row["step"], row["prompt_id"]
        counts[key] = counts.get(key, -1) + 1
        text = as_graded(row["prompt"], row["completion"])
        yield {
            **about, "step": row["step"], "area": row["split"], "problem": row["prompt_id"], "family": "",
            **{name: row[name] for name in ("prompt", "gold")}, "sample": counts[key], "greedy": False,
            **{name: row[name] for name in ("completion", "answer", "correct", "reward")},
            "tokens": row["num_tokens"], "cut": row["finish_reason"] == "length", "run_on": task.own_part(text) != text,
        }  # fmt: skip
