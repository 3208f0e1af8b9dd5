"""`lightning-llm evaluate` under a layout: what one process measures, by ranks that hold a part of the weights each."""

import json
import shutil
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import lightning_llm
from lightning_llm.__main__ import main
from lightning_llm.base.errors import RanksFailedError
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.evaluate.evaluation import evaluate_models
from lightning_llm.evaluate.harness import OwnModel
from lightning_llm.evaluate.request import checked_request
from lightning_llm.evaluate.weights import decoder_of, sharded_decoder_of
from lightning_llm.model.weights.load import InitialWeights
from lightning_llm.parallel.layout import Layout
from lightning_llm.run.subject import read_weights, verified_weights

PAIRS = [
    ("the of and", " to in"),
    ("is that for ", "it"),
    ("the of and to in is that for it as was with be by on not he " * 9, " and to the of"),  # beyond the context
    ("was with", " be by on not he the of and to in is that"),
    ("", "the of and to"),
]  # in batches of two: three, which two ranks do not share evenly
PROMPT = "the of and", {"until": ["never written"], "max_gen_toks": 6, "do_sample": False}
EXACT = "zero3", "ddp", "pp"
CLOSE = "tp", "cp"
FULL = dict.fromkeys(("ddp", "cp"), pytest.mark.full)


def answers(model: OwnModel):
    """Return log-likelihoods, whether each was the likeliest, and the written files."""
    scored = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
    return scored, model.generate_until([Instance("generate_until", {}, PROMPT, 0)])


def measured(run: Path, words: list[str], output: Path, average: list[Path]):
    """Return losses and answers under the layout of `words`; on every rank of it, or in one process without."""
    request = checked_request(run, average=average, layout=words, device="cpu")
    losses = evaluate_models(request, output).values
    if average:
        return losses
    (subject,) = request.subjects
    if words:
        layout = Layout.from_config(subject.config.parallel, request.degrees, request.device)
        initial = InitialWeights(verified_weights(subject), subject.config.model)
        model = sharded_decoder_of(subject, initial, layout, request.device)
    else:
        model = decoder_of(subject, read_weights(subject), request.device)
    return losses, *answers(OwnModel(model, Tokenizer(run), request.device, batch_size=2))


def trained(folder: Path, words: list[str]) -> Path:
    validated = "trainer.max_steps=2", "trainer.validate_every_steps=1", "checkpoint.every_steps=1"
    shape = "model.num_kv_heads=2", "model.max_sequence_length=128", "precision.casts=eager"
    assert main(["train", *words, *shape, *validated]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_run) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return trained(folder, small_run(folder))


@pytest.fixture(scope="module")
def one_process(run, tmp_path_factory):
    return measured(run, [], tmp_path_factory.mktemp("out") / "one.json", [])


@pytest.mark.parametrize("layout", [pytest.param(each, marks=FULL.get(each, ())) for each in EXACT + CLOSE])
def test_losses_and_answers_are_those_of_one_process(layout, run, one_process, ranks, tmp_path):
    words = [f"parallel={layout}", "trainer.devices=2"]
    output = tmp_path / "out.json"
    losses, scored, written = ranks(2).call(measured, run, words, output, [])
    alone, alone_scored, alone_written = one_process
    assert json.loads(output.read_text())["metrics"]["val_loss"]["value"] == losses["val_loss"]
    assert written == alone_written
    assert [likeliest for _, likeliest in scored] == [likeliest for _, likeliest in alone_scored]
    if layout in EXACT:
        assert (losses, scored) == (alone, alone_scored)
    assert losses == pytest.approx(alone, rel=1e-5)
    assert [value for value, _ in scored] == pytest.approx([value for value, _ in alone_scored], abs=1e-4)


def in_main(words: list[str]) -> None:
    if code := main(words):
        raise RuntimeError(f"the command ended with {code}")


@pytest.fixture
def launched(ranks, monkeypatch):
    """Have ranks that are started be those of the shared group; return the words that they were started with."""
    started = []

    def launch(count, words, **_):
        started.append(words)
        ranks(count).call(in_main, list(words))

    monkeypatch.setattr("lightning_llm.run.launch.torch_agent.launch_ranks", launch)
    return started


