"""Uploads the final policy of a run to the Hugging Face Hub, with a model card from the record."""
