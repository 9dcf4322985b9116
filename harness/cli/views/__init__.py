"""Results on a terminal: one file per subject."""
