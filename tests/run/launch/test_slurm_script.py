"""The batch script of `plan --script`: its requests, and training through stand-ins of sbatch and srun."""

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.plan.check import check_config
from lightning_llm.run.launch.slurm import frozen_config, script_problems, write_script
from lightning_llm.tracking.files import summary_of
from tests.run.launch.test_requeue import STEPS, alarmed, slurm  # noqa: F401  (a fixture)
from tests.run_metrics import curve

CLUSTER = [
    "recipe=quickstart", "cluster=h100_dgx", "world=16", "trainer.devices=8", "parallel=hsdp", "launcher=slurm",
    "data.global_batch_size=32", "run.name=job",
]  # fmt: skip


def options_of(file: Path) -> dict[str, str]:
    """Return Slurm's options, read as a shell would."""
    lines = [line.removeprefix("#SBATCH ") for line in file.read_text().splitlines() if line.startswith("#SBATCH")]
    return dict(shlex.split(line)[0].removeprefix("--").partition("=")[::2] for line in lines)


def srun_of(file: Path) -> list[str]:
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("exec srun")]
    return shlex.split(line)


def test_a_script_asks_for_what_the_plan_needs(tmp_path):
    more = [f"run.root={tmp_path}/runs", "launcher.partition=gpu", "launcher.account=it's mine", "launcher.qos=high"]
    more += ["launcher.cpus_per_task=64", "launcher.memory_gb=900", "launcher.setup=[module load cuda]"]
    config = compose_config([*CLUSTER, *more])
    file = tmp_path / "my job.sh"
    write_script(config, file, run_seconds=36_000)
    options = options_of(file)
    assert options == {
        "job-name": "job", "nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "8",
        "mem": "900G", "time": "12:50:00", "partition": "gpu", "account": "it's mine", "qos": "high",
        "signal": "USR1@300", "requeue": "", "open-mode": "append", "output": f"{file}.%j.out",
    }  # fmt: skip
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    text = file.read_text()
    assert text.index("module load cuda") < text.index("exec srun")
    frozen = load_config(frozen_config(file), [])
    assert frozen == config.model_copy(update={"resume": "auto"})
    words = srun_of(file)
    assert words[words.index("train") :] == ["train", "--config", str(frozen_config(file))]
    write_script(config, file, run_seconds=None)  # it replaces its own
    assert options_of(file)["time"] == "1-00:00:00"


def test_a_container_mounts_all_paths_of_the_run(tmp_path):
    (tmp_path / "text.jsonl").touch()
    more = ["launcher.container=nvcr.io/nvidia/pytorch:26.01-py3", "data=jsonl", f"run.root={tmp_path}/runs"]
    more += [f"data.sources.jsonl.path={tmp_path}/text.jsonl", f"data.cache_dir={tmp_path}/cache"]
    more += [f"run.dir={tmp_path}/elsewhere/mine"]
    write_script(compose_config([*CLUSTER, *more]), tmp_path / "job", None)
    words = srun_of(tmp_path / "job")
    (mounts,) = [word.partition("=")[2].split(",") for word in words if word.startswith("--container-mounts=")]
    assert "--container-image=nvcr.io/nvidia/pytorch:26.01-py3" in words
    made = {f"{tmp_path}/{name}" for name in ("runs", "elsewhere", "cache")}
    assert {str(tmp_path), f"{tmp_path}/text.jsonl", *made} <= set(mounts)
    (making,) = [line for line in (tmp_path / "job").read_text().splitlines() if line.startswith("mkdir -p ")]
    assert made <= set(shlex.split(making))  # before srun, since a container mounts no folder that is not there
    assert len(mounts) == len(set(mounts))
    assert words[words.index("train") - 1] == "lightning-llm"  # the image's own


def test_configs_without_a_possible_script_are_rejected(tmp_path, capsys):
    (tmp_path / "mine.sh").write_text("#!/bin/bash\n")
    config = compose_config([*CLUSTER, "world=15", "launcher.partition='a\nb'"])
    keys = [problem.key for problem in script_problems(config, tmp_path / "mine.sh")]
    assert keys == ["--script", "world", "launcher.partition"]
    assert (tmp_path / "mine.sh").read_text() == "#!/bin/bash\n"
    ray = compose_config([*CLUSTER, "launcher=ray"])
    assert [problem.key for problem in script_problems(ray, tmp_path / "no" / "job")] == ["--script", "launcher.name"]
    assert main(["plan", "-m", "recipe=quickstart", "seed=0,1", "--script", str(tmp_path / "job")]) == 2
    assert "--script: needs a single run, but -m covers several" in capsys.readouterr().err


def test_keys_of_another_launcher_are_refused_by_name():
    for words, keys in (
        (["launcher.account=x", "launcher.memory_gb=4"], ["launcher.memory_gb", "launcher.account"]),
        (["launcher=ray", "launcher.qos=x", "launcher.memory_gb=4"], ["launcher.qos"]),
        (["launcher=slurm", "launcher.address=auto", "launcher.setup=[x]"], ["launcher.address"]),
        (["launcher.at_once=4"], []),
    ):
        config = compose_config(["recipe=quickstart", *words])
        if not keys:
            check_config(config)
            continue
        with pytest.raises(ConfigError) as refused:
            check_config(config)
        assert [problem.key for problem in refused.value.problems] == keys
        assert "no effect with launcher=" in refused.value.problems[0].text


def test_launcher_slurm_does_not_train_on_a_login_node(tmp_path, small_run, monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "SUBMITIT_EXECUTOR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", *small_run(tmp_path), "launcher=slurm"]) == 2
    assert "plan ... --script FILE" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_script_trains_on_two_ranks_to_the_same_curve(stopped, tmp_path, small_run, slurm, capsys):  # noqa: F811
    """Planned, submitted, or also stopped by USR1 and queued again: as one undisturbed rank of this process."""
    words = small_run(tmp_path, *STEPS, "parallel=ddp", "trainer.devices=2", "launcher=slurm")
    faults = [alarmed(signal.SIGUSR1, 0)] if stopped else []
    assert main(["plan", *words, *faults, "--script", str(tmp_path / "job.sh")]) == 0
    assert f"submit with: sbatch {tmp_path}/job.sh" in capsys.readouterr().out
    done = subprocess.run(["sbatch", str(tmp_path / "job.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bool(re.search(r"resume from step [34]: ", done.stdout)) == stopped
    assert (slurm / "requeued.0").exists() == stopped
    assert summary_of(tmp_path / "run")["status"] == "finished"
    undisturbed = [word for word in words if not word.startswith(("parallel", "run.", "launcher", "trainer.devices"))]
    assert main(["train", *undisturbed, f"run.dir={tmp_path}/undisturbed"]) == 0
    assert curve(tmp_path / "run") == curve(tmp_path / "undisturbed")
