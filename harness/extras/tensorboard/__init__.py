"""The mirror `tensorboard`: curves in files that TensorBoard shows."""
