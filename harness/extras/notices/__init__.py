"""COHORT_NOTIFY: a webhook or a command gets a notice when a trial fails, a claim is decided or a study ends."""