@pytest.mark.full
def test_the_command_starts_ranks_and_reports_their_findings(tmp_path, small_run, launched, monkeypatch, capsys):
    """Delayed scales, a stage's share of them too, an average of two models, and a task of lm-eval's."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    run = trained(tmp_path, small_run(tmp_path, "precision=fp8_delayed"))
    task = choice_task(tmp_path)
    found = []
    for words in (
        [],
        ["parallel=zero3", "trainer.devices=2", "--batch-size=4"],
        ["parallel.pp=2", "trainer.devices=2"],
    ):
        capsys.readouterr()
        asked = [] if "parallel.pp=2" in words else ["--tasks", str(task)]
        assert main(["evaluate", str(run), *asked, *words, "--json", "--output", str(tmp_path / "o.json")]) == 0
        said = json.loads(capsys.readouterr().out)
        assert json.loads((tmp_path / "o.json").read_text())["metrics"].keys() == said["metrics"].keys()
        found.append(said["metrics"])
    alone, zero3, pp = found
    assert alone == zero3
    assert alone.items() >= pp.items() >= {"val_loss_high_precision": alone["val_loss_high_precision"]}.items()
    steps = [str(run / "checkpoints" / f"step={step}") for step in (1, 2)]
    means = []
    for words in ([], ["parallel=zero3", "trainer.devices=2"]):
        assert main(["evaluate", "--average", *steps, *words, "--json", "--output", str(tmp_path / "o.json")]) == 0
        means.append(json.loads(capsys.readouterr().out))
    assert means[0] == means[1]
    assert means[0]["metrics"]["val_loss"] != alone["val_loss"]
    assert len(launched) == 3


def test_all_ranks_skip_the_same_damaged_checkpoint(run, ranks, launched, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    file = max((copy / "checkpoints" / "step=2" / "tensors").glob("*.distcp"), key=lambda each: each.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    words = "parallel=zero3", "trainer.devices=2"
    before = str(copy / "checkpoints" / "step=1")
    assert lightning_llm.evaluate(copy, layout=words, output=tmp_path / "o.json", device="cpu").members == [before]
    assert launched[0][1] == before
    own = tmp_path / "own.json"  # torchrun's ranks receive the path of the run only
    ranks(2).call(in_main, ["evaluate", str(copy), *words, "--output", str(own)])
    assert own.read_text() == (tmp_path / "o.json").read_text()


def choice_task(folder: Path) -> Path:
    documents = [{"q": "the of", "choices": [" and to", " not he"], "gold": i % 2} for i in range(5)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(each) + "\n" for each in documents))
    file = folder / "my_choice.yaml"
    file.write_text(
        f"task: my_choice\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/documents.jsonl\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{gold}}'\n"
        "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n"
    )
    return file


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.tp=2"], "parallel=single: has tp=2, which needs 2 ranks, and there are 1"),
        (["parallel=tp", "trainer.devices=4"], "parallel.tp=4: must divide"),
        (["parallel=pp", "trainer.devices=4"], "model.num_layers: is 2"),
        (["parallel=zero4"], "there is no 'zero4'"),
        (["precision=bf16"], "precision=bf16: cannot be overridden here"),
        (["parallel=zero3", "trainer.devices=2", "parallel.compile=true"], "parallel.compile: is true"),
        (["parallel=zero3", "trainer.devices=2", "--ensemble", "RUN"], "--ensemble: runs on one rank"),
        (["parallel=zero3", "world=4"], "world=4: must equal trainer.devices=1"),
    ],
)  # fmt: skip
def test_indivisible_work_is_rejected_before_ranks_start(words, said, run, launched, capsys):
    assert main(["evaluate", str(run), *[str(run) if word == "RUN" else word for word in words]]) == 2
    assert said in capsys.readouterr().err
    assert not launched


def test_a_rank_that_fails_is_named_once(run, monkeypatch, capsys):
    def fail(*_, **__):
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file="")
        failure.message = {"message": "RuntimeError: no memory", "extraInfo": {"py_callstack": "Traceback: its line"}}
        raise ChildFailedError("evaluate", {1: failure})

    monkeypatch.setattr("lightning_llm.run.launch.torch_agent.launch_ranks", fail)
    words = [str(run), "parallel=zero3", "trainer.devices=2"]
    assert main(["evaluate", *words]) == 1
    said = capsys.readouterr().err
    assert said == "Traceback: its line\nerror: rank 1 failed first (exit code 1): RuntimeError: no memory\n"
    with pytest.raises(RanksFailedError, match="no memory"):
        lightning_llm.evaluate(run, layout=words[1:])
