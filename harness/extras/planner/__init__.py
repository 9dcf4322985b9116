"""The planner: predicts the cost of a study from a short calibration, and proposes a number of seeds."""
