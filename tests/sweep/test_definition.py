"""Which jobs a sweep has, what they are called over repeated starts, and which of them are left to do. Seconds."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from short_jobs import CHILD, MEETING_CHILD, start_short_jobs, sweep_of, times

from lightning_llm.__main__ import _parser, main
from lightning_llm.config.compose import compose_config, compose_sweep, typed_value
from lightning_llm.config.file import write_config
from lightning_llm.config.identity import config_hash, training_hash
from lightning_llm.errors import ConfigError
from lightning_llm.record import liveness as heartbeat
from lightning_llm.record import sweep_definition as definition
from lightning_llm.record.files import write_json
from lightning_llm.record.provenance import has_ended, process_mark
from lightning_llm.record.reading import read_run
from lightning_llm.record.state import detail_of, state_of
from lightning_llm.record.sweep_definition import Job, Sweep, Typed, command_to_go_on, command_with_seeds, define, write
from lightning_llm.run.start import Start, decide_start
from lightning_llm.sweep import run as sweep_run
from lightning_llm.sweep.claims import allow_open_files, claimed
from lightning_llm.sweep.devices import DevicePool, cuda_devices
from lightning_llm.sweep.local import Relay, run_here
from lightning_llm.sweep.progress import Progress, duration

RECIPE = """# @package _global_
# Two precisions, and bf16 against itself.
run: {experiment: mine}
hydra: {sweeper: {params: {precision: "bf16,fp32", seed: "0,1"}}}
sweep:
  also: ["precision=bf16 data.micro_batch_size=1 seed=0,1"]
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "groups" / "recipe").mkdir(parents=True)
    (tmp_path / "groups" / "recipe" / "mine.yaml").write_text(RECIPE)
    return tmp_path / "groups"


def test_a_recipe_adds_jobs_beside_its_product(recipes: Path) -> None:
    jobs = compose_sweep(["recipe=mine"], recipes)
    assert [(c.precision.name, c.data.micro_batch_size, c.seed) for _, c in jobs] == [
        ("bf16", 4, 0), ("bf16", 4, 1), ("fp32", 4, 0), ("fp32", 4, 1), ("bf16", 1, 0), ("bf16", 1, 1),
    ]  # fmt: skip
    assert jobs[4][0] == ["precision=bf16", "data.micro_batch_size=1", "seed=0"]


def test_what_is_typed_takes_the_place_of_a_recipes_choices(recipes: Path) -> None:
    jobs = compose_sweep(["recipe=mine", "seed=5,6", "precision=mxfp8", "trainer.max_steps=9"], recipes)
    assert [(c.precision.name, c.seed, c.data.micro_batch_size) for _, c in jobs] == [
        ("mxfp8", 5, 4), ("mxfp8", 6, 4), ("bf16", 5, 1), ("bf16", 6, 1),
    ]  # fmt: skip
    assert {config.trainer.max_steps for _, config in jobs} == {9}


@pytest.mark.parametrize("also", ['{"a": 1}', "[3]", '["precision=bf16"], and: 2'])
def test_other_keys_of_a_sweep_are_refused(also: str, recipes: Path) -> None:
    (recipes / "recipe" / "mine.yaml").write_text(f"# @package _global_\n# x\nsweep: {{also: {also}}}\n")
    with pytest.raises(ConfigError, match="sweep: takes `also` alone"):
        compose_sweep(["recipe=mine", "seed=0,1"], recipes)


def test_a_recipe_that_is_a_sweep_is_no_single_run(recipes: Path) -> None:
    with pytest.raises(ConfigError, match="Add -m"):
        compose_config(["recipe=mine"], recipes)


def test_a_recipe_that_is_a_sweep_is_not_one_of_several(recipes: Path) -> None:
    with pytest.raises(ConfigError, match="recipe: has several values, and recipe=mine is a sweep itself"):
        compose_sweep(["recipe=quickstart,mine", "run.experiment=x"], recipes)
    assert len(compose_sweep(["recipe=quickstart,llama3_8b_fsdp2", "run.experiment=x"], recipes)) == 2


def test_the_same_words_are_the_same_sweep_and_others_are_not(tmp_path: Path) -> None:
    first = sweep_of(tmp_path, "seed=0,1")
    assert sweep_of(tmp_path, "seed=1,0").folder == first.folder  # the order is not what it is
    assert sweep_of(tmp_path, "seed=0,1", "logger=none", "launcher.at_once=2").folder == first.folder
    assert sweep_of(tmp_path, "seed=0,1,2").folder != first.folder
    assert [job.key for job in first.jobs] == [training_hash(job.config) for job in first.jobs]
    assert [job.folder for job in first.jobs] == [first.folder / "0", first.folder / "1"]
    assert first.axes == {"seed": ["0", "1"]}


