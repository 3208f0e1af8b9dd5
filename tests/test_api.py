"""The functions of `lightning_llm` do the same as the verbs, and refuse with messages. 10 seconds."""

import inspect
import json
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.launcher.api

import lightning_llm
import lightning_llm.train.step
from lightning_llm.__main__ import main
from lightning_llm.cli import train as train_verb
from lightning_llm.run.launch.torch_agent import AGENT_SIGNALS
from tests.run_metrics import curve, read_metrics, same_weights

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, small_run) -> tuple[lightning_llm.TrainResult, lightning_llm.TrainResult]:
    """The same run in fp32 and under mxfp8, 4 steps."""
    folder = tmp_path_factory.mktemp("runs")

    def trained(name: str, *more: str) -> lightning_llm.TrainResult:
        words = small_run(folder / name, "trainer.max_steps=4", "trainer.compile=false", *more)
        return lightning_llm.train(lightning_llm.compose(*words), quiet=True)

    return trained("fp32"), trained("mxfp8", "precision=mxfp8", "precision.casts=eager")


def test_importing_it_imports_no_library_and_only_small_modules():
    code = (
        "import sys; before = set(sys.modules); import lightning_llm; dir(lightning_llm); "
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] not in sys.stdlib_module_names)); "
        "print(sorted({'inspect', 'dataclasses', 'argparse'} & (set(sys.modules) - before)));"
        "lightning_llm.train, lightning_llm.compose, lightning_llm.ConfigError; "
        "print(sorted({'torch', 'hydra', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT)
    packages, standard, with_api = done.stdout.splitlines()
    assert packages == str(
        [
            "lightning_llm",
            "lightning_llm.base",
            "lightning_llm.base.at_start",
            "lightning_llm.base.moved",
            "lightning_llm.base.process",
            "lightning_llm.compare",
            "lightning_llm.evaluate",
            "lightning_llm.probe",
            "lightning_llm.train",
        ]
    ), done.stderr
    assert standard == "[]"
    assert with_api == "[]"


def test_the_names_are_functions_and_packages_both():
    assert lightning_llm.train.step.TrainStep
    for name in lightning_llm.__all__:
        assert name in dir(lightning_llm)
        assert inspect.getdoc(getattr(lightning_llm, name))
    assert list(inspect.signature(lightning_llm.train).parameters) == ["config", "quiet"]
    assert "margin" in inspect.signature(lightning_llm.compare).parameters
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = lightning_llm.trian


def test_compose_raises_all_problems_at_once(small_run, tmp_path):
    with pytest.raises(lightning_llm.ConfigError) as raised:
        lightning_llm.compose(*small_run(tmp_path), "model.hiden_size=3", "trainer.max_steps=x", "parallel.tp=3")
    assert [problem.key for problem in raised.value.problems][:2] == ["model.hiden_size", "trainer.max_steps"]
    assert any("parallel.tp" in problem.key for problem in raised.value.problems)
    with pytest.raises(lightning_llm.ConfigError, match=r"overrides: .*Unpack a list with \*list"):
        lightning_llm.compose(["seed=1"])


def test_train_is_the_verb(runs, small_run, tmp_path, capsys):
    result, _ = runs
    words = small_run(tmp_path, "trainer.max_steps=4", "trainer.compile=false")
    assert main(["train", *words]) == 0
    printed = capsys.readouterr().out
    assert curve(result.folder) == curve(tmp_path / "run")
    assert same_weights(result.folder, tmp_path / "run", 4)
    assert result.summary["status"] == "finished"
    assert result.records == read_metrics(result.folder)
    assert [each["step"] for each in result.records if "loss" in each] == [1, 2, 3, 4]
    assert len(repr(result)) < 300
    again = lightning_llm.train(lightning_llm.compose(*words, "resume=auto"))
    assert again.records == read_metrics(tmp_path / "run")
    assert "is finished at step 4" in capsys.readouterr().out
    assert "run    " in printed


def test_quiet_prints_nothing_and_what_was_changed_is_put_back(small_run, tmp_path, capsys):
    threads, handlers = torch.get_num_threads(), [signal.getsignal(each) for each in AGENT_SIGNALS]
    torch.set_num_threads(2)
    lightning_llm.train(
        lightning_llm.compose(*small_run(tmp_path, "trainer.max_steps=1", "parallel=zero1")), quiet=True
    )
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    assert [signal.getsignal(each) for each in AGENT_SIGNALS] == handlers
    assert not dist.is_initialized()
    assert capsys.readouterr().out == ""


