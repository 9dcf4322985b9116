"""Prints text, tables and progress on a terminal; no lower room imports it."""
