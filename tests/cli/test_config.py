"""`config` prints a config that repeats the run, the differences, and the choices; Tab completes them. 10 seconds."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.cli.completion import SHELLS, complete_override
from lightning_llm.cli.config import override_value
from lightning_llm.config import yaml_file as config_file
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.recipes import describe, group_names, option_files
from lightning_llm.config.schema.optim import SCHEDULES, ScheduleConfig

ROOT = Path(__file__).parents[2]
PLACE = {"run": {"name", "dir"}, "recipe": True}
"""Left out of comparisons: the name contains the time, and a composed config has no preset."""


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def printed(capsys, *words: str) -> str:
    assert main(["config", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_what_is_printed_repeats_the_run(capsys, tmp_path):
    words = ["recipe=quickstart", "precision=mxfp8", "seed=3", "run.name=mine"]
    text = printed(capsys, *words)
    (tmp_path / "config.yaml").write_text(text)
    assert load_config(tmp_path / "config.yaml", []) == compose_config(words)
    assert printed(capsys, "--config", str(tmp_path / "config.yaml")) == text
    assert json.loads(printed(capsys, *words, "--json")) == yaml.safe_load(text)
    assert main(["train", "--cfg", "job", *words]) == 0  # as Hydra's own programs have it
    assert capsys.readouterr().out == text


def test_the_text_reads_the_same_without_libyaml(monkeypatch):
    long = "many words, more of them: than a line of eighty columns takes, " * 3
    words = ["run.name='ü # \u2028 \U0001f600'", f"run.experiment='{long}'", "+logger.tags.why='a: b, {c}\t- \"d\"'"]
    config = compose_config(words)
    read = yaml.safe_load(config_file.config_text(config))
    assert read["run"] == config.run.model_dump()
    monkeypatch.setattr(config_file, "_DUMPER", yaml.SafeDumper)
    assert yaml.safe_load(config_file.config_text(config)) == read


@pytest.mark.parametrize(
    "words",
    [
        ["recipe=llama3_8b_fsdp2", "~callbacks.memory", "precision.modules.exclude=['layers.0.*']"],
        [
            "precision=quartet", "data=jsonl", "data.sources.jsonl.path=~/a b/it's (1).jsonl", "seed=4294967295",
            "+logger.tags.why='a: b, {c}'", "+logger.tags.n=7", "optim.gradient_clip_norm=null", "optim.eps=1e-30",
            "precision.phases=[{start: 0.5, fprop: {x: {format: e4m3}, w: {format: e4m3}}}]", "callbacks=none",
        ],
    ],
    ids=["recipe", "typed"],
)  # fmt: skip
def test_the_difference_makes_the_same_config_of_the_defaults(words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "it's (1).jsonl").touch()
    lines = printed(capsys, *words, "--diff").splitlines()
    difference = [shlex.split(line, comments=True)[0] for line in lines if not line.startswith("#")]
    composed, again = compose_config(words), compose_config(difference)
    assert again.model_dump(exclude=PLACE) == composed.model_dump(exclude=PLACE)
    assert len(difference) <= 20  # a group's file is one word, not its keys
    assert not printed(capsys, "--diff")


@pytest.mark.parametrize("option", ["--json", "--diff"])
def test_config_reports_conflicts_that_train_would_reject(option, capsys):
    assert main(["config", option, "model.num_heads=5", "parallel=tp", "data.micro_batch_size=3"]) == 2
    out, err = capsys.readouterr()
    assert "num_heads" in out
    assert "model.hidden_size: " in err
    assert "data.global_batch_size: " in err


def test_the_difference_of_a_runs_own_file(capsys, tmp_path):
    (tmp_path / "config.yaml").write_text(printed(capsys, "precision=fp32", "optim.learning_rate=2e-3", "run.name=x"))
    lines = printed(capsys, "--config", str(tmp_path / "config.yaml"), "--diff").splitlines()
    assert {"precision=fp32  # bf16", "optim.learning_rate=0.002  # 0.001"} <= set(lines)
    assert not any(line.startswith("precision.") for line in lines)


def test_the_difference_of_a_runs_own_file_names_the_files_of_a_config_dir(capsys, tmp_path):
    own = tmp_path / "own" / "precision" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("defaults: [mxfp8, _self_]\nname: mine\n")
    file, option = tmp_path / "config.yaml", ("--config-dir", str(tmp_path / "own"))
    file.write_text(printed(capsys, *option, "precision=mine", "run.name=x"))
    lines = printed(capsys, *option, "--config", str(file), "--diff").splitlines()
    assert "precision=mine  # bf16" in lines
    assert not any(line.startswith("precision.") for line in lines)


@pytest.mark.parametrize("option", ["--json", "--diff"])
def test_no_password_is_printed(option, capsys):
    told = printed(capsys, "logger.tracking_uri=postgresql://me:hunter2@host/db", option)
    assert "hunter2" not in told
    assert "@host/db" in told or "//host/db" in told


@pytest.mark.parametrize(
    "value", [None, True, 3, -0.5, 1e-30, "x", "", "null", "7", "a'b", "a\\", "${x}", ["a", 1], {"k": [{}]}]
)
def test_values_read_back(value):
    (parsed,) = parse_overrides([f"callbacks.x.y={override_value(value)}"])
    assert parsed.value() == value
    assert type(parsed.value()) is type(value)


def test_groups(capsys):
    lines = printed(capsys, "precision=mxfp8", "--group", "precision").splitlines()
    assert [line[2:].split()[0] for line in lines] == list(option_files("precision"))
    assert [line for line in lines if line[0] == "*"] == [line for line in lines if line.split()[1:2] == ["mxfp8"]]
    everything = printed(capsys, "--group").splitlines()
    assert [line[:-1] for line in everything if line[0] not in " *"] == group_names()
    assert json.loads(printed(capsys, "--group", "--json"))["parallel"]["chosen"] == "single"


def test_a_group_shows_kinds_of_installed_packages(capsys, monkeypatch):
    class RisingConfig(ScheduleConfig):
        """A rate that only rises."""

        name: Literal["rising"] = "rising"

    assert "Has no file" not in printed(capsys, "--group", "schedule")
    monkeypatch.setitem(SCHEDULES._kinds, "rising", RisingConfig)
    last = printed(capsys, "--group", "schedule").splitlines()[-1]
    assert last.split(maxsplit=1) == ["rising", "A rate that only rises. Has no file: set schedule.name=rising."]
    shown = json.loads(printed(capsys, "--group", "schedule", "--json"))["schedule"]
    assert shown["kinds_without_file"] == {"rising": "A rate that only rises."}
    assert "rising" not in shown["values"]


@pytest.mark.parametrize("group", group_names())
def test_every_file_says_in_one_sentence_what_it_is(group):
    for name, file in option_files(group).items():
        assert describe(file).endswith((".", "?")), name


@pytest.mark.parametrize(
    ("prefix", "offered"),
    [
        ("prec", ["precision=", "precision."]),
        ("precision=mxfp4_r", ["precision=mxfp4_rht_rne", "precision=mxfp4_rne"]),
        ("+precision=fp3", ["+precision=fp32"]),
        ("~callb", ["~callbacks=", "~callbacks."]),
        ("recipe=sweep/a", ["recipe=sweep/aa_noise"]),
        ("model.num_", ["model.num_layers=", "model.num_heads=", "model.num_kv_heads="]),
        ("precision.loss_scaling.h", ["precision.loss_scaling.hysteresis="]),
        ("optim.", None),
        ("data.shuffle=", ["data.shuffle=true", "data.shuffle=false"]),
        ("trainer.accelerator=c", ["trainer.accelerator=cpu", "trainer.accelerator=cuda"]),
        ("data.sources.", []),
        ("seed=", []),
        ("nothing.", []),
    ],
)
def test_completions(prefix, offered):
    found = [each for each in complete_override(prefix, argparse.Namespace(config_dir=None)) if each.startswith(prefix)]
    assert offered is None or found == offered
    assert bool(found) == (offered != [])


def test_own_groups_are_completed(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").touch()
    assert "recipe=mine" in complete_override("recipe=", argparse.Namespace(config_dir=tmp_path))


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_for_each_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "lightning-llm" in capsys.readouterr().out


def test_shell_completion_answers(tmp_path):
    """The completion that the script runs: arguments in the environment, answers to a file; without Hydra and torch."""
    for line, offered in (("lightning-llm pl", {"plan"}), ("lightning-llm plan precision=fp3", {"precision=fp32"})):
        answer = tmp_path / "answer"
        code = (
            "import atexit, os, sys\nfrom lightning_llm import __main__\n"
            "os._exit = lambda code: sys.exit(print(*sorted({'hydra', 'torch', 'pydantic'} & set(sys.modules))))\n"
            "__main__.main()"
        )
        environment = os.environ | {
            "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT)
        assert set(answer.read_text().split()) == offered, done.stderr
        assert done.stdout.strip() == ""


def test_a_sweep_is_printed_with_what_its_jobs_differ_in(capsys):
    words = ["precision=bf16,nvfp4", "seed=0,1", "trainer.max_steps=7"]
    assert main(["config", "-m", *words]) == 0
    text = capsys.readouterr().out
    first = yaml.safe_load(text)  # what follows the first job's config are comments
    assert (first["precision"]["name"], first["seed"], first["trainer"]["max_steps"]) == ("bf16", 0, 7)
    assert text.endswith("# job 3 of 4: precision=nvfp4 seed=1\n#   precision.name=nvfp4\n#   seed=1\n")
    assert main(["config", "-m", "--json", *words]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert [each["config"]["seed"] for each in jobs] == [0, 1, 0, 1]
    assert jobs[3]["overrides"] == ["precision=nvfp4", "seed=1"]
    assert main(["config", "-m", "--diff", *words]) == 2
    assert "--diff: cannot be used with -m" in capsys.readouterr().err


def test_values_are_completed_behind_a_comma_too():
    typed = complete_override("precision=bf16,mx", argparse.Namespace(config_dir=None))
    assert "precision=bf16,mxfp8" in typed
    assert "precision=bf16,bf16" not in typed
    assert complete_override("parallel.schedule=gpipe,", argparse.Namespace(config_dir=None))[0].startswith(
        "parallel.schedule=gpipe,1f1b"
    )
