"""Jobs of a sweep as processes on this machine (launcher=local, or ray, where Ray places the ranks of each job).

Concurrent jobs get separate CUDA devices, because otherwise all would use the first.
"""

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_llm.base.hardware import has_nvidia_driver
from lightning_llm.base.interpreter import python_environment, python_module
from lightning_llm.base.signals import Relay
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import write_config
from lightning_llm.sweep.job_locks import Outcome, locked, runs_elsewhere
from lightning_llm.sweep.progress import Progress
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
            progress.ended(Outcome(job, code, time.monotonic() - began))

    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(one, job) for job in jobs]:
            while not each.done():  # signals are handled between waits
                time.sleep(0.05)
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
