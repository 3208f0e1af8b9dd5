"""Sweeps (`train -m`, `plan -m`): their jobs are checked, started here or by Slurm, watched, or chosen by a search."""