def test_a_named_sweep_grows_and_its_jobs_keep_their_numbers(tmp_path: Path) -> None:
    write(sweep_of(tmp_path, "seed=1,2", name="grown"))
    grown = sweep_of(tmp_path, "seed=0,1,2,3", name="grown")
    assert [(job.config.seed, job.number) for job in grown.jobs] == [(0, 2), (1, 0), (2, 1), (3, 3)]
    write(sweep_of(tmp_path, "seed=3", name="grown"))
    listed = json.loads((tmp_path / "default" / "grown" / "sweep.json").read_text())["jobs"]
    assert [each["number"] for each in listed] == [0, 1, 2]


def test_more_seeds_by_the_printed_command_repeat_nothing(
    tmp_path: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command for seeds 0, 1, 2 of a sweep nobody named composes to its four jobs of old and to three new ones."""
    root = tmp_path / "runs of mine"

    def typed(*words: str) -> Sweep:
        return define(compose_sweep(words, recipes), typed_value(words, "run.name"), Typed(words, recipes))

    first = typed("recipe=mine", f"run.root={root}", "seed=0,1", "optim.learning_rate=2e-3", "logger.tags.who=a b")
    write(first)
    program, *words = shlex.split(command_with_seeds(first.folder, [2, 0, 1]))
    assert Path(program).name == "lightning-llm"
    arguments = _parser().parse_args(words)
    assert (arguments.verb, arguments.multirun, arguments.config_dir) == ("train", True, recipes)
    assert arguments.overrides == [
        "recipe=mine", "optim.learning_rate=2e-3", "logger.tags.who=a b", "seed=0,1,2",
        f"run.name={first.folder.name}", f"run.root={root}",
    ]  # fmt: skip
    grown = typed(*arguments.overrides)
    assert grown.folder == first.folder
    known = {job.key: job.number for job in first.jobs}
    assert {job.number for job in grown.jobs if job.key in known} == set(known.values())
    assert sorted(job.number for job in grown.jobs if job.key not in known) == [6, 7, 8]
    write(grown)  # by more seeds alone: still one command
    assert command_with_seeds(first.folder, [0]).count("train -m") == 1
    write(typed("recipe=mine", f"run.root={root}", "precision=mxfp8", "seed=0", f"run.name={first.folder.name}"))
    both = command_with_seeds(first.folder, [0, 9]).split(" && ")
    assert ["precision=mxfp8" in shlex.split(each) for each in both] == [False, True]
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(root))
    assert "run.root" not in command_with_seeds(first.folder, [0])


def test_a_printed_command_with_a_relative_path_says_where_to_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "the text"
    place.mkdir()
    words = ["data=jsonl", "data.sources.jsonl.path=a.jsonl", "seed=0,1", f"run.root={tmp_path}"]

    def typed(*words: str) -> Sweep:
        return define(compose_sweep(words), typed_value(words, "run.name"), Typed(words))

    monkeypatch.chdir(place)
    first = typed(*words)
    write(first)
    monkeypatch.chdir(tmp_path)
    for printed in (command_to_go_on(first), command_with_seeds(first.folder, [0, 1])):
        change, command = printed.split(" && ")
        monkeypatch.chdir(shlex.split(change)[1])
        again = typed(*_parser().parse_args(shlex.split(command)[1:]).overrides)
        assert [job.key for job in again.jobs] == [job.key for job in first.jobs]
        assert [job.config for job in again.jobs] == [job.config for job in first.jobs]
    monkeypatch.chdir(tmp_path)
    assert typed(*words).folder != first.folder  # another text


def test_the_same_run_twice_is_two_jobs(tmp_path: Path, recipes: Path) -> None:
    (recipes / "recipe" / "mine.yaml").write_text(RECIPE.replace("precision=bf16 data.micro_batch_size=1 seed", "seed"))
    jobs = define(compose_sweep([f"run.root={tmp_path}", "recipe=mine", "precision=fp32"], recipes), None).jobs
    assert [(job.number, job.config.seed) for job in jobs] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [job.key for job in jobs[2:]] == [f"{job.key}-1" for job in jobs[:2]]


def test_jobs_that_differ_in_what_no_config_hash_holds_keep_apart(tmp_path: Path) -> None:
    words = ["precision=mxfp8", "precision.casts=eager"]
    first = sweep_of(tmp_path, *words, "precision.backend=emulated,auto")
    write(first)
    again = sweep_of(tmp_path, *words, "precision.backend=auto,emulated")
    assert again.folder == first.folder
    assert [(job.number, job.config.precision.backend) for job in again.jobs] == [(1, "auto"), (0, "emulated")]
    plain = sweep_of(tmp_path, *words, "precision.backend=emulated", "seed=0,1")
    assert [job.key for job in plain.jobs] == [training_hash(job.config) for job in plain.jobs]


def test_observers_make_no_other_sweep_and_one_of_an_earlier_version_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["precision=bf16,fp32"]
    averaged = "+callbacks.ema={_target_: lightning.pytorch.callbacks.EMAWeightAveraging}"
    observed = [(), ("callbacks=none",), ("callbacks.progress=null", "callbacks.sample.prompt=x")]
    assert len({sweep_of(tmp_path, *words, *more).hash for more in observed}) == 1
    assert sweep_of(tmp_path, *words, averaged).hash != sweep_of(tmp_path, *words).hash
    shown = sweep_of(tmp_path, "callbacks=none,default").jobs
    assert len({training_hash(job.config) for job in shown}) == 1
    assert len({job.key for job in shown}) == 2
    with monkeypatch.context() as earlier:
        earlier.setattr(definition, "training_hash", config_hash)
        earlier.setattr(definition, "UNHASHED", ())
        before = sweep_of(tmp_path, *words)
        write(before)
    again = sweep_of(tmp_path, *words)
    assert (again.folder, again.hash) == (before.folder, before.hash)
    assert [(job.number, job.key) for job in again.jobs] == [(job.number, job.key) for job in before.jobs]
    grown = sweep_of(tmp_path, "precision=bf16,fp16", name=before.folder.name)
    assert [job.number for job in grown.jobs] == [0, 2]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "default" / "taken").mkdir(parents=True)
    (tmp_path / "default" / "taken" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"no sweep.*run\.name"):
        sweep_of(tmp_path, "seed=0,1", name="taken")


@pytest.mark.parametrize(
    "damage",
    [
        [],
        {"jobs": None},
        {"jobs": [{}]},
        {"jobs": [{"number": -5, "key": "a"}]},
        {"jobs": [{"number": "../../evil", "key": "a"}]},
        {"jobs": [{"number": 0, "key": "a"}, {"number": 0, "key": "b"}]},
        {"jobs": [{"number": 0, "key": "a"}, {"number": 1, "key": "a"}]},
    ],
    ids=str,
)
def test_a_damaged_sweep_file_calls_no_job_finished(damage: Any, tmp_path: Path) -> None:
    whole = sweep_of(tmp_path, "seed=0,1", name="one")
    write(whole)
    (whole.folder / "sweep.json").write_text(json.dumps(damage))
    with pytest.raises(ConfigError, match="it is damaged"):
        sweep_of(tmp_path, "seed=3,4", name="one")


def test_a_sweep_over_experiments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one for all jobs"):
        sweep_of(tmp_path, "run.experiment=a,b")


def test_processes_are_told_apart_from_those_that_took_their_number() -> None:
    mine = process_mark()
    host, number, started = mine.split()
    assert not has_ended(mine)
    assert has_ended(f"{host} {number} {float(started) - 100:.0f}")
    assert not has_ended(f"elsewhere {number} {started}")  # nobody here can tell
    assert not has_ended("")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        mark = f"{host} {child.pid} {started}"
        child.communicate(b"\n")
    assert has_ended(mark)


def summary(job: Job, status: str, process: str = "") -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / "summary.json").write_text(json.dumps({"status": status, "process": process, "detail": ""}))


def test_a_run_whose_process_died_is_stopped(tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    assert state_of(job.folder) == "new"
    summary(job, "running", process_mark())
    assert state_of(job.folder) == "running"
    host, number, _ = process_mark().split()
    summary(job, "running", f"{host} {number} 1")
    assert state_of(job.folder) == "stopped"
    summary(job, "failed")
    assert state_of(job.folder) == "failed"


@pytest.mark.parametrize("damage", [b"", b'{"status": "fin', b"null", b"\xff\xfe"])
def test_a_damaged_summary_is_a_stopped_run_that_says_so(damage: bytes, tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    job.folder.mkdir(parents=True)
    file = job.folder / "summary.json"
    file.write_bytes(damage)
    assert state_of(job.folder) == "stopped"
    assert detail_of(job.folder).startswith(f"{file} is damaged: ")
    write_config(job.config, job.folder / "config.yaml")
    for resume in (None, "auto"):
        with pytest.raises(ConfigError, match=rf"run\.dir: {re.escape(str(file))} is damaged.*remove that file"):
            decide_start(job.config.model_copy(update={"resume": resume}))
    file.unlink()
    assert decide_start(job.config.model_copy(update={"resume": "auto"})) == Start()


def silent(folder: Path, seconds: float) -> None:
    """Let nothing have been heard of the run for `seconds`."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds, time.time() - seconds))


def test_a_run_of_another_machine_is_stopped_once_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 100.0)
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    again = job.config.model_copy(update={"resume": "auto"})
    summary(job, "running", "node17 4242 1700000000")
    write_config(job.config, job.folder / "config.yaml")
    silent(job.folder, 90)
    assert state_of(job.folder) == "running"
    with pytest.raises(ConfigError, match="being trained right now, by process 4242 of the machine node17"):
        decide_start(job.config)  # which wants a folder without a run, whatever becomes of that one

    silent(job.folder, 90)
    sign = threading.Timer(0.7, os.utime, [job.folder / "summary.json"])
    sign.start()
    with pytest.raises(ConfigError, match="being trained right now, by process 4242 of the machine node17"):
        decide_start(again)
    sign.join()
    silent(job.folder, 99)  # as where a killed job is started again on another node, at once
    assert decide_start(again) == Start()
    assert "waiting for a sign of it, 1 s at most" in capsys.readouterr().out
    assert state_of(job.folder) == "stopped"
    silent(job.folder, 1e6)
    summary(job, "running", process_mark())  # of this machine, its number says more than its silence
    silent(job.folder, 1e6)
    assert state_of(job.folder) == "running"


