"""Cohort from Python: load a study, run it, read its results as pandas frames, show and print its report.

    import cohort

    study = cohort.load_study("group_size").with_set(steps=20)
    result = cohort.run(study, workers=2)
    result.compare()

Names load on first use, so that the import costs nothing; what is not in `__all__` may change. In a checkout the
folders beside this one are its packages.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pyright resolves names by folder, and in a checkout the API lies beside this one
    from harness.api import (
        Evaluation,
        Report,
        Result,
        Study,
        compare,
        evaluate,
        load_study,
        open_result,
        report,
        run,
        train,
    )

_CHECKOUT = Path(__file__).parents[1]
if (_CHECKOUT / "harness" / "api").is_dir():  # in a wheel they lie in this folder
    __path__.append(str(_CHECKOUT))

__all__ = ["Evaluation", "Report", "Result", "Study", "compare", "evaluate", "load_study", "open_result", "report",
           "run", "train"]  # fmt: skip
_extras = importlib.import_module("cohort.harness.extras")
__all__ += sorted(_extras.public())  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cohort' has no attribute '{name}'; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_extras.public().get(name, "cohort.harness.api")), name)


def __dir__() -> list[str]:
    return __all__
