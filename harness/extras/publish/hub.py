"""Puts the final policy of a run on the Hugging Face Hub, with a model card that is written from its record."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from ....reports.analysis import analysed
from ....reports.prose import wording
from ....reports.statistics import wilson_interval
from ...base.files import sha256
from ...base.words import in_markdown
from ...record.events import EVENTS, read_history
from ...record.evidence import EVIDENCE
from ...record.run import RunInfo, final_result, model_folder
from ...record.study import STUDY, read_folder
from ...settings.errors import SpecError


def publish(run: Path, repository: str) -> str:
    """Upload the final policy of a run and its card to a repository of the Hub, private if it is new; its address.

    SpecError for an impossible name, a run that has not ended, or a refusal of the Hub.
    """
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
        raise SpecError(f"`repository` must be the name of a user and a repository, got '{repository}'")
    policy, card = model_folder(str(run)), model_card(run)
    api = HfApi()
    try:
        place = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repository)
        api.upload_folder(folder_path=policy, repo_id=repository, ignore_patterns=["README.md"])
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        fix = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
        raise SpecError(f"the Hub does not take '{repository}' ({why}); {fix}") from None
    return str(place)


def model_card(run: Path) -> str:
    """The card of a run that has ended: metadata, and what its record says of task, algorithm, tests and versions."""
    info, ended = RunInfo.load(run), final_result(run)
    if info is None or ended is None:
        raise SpecError(f"only a run that has ended can be published: RUN must be its folder, got '{run}'")
    model = info.spec["model"] if _on_hub(info.spec["model"]) else Path(info.spec["model"]).name  # no path of a machine
    spec, spent, history = info.spec, ended["summary"], read_history(run / EVENTS)
    tasks = {"test": spec["task"], **{f"test_{one['name']}": one for one in spec["evaluation"].get("tests", ())}}
    latest, rows, results = history.latest(), [], []
    for area, task in tasks.items():
        for name in ("accuracy", "greedy_accuracy"):
            if (value := latest.get(f"{area}/{name}")) is None:
                continue
            problems = len(history.scores[area])
            low, high = wilson_interval(value, problems)
            label = "greedy" if name == "greedy_accuracy" else f"mean of {latest[f'{area}/num_samples']:.0f}"
            rows.append((task["name"], label, problems, f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"))
            source = str(task["path"]) if _on_hub(task.get("path")) else task["name"]
            results.append(EvalResult("text-generation", source, task["name"], name, round(100 * value, 2)))
    data = ModelCardData(
        base_model=spec["model"] if _on_hub(spec["model"]) else None,
        library_name="peft" if spec.get("lora") else "transformers", tags=["cohort", "rlvr", spec["algorithm"]["name"]],
        datasets=sorted({str(one["path"]) for one in tasks.values() if _on_hub(one.get("path"))}),
        model_name=run.name, eval_results=results,
    )  # fmt: skip
    settings = {key: value for key, value in spec["algorithm"].items() if key != "name"}
    lines = [
        f"# {in_markdown(run.name)}", "",
        f"Trained by Cohort (`cohort-rl`) with `{spec['algorithm']['name']}` on `{spec['task']['name']}`, from "
        f"`{_code(model)}`, for {spent.get('optimizer_steps', 0):.0f} optimiser steps on "
        f"{spent.get('rollouts', 0):.0f} completions. Seed {spec['seed']}.", "",
        "| test | accuracy | problems | %, with 95 % interval over problems |", "| --- | --- | --: | --: |",
        *(f"| {in_markdown(task)} | {label} | {problems} | {text} |" for task, label, problems, text in rows), "",
        *_of_study(run), "## Objective", "",
        *(f"- {key}: {in_markdown(text)}" for key, text in info.objective.items()),
        f"- settings: `{_code(json.dumps(settings))}`", "", "## Record", "",
        *(f"- {key}: `{_code(value)}`" for key, value in info.versions.items()),
        f"- SHA-256 of its events: `{sha256(run / EVENTS)}`", "",
    ]  # fmt: skip
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)


def _of_study(run: Path) -> list[str]:
    """Lines on a trial's arm from its study, over all seeds; none for a single run."""
    folder = run.resolve().parents[1]
    if not (folder / STUDY).is_file():
        return []
    record = read_folder(folder)
    arm = next(one.arm for one in record.trials if one.trial == run.name)
    analysis = analysed(record)
    found = next((one for one in analysis.arms if one.label == arm and one.scores), None)
    lines = ["## Study", "", in_markdown(record.question), ""]
    if found is not None:
        metric, seeds = analysis.outcome.name, ", ".join(map(str, found.scores))
        mean = wording.with_limits(found.mean, found.interval, metric)
        unit = " %" if analysis.outcome.is_fraction else ""
        count = wording.plural(len(found.scores), "seed")
        lines.append(f"One of {count} ({seeds}) of the arm `{_code(arm)}`: {analysis.outcome.label} {mean}{unit}.")
    lines += ["", f"- command: `{_code(record.command)}`"]
    if (folder / EVIDENCE).is_file():
        lines.append(f"- SHA-256 of the study's `evidence.json`: `{sha256(folder / EVIDENCE)}`")
    return [*lines, ""]


def _on_hub(name: Any) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) is not None and not Path(str(name)).exists()


def _code(text: Any) -> str:
    """A text within backticks."""
    return " ".join(str(text).split()).replace("`", "'")
