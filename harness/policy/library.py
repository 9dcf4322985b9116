"""Imports transformers without the parts that nothing here needs, and without its progress bars, which break ours."""

import sys
from importlib import import_module
from typing import Any


def import_generation() -> None:
    """Import transformers' generation and losses without scikit-learn and SciPy.

    Only assisted decoding uses scikit-learn, and only losses of object detection use SciPy. Importing them costs 0.9 s
    and 103 MB, and 0.3 s; they are installed for the importances of searches, for MLflow and for reports.
    """
    utils: Any = import_module("transformers.utils")
    utils.logging.disable_progress_bar()
    if "transformers.generation.candidate_generator" in sys.modules:
        return
    found = {name: getattr(utils, name) for name in ("is_sklearn_available", "is_scipy_available")}
    for name in found:
        setattr(utils, name, lambda: False)
    try:
        import transformers.generation.candidate_generator
        import transformers.loss.loss_utils  # noqa: F401
    finally:
        for name, available in found.items():
            setattr(utils, name, available)
