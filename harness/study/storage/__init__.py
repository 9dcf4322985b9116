"""Stores a study's queue in files or in PostgreSQL."""
