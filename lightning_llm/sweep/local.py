"""Jobs of a sweep as processes on this machine; with launcher=ray each has its ranks placed by Ray, and waits.

Jobs that run side by side get CUDA devices of their own: otherwise all would take the first.
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

from lightning_llm.base.interpreter import python_environment, python_module
from lightning_llm.config.workspace import config_dir_arguments
from lightning_llm.config.yaml_file import write_config
from lightning_llm.precision.native.capability import DRIVER_FILES
from lightning_llm.run.launch.relay import Relay
from lightning_llm.sweep.job_locks import Outcome, locked, runs_elsewhere
from lightning_llm.sweep.progress import Progress
from lightning_llm.tracking.run_state import JOB_VARIABLE, SETTLED, state_of
from lightning_llm.tracking.sweep_definition import Job

VISIBLE = "CUDA_VISIBLE_DEVICES"
REFUSED = 2
"""Exit code of a job whose config or folder is no good: another process trains there, say."""


def run_here(jobs: Sequence[Job], at_once: int, relay: Relay, progress: Progress) -> None:
    """Run `jobs`, `at_once` of them at a time, and tell `progress` of each. None is started after a signal.

    One at a time speaks on this terminal; several write to `logs/N.log` beside their folders, share the cores, and get
    CUDA devices of their own as far as there are any.
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
    """Return the file that a job's process reads its config from; the run's folder then holds it as config.yaml."""
    return job.folder.with_suffix(".yaml")


def job_command(job: Job) -> tuple[list[str], Path]:
    """Write the job's frozen config; return the command that runs it, and the file, which can go once it has run."""
    file = job_config_file(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    resume = job.config.resume or "auto"  # go on where an earlier start of the sweep failed or was stopped
    write_config(job.config.model_copy(update={"resume": resume}), file)
    return python_module("lightning_llm", "train", "--config", str(file), *config_dir_arguments()), file


def _may_use_cuda(job: Job) -> bool:
    return job.config.trainer.accelerator != "cpu" and job.config.launcher.name != "ray"  # Ray gives out its own


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
        # In a process group of its own: a terminal's Ctrl-C would reach it beside ours, and the second one kills.
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
        file.unlink(missing_ok=True)  # the folder holds it as config.yaml
    return code if code >= 0 else 128 - code


class DevicePool:
    """Lends devices to jobs side by side: each gets those with the fewest jobs on them, in the order of `devices`."""

    def __init__(self, devices: Sequence[str]):
        self.devices = list(devices)
        self._jobs: Counter[str] = Counter()
        self._changing = threading.Lock()

    @contextmanager
    def lent(self, count: int) -> Iterator[list[str]]:
        """Yield `count` different devices until the context ends; [] where the machine has fewer: the job says so."""
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
    """Return the CUDA devices of this machine by the names that `CUDA_VISIBLE_DEVICES` takes; [] without a driver."""
    if VISIBLE in os.environ:
        return [name.strip() for name in os.environ[VISIBLE].split(",") if name.strip() not in ("", "-1")]
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return []
    import torch  # seconds, which a machine without a GPU does not need to spend; it makes no CUDA context here

    return [str(number) for number in range(torch.cuda.device_count())]
