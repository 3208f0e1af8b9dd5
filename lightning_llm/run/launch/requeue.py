"""Slurm's `scontrol requeue` of the job that a run is in, as Lightning's SLURMEnvironment has it. Imports no torch."""

import os
import subprocess

REQUEUE_SECONDS = 30


def requeue() -> str | None:
    """Queue this Slurm job again; return a line on that, None where this is no job of Slurm's.

    It then starts with SLURM_RESTART_COUNT set, which a run takes for resume=auto.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # scontrol(1): a job array's task by the array's number
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=REQUEUE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return (
            f"note   Slurm did not queue job {job} again ({' '.join(command)}: {why[0] if why else 'no reason given'})"
        )
    return f"note   Slurm queues job {job} again"
