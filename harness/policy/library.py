"""Imports of transformers, without the parts that nothing here needs."""

import sys
from importlib import import_module
from typing import Any


def import_generation() -> None:
    """Import transformers' generation without scikit-learn, which only its assisted decoding uses.

    Importing scikit-learn costs 0.9 s and 103 MB; it is installed for the importances of searches, and for MLflow.
    """
    if "transformers.generation.candidate_generator" in sys.modules:
        return
    utils: Any = import_module("transformers.utils")
    found = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        import transformers.generation.candidate_generator  # noqa: F401
    finally:
        utils.is_sklearn_available = found


def no_progress_bars() -> None:
    """Keep transformers from drawing one for every checkpoint; they would break into our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
