"""Slurm: the batch script of a planned run (nodes, ranks, GPUs, time, caches), and requeueing of its job."""

import math
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.folders import user_cache_dir
from lightning_llm.config.run_paths import texts_in
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import command, config_dir_arguments
from lightning_llm.config.yaml_file import write_config
from lightning_llm.plan.nodes import ranks_per_node

MARK = "# Written by lightning-llm plan --script"
"""Second line of a script; a file with it may be overwritten."""
WARNED_SECONDS = 300
"""Time before a job's limit at which it gets SIGUSR1 and saves; one step and a save must fit in."""
SPARE = 1.25
"""Ratio of a job's time to the time of its steps, to allow for the start, validation and saves."""
START_MINUTES = 15
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders that are local to each machine."""


def script_problems(config: Config, file: Path) -> list[Problem]:
    """Return the reasons why the batch script of `config` cannot be written to `file`."""
    return [*_file_problems(file), *_config_problems(config)]


def write_script(config: Config, file: Path, run_seconds: float | None) -> list[str]:
    """Write the script and its frozen config; return lines about them.

    `run_seconds`: the planned time of all steps, None if unknown. The job's time limit is at most
    `launcher.timeout_minutes`; if that is too short, it is requeued.

    Raises:
        ConfigError: as `script_problems`.
    """
    if problems := script_problems(config, file):
        raise ConfigError(problems)
    file = file.absolute()
    frozen = frozen_config(file)
    write_config(config.model_copy(update={"resume": config.resume or "auto"}), frozen)
    file.write_text(_script(config, file, frozen, run_seconds), encoding="utf-8")
    file.chmod(0o755)
    nodes, per_node = _nodes(config)
    ranks = f"{nodes} node{'s' if nodes > 1 else ''} with {per_node} rank{'s' if per_node > 1 else ''} each"
    lines = [f"script            {file}: {ranks}; submit with: {shlex.join(['sbatch', str(file)])}"]
    if local := _node_local(config):
        lines.append(f"note   {', '.join(local)}: local to each machine, but the job needs shared storage")
    return lines


def frozen_config(file: Path) -> Path:
    """Return the path of the config file that the ranks of the batch script `file` read."""
    return file.with_name(f"{file.name}.yaml")


def _script(config: Config, file: Path, frozen: Path, run_seconds: float | None) -> str:
    launcher, (nodes, per_node) = config.launcher, _nodes(config)
    options: dict[str, object] = {
        "job-name": config.run.name,
        "nodes": nodes,
        "ntasks-per-node": per_node,
        "cpus-per-task": max(1, launcher.cpus_per_task // per_node) if launcher.cpus_per_task else None,
        "gpus-per-node": _gpus(config),
        "mem": f"{launcher.memory_gb}G" if launcher.memory_gb else None,
        "time": _time(_minutes(config, run_seconds)),
        "partition": launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "constraint": launcher.constraint,
        "signal": f"USR1@{WARNED_SECONDS}",
        "requeue": "",
        "open-mode": "append",
        "output": f"{file}.%j.out",
    }
    asked = [
        f"#SBATCH --{name}{'=' if value != '' else ''}{shlex.quote(str(value)) if value != '' else ''}"
        for name, value in options.items()
        if value is not None
    ]
    spread = ['export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'] if launcher.cpus_per_task else []
    made = [shlex.join(["mkdir", "-p", *_made_folders(config)])] if launcher.container else []
    return "\n".join(
        [
            "#!/bin/bash",
            f"{MARK}; its ranks read {shlex.quote(frozen.name)}, and it resumes where an earlier job stopped.",
            *asked,
            "",
            *launcher.setup,
            "# Compiled kernels on shared storage, kept for later jobs.",
            f"export LIGHTNING_LLM_KERNELS={shlex.quote(_kernels())}",
            *spread,
            *made,
            _srun(config, frozen),
            "",
        ]
    )


def _srun(config: Config, frozen: Path) -> str:
    words = ["srun", "--kill-on-bad-exit=1"]
    arguments = ["train", *config_dir_arguments(), "--config", str(frozen)]
    if (image := config.launcher.container) is None:
        return f"exec {shlex.join(words)} {command(*arguments)}"
    mounts = ",".join(dict.fromkeys(_mounted(config, frozen)))
    words += [f"--container-image={image}", f"--container-mounts={mounts}"]  # pyxis
    return f"exec {shlex.join([*words, 'lightning-llm', *arguments])}"


def _nodes(config: Config) -> tuple[int, int]:
    """Return (number of machines, ranks per machine)."""
    per_node = ranks_per_node(config)
    return (config.world or config.trainer.devices) // per_node, per_node


def _gpus(config: Config) -> int | None:
    """Return the GPUs per machine: as configured, or one per rank if the run is planned for GPUs."""
    accelerator = config.trainer.accelerator
    planned = accelerator == "cuda" or (accelerator == "auto" and config.planned_hardware is not None)
    return config.launcher.gpus_per_node or (ranks_per_node(config) if planned else None)


def _minutes(config: Config, run_seconds: float | None) -> int:
    most = config.launcher.timeout_minutes
    if run_seconds is None:
        return most
    return min(most, START_MINUTES + math.ceil(SPARE * run_seconds / 60) + math.ceil(WARNED_SECONDS / 60))


def _time(minutes: int) -> str:
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00" if days else f"{rest // 60:02}:{rest % 60:02}:00"


def _kernels() -> str:
    """Return the folder of compiled kernels; tokens are in `data.cache_dir`."""
    return str(Path(os.environ.get("LIGHTNING_LLM_KERNELS") or user_cache_dir() / "kernels").absolute())


def _written(config: Config) -> list[str]:
    """Return the folders that the ranks of all nodes write to."""
    return [config.run.root, config.run.dir, config.data.cache_dir or str(user_cache_dir()), _kernels()]


def _made_folders(config: Config) -> list[str]:
    """Return the folders that must exist before a container starts: folders that ranks write to, or their parents."""
    folder = Path(config.run.dir)
    outside = [] if folder.is_relative_to(config.run.root) else [str(folder.parent)]
    return [*outside, *(each for each in _written(config) if each != config.run.dir)]


def _mounted(config: Config, frozen: Path) -> Iterator[str]:
    """Yield the paths that a container mounts unchanged: folders that are written to, and paths in the config."""
    yield from (str(frozen.parent), *_made_folders(config), *config_dir_arguments()[1:])
    for value in texts_in(config.model_dump()):
        if value.startswith("/") and Path(value).exists():
            yield value


def _node_local(config: Config) -> list[str]:
    folders = tuple(f"{each}/" for each in NODE_LOCAL)
    return list(dict.fromkeys(each for each in _written(config) if each.startswith(folders)))


def _file_problems(file: Path) -> Iterator[Problem]:
    if not file.absolute().parent.is_dir():
        yield Problem("--script", f"the folder {file.parent} does not exist. Create it first.")
    elif file.is_dir():
        yield Problem("--script", f"{file} is a folder. Give a file in it.")
    elif file.exists() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        text = f"{file} exists and was not written by `plan --script`. Remove it, or choose another name."
        yield Problem("--script", text)


def _config_problems(config: Config) -> Iterator[Problem]:
    launcher, world = config.launcher, config.world or config.trainer.devices
    if launcher.name == "ray":
        text = "is ray, but --script writes a Slurm job. Use launcher=slurm, or train with launcher=ray."
        yield Problem("launcher.name", text)
    if world % ranks_per_node(config):
        text = f"must be a multiple of the {ranks_per_node(config)} ranks of a machine."
        yield Problem("world", text, world)
    for key in ("partition", "account", "qos", "constraint", "container"):
        if (value := getattr(launcher, key)) and any(letter in value for letter in "\n\r\0"):
            yield Problem(f"launcher.{key}", "must be one line of text. Remove line breaks.", repr(value))


REQUEUE_SECONDS = 30


def requeue() -> str | None:
    """Requeue this Slurm job; return a line about it, or None if this is not a Slurm job.

    The job then starts with SLURM_RESTART_COUNT set, which implies resume=auto.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # scontrol(1): a task of a job array is named by the array's id
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=REQUEUE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"note   Slurm did not requeue job {job} ({' '.join(command)}: {why[0] if why else 'no reason given'})"
    return f"note   Slurm job {job} was requeued"
