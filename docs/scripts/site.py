"""What mkdocs builds beside the written pages: the reference pages that follow from the code, made anew by every build.

`$COHORT` is the command `cohort` of an environment that has Cohort; the site's environment needs neither it nor torch.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

COHORT = Path(os.environ.get("COHORT", ".venv/bin/cohort"))
PLUGINS = {"algorithms": "algorithm", "tasks": "task", "rewards": "reward", "samplers": "sampler", "engines": "engine"}
# What a browser loads by itself; a link that a reader follows is none of it.
FOREIGN = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//|<link\b[^>]*\bhref=["']?https?://"""
)


# The folders of the package `cohort` as a wheel maps them, for the page of the Python API.
PACKAGE = Path("build/docs/cohort")
FOLDERS = ("harness", "algorithms", "tasks", "reports")


def on_startup(**_: Any) -> None:
    """Lay out the package, before anything looks for it."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    shutil.copytree("cohort", PACKAGE)
    for folder in FOLDERS:
        shutil.copytree(folder, PACKAGE / folder)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation without the pages that are not written yet."""
    config.nav = list(_present(config.nav or [], Path(config.docs_dir)))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The written pages and the generated ones."""
    pages = {"settings": _settings(), "commands": _commands()}
    pages |= {kind: _plugins(kind) for kind in PLUGINS}
    for name, content in pages.items():
        files.append(File.generated(config, f"generated/{name}.md", content=content))
    return files


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """The page, unless it would ask another machine for something."""
    if found := FOREIGN.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from the network: {output[found.start() :][:120]}")
    return output


def _present(entries: Iterable[dict[str, Any]], docs: Path) -> Iterable[dict[str, Any]]:
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            yield {title: list(_present(target, docs))}
        elif target.startswith("generated/") or (docs / target).exists():
            yield entry


def _settings() -> str:
    """One table for each section of a run, then for each of a study file."""
    documents = _json("list", "settings")
    sections: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        head, dot, _ = document["name"].partition(".")
        sections.setdefault(head if dot else "A run", []).append(document)
    text = [
        "# Settings\n",
        "Every setting of a run by its full path, as `cohort list settings` prints them. `--set path=value` and study "
        "files name them by this path.\n",
    ]
    for section, settings in [*sections.items(), ("A study file", _json("list", "settings", "study"))]:
        text += [f"## {section}\n", _table(settings)]
    return "\n".join(text)


def _plugins(kind: str) -> str:
    """One section a plugin: its docstring, its facts, its settings."""
    title = "Algorithms" if kind == "algorithms" else f"Settings of {kind}"
    text = [f"# {title}\n", f"As `cohort list {kind}` prints them.\n"]
    for document in _json("list", kind):
        facts = {k: v for k, v in document.items() if k not in ("name", "summary", "document", "settings", "objective")}
        text += [f"## {document['name']}\n", _prose(document["document"]) + "\n"]
        if facts:
            text.append(", ".join(f"`{name}`: {value}" for name, value in facts.items()) + "\n")
        if objective := document.get("objective"):
            text += ["| objective | |", "| --- | --- |"]
            text += [f"| {part} | {_cell(formula)} |" for part, formula in objective.items()] + [""]
        if document["settings"]:
            text.append(_table(document["settings"]))
    return "\n".join(text)


def _commands() -> str:
    """Every command with its arguments, options and examples, as typer documents it."""
    command = [COHORT.parent / "typer", "cohort.harness.cli.app", "utils", "docs", "--name", "cohort", "--title"]
    text = subprocess.run([*command, "Command line"], capture_output=True, text=True, check=True).stdout
    text = re.sub(r"\[(/?)bold\]", "**", text).replace("[/]", "**")
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+", "", text)  # each has its section; here their sentences are cut
    return re.sub(r"(?m)^(cohort .*)\n(?:\n(?=cohort )|$)", r"    \1\n", text)  # the examples, as code


def _json(*arguments: str) -> list[dict[str, Any]]:
    return json.loads(subprocess.run([COHORT, *arguments, "--json"], capture_output=True, text=True, check=True).stdout)


def _table(settings: list[dict[str, Any]]) -> str:
    rows = [
        f"| `{s['name']}` | {_code(s['default'])} | {_cell(s['range'])} | {_cell(s['description'])} |" for s in settings
    ]
    return "\n".join(["| setting | default | range | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _code(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return "required" if text == "required" else f"`{text}`".replace("|", "\\|").replace("\n", " ") if text else ""


def _cell(value: Any) -> str:
    return _prose(str(value)).replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    """Plain text as Markdown: nothing in it is markup but `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    escaped = (part if i % 2 else re.sub(r"([*_\\\[])", r"\\\1", part) for i, part in enumerate(parts))
    return "".join(part if part[:1] == "`" else part.replace("<", "&lt;") for part in escaped)
