"""Statistics, figures and the report; reads results through `harness.tracking` only."""
