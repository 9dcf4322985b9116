"""Files, streams, stop, machine, tensors, rationals: imports nothing of ours."""
