"""slurm: jobs of SLURM with these options of sbatch, as 'slurm partition=gpu time=4:00:00'"""
