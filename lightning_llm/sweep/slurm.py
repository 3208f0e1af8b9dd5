"""Jobs of a sweep as one Slurm array, by submitit (https://github.com/facebookincubator/submitit)."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from shutil import which
from typing import Any

from lightning_llm.errors import Problem
from lightning_llm.schema import Config
from lightning_llm.schema.run import LauncherConfig
from lightning_llm.sweep.definition import Job
from lightning_llm.sweep.local import Relay, job_command
from lightning_llm.sweep.progress import Progress
from lightning_llm.sweep.state import Outcome

POLL_SECONDS = 2.0


def slurm_problems(launcher: LauncherConfig) -> Iterator[Problem]:
    """Yield what keeps jobs from being submitted from this machine."""
    if launcher.name != "slurm":
        return
    if find_spec("submitit") is None:
        yield Problem("launcher.name", "is slurm, which needs submitit: pip install 'lightning-llm[slurm]'.")
    if launcher.cluster == "slurm" and which("sbatch") is None:
        text = "is slurm, and there is no sbatch here. Start from a login node, or set launcher=local."
        yield Problem("launcher.name", text)


def array_parameters(config: Config) -> dict[str, Any]:
    """Return what submitit's executor is told: one task per rank, as many nodes as the world needs."""
    launcher, devices = config.launcher, config.trainer.devices
    nodes = max(1, (config.world or devices) // devices)
    shared = {
        "name": config.run.experiment,
        "timeout_min": launcher.timeout_minutes,
        "nodes": nodes,
        # On one node our own launcher starts the ranks; over several nodes Slurm does, and each task is a rank.
        "tasks_per_node": devices if nodes > 1 else 1,
        "cpus_per_task": launcher.cpus_per_task,
        "gpus_per_node": launcher.gpus_per_node,
        "mem_gb": launcher.memory_gb,
    }
    if launcher.cluster == "slurm":
        shared |= {
            "slurm_partition": launcher.partition,
            "slurm_account": launcher.account,
            "slurm_qos": launcher.qos,
            "slurm_constraint": launcher.constraint,
            "slurm_setup": launcher.setup or None,
            "slurm_array_parallelism": launcher.at_once,
        }
    return {key: value for key, value in shared.items() if value is not None}


def run_on_slurm(jobs: Sequence[Job], relay: Relay, progress: Progress) -> None:
    """Submit `jobs`, wait for them and tell `progress` of each; a signal cancels what has not ended.

    Jobs of unlike world size are submitted as they need. Their output is in `slurm/` beside the jobs' folders.
    """
    import submitit

    began = time.monotonic()
    waiting: dict[Any, Job] = {}
    for job in jobs:
        launcher = job.config.launcher
        executor = submitit.AutoExecutor(folder=job.folder.parent / "slurm", cluster=launcher.cluster)
        executor.update_parameters(**array_parameters(job.config))
        command, _ = job_command(job)
        progress.starting(job)
        waiting[executor.submit(subprocess.call, command)] = job
    while waiting:
        for submitted in [each for each in waiting if each.done()]:
            progress.ended(Outcome(waiting.pop(submitted), _exit_code(submitted), time.monotonic() - began))
        if relay.received:
            for submitted in waiting:
                submitted.cancel()
            return
        time.sleep(POLL_SECONDS if waiting else 0)


def _exit_code(submitted: Any) -> int:
    """Return the exit code of a job's first rank that failed, 0 if none did; 1 for a job that Slurm ended."""
    import submitit

    try:
        codes = [int(code) for code in submitted.results()]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
        return 1
    return next((code if code > 0 else 128 - code for code in codes if code), 0)
