"""The mirror `wandb`: curves and results in Weights & Biases."""
