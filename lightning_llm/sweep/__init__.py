"""`train -m`: the jobs of a sweep checked, started here or by Slurm, watched, and outlined for `plan -m`."""