def test_two_at_a_time_are_two_and_never_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, MEETING_CHILD)
    jobs = sweep_of(tmp_path, "seed=0,1,2,3").jobs
    progress = Progress(len(jobs))
    run_here(jobs, 2, Relay(), progress)
    assert {each.job.number: each.code for each in progress.outcomes} == {0: 0, 1: 0, 2: 1, 3: 0}
    began = [times(job)[0] for job in jobs]
    most = max(sum(times(job)[0] <= moment < times(job)[1] for job in jobs) for moment in began)
    assert most == 2
    assert (jobs[0].folder.parent / "logs" / "0.log").read_text() == "spoke auto\n"
    assert sorted(path.name for path in jobs[0].folder.parent.iterdir()) == [".claims", "0", "1", "2", "3", "logs"]


@pytest.mark.usefixtures("short_children")
def test_two_starts_of_one_sweep_share_its_jobs(tmp_path: Path) -> None:
    jobs = sweep_of(tmp_path, "seed=0,1,3").jobs
    both = [Progress(len(jobs)), Progress(len(jobs))]
    threads = [threading.Thread(target=run_here, args=(jobs, 1, Relay(), each)) for each in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [outcome.job.number for each in both for outcome in each.outcomes]
    assert sorted(done) == [0, 1, 2]  # the folder of a job that ran twice would be there already


def test_two_starts_of_one_sweep_make_one_parent_and_see_each_others_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    composed = compose_sweep([f"run.root={tmp_path}", "seed=0,1"])
    made: list[str] = []

    def slow_parent(job: dict[str, Any]) -> tuple[str, str]:
        time.sleep(0.2)
        if not job["run_id"]:
            made.append(f"parent{len(made)}")
        return job["run_id"] or made[-1], ""

    monkeypatch.setattr(sweep_run, "checked_jobs", lambda arguments: (composed, None, None))  # Hydra is of one thread
    monkeypatch.setattr(sweep_run, "signals_passed_on", lambda: nullcontext(Relay()))
    monkeypatch.setattr(sweep_run, "run_here", lambda *_: None)
    monkeypatch.setattr(sweep_run, "catch_up", lambda folders: "")
    monkeypatch.setattr(sweep_run, "write_parent", slow_parent)
    with ThreadPoolExecutor(2) as pool:
        assert [start.result() for start in [pool.submit(sweep_run.sweep, None) for _ in range(2)]] == [0, 0]
    assert made == ["parent0"]
    whole = define(composed, None)
    assert whole.parent_run_id == "parent0"
    whole.jobs[0].folder.mkdir()
    (whole.jobs[0].folder / "summary.json").write_text('{"status": "failed", "detail": "OSError: full"}')
    monkeypatch.setattr(sweep_run, "settled_state", lambda folder: "running")  # as if another start ran them
    assert sweep_run.sweep(None) == 0  # nothing to do here
    monkeypatch.setattr(sweep_run, "settled_state", state_of)
    assert sweep_run.sweep(None) == 1
    assert "failed in another start" in capsys.readouterr().err


ENDINGS = """
import json, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[1]))
folder = pathlib.Path(config["run"]["dir"]); folder.mkdir(exist_ok=True)
with (folder / "starts").open("a") as file: file.write("x")
detail = {1: "NonFiniteError: the loss of step 3 is nan.", 2: "OSError: No space left on device"}.get(config["seed"])
(folder / "summary.json").write_text(json.dumps({"status": "failed" if detail else "finished", "detail": detail}))
sys.exit(detail is not None)
"""


def test_a_crashed_job_is_run_again_and_a_diverged_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, ENDINGS)
    handed_in: list[dict[str, Any]] = []
    monkeypatch.setattr(sweep_run, "write_parent", lambda job: handed_in.append(job) or ("parent", ""))
    words = ["train", "-m", f"run.root={tmp_path}", "logger=mlflow", "run.name=all"]
    assert [main([*words, "seed=0,1,2"]) for _ in range(2)] == [1, 1]
    folder = tmp_path / "default" / "all"
    assert [(folder / str(number) / "starts").read_text() for number in range(3)] == ["x", "x", "xx"]
    assert [job["status"] for job in handed_in] == [None, "FAILED", None, "FAILED"]  # as it begins and as it ends
    assert handed_in[-1]["metrics"] == {"jobs/finished": 1, "jobs/diverged": 1, "jobs/failed": 1, "jobs/total": 3}
    assert main([*words, "seed=0,1,3"]) == 0
    assert handed_in[-1]["status"] == "FINISHED"


