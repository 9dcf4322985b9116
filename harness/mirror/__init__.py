"""MLflow, a mirror that is written from the record."""
