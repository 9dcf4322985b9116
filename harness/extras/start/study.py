"""Chooses the settings of a first study by its model, task and comparison, and writes them with comments.

`tiny` gets the settings of `quickstart`, the model of `make smollm2` those of `real_sums`, which were measured
(docs/results.md); any other model gets what `cohort compare` gives it. Comments are the descriptions of the settings.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ....tasks._data import DatasetTask, file_rows
from ...api.settings import as_texts, scale_settings
from ...policy.model import check_model, model_config
from ...settings import paths
from ...settings.raw import parse_overrides, with_overrides
from ...settings.run import RunSpec, parse_run
from ...settings.study import StudySpec, parse_study

CHAT_MODEL, SUMS = "models/smollm2", "models/sums"  # of `make smollm2`
COMPARISONS: Mapping[str, tuple[str, Mapping[str, list[Any]]]] = {
    "algorithms": ("Which algorithm", {"algorithm.name": ["grpo", "ppo", "grpo_self_consistency"]}),
    "group size": ("Which group size", {"algorithm.group_size": [8, 4, 16]}),
    "kl": ("Which KL weight", {"algorithm.kl_beta": [0.0, 0.04, 0.1]}),
}
FILES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
COLUMNS: Mapping[str, tuple[str, ...]] = {  # common names of the fields of a problem
    "question": ("question", "prompt", "problem", "instruction", "input", "text"),
    "answer": ("answer", "target", "gold", "solution", "output", "label"),
}
MOST_TOKENS, WIDTH, COLUMN = 512, 120, 46
HEAD = """\
# Written by `cohort start`; `cohort study run FILE` runs it. docs/studies.md has all keys, `cohort list settings` all
# settings. A study that has started cannot change: give a changed file another name.
"""
ABOUT = {
    "run": "settings that all arms share",
    "run.task.name": "the problems; `cohort task show NAME` prints some",
    "run.algorithm.name": "how answers become a loss; `cohort list algorithms`",
    "run.cold_start.steps": "supervised steps before the study, because tiny knows nothing",
    "run.steps": "training steps",
    "run.engine.name": "what samples the answers",
    "factors": "what differs: each level is an arm; the first is the baseline",
    "seeds": "each arm runs once with each of them",
    "metric": "what arms are compared by, in the end on test problems",
}


def default_model() -> str:
    return CHAT_MODEL if Path(CHAT_MODEL, "config.json").is_file() else "tiny"


def default_task(model: str) -> str:
    return SUMS if is_chat_model(model) and Path(SUMS).is_dir() else "arithmetic"


def checked_model(name: str) -> str:
    """The name of a model that is here or on the Hub. ValueError or OSError for another one; reads no weights."""
    check_model(name)
    model_config(name)
    return name


def checked_task(model: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a task for a model, as its problems allow. ValueError if a split has no problems."""
    is_file = Path(raw.get("path", "")).expanduser().is_file()
    chosen = {**raw, **({"test_fraction": 0.2, "validation_fraction": 0.1} if is_file else {})}
    task: Any = parse_run({"task": chosen, "algorithm": "grpo"}, "task").task
    sizes = {split: len(task.prompts(split)) for split in ("train", "validation", "test")}
    if is_chat_model(model) and isinstance(task, DatasetTask):
        chosen |= {"template": "{question} ", "shots": min(3, sizes["train"] - 1)}
    return chosen


def is_chat_model(model: str) -> bool:
    """Whether it is the model of `make smollm2`, as a folder or as its file."""
    return Path(model).stem == Path(CHAT_MODEL).name


def fields_of(path: str) -> list[str]:
    """Fields of the first row of a file, or of the first file in a folder; none of what is not here."""
    here = Path(path).expanduser()
    found = [file for file in [here, *sorted(here.rglob("*"))] if file.is_file() and file.suffix.lower() in FILES]
    first: Any = next(file_rows(found[0]), ("", {}))[1] if found else {}
    return list(map(str, first))


