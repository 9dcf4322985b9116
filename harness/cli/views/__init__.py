"""What a terminal shows of results: one file per subject."""
