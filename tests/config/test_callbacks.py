"""Classes that a config names: allowed ones, and the messages about others, from every verb before any import."""

import sys

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.schema.callbacks import check_target

LIGHTNING = "lightning.pytorch.callbacks"
REFUSED = {
    f"{LIGHTNING}.ModelCheckpoint": "checkpoint.every_steps",
    f"{LIGHTNING}.model_checkpoint.ModelCheckpoint": "checkpoint.every_steps",
    f"{LIGHTNING}.GradientAccumulationScheduler": "data.global_batch_size",
    f"{LIGHTNING}.TQDMProgressBar": "callbacks.progress",
    f"{LIGHTNING}.StochasticWeightAveraging": "EMAWeightAveraging",
    f"{LIGHTNING}.BackboneFinetuning": "every parameter is trained",
    "tests.own_callbacks.Bars": "Bars (a TQDMProgressBar) conflicts with this trainer: callbacks.progress",
    "subprocess.Popen": "must be a class derived from lightning.pytorch.Callback",
    "lightning_llm.callbacks.throughput.FetchClock": "must be a class derived from lightning.pytorch.Callback",
    "pytorch_lightning.callbacks.Timer": "Use lightning.pytorch",
    "os.system": "there is no class 'system' in the source of os",
    "builtins.eval": "there is no class 'eval' in the source of builtins",
    f"{LIGHTNING}.EarlyStoping": "Did you mean 'EarlyStopping'?",
    "no_such_package.Callback": "--config-dir",
    "config_dir.callbacks.mine.Mine": "give --config-dir DIR",
    "Nothing": "must be package.module.Class",
}


@pytest.mark.parametrize("target", REFUSED)
def test_forbidden_callbacks_are_refused_with_a_remedy(target):
    (problem,) = check_target("callbacks.x", {"_target_": target})
    assert problem.key == "callbacks.x._target_"
    assert REFUSED[target] in problem.text


@pytest.mark.parametrize(
    "target",
    [
        *(f"{LIGHTNING}.{name}" for name in ("Timer", "LearningRateMonitor", "DeviceStatsMonitor", "WeightAveraging")),
        "lightning.pytorch.Callback",
        "lightning_llm.callbacks.throughput.Throughput",
        "tests.own_callbacks.Remembers",
    ],
)
def test_callbacks_may_be_named_wherever_they_are_imported_from(target):
    assert check_target("callbacks.x", {"_target_": target}) == []


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"duration": {"_target_": "subprocess.Popen"}}, "callbacks.x.duration._target_"),
        ({"interval": [{"deep": {"_target_": "os.system"}}]}, "callbacks.x.interval.0.deep._target_"),
        ({"_partial_": True}, "callbacks.x._partial_"),
        ({"_args_": [1]}, "callbacks.x._args_"),
    ],
)
def test_nothing_but_the_callback_names_a_class(more, key):
    (problem,) = check_target("callbacks.x", {"_target_": f"{LIGHTNING}.Timer", **more})
    assert problem.key == key


def test_arguments_of_a_parent_are_known():
    (problem,) = check_target("callbacks.x", {"_target_": f"{LIGHTNING}.EarlyStopping", "monitor": "a", "patiance": 1})
    assert (problem.key, problem.text[-24:]) == ("callbacks.x.patiance", "Did you mean 'patience'?")


def test_every_verb_refuses_a_program_and_does_not_run_it(tmp_path, small_run, capsys):
    mark = tmp_path / "ran"
    words = small_run(tmp_path, f"+callbacks.x={{_target_: subprocess.Popen, args: [touch, '{mark}']}}")
    for verb in ("plan", "train"):
        assert main([verb, *words]) == 2
        assert "callbacks.x._target_=subprocess.Popen: must be a class derived from" in capsys.readouterr().err
    assert not mark.exists()


def test_errors_of_a_callbacks_constructor_are_reported_with_its_key(tmp_path, small_run, capsys):
    stop = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: val_loss, mode: least}"
    assert main(["train", *small_run(tmp_path, stop)]) == 2
    assert "callbacks.stop: lightning.pytorch.callbacks.EarlyStopping cannot be built" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("accumulate_grad_batches", "data.global_batch_size"),
        ("strategy", "parallel=zero3"),
        ("max_epochs", "max_steps"),
    ],
)
def test_a_key_of_lightnings_trainer_gets_a_hint(key, ours, tmp_path, small_run, capsys):
    assert main(["plan", *small_run(tmp_path, f"trainer.{key}=2")]) == 2
    said = capsys.readouterr().err
    assert f"trainer.{key}: is an argument of Lightning's Trainer. Use " in said
    assert ours in said


OWN = """
import lightning.pytorch as pl


class Says(pl.Callback):
    def __init__(self, word: str = "hello"):
        self.word = word

    def on_train_start(self, trainer, pl_module):
        print(self.word, flush=True)
"""


def test_own_callbacks_beside_a_recipe(tmp_path, small_run, capsys):
    folder = tmp_path / "mine"
    (folder / "callbacks").mkdir(parents=True)
    (folder / "callbacks" / "says.py").write_text(OWN)
    (folder / "callbacks" / "mine.yaml").write_text("says:\n  _target_: config_dir.callbacks.says.Says\n  word: hi\n")
    words = [word for word in small_run(tmp_path) if not word.startswith("callbacks=")]
    words += ["callbacks=mine", "trainer.max_steps=1"]
    assert main(["train", *words, "--config-dir", str(folder)]) == 0
    assert "hi\n" in capsys.readouterr().out
    config = tmp_path / "run" / "config.yaml"
    again = ["train", "--config", str(config), f"run.dir={tmp_path / 'again'}"]
    assert main([*again, "--config-dir", str(folder), "callbacks.says.word=ho"]) == 0
    assert "ho\n" in capsys.readouterr().out
    assert main([*again, "--config-dir", str(tmp_path)]) == 2  # a config alone names no code that is not installed
    assert "callbacks.says._target_: there is no 'config_dir.callbacks.says'" in capsys.readouterr().err


def test_a_file_of_callbacks_is_not_imported_to_check_it():
    before = set(sys.modules)
    assert check_target("callbacks.x", {"_target_": "tests.own_callbacks.StopsAlone", "rank": 1, "step": "2"})
    assert not {
        each for each in set(sys.modules) - before if each.startswith(("tests.own_callbacks", "lightning.pytorch"))
    }
