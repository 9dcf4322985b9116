"""Statistics, figures and the report; reads a study as the record of `harness.data` only."""
