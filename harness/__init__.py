"""The shared machinery of Cohort: types, specs, engine, learner, training loop, study runner, tracking, commands."""

__version__ = "0.1.0"
