"""Launchers of a sweep's jobs: processes on this machine, or Slurm job arrays.

With launcher=ray a job is a process here, too, and Ray places its ranks. Concurrent jobs get separate CUDA devices,
because otherwise all would use the first. launcher=slurm uses submitit (https://github.com/facebookincubator/submitit).
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.hardware import has_nvidia_driver
from lightning_llm.base.process import python_environment, python_module
from lightning_llm.base.signals import Relay, stop_reason
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.run import LauncherConfig
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import write_config
from lightning_llm.sweep.progress import Outcome, Progress, allow_open_files, locked, runs_elsewhere
from lightning_llm.tracking.files import mark_failed, write_json
from lightning_llm.tracking.run_state import JOB_VARIABLE, SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job

VISIBLE = "CUDA_VISIBLE_DEVICES"
REFUSED = 2
"""Exit code of a job with an invalid config or folder, for example because another process trains there."""


def run_here(jobs: Sequence[Job], at_once: int, relay: Relay, progress: Progress) -> None:
    """Run `jobs`, `at_once` at a time, and report each to `progress`. After a signal no further job is started.

    With `at_once=1` a job prints to this terminal. Otherwise jobs write to `logs/N.log` next to their folders, share
    the cores, and get separate CUDA devices as far as available.
    """
    printing = threading.Lock()
    devices = DevicePool(cuda_devices() if at_once > 1 and any(map(_may_use_cuda, jobs)) else [])

    def one(job: Job) -> None:
        if relay.received:
            return
        with locked(job) as mine:
            if not mine or state_of(job.folder) in SETTLED:  # another start of this sweep was faster
                return
            if runs_elsewhere(job):
                with printing:
                    progress.left_alone(job)
                return
            with printing:
                progress.starting(job)
            began = time.monotonic()
            with devices.lent(job.config.trainer.devices if _may_use_cuda(job) else 0) as mine_alone:
                code = _run(job, at_once, relay, mine_alone)
            if code == REFUSED and runs_elsewhere(job):  # a process that was about to begin was faster
                with printing:
                    progress.left_alone(job)
                return
        with printing:
            progress.ended(Outcome(job, code, time.monotonic() - began), stopping=bool(relay.received))

    reported = at_once == 1  # by the job itself
    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(one, job) for job in jobs]:
            while not each.done():  # signals are handled between waits
                time.sleep(0.05)
                if relay.received and not reported:
                    reported = True
                    text = f"{stop_reason(relay.received)}: running jobs stop after their step, which is saved"
                    print(f"{text}; again: they end at once without saving", file=sys.stderr)
            each.result()


def job_config_file(job: Job) -> Path:
    """Return the temporary file from which a job's process reads its config, next to the job's folder."""
    return job.folder.with_suffix(".yaml")


def job_command(job: Job) -> tuple[list[str], Path]:
    """Write the config of a job to a temporary file; return (command that runs the job, that file)."""
    file = job_config_file(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    resume = job.config.resume or "auto"  # resume if an earlier start failed or was stopped
    write_config(job.config.model_copy(update={"resume": resume}), file)
    return python_module("lightning_llm", "train", "--config", str(file), *config_dir_arguments()), file


def _may_use_cuda(job: Job) -> bool:
    return job.config.trainer.accelerator != "cpu" and job.config.launcher.name != "ray"  # Ray assigns devices itself


def _run(job: Job, at_once: int, relay: Relay, devices: Sequence[str]) -> int:
    command, file = job_command(job)
    environment = os.environ | python_environment()
    if devices:
        environment[VISIBLE] = ",".join(devices)
    output: Any = None
    if at_once == 1:
        environment[JOB_VARIABLE] = str(job.number)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
        log = job.folder.parent / "logs" / f"{job.number}.log"
        log.parent.mkdir(exist_ok=True)
        output = log.open("ab")
    try:
        # In a separate process group: Ctrl-C would reach it twice, and the second signal kills.
        process = subprocess.Popen(command, process_group=0, env=environment, stdout=output, stderr=output)
        relay.processes.add(process)
        relay.of_job[job.number] = process
        if relay.received:  # it came while the process was started
            process.send_signal(relay.received)
        code = process.wait()
        relay.processes.discard(process)
        del relay.of_job[job.number]
    finally:
        if output is not None:
            output.close()
        file.unlink(missing_ok=True)  # the folder has it as config.yaml
    return code if code >= 0 else 128 - code


class DevicePool:
    """Devices that are lent to concurrent jobs: each job gets those with the fewest jobs at that time."""

    def __init__(self, devices: Sequence[str]):
        self.devices = list(devices)
        self._jobs: Counter[str] = Counter()
        self._changing = threading.Lock()

    @contextmanager
    def lent(self, count: int) -> Iterator[list[str]]:
        """Context that yields the names of `count` different devices; [] if there are fewer, which the job reports."""
        with self._changing:
            enough = count <= len(self.devices)
            chosen = sorted(self.devices, key=lambda name: self._jobs[name])[:count] if enough else []
            chosen.sort(key=self.devices.index)
            self._jobs.update(chosen)
        try:
            yield chosen
        finally:
            with self._changing:
                self._jobs.subtract(chosen)


def cuda_devices() -> list[str]:
    """Return the names of this machine's CUDA devices for `CUDA_VISIBLE_DEVICES`, e.g. ["0", "1"]; [] without a driver.

    If that variable is set, they are those in it.
    """
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    if not has_nvidia_driver():
        return []
    import torch  # takes seconds, so only with a driver; creates no CUDA context

    return [str(number) for number in range(torch.cuda.device_count())]


POLL_SECONDS = 2.0


def slurm_problems(launcher: LauncherConfig) -> Iterator[Problem]:
    """Yield the problems that prevent submitting jobs to Slurm from here; none with another launcher."""
    if launcher.name != "slurm":
        return
    if find_spec("submitit") is None:
        yield Problem("launcher.name", "is slurm, which requires submitit: pip install 'lightning-llm[slurm]'.")
    if launcher.cluster == "slurm" and which("sbatch") is None:
        text = "is slurm, but there is no sbatch here. Start from a login node, or use launcher=local."
        yield Problem("launcher.name", text)
    if launcher.container is not None:
        text = f"is {launcher.container!r}, but only `plan --script` supports containers. Remove it for a sweep."
        yield Problem("launcher.container", text)


def array_parameters(config: Config) -> dict[str, Any]:
    """Return the parameters of submitit's executor for a job: its nodes, tasks, resources and Slurm options.

    On several nodes each rank is a task; on one node the job's own launcher starts the ranks.
    """
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
    """Submit `jobs` to Slurm, wait for them, and report each to `progress`; a signal cancels those that have not ended.

    Jobs with equal `array_parameters` form one array; `launcher.at_once` jobs of an array run at a time. Jobs that an
    earlier start submitted and that have not ended are awaited, not submitted again. Jobs that another start waits for
    are left to it. Output is in `slurm/` next to the jobs' folders.

    Raises:
        ConfigError: Slurm rejected them.
    """
    began = time.monotonic()
    allow_open_files(len(jobs))
    with ExitStack() as locks:
        mine = [each for each in jobs if locks.enter_context(locked(each)) and state_of(each.folder) not in SETTLED]
        for job in mine:
            progress.starting(job)
        waiting = _known_to_slurm(mine)
        taken = {job.number for job in waiting.values()}
        waiting |= _submit([job for job in mine if job.number not in taken])
        while waiting:
            for submitted in [each for each in waiting if each.done()]:
                job = waiting.pop(submitted)
                progress.ended(Outcome(job, _code_of_ended(job, submitted), time.monotonic() - began))
            if relay.received:
                for submitted, job in waiting.items():
                    submitted.cancel()
                    _note_of(job).unlink(missing_ok=True)
                return
            time.sleep(POLL_SECONDS if waiting else 0)


def _submit(jobs: Sequence[Job]) -> dict[Any, Job]:
    import submitit

    alike: dict[str, list[Job]] = {}
    for job in jobs:
        alike.setdefault(json.dumps(array_parameters(job.config), sort_keys=True), []).append(job)
    waiting = {}
    for group in alike.values():
        executor = submitit.AutoExecutor(folder=_folder_of(group[0]), cluster=group[0].config.launcher.cluster)
        executor.update_parameters(**array_parameters(group[0].config))
        submissions = []
        try:
            with executor.batch():  # one array, to which at_once applies
                for job in group:
                    submissions.append(executor.submit(subprocess.call, job_command(job)[0]))
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            why = (str(error).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
            raise ConfigError(Problem("launcher", f"Slurm rejected the jobs: {why}. Change launcher.*")) from error
        for submitted, job in zip(submissions, group, strict=True):
            tasks = max(1, submitted.num_tasks)
            write_json(_note_of(job), {"slurm_job_id": submitted.job_id, "tasks": tasks})
            waiting[submitted] = job
    return waiting


def _known_to_slurm(jobs: Sequence[Job]) -> dict[Any, Job]:
    """Return {submission: job} of submissions of an earlier start that have not ended."""
    import submitit

    noted: dict[Any, Job] = {}
    for job in jobs:
        if job.config.launcher.cluster == "slurm" and _note_of(job).is_file():
            note = json.loads(_note_of(job).read_text(encoding="utf-8"))
            noted[submitit.SlurmJob(_folder_of(job), note["slurm_job_id"], range(note["tasks"]))] = job
    # A preempted job counts as ended: if it is requeued, its state shows that.
    return {
        known: job
        for known, job in noted.items()
        if not known.done() and known.state.upper() not in ("UNKNOWN", "PREEMPTED")
    }


def _folder_of(job: Job) -> Path:
    return job.folder.parent / "slurm"


def _note_of(job: Job) -> Path:
    """Return the file with the Slurm id of this job while it is queued or runs."""
    return _folder_of(job) / f"{job.number}.json"


def _code_of_ended(job: Job, submitted: Any) -> int:
    """Clean up after an ended job and return its exit code; records the reason in its summary if the job could not."""
    code = _exit_code(submitted)
    if code and state_of(job.folder) == "running":  # on another machine, so only Slurm knows
        mark_failed(job.folder, f"ended without a message: exit code {code}, Slurm state {submitted.state}")
    for file in (_note_of(job), job_config_file(job)):
        file.unlink(missing_ok=True)
    return code


def _exit_code(submitted: Any) -> int:
    """Return the exit code of a job's first failed rank, 0 if none failed; 1 for a job that Slurm ended."""
    import submitit

    try:
        codes = [int(code) for code in submitted.results()]
    except (submitit.core.utils.FailedJobError, submitit.core.utils.UncompletedJobError):
        return 1
    return next((code if code > 0 else 128 - code for code in codes if code), 0)
