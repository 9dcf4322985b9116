"""Recomputes a study's numbers from the files that its runs keep, and packs these files into a capsule."""