@pytest.mark.full
def test_quiet_is_quiet_in_a_notebook(runs, small_run, tmp_path, capsys, monkeypatch):
    """In Jupyter, rich's consoles print through IPython's `display`, not `sys.stdout`."""
    displayed = []
    ipython = ModuleType("IPython.display")  # not a dependency of ours: rich imports it where it runs in Jupyter
    ipython.display = lambda *shown, **_: displayed.extend(shown)
    ipython.DisplayHandle = ipython.HTML = object
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", ipython)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    words = small_run(tmp_path, "trainer.max_steps=2", "trainer.validate_every_steps=1", "callbacks=default")
    lightning_llm.train(lightning_llm.compose(*words), quiet=True)
    lightning_llm.compare(runs, quiet=True, output=tmp_path / "report")
    lightning_llm.evaluate(runs[0], quiet=True, output=tmp_path / "evaluation.json")
    assert (capsys.readouterr().out, displayed) == ("", [])
    lightning_llm.compare(runs, output=tmp_path / "report")
    assert "mxfp8" in capsys.readouterr().out
    assert displayed == []


def test_a_copy_is_checked_too(small_run, tmp_path):
    config = lightning_llm.compose(*small_run(tmp_path))
    wrong = config.model_copy(update={"seed": -1, "trainer": config.trainer.model_copy(update={"max_steps": 0})})
    with pytest.raises(lightning_llm.ConfigError) as raised:
        lightning_llm.train(wrong)
    assert {problem.key for problem in raised.value.problems} == {"seed", "trainer.max_steps"}
    with pytest.raises(lightning_llm.ConfigError, match=r"config: must be a Config .* got dict"):
        lightning_llm.train({"seed": 1})
    assert not (tmp_path / "run").exists()


def test_processes_that_cannot_train_are_refused_in_words(small_run, tmp_path, monkeypatch):
    config = lightning_llm.compose(*small_run(tmp_path))
    refused: list[str] = []

    def attempt() -> None:
        with pytest.raises(lightning_llm.ConfigError) as raised:
            lightning_llm.train(config.model_copy(update={"seed": -1}))
        refused.extend(problem.key for problem in raised.value.problems)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    finally:
        dist.destroy_process_group()
    assert refused == ["thread", "torch.distributed", "seed"]
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(lightning_llm.ConfigError, match=r"process: this is rank 1 of 2.*lightning-llm train --config"):
        lightning_llm.train(config)


def test_a_run_that_fails_or_is_stopped_raises(small_run, tmp_path, monkeypatch):
    words = small_run(tmp_path, "optim.gradient_clip_norm=null", "optim.learning_rate=1e30", "parallel=zero1")
    with pytest.raises(lightning_llm.RunFailedError, match="NonFiniteError") as raised:
        lightning_llm.train(lightning_llm.compose(*words), quiet=True)
    assert raised.value.folder == tmp_path / "run"
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert not dist.is_initialized()  # or the next run would be refused
    config = lightning_llm.compose(*small_run(tmp_path / "other"))
    kinds = {
        130: KeyboardInterrupt, 143: KeyboardInterrupt, 2: lightning_llm.ConfigError,
        137: lightning_llm.RunFailedError, 255: lightning_llm.RunFailedError,
    }  # fmt: skip
    for code, kind in kinds.items():
        monkeypatch.setattr(train_verb, "train_config", lambda *_, code=code, **__: code)
        with pytest.raises(kind):
            lightning_llm.train(config)


def test_auto_without_a_name_is_refused_as_the_verb_does(small_run, tmp_path):
    words = [word for word in small_run(tmp_path) if not word.startswith("run.dir")]
    with pytest.raises(lightning_llm.ConfigError, match=r"resume=auto: needs an explicit run.name or run.dir"):
        lightning_llm.train(lightning_llm.compose(*words, "resume=auto"))


def test_ranks_leave_this_process_as_it_was(small_run, tmp_path, monkeypatch):
    """torch's agent takes SIGINT, which a notebook needs; threads are shared out to the ranks alone."""
    seen = {}

    def launch(*_):
        def start(*_):
            seen["threads"] = train_verb.os.environ["OMP_NUM_THREADS"]
            for number in AGENT_SIGNALS:
                signal.signal(number, signal.SIG_IGN)

        return start

    monkeypatch.setattr(torch.distributed.launcher.api, "elastic_launch", launch)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = [signal.getsignal(each) for each in AGENT_SIGNALS]
    config = lightning_llm.compose(*small_run(tmp_path, "trainer.devices=2", "parallel=ddp", "trainer.threads=null"))
    assert train_verb.train_config(config, quiet=True) == 0
    assert int(seen["threads"]) >= 1
    assert "OMP_NUM_THREADS" not in train_verb.os.environ
    assert [signal.getsignal(each) for each in AGENT_SIGNALS] == before


