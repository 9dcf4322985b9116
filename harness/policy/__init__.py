"""The model that is trained: loading, log-probs, critic, adapters, fused weights."""
