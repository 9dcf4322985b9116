"""The command line `cohort`."""
