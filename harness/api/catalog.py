"""Lists plugins, settings with defaults and ranges, and the problems of a task."""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from pydantic.fields import FieldInfo

from .. import plugins
from ..data import Split
from ..settings import paths
from ..settings.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from .settings import Settings

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def describe_plugins(kind: str, name: str | None = None, facts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The plugins of a kind, or one, as class and module describe them: summary, facts (class attributes), settings."""
    documents, of = [], cast(plugins.Kind, kind)
    for one in plugins.names(of) if name is None else [name]:
        cls: Any = plugins.load(of, one)
        fields = getattr(plugins.settings_class(of, one), "model_fields", {})
        document = (importlib.import_module(cls.__module__).__doc__ or cls.__doc__ or "").strip()
        paragraph = " ".join(document.split("\n\n")[0].split())
        documents.append({
            "name": one,
            "summary": re.split(r"(?<=[.])\s+(?=[A-Z`])", paragraph)[0],
            "document": document,
            **{fact: getattr(cls, fact) for fact in facts},
            "settings": [_setting(key, field) for key, field in fields.items() if key != "name"],
        })  # fmt: skip
    return documents


def describe_settings(section: str | None = None) -> list[dict[str, Any]]:
    """The settings, with default and range, of a run, of one of its sections, or (`study`) of a study file."""
    from ..settings.run import RunSpec
    from ..settings.study import StudySpec

    fields = list(paths.settings(StudySpec if section == "study" else RunSpec))
    if section not in (None, "study"):
        known = list(dict.fromkeys(["study", *(path.partition(".")[0] for path, _ in fields)]))
        near = did_you_mean(section, [*known, *(path for path, _ in fields)])
        fields = [(path, field) for path, field in fields if f"{path}.".startswith(f"{section}.")]
        if not fields:
            rule = f"SECTION must be one of {', '.join(known)} or a full path"
            raise SpecError(f"{rule}, got '{section}'; {near}".rstrip("; "))
    documents = [_setting(path, field) for path, field in fields]
    for document in documents:
        if (kind := document["name"].removesuffix("s")) in get_args(plugins.Kind):
            document["range"] = f"cohort list {kind}s"
    return documents


def describe_task(
    name: str, settings: "Settings" = (), *, split: str = "test", count: int = 3, model: str | None = None
) -> dict[str, Any]:
    """Settings of a task, sizes of its splits (or why one is missing), the first problems of `split`, and a worked
    solution; each text as `model` reads it, if one is named."""
    from ..run.grading import problem_rows
    from ..settings.load import load_run
    from .settings import as_texts, checked_split

    part = checked_split(split)
    spec = load_run(None, as_texts(settings), {"task": name, "algorithm": "grpo"})
    task = spec.task
    first = _or_reason(lambda: next(iter(task.demonstrations()), None))  # some have them one at a time
    shown = None if isinstance(first, str) else first
    document: dict[str, Any] = {
        "task": task.name,
        "settings": task.model_dump(mode="json"),
        "sizes": {one: _or_reason(lambda one=one: len(task.prompts(one))) for one in get_args(Split)},
        "max_completion_tokens": task.max_completion_tokens,
        "split": part,
        "problems": problem_rows(task.prompts(part)[:count]),
        "worked_solution": None if shown is None else {"prompt": shown.prompt, "completion": shown.completion},
    }
    if model is not None:  # each text as the model's input
        from ..policy.text import codec_of

        codec = codec_of(spec, model)
        for problem in document["problems"]:
            ids = codec.encode(problem["prompt"])
            problem |= {"prompt": codec.decode(ids), "prompt_tokens": len(ids)}
        if solution := document["worked_solution"]:
            solution["prompt"] = codec.decode(codec.encode(solution["prompt"]))
            solution["completion"] = codec.decode(codec.encode_completion(solution["completion"]))
        document["completion_ends"] = [codec.decode([i]) for i in codec.end_ids()]
    return document


def _or_reason(read: Callable[[], Any]) -> Any:
    """The result of `read`, or the message of its ValueError."""
    try:
        return read()
    except ValueError as error:
        return str(error)


def _setting(name: str, field: FieldInfo) -> dict[str, Any]:
    bounds = [f"{sign} {getattr(m, key)}" for m in field.metadata for key, sign in SIGNS.items() if hasattr(m, key)]
    if get_origin(field.annotation) is Literal:
        bounds.append(" or ".join(map(str, get_args(field.annotation))))
    default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return {"name": name, "default": default, "range": ", ".join(bounds), "description": field.description or ""}
