"""Puts the final policy of a run on the Hugging Face Hub, with a model card."""
