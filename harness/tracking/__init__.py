"""Where results are kept: the event file of a run, and MLflow, which only `mlflow_*` import."""
