"""Fills `study.jinja`, the file of a first study, by its model, task and comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from ....tasks._data import SUFFIXES, DatasetTask, file_rows
from ...policy.model import check_model, model_config
from ...settings.raw import parse_overrides
from ...settings.run import parse_run
from ...settings.study import parse_study

COMPARISONS: Mapping[str, str] = {
    "algorithms": "algorithm.name=grpo,ppo,grpo_self_consistency",
    "group size": "algorithm.group_size=8,4,16",
    "kl": "algorithm.kl_beta=0,0.04,0.1",
}


def checked_model(name: str) -> str:
    """The name of a model that is here or on the Hub. ValueError or OSError for another one; reads no weights."""
    check_model(name)
    model_config(name)
    return name


def fields_of(path: str) -> list[str]:
    """Fields of the first row of a file, or of the first file in a folder; none if it is not here."""
    here = Path(path).expanduser()
    files = [one for one in (here, *sorted(here.rglob("*"))) if one.suffix.lower() in SUFFIXES]
    return list(map(str, next(file_rows(files[0]))[1])) if files else []


def values(model: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the template needs of a model and a task. ValueError if a split of the task has no problems."""
    is_file = Path(chosen.get("path", "")).expanduser().is_file()
    raw = {**chosen, **({"test_fraction": 0.2, "validation_fraction": 0.1} if is_file else {})}
    task: Any = parse_run({"task": raw, "algorithm": "grpo"}, "task").task
    size, *_ = [len(task.prompts(split)) for split in ("train", "validation", "test")]
    longest = max((len(one.completion) for one in task.demonstrations()), default=0)
    kind = "other" if Path(model).stem == "tiny" != model else Path(model).stem  # a folder may be called tiny
    found = {"model": model, "task": raw, "kind": kind, "cold_start": model == "tiny" and longest}
    if found["kind"] == "smollm2" and isinstance(task, DatasetTask):
        raw |= {"template": "{question} ", "shots": min(3, size - 1)}
        found["limit"] = min(512, max(12, longest // 2))  # a token is two characters or more, but not in a sum
    return found


def study_file(found: Mapping[str, Any], compared: str) -> str:
    """The text of the study. ValueError for a comparison that cannot run."""
    path, _, words = COMPARISONS.get(compared, compared).partition("=")
    levels = parse_overrides([f"levels=[{words}]"])["levels"]
    if len(levels) < 2:
        known = ", ".join(COMPARISONS)
        raise ValueError(f"it must be {known}, or PATH=A,B with two values or more, got '{compared}'")
    asked = path.strip().removesuffix(".name").rpartition(".")[2].replace("_", " ")
    model, problems = Path(found["model"]).name, Path(found["task"].get("path", found["task"]["name"])).name
    question = f"Which {asked} teaches {model} most about {problems}?"
    template = jinja2.Template(Path(__file__).with_name("study.jinja").read_text("utf-8"), trim_blocks=True)
    text = template.render(**found, path=path.strip(), levels=levels, question=question)
    parse_study({"name": "start", **yaml.safe_load(text)}, "the study").checked_arms()
    return f"{text}\n"
