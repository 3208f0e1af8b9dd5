"""`train -m`: checks the jobs of a sweep, starts them here or by Slurm, watches them; `plan -m`."""