def base_run(model: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """The run that all arms share."""
    loaded: Any = parse_run({"task": task, "algorithm": "grpo"}, "task").task
    run: dict[str, Any] = {"model": model, "task": dict(task)}
    algorithm = {"name": "grpo", "group_size": 8, "kl_beta": 0.04 if model == "tiny" else 0.0}
    worked = [one.completion for one in loaded.demonstrations()]
    if model == "tiny":
        run |= {"cold_start": {"steps": 400}} if worked else {}
        sizes = {"rollouts_per_step": 128, "steps": 60, "evaluation": {"every": 20}}
        return {**run, "algorithm": algorithm, "optimizer": {"learning_rate": 1e-4}, **sizes}
    if not is_chat_model(model):
        return {**run, "algorithm": algorithm, "rollouts_per_step": 128, "steps": 100, "evaluation": {"every": 20}}
    if "shots" in task:
        longest = max(map(len, worked), default=0)  # characters, of which a token has about two in sums, more in text
        sampling: dict[str, Any] = {"max_tokens": min(MOST_TOKENS, max(12, longest // 2))}
        run |= {"prompt": {"format": "plain"}, "sampling": sampling | {"stop": ["\n\n"]}}
    run |= {"algorithm": algorithm, "optimizer": {"learning_rate": 1e-5}, "rollouts_per_step": 64, "steps": 10}
    return run | {"evaluation": {"every": 5, "num_prompts": 64, "num_test_prompts": 100, "num_samples": 1}}


def study_file(model: str, task: Mapping[str, Any], compared: str) -> str:
    """The text of the study. ValueError for a comparison that cannot run."""
    asked, factors = COMPARISONS.get(compared, ("", {}))
    if not factors:
        path, equals, levels = compared.partition("=")
        if not equals:
            raise ValueError(f"it must be {', '.join(COMPARISONS)} or PATH=A,B, got '{compared}'")
        asked, factors = f"Which {path.strip()}", parse_overrides([f"{path}=[{levels}]"])
        if len(next(iter(factors.values()))) < 2:
            raise ValueError(f"a comparison needs two values or more, got '{compared}'; {path}=A,B")
    run = base_run(model, task)
    settings = scale_settings(model, (), file=run, has_critic="ppo" in factors.get("algorithm.name", ()))
    raw = {
        "question": f"{asked} teaches {Path(model).name} most about {Path(task.get('path', task['name'])).name}?",
        "run": with_overrides(run, parse_overrides(settings)),
        "factors": dict(factors), "seeds": [0, 1, 2, 3], "metric": "validation/accuracy",
    }  # fmt: skip
    parse_study({"name": "start", **raw}, "the study").checked_arms()
    found = paths.settings(RunSpec, raw["run"])
    about = {f"run.{path}": field.description or "" for path, field in found}
    about |= {key: field.description or "" for key, field in StudySpec.model_fields.items()} | ABOUT
    about |= {f"factors.{path}": about.get(f"run.{path}", "") for path in factors}
    return HEAD + "".join(f"{line}\n" for line in _lines(raw, about))


def _lines(raw: Mapping[str, Any], about: Mapping[str, str], above: str = "", indent: str = "") -> Iterator[str]:
    """The settings as YAML, each with what it is: after it, or before a long one."""
    for key, value in raw.items():
        is_section = isinstance(value, Mapping)
        text = "" if is_section else f" {as_texts({key: value})[0].partition('=')[2]}"
        line = f"{indent}{key}:" + (text if "\n" not in text else f" {json.dumps(value)}")
        room = WIDTH - 2 - (COLUMN if len(line) < COLUMN else len(indent))
        words = [f"# {part}" for part in textwrap.wrap(about.get(f"{above}{key}", ""), room)]
        if len(line) < COLUMN:
            first, *more = words or [""]
            yield f"{line:<{COLUMN}}{first}".rstrip()
            yield from (f"{'':<{COLUMN}}{part}" for part in more)
        else:
            yield from (f"{indent}{part}" for part in words)
            yield line
        if is_section:
            yield from _lines(value, about, f"{above}{key}.", f"{indent}  ")
