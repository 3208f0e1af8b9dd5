"""`callbacks=evaluate`: the numbers of `evaluate`, the bits of a run without it, and refusals of a plan."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config
from lightning_llm.tracking.evaluations import read_evaluations
from lightning_llm.tracking.files import read_records
from lightning_llm.tracking.reading import read_run
from tests.evaluate.choice_task import choice_task

CALLBACK = "lightning_llm.evaluate.during_training.Evaluate"
WORDS = (
    "trainer.max_steps=5", "model.max_sequence_length=128", "checkpoint.every_steps=2", "checkpoint.keep_every=2",
    "precision=mxfp4_sr_norht", "precision.casts=eager",
)  # fmt: skip
TIMES = ("time", "seconds", "per_second", "memory", "mfu", "host", "process")


def steps_of(run):
    """Return the records without times and evaluations."""
    return [
        {key: value for key, value in record.items() if not any(each in key for each in (*TIMES, "eval/"))}
        for record in read_records(run / "metrics.jsonl")
    ]


def evaluating(folder):
    """Return the override that adds the callback, with a task of ours in `folder`."""
    return f"+callbacks.evaluate={{_target_: {CALLBACK}, every_steps: 2, tasks: [{choice_task(folder)}]}}"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_a_run_has_the_bits_of_one_without_it_and_the_numbers_of_its_validation(trained, tmp_path, small_run, offline):
    """`trained` validates after the same steps."""
    words = ("trainer.max_steps=4", "trainer.validate_every_steps=2", "model.max_sequence_length=128")
    assert main(["train", *small_run(tmp_path, *words, evaluating(tmp_path))]) == 0
    run = tmp_path / "run"
    assert steps_of(run) == steps_of(trained)
    own = {each["step"]: each["val_loss"] for each in read_records(run / "metrics.jsonl") if "val_loss" in each}
    recorded = [each for each in read_records(run / "metrics.jsonl") if "eval/val_loss" in each]
    assert {each["step"]: each["eval/val_loss"] for each in recorded} == own
    assert [each["eval/my_choice/acc"] for each in recorded] == [0.5, 0.5]
    assert read_run(run).validations["eval/my_choice/acc"] == {2: 0.5, 4: 0.5}  # for `compare`


@pytest.mark.full
def test_resumed_runs_and_checkpoints_have_the_same_numbers(tmp_path, small_run, offline, capsys):
    assert main(["train", *small_run(tmp_path / "plain", *WORDS)]) == 0
    words = (*WORDS, evaluating(tmp_path), "run.name=run")
    stop = "+callbacks.stop={_target_: tests.own_callbacks.StopsAlone, rank: 0, step: 3}"
    run = tmp_path / "run"
    assert main(["train", *small_run(tmp_path, *words, stop)]) == 0
    shutil.rmtree(run / "checkpoints" / "step=3")  # as if it had been killed before the save
    assert main(["train", *small_run(tmp_path, *words, "resume=auto")]) == 0
    assert [each for each in steps_of(run) if "loss" in each] == [
        each for each in steps_of(tmp_path / "plain" / "run") if "loss" in each
    ]
    inline = read_evaluations(run)
    assert sorted(inline) == [2, 4, 5]
    assert main(["evaluate", str(run), "--all-checkpoints", "--tasks", str(tmp_path / "my_choice.yaml")]) == 0
    for step, its in read_evaluations(run).items():
        assert {name: each["value"] for name, each in inline[step].items()}.items() <= {
            name: each["value"] for name, each in its.items()
        }.items()
        assert all(each["of"] == its[name]["of"] for name, each in inline[step].items())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "zero3", "tp", "pp", "cp"])
def test_every_layout_evaluates(layout, tmp_path, small_run, offline):
    words = (
        "trainer.max_steps=2",
        "model.max_sequence_length=128",
        "trainer.validate_every_steps=2",
        "model.num_kv_heads=2",
    )
    layout_words = (f"parallel={layout}", "trainer.devices=2")
    plain = run_of(small_run(tmp_path / "plain", *words, *layout_words))
    run = run_of(small_run(tmp_path, *words, *layout_words, evaluating(tmp_path)))
    assert steps_of(run) == steps_of(plain)
    (last,) = (each for each in read_records(run / "metrics.jsonl") if "val_loss" in each)
    (evaluated,) = (each for each in read_records(run / "metrics.jsonl") if "eval/val_loss" in each)
    assert evaluated["eval/val_loss"] == last["val_loss"]
    assert evaluated["eval/my_choice/acc"] == 0.5


def run_of(words):
    """Train in separate ranks; return the folder."""
    assert main(["train", *words]) == 0
    return next(Path(word.removeprefix("run.dir=")) for word in words if word.startswith("run.dir="))


def refused(*words):
    with pytest.raises(ConfigError) as error:
        check_config(compose_config(["recipe=quickstart", "callbacks=evaluate", *words]))
    return str(error.value)


def test_plans_refuse_evaluations_that_cannot_be_made(tmp_path):
    found = refused(
        "callbacks.evaluate.every_steps=0", "callbacks.evaluate.limit=1.5", "callbacks.evaluate.batch_size=0",
        f"callbacks.evaluate.tasks=[{tmp_path}/none.yaml]",
    )  # fmt: skip
    assert all(f"callbacks.evaluate.{key}" in found for key in ("every_steps", "limit", "batch_size"))
    assert "none.yaml is not a file" in found
    assert "holds out nothing" in refused("data.validation.fraction=0")
    assert "evaluates nothing" in refused("callbacks.evaluate.validation=false")


def test_random_generators_and_modes_are_restored():
    from types import SimpleNamespace

    from lightning_llm.evaluate.during_training import _restored

    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    module[1].eval()
    module.parallel = SimpleNamespace(decoders=[module[0]])
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))

    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with _restored(trainer, module):
        assert not any(each.training for each in module.modules())
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
    assert drawn() == expected
    assert [module.training, module[0].training, module[1].training] == [True, True, False]