def test_jobs_side_by_side_get_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = DevicePool(["0", "1", "2", "3"])
    with pool.lent(1) as first, pool.lent(2) as second, pool.lent(1) as third:
        assert (first, second, third) == (["0"], ["1", "2"], ["3"])
        with pool.lent(4) as everything, pool.lent(5) as more_than_there_are:
            assert (everything, more_than_there_are) == (["0", "1", "2", "3"], [])
    with pool.lent(2):
        with pool.lent(1) as other:
            assert other == ["2"]
        with pool.lent(1) as again:
            assert again == ["2"]  # given back
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1f, 3")
    assert cuda_devices() == ["GPU-1f", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_devices() == []


def test_two_jobs_at_a_time_run_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_short_jobs(monkeypatch, CHILD.replace('config["resume"]', '__import__("os").environ["CUDA_VISIBLE_DEVICES"]'))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    jobs = sweep_of(tmp_path, "seed=0,1", "trainer.accelerator=auto").jobs
    run_here(jobs, 2, Relay(), Progress(2))
    assert {(jobs[0].folder.parent / "logs" / f"{job.number}.log").read_text() for job in jobs} == {
        "spoke 4\n", "spoke 7\n"
    }  # fmt: skip


def test_more_claims_than_open_files_are_allowed(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, before[1]))
    try:
        allow_open_files(200)
        with ExitStack() as claims:
            assert all(claims.enter_context(claimed(replace(job, number=number))) for number in range(200))
        with pytest.raises(ConfigError, match="open files, and this machine allows"):
            allow_open_files(before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_claimed_job_is_left_alone(tmp_path: Path) -> None:
    job = sweep_of(tmp_path, "seed=0").jobs[0]
    with claimed(job) as mine, claimed(job) as also:
        assert (mine, also) == (True, False)
    with claimed(job) as again:
        assert again


@pytest.mark.parametrize(("seconds", "text"), [(12.2, "12s"), (185, "3m05s"), (9600, "2h40m")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("policy", "event", "state"),
    [
        ("stop", "divergence", "diverged"),
        ("stop", "non_finite", "diverged"),
        ("skip", "spike", "diverged"),
        ("stop", "spike", "failed"),
        ("stop", "shift", "failed"),
    ],
)
def test_an_end_by_the_spike_policy_is_what_compare_takes_it_for(
    policy: str, event: str, state: str, tmp_path: Path
) -> None:
    (job,) = sweep_of(tmp_path, f"spikes.policy={policy}").jobs
    job.folder.mkdir(parents=True)
    write_config(job.config, job.folder / "config.yaml")
    records = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 9.0, "event": event, "event_action": "stop"}]
    (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    write_json(job.folder / "summary.json", {"status": "failed", "detail": "SpikeStop: step 2 is out of the ordinary"})
    assert state_of(job.folder) == state
    assert read_run(job.folder).lost_its_loss == (state == "diverged")
