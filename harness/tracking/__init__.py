"""Keeps results: the event file of a run, and MLflow, which only the `mlflow_*` modules import."""
