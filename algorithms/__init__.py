"""Learning algorithms, one file each; `_`-prefixed files are shared helpers."""
