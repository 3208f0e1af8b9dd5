"""torchrun's and Slurm's variables, as their documentation gives them."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.launcher.api
from torch.distributed.elastic.multiprocessing.api import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.yaml_file import write_config
from lightning_llm.run.launch import environment
from lightning_llm.run.launch.environment import (
    RankEnvironment,
    adopt_world,
    interactive_note,
    rank_environment,
    world_problems,
)
from lightning_llm.run.launch.local_ranks import ExitStatus, crowd_note, ended_by_failure, start_ranks
from lightning_llm.run.launch.torch_agent import first_failure, launch_ranks

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_NTASKS": "9", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "3,4,1(x2)", "SLURM_NODELIST": "node[07-08]", "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*TORCHRUN, *SRUN, "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "SLURM_PTY_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_torchrun(monkeypatch):
    assert rank_environment() is None
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert rank_environment() == RankEnvironment(rank=5, local_rank=1, world=8, local_world=4)


def test_srun_is_put_under_torchruns_names(monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    expected = RankEnvironment(rank=5, local_rank=1, world=9, local_world=4)
    assert rank_environment() == expected
    assert os.environ["MASTER_ADDR"] == "node07"
    assert os.environ["MASTER_PORT"] == "19567"
    assert {name: os.environ[name] for name in TORCHRUN} == {**TORCHRUN, "WORLD_SIZE": "9"}


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK, LOCAL_WORLD_SIZE"),  # a PyTorchJob of Kubeflow
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "five"}, "RANK"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "WORLD_SIZE": "-1"}, "WORLD_SIZE"),
        (dict.fromkeys(TORCHRUN, ""), None),  # empty counts as unset
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),  # a world of one
        ({"LOCAL_RANK": "0", "WORLD_SIZE": " "}, None),
        ({**SRUN, "SLURM_NTASKS": ""}, None),
        ({**SRUN, "SLURM_JOB_NAME": "bash"}, None),  # srun --pty bash
        ({**SRUN, "SLURM_PTY_PORT": "4000"}, None),
    ],
)
def test_variables_that_are_half_there_are_refused_by_name(variables, refused, monkeypatch, capsys, tmp_path):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if refused is None:
        assert rank_environment() is None
        assert (interactive_note() is not None) == ("SLURM_JOB_ID" in variables and variables["SLURM_NTASKS"] != "")
        return
    assert main(["train", "recipe=quickstart", f"run.root={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert f"- {refused}: " in told or f"- {refused}=" in told
    assert "torchrun" in told


def test_a_task_of_srun_within_an_interactive_shell_is_a_rank(monkeypatch):
    for name, value in {**SRUN, "SLURM_PTY_PORT": "4000"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_name_of_parent", lambda: "slurmstepd")
    assert rank_environment() == RankEnvironment(rank=5, local_rank=1, world=9, local_world=4)


@pytest.mark.parametrize("step", [None, str(0xFFFFFFFB), str(0xFFFFFFFA)])
def test_batch_scripts_and_interactive_slurm_shells_are_not_ranks(monkeypatch, step):
    for name, value in SRUN.items():
        if name != "SLURM_STEP_ID":
            monkeypatch.setenv(name, value)
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    assert rank_environment() is None


def test_the_number_of_started_ranks_is_adopted_or_rejected(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    config = adopt_world(compose_config(["recipe=quickstart"]))
    assert (config.trainer.devices, config.world) == (4, 8)
    with pytest.raises(ConfigError, match=r"trainer\.devices=2: but 4 ranks were started on this machine"):
        adopt_world(compose_config(["recipe=quickstart", "trainer.devices=2"]))


def test_the_world_in_a_runs_config_gives_way_to_other_devices(tmp_path):
    """Ranks note it when they start; several machines have more of it than devices, and it is asked for again."""
    of_two = ["recipe=quickstart", "parallel=ddp", "trainer.devices=2"]
    write_config(compose_config([*of_two, "world=2"]), tmp_path / "config.yaml")
    config = load_config(tmp_path / "config.yaml", ["trainer.devices=1"])
    assert (config.trainer.devices, config.world, world_problems(config)) == (1, None, [])
    assert load_config(tmp_path / "config.yaml", ["trainer.devices=1", "world=2"]).world == 2
    write_config(compose_config([*of_two, "world=4"]), tmp_path / "config.yaml")
    (problem,) = world_problems(load_config(tmp_path / "config.yaml", ["trainer.devices=1"]))
    assert "Set world=null or trainer.devices=4, or" in problem.text
    for word in ("world=null", "trainer.devices=4"):  # as it says
        assert world_problems(load_config(tmp_path / "config.yaml", ["trainer.devices=1", word])) == []


def test_more_ranks_than_cores_are_reported():
    config = compose_config(["recipe=quickstart", "parallel=zero3", "trainer.devices=4"])
    assert crowd_note(config, cores=4) is None
    assert "4 ranks share 2 CPU cores" in crowd_note(config, cores=2)


def test_problems_found_by_another_rank_are_reported(tmp_path, capsys):
    """Rank 0 reports problems that all ranks find; a problem that one rank finds first may be unknown to it."""
    told = "error: rank 2: data.sources: line 9 has no text\n"
    found = ((2, 2, "ConfigError", told), (0, 2, "ConfigError", ""), (2, 2, "AgreedError", ""))
    for rank, code, kind, said in (*found, (2, -15, "AgreedError", "")):  # ended by the agent as it was about to
        failure = SimpleNamespace(exitcode=code, message={"message": f"{kind}: data.sources: line 9 has no text"})
        error = SimpleNamespace(
            failures={rank: failure}, get_first_failure=lambda rank=rank, failure=failure: (rank, failure)
        )
        assert ended_by_failure(error, tmp_path, 600.0) == ExitStatus(2)
        assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("rank", "local_rank", "more", "waits", "says"),
    [
        (0, 0, {"TORCHELASTIC_RUN_ID": "r"}, False, "error: 1 problem with the config"),
        (1, 1, {"TORCHELASTIC_RUN_ID": "r"}, True, "error: rank 1 on "),  # ended meanwhile, where rank 0 finds it, too
        (1, 1, {}, False, ""),  # srun's, not the first of its machine
        (1, 0, {}, True, "error: rank 1 on "),
        (1, 1, {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_ERROR_FILE": "FILE"}, False, ""),  # the launcher says it
    ],
)
def test_rank_0_reports_an_invalid_config_before_torchrun_ends_it(
    rank, local_rank, more, waits, says, monkeypatch, tmp_path, capsys
):
    (tmp_path / "error.json").write_text("{}")
    more = {name: str(tmp_path / "error.json") if value == "FILE" else value for name, value in more.items()}
    variables = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(name, str(value))
    waited = []
    monkeypatch.setattr(environment.time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
    assert main(["train", "recipe=quickstart", "model.num_layers=abc"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(says) if says else not told
    assert ("model.num_layers='abc'" in told) == bool(says)
    assert waited == ([(environment.SECONDS + local_rank, "")] if waits else [])


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("stopped", 143)])
def test_a_rank_ended_by_the_agent_after_a_failure_is_not_reported_as_stopped(status, code, tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"status": status, "detail": "NonFiniteError: step 2"}))
    failure = SimpleNamespace(exitcode=143, message="Signal 15")
    error = SimpleNamespace(failures={0: failure}, get_first_failure=lambda: (0, failure))
    assert ended_by_failure(error, tmp_path, 600.0).code == code


@pytest.mark.parametrize("first_too", [True, False])
def test_a_callback_failure_on_another_rank_is_reported_once(first_too, tmp_path, capsys):
    text = "CallbackFailedError: callbacks.own failed: \x1b[31m"
    detail = text if first_too else "RuntimeError: connection closed by peer"
    (tmp_path / "config.yaml").touch()  # a run's folder, where why is written down
    (tmp_path / "summary.json").write_text(json.dumps({"status": "failed", "detail": detail}))
    failure = SimpleNamespace(exitcode=1, message={"message": text})
    error = SimpleNamespace(failures={1: failure}, get_first_failure=lambda: (1, failure))
    assert ended_by_failure(error, tmp_path, 600.0) == ExitStatus(1)
    said = r"rank 1 failed first (exit code 1): CallbackFailedError: callbacks.own failed: \x1b[31m"
    printed = capsys.readouterr().err
    assert printed.splitlines()[:1] == ([] if first_too else [f"error: {said}"])
    assert printed.count("callbacks.own failed") == (0 if first_too else 1)
    assert json.loads((tmp_path / "summary.json").read_text())["detail"] == (text if first_too else said)


def test_heartbeats_of_a_previous_session_are_ignored(tmp_path, monkeypatch, small_run, capsys):
    """Ranks that fail before the run has a folder leave no heartbeat."""
    config = compose_config(small_run(tmp_path, "trainer.devices=2", "parallel=ddp", "parallel.timeout_seconds=10"))
    left = tmp_path / "run" / "ranks"
    left.mkdir(parents=True)
    for rank, seen in ((0, 1000), (1, 900)):
        beat = {"rank": rank, "process": "elsewhere 4711 1", "step": 3, "at": "?"}
        (left / f"{rank}.json").write_text(json.dumps(beat))
        os.utime(left / f"{rank}.json", (seen, seen))

    def fail(*_):
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="")
        failure.message = {"message": "RuntimeError: no memory"}
        raise ChildFailedError("train", {0: failure})

    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", lambda *_: fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_ranks(config) == 1
    said = capsys.readouterr().err
    assert "rank 0 failed first (exit code 1): RuntimeError: no memory" in said
    assert "sign of life" not in said


PLANTED = "RuntimeError: planted failure"
LOST = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    ("seen", "left_behind", "first"),
    [
        ({0: (LOST, 7), 1: (PLANTED, 7)}, {}, 1),
        ({0: (LOST, 7)}, {1: (PLANTED, 7)}, 1),  # the agent looked before it had ended
        ({0: (LOST, 7)}, {1: (PLANTED, 60)}, 0),  # which failed of its own long after
        ({0: (PLANTED, 7), 1: (LOST, 7)}, {}, 0),
        ({0: (LOST, 7), 1: (LOST, 8)}, {}, 0),
    ],
)
def test_the_first_failure_within_a_second_is_the_rank_that_lost_no_peer(seen, left_behind, first, monkeypatch):
    def reply(folder: Path, rank: int, text: str, at: int) -> str:
        file = folder / "run" / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        about = {"message": text, "extraInfo": {"py_callstack": "", "timestamp": str(at)}}
        file.write_text(json.dumps({"message": about}))
        return str(file)

    def agent(settings, *_):
        def fail(*_):
            logs = Path(settings.logs_specs.root_log_dir)
            files = {rank: reply(logs, rank, *what) for rank, what in (seen | left_behind).items()}
            known = {rank: ProcessFailure(local_rank=rank, pid=1, exitcode=1, error_file=files[rank]) for rank in seen}
            raise ChildFailedError("train", known)

        return fail

    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", agent)
    with pytest.raises(ChildFailedError) as caught:
        launch_ranks(2, ["train"], threads=1, shutdown_seconds=1)
    assert first_failure(caught.value)[0] == first


@pytest.mark.parametrize(("code", "first"), [(-signal.SIGKILL, 1), (-signal.SIGSEGV, 1), (-signal.SIGTERM, 0)])
def test_a_rank_that_was_killed_is_first_and_one_that_the_agent_ended_is_not(code, first):
    lost = SimpleNamespace(exitcode=1, message={"message": LOST}, timestamp=7)
    ended = SimpleNamespace(exitcode=code, message="Signal received", timestamp=8)
    error = SimpleNamespace(failures={0: lost, 1: ended}, get_first_failure=lambda: (0, lost))
    assert first_failure(error)[0] == first
