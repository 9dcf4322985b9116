"""What a run and a study are, as validated, frozen values."""