def test_compare_is_the_verb(runs, capsys):
    folders = [str(each.folder) for each in runs]
    comparison = lightning_llm.compare(runs, metric="val_loss", margin=0.02)
    printed = capsys.readouterr().out
    (verdict,) = comparison.verdicts
    assert (verdict.name, verdict.decision) == ("mxfp8", "inconclusive")
    assert verdict.terms.margin == 0.02
    assert main(["compare", *folders, "--margin=0.02"]) == 0
    # The second look at the same runs is reported; everything else is equal.
    assert printed.splitlines()[:3] == capsys.readouterr().out.splitlines()[:3]
    written = json.loads((runs[0].folder.parents[1] / "compare" / "compare.json").read_text())
    assert written["verdicts"][0]["gap"] == verdict.judged.estimate.gap
    assert lightning_llm.compare(runs, quiet=True).verdicts
    assert capsys.readouterr().out == ""


def test_compare_raises_and_loses_nothing(runs, tmp_path):
    with pytest.raises(lightning_llm.IncompleteComparisonError) as raised:
        lightning_llm.compare([*runs, tmp_path / "nowhere"], quiet=True)
    assert [problem.key for problem in raised.value.problems] == [str(tmp_path / "nowhere")]
    assert [each.name for each in raised.value.comparison.verdicts] == ["mxfp8"]
    with pytest.raises(lightning_llm.ConfigError, match=r"--margin(.|\n)*--confidence"):
        lightning_llm.compare(runs, margin=-1, confidence=2)
    with pytest.raises(lightning_llm.ConfigError, match="needs a baseline and another"):
        lightning_llm.compare(runs[0].folder)
    with pytest.raises(lightning_llm.ConfigError, match="until: has no effect without curves"):
        lightning_llm.compare(runs, until=2)


def test_one_of_several_needs_no_list(tmp_path):
    with pytest.raises(lightning_llm.ConfigError, match=r"--target=4\.4x: must be a number above 0"):
        lightning_llm.compare(tmp_path, targets="4.4x")
    with pytest.raises(lightning_llm.ConfigError, match="nowhere: does not exist") as raised:
        lightning_llm.evaluate(average=tmp_path / "nowhere")
    assert len(raised.value.problems) == 1


def test_load_gives_the_same_weights_from_whatever_holds_them(runs, tmp_path, capsys):
    folder = runs[0].folder
    assert main(["export", str(folder), "--output", str(tmp_path / "release"), "--no-parity"]) == 0
    assert main(["import", str(tmp_path / "release"), "--output", str(tmp_path / "base"), "--no-parity"]) == 0
    model, tokenizer = lightning_llm.load(runs[0])
    assert not model.training
    assert not any(each.requires_grad for each in model.parameters())
    tokens = torch.tensor([tokenizer.encode_batch(["the of and"])[0].tolist()])  # [1, T]
    logits = model(tokens)[..., : model.config.vocab_size]  # [1, T, vocab_size]
    for path in (folder / "checkpoints" / "step=4", str(tmp_path / "release"), tmp_path / "base"):
        again, same = lightning_llm.load(path, compute_dtype="fp32")
        assert torch.equal(again(tokens)[..., : model.config.vocab_size], logits), path
        assert same.decode(tokens[0].tolist()) == "the of and"
    earlier, _ = lightning_llm.load(folder / "checkpoints" / "step=2")
    assert not torch.equal(earlier(tokens)[..., : model.config.vocab_size], logits)
    weights = next((tmp_path / "base").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(lightning_llm.ConfigError, match="Import it again"):
        lightning_llm.load(tmp_path / "base")


def test_load_says_all_that_is_wrong_at_once(tmp_path):
    with pytest.raises(lightning_llm.ConfigError) as raised:
        lightning_llm.load(tmp_path / "nowhere", compute_dtype="fp12", device="tpu")
    assert [problem.key for problem in raised.value.problems] == [
        "--device", "--compute-dtype", str(tmp_path / "nowhere"),
    ]  # fmt: skip


def test_evaluate_is_the_verb(runs, tmp_path, capsys):
    capsys.readouterr()
    done = lightning_llm.evaluate(runs[0])
    printed = capsys.readouterr()
    assert main(["evaluate", str(runs[0].folder)]) == 0
    told = capsys.readouterr()
    assert printed.out == told.out
    assert told.err == f"written    {done.file}\n"
    own = [each for each in runs[0].records if "val_loss" in each][-1]
    assert done.values["val_loss"] == own["val_loss"]
    assert done.step == 4
    two = [str(each.folder / "checkpoints" / "step=4") for each in runs]
    assert lightning_llm.evaluate(ensemble=runs, quiet=True, output=tmp_path / "both.json").members == two
    assert capsys.readouterr().out == ""
    with pytest.raises(lightning_llm.ConfigError) as raised:
        lightning_llm.evaluate(runs[0], limit=0, average=runs, ensemble=runs, compute_dtype="fp12")
    assert {"--limit", "--ensemble", "--compute-dtype"} <= {problem.key for problem in raised.value.problems}
