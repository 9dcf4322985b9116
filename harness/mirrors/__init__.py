"""Mirrors beside MLflow, one file each, behind `harness.interfaces.Mirror`."""
