"""What a user can ask for: each is a function or a class, and the command line and `import cohort` are its clients.

Names load on first use. `import cohort` hands on those that are documented; the others serve commands.
"""

# ruff: noqa: F401
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..ground.addresses import hides
    from ..mirror.ui import browse
    from ..policy.bradley_terry import train_reward_model
    from ..record.finished import model_folder
    from ..spec.raw import parse_overrides
    from ..study.estimates import cost, remaining_seconds
    from ..study.queue import study_status
    from ..study.steering import clone_arm, resume_arm, stop_arm
    from ..study.work import work
    from .capsule import export_capsule, verify
    from .catalog import describe_plugins, describe_settings, describe_task
    from .machine import check_machine
    from .planner import plan
    from .regrade import grade
    from .reporting import report
    from .result import Report, Result
    from .runs import Evaluation, estimate_runs, evaluate, probe, register, train
    from .settings import shell
    from .study import (
        Study,
        compare,
        comparison,
        dry_run,
        launcher,
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

__all__ = ["Evaluation", "Report", "Result", "Study", "compare", "evaluate", "grade", "load_study", "open_result",
           "report", "run", "train", "verify"]  # fmt: skip
_NAMES = {
    "..ground.addresses": "hides",
    "..mirror.ui": "browse",
    "..policy.bradley_terry": "train_reward_model",
    "..record.finished": "model_folder",
    "..spec.raw": "parse_overrides",
    "..study.steering": "clone_arm resume_arm stop_arm",
    "..study.estimates": "cost remaining_seconds",
    "..study.queue": "study_status",
    "..study.work": "work",
    ".capsule": "export_capsule verify",
    ".catalog": "describe_plugins describe_settings describe_task",
    ".machine": "check_machine",
    ".planner": "plan",
    ".regrade": "grade",
    ".reporting": "report",
    ".result": "Report Result",
    ".runs": "Evaluation estimate_runs evaluate probe register train",
    ".settings": "shell",
    ".study": "Study compare comparison dry_run launcher list_studies load_study open_result run run_to_report show "
    "say_without_result start study_of watch",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:  # on first use, because results load pandas
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name], __name__), name)
