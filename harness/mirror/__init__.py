"""Mirrors follow the record and show it elsewhere: MLflow, and mirrors that are plugins."""
