"""All that a user can ask for, as functions and classes; the command line and `import cohort` are the clients.

Names load on first use. `import cohort` hands on those that are documented; the others serve commands.
"""

# ruff: noqa: F401
import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..base.addresses import hides
    from ..mirror.ui import browse
    from ..study.estimates import cost
    from ..study.pool import work
    from ..study.queue import study_status
    from ..study.steering import clone_arm, drop_arm, hold_arm, remove_study
    from .catalog import describe_plugins, describe_settings, describe_task
    from .machine import check_machine
    from .reporting import report
    from .result import Evaluation, Report, Result
    from .runs import estimate_runs, evaluate, train
    from .settings import shell
    from .study import (
        Study,
        compare,
        comparison,
        dry_run,
        list_studies,
        load_study,
        open_result,
        run,
        run_to_report,
        say_without_result,
        show,
        start,
        study_of,
        watch,
    )

_NODES = ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
_IMPORTS = [node for node in _NODES if isinstance(node, ast.ImportFrom) and node.level]  # above, for type checkers
_HOME = {alias.name: "." * node.level + str(node.module) for node in _IMPORTS for alias in node.names}


def __getattr__(name: str) -> Any:  # on first use, because results load pandas
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
