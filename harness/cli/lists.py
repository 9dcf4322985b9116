"""`cohort list` and `task show`: studies, settings, plugins and problems, without a model."""

from typing import Annotated

import typer

from .. import api
from ..console import terminal
from ..console.terminal import shortened
from .commands import command
from .options import RUNS, Json, Runs, Sets, Split

# Class attributes of each kind of plugin that its table shows.
FACTS = {"algorithms": ("needs_critic", "sees_gold", "min_group_size"), "tasks": (), "rewards": ("sees_gold",),
         "samplers": ("sees_gold",), "engines": ("exact_logprobs",), "stages": ("section",),
         "mirrors": ("package",)}  # fmt: skip
COLUMNS = ("name", "default", "range", "description")
HEADERS = ("setting", "default", "range", "meaning")


@command(
    "list",
    "cohort list studies --runs /data/runs",
    "cohort list algorithms",
    "cohort list tasks gsm8k",
    "cohort list rewards",
    "cohort list stages",
    "cohort list settings optimizer",
    "cohort list settings study",
)
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help=f"studies, {', '.join(FACTS)} or settings.")],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Only this plugin, in full; a section of a run, a setting, or `study`."),
    ] = None,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """List the shipped studies and those in the runs folder, or what a study file can name: the plugins of a kind with
    their settings, defaults and ranges, and for algorithms the objective of each.

    `cohort list settings` has every setting of a run by its full path; `cohort list settings study` has the settings
    of a study file.
    """
    if what == "studies":
        documents = api.list_studies(runs)
        if as_json:
            return terminal.print_json(documents)
        rows = [(d["name"], d["where"], d["question"]) for d in documents]
        return terminal.show_table("", ["study", "where", "question"], rows)
    if what == "settings":
        documents = api.describe_settings(name)
        if as_json:
            return terminal.print_json(documents)
        rows = [[str(d[key]) for key in COLUMNS] for d in documents]
        return terminal.show_table("", HEADERS, rows)
    if what not in FACTS:
        raise ValueError(f"cohort list takes studies, {', '.join(FACTS)} or settings, got '{what}'")
    kind, facts = what.removesuffix("s"), FACTS[what]
    objective = ["objective"] if what == "algorithms" else []
    documents = api.describe_plugins(kind, name, [*facts, *objective])
    if as_json:
        return terminal.print_json(documents)
    if name is not None:
        terminal.say(documents[0]["document"] + "\n")
    rows = [[d["name"], *(str(d[fact]) for fact in facts), d["summary"]] for d in documents]
    terminal.show_table("", [kind, *facts, "summary"], rows)
    if objective:
        columns = list(dict.fromkeys(key for d in documents for key in d["objective"]))
        cells = [(d["name"], *(d["objective"].get(column, "") for column in columns)) for d in documents]
        terminal.show_table("Objective", [kind, *columns], cells)
    fields = [(d["name"] if i == 0 else "", field) for d in documents for i, field in enumerate(d["settings"])]
    settings = [(plugin, *(str(field[key]) for key in COLUMNS)) for plugin, field in fields]
    if settings:
        terminal.show_table("Settings", [kind, *HEADERS], settings)


@command(
    "task show",
    "cohort task show arithmetic",
    "cohort task show gsm8k -n 3 --set task.path=data/gsm8k --set task.answer_format=think_answer --set task.shots=2",
    "cohort task show gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --set prompt.system='Be brief.'",
    "cohort task show math --model Qwen/Qwen3-0.6B --set prompt.template_arguments.enable_thinking=false",
)
def task_show(
    task: Annotated[str, typer.Argument(help="Task by name.")],
    count: Annotated[int, typer.Option("-n", min=0, metavar="N", help="Problems shown.")] = 3,
    split: Split = "test",
    model: Annotated[str | None, typer.Option(help="Show the texts exactly as this model reads them.")] = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """Show a task's settings, sizes and problems exactly as a policy reads them."""
    document = api.describe_task(task, sets or (), split=split, count=count, model=model)
    if as_json:
        return terminal.print_json(document)
    settings = [(key, repr(value)) for key, value in document["settings"].items()]
    terminal.show_table(f"Task {document['task']}", ["setting", "value"], settings)
    terminal.show_table("", ["split", "problems"], list(document["sizes"].items()))
    terminal.say(f"Completion limit: {document['max_completion_tokens']} tokens")
    if "completion_ends" in document:
        terminal.say(f"A completion ends at {' or '.join(document['completion_ends'])}")
    for number, problem in enumerate(document["problems"], start=1):
        tokens = f", {problem['prompt_tokens']} tokens" if "prompt_tokens" in problem else ""
        tags = "".join(f", {name} {value}" for name, value in problem["tags"].items())
        terminal.say(f"\nProblem {number} ({split}{tags}{tokens})", style="bold")
        terminal.say(shortened(problem["prompt"], 4000))
        terminal.say(f"gold: {problem['gold']}", style="green")
    if solution := document["worked_solution"]:
        terminal.say("\nA worked solution (cold start)", style="bold")
        terminal.say(solution["prompt"] + solution["completion"])
