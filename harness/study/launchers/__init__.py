"""Where the workers of a study run: this machine, Ray, SLURM."""
