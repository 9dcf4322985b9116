"""Runs and studies as validated, frozen values."""
