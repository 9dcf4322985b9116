"""Rewards, one file each; `_`-prefixed files are shared helpers."""
