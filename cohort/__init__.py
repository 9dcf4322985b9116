"""Cohort from Python: load a study, run it, read its results as pandas frames, show and print its report.

    import cohort

    study = cohort.load_study("group_size").with_set(steps=20)
    result = cohort.run(study, workers=2)
    result.compare()

In a checkout the folders beside this one are its packages, by symbolic links. Names load on first use, so that the
import costs nothing; what is not in `__all__` may change.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cohort._api import Study, evaluate, load_study, open_result, run
    from cohort._result import Evaluation, Report, Result

__all__ = ["Evaluation", "Report", "Result", "Study", "evaluate", "load_study", "open_result", "run"]

_RESULTS = ("Evaluation", "Report", "Result")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cohort' has no attribute '{name}'; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module("cohort._result" if name in _RESULTS else "cohort._api"), name)


def __dir__() -> list[str]:
    return __all__
