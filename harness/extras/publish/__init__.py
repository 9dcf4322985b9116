"""Keeps the final policy of a run in MLflow's registry, or on the Hugging Face Hub with a model card."""
