"""The run-book: measures on one machine what Cohort claims of a GPU."""
