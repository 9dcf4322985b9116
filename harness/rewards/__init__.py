"""The rewards, one file each; `_`-prefixed files are shared helpers."""
