"""Derives every number of a study's report again from its stored completions and events."""

API = {"verify": "verification"}
