"""Stores a study's queue in files, or where an extra does."""
