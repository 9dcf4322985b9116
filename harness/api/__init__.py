"""What a user can ask for: each is a function here, and the command line and `import cohort` are its clients."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .result import Evaluation, Report, Result
    from .study import Study, evaluate, load_study, open_result, run

__all__ = ["Evaluation", "Report", "Result", "Study", "evaluate", "load_study", "open_result", "run"]

_HOME = {
    "Study": "study",
    "evaluate": "study",
    "load_study": "study",
    "open_result": "study",
    "run": "study",
    "Evaluation": "result",
    "Report": "result",
    "Result": "result",
}


def __getattr__(name: str) -> Any:  # on first use, because results load pandas
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
