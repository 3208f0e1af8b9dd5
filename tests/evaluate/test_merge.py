"""evaluate --merge: proxies against torch's average, correlations against scipy and simulation, rejected sweeps."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from torch.optim.swa_utils import AveragedModel

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.data.sources.python import library_files
from lightning_llm.evaluate import merge
from lightning_llm.evaluate.merge import RankCorrelation, _sets
from lightning_llm.evaluate.weights import load_model
from lightning_llm.model.weights.load import whole_decoder

PARTS = "abc"


@pytest.fixture(scope="module")
def swept(small_run, tmp_path_factory):
    """A start, and from it three runs on a part each and two on pairs, as `recipe=ablate/merge` makes them."""
    folder, texts = tmp_path_factory.mktemp("merge"), {"a": "stone river", "b": "cloud wind", "c": "seed leaf"}
    sources = []
    for part, words in texts.items():
        file = folder / f"{part}.jsonl"
        lines = [json.dumps({"text": f"{words} {i} " * (9 + i % 5)}) for i in range(40)]
        file.write_text("\n".join(lines))
        sources.append(f"+data.sources.{part}={{loader: jsonl, path: {file}, weight: WEIGHT}}")
    scored = "data.validation.weights={a: 1.0, b: 1.0, c: 1.0}"
    base = [
        word for word in small_run(folder) if not word.startswith(("data.sources", "run.dir", "trainer.max", "optim"))
    ]
    base += [
        "~data.sources.jsonl",
        scored,
        "trainer.max_steps=3",
        "optim.learning_rate=2e-2",
        "checkpoint.every_steps=null",
    ]

    def train(name: str, trained: str, *more: str) -> str:
        weights = [s.replace("WEIGHT", "1.0" if p in trained else "0.0") for p, s in zip(PARTS, sources, strict=True)]
        assert main(["train", *base, *weights, f"run.dir={folder / name}", *more]) == 0
        return str(folder / name)

    start = f"model.init_from={train('start', 'abc')}"
    for number, parts in enumerate(("a", "b", "c", "ab", "bc")):
        train(f"sweep/{number}", parts, start, "data.tokenizer.kind=file", f"data.tokenizer.path={folder / 'start'}",
              "data.tokenizer.vocab_size=null")  # fmt: skip
    return folder / "sweep"


@pytest.mark.full
def test_proxies_are_the_losses_of_torchs_average(swept, capsys, tmp_path):
    assert main(["evaluate", "--merge", str(swept), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["part"] for each in found["units"]] == ["a", "b", "c"]
    sets = {"".join(each["parts"]): each for each in found["candidates"]}
    assert list(sets) == ["ab", "ac", "bc", "abc"]
    models = [load_model(swept / str(number), "fp32", "cpu")[0] for number in range(3)]
    averaged = AveragedModel(models[0])
    for model in models:
        averaged.update_parameters(model)
    weights = dict(averaged.module.named_parameters())
    config = models[0].config
    again = whole_decoder(config, {name: tensor.detach() for name, tensor in weights.items()})
    from lightning_llm.data.opening import open_corpus
    from lightning_llm.run.subject import find_subject

    data = find_subject(swept / "0", [], None).config
    corpus = open_corpus(data.data, data.seed, config.vocab_size, 3)
    sums = np.zeros(2)
    for batch in corpus.validation_batches(2):
        logits = again(batch.tokens)[..., :320].double().log_softmax(-1)
        counted = batch.labels != -100
        sums += (
            -logits.gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0][counted].sum().item(),
            counted.sum().item(),
        )
    assert sets["abc"]["proxy"]["val_loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5)
    assert sets["ac"]["true"] is None
    recorded = json.loads((swept / "3" / "summary.json").read_text())
    assert sets["ab"]["true"]["val_loss/a"] == pytest.approx(recorded["val_loss/a"], rel=1e-6)
    assert found["spearman"]["val_loss"]["count"] == 2
    assert main(["evaluate", "--merge", str(swept)]) == 0
    assert "Spearman correlation of proxy and trained loss over 2 combinations" in capsys.readouterr().out
    assert json.loads((swept / "merge.json").read_text()) == found


@pytest.mark.full
def test_a_units_average_with_itself_is_itself_to_the_bit(swept):
    from lightning_llm.evaluate.weights import AverageWeights
    from lightning_llm.model.weights.load import InitialWeights
    from lightning_llm.run.subject import find_subject, read_weights, verified_weights

    subject = find_subject(swept / "0", [], None)
    own = InitialWeights(verified_weights(subject), subject.config.model)
    mean = AverageWeights([own] * 5)
    for name, tensor in read_weights(subject).items():
        assert (mean(name, 0, tensor.numel()) == tensor.flatten()).all()


@pytest.mark.full
def test_refusals(swept, tmp_path, capsys):
    def told(*words) -> str:
        assert main(["evaluate", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "--merge: /nowhere is no folder" in told("--merge", "/nowhere")
    assert "--average: cannot be used with --merge" in told("--merge", swept, "--average", swept / "0")
    assert "has 0 runs on one source" in told("--merge", tmp_path)


def test_a_sweep_that_is_no_merge_sweep_is_reported_once(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").touch()
    data = SimpleNamespace(trained_weights={"a": 1.0, "b": 1.0}, drawn=["a", "b"])
    run = SimpleNamespace(folder=tmp_path, config=SimpleNamespace(data=data, seed=0))
    monkeypatch.setattr(merge, "state_of", lambda _: "finished")
    monkeypatch.setattr(merge, "find_subject", lambda *_, **__: run)
    with pytest.raises(ConfigError) as caught:
        merge._runs(tmp_path)
    (problem,) = caught.value.problems
    assert "has 0 runs on one source of data" in problem.text
    monkeypatch.setattr(merge, "state_of", lambda folder: "stopped" if folder.name == "3" else "finished")
    with pytest.raises(ConfigError) as caught:
        merge._runs(tmp_path)
    unfinished, problem = caught.value.problems
    assert (unfinished.key, "is not finished" in unfinished.text) == (str(tmp_path / "3"), True)
    assert "has 0 runs on one source of data" in problem.text


def run_on(parts: str, sources: str = "abc"):
    return SimpleNamespace(folder=parts, config=SimpleNamespace(data=SimpleNamespace(sources=dict.fromkeys(sources))))


def test_sets_have_the_order_of_the_sources_not_of_the_folders():
    runs = {(0, tuple(parts)): run_on(parts) for parts in ("c", "a", "b", "ac", "abc")}
    assert [parts for _, parts in _sets(runs)] == [("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]
    with pytest.raises(ConfigError, match="bd: was trained on b, d, but with seed 0 some of these sources"):
        _sets(runs | {(0, ("b", "d")): run_on("bd", "abcd")})
    with pytest.raises(ConfigError, match="with seed 1"):
        _sets(runs | {(1, ("a", "b")): run_on("ab")})


def test_correlation_and_its_interval():
    generator = np.random.default_rng(0)
    one, other = generator.random(9), generator.random(9)
    found = RankCorrelation.from_values(one, other)
    assert found.rho == pytest.approx(stats.spearmanr(one, other).statistic)
    assert RankCorrelation.from_values([1, 2, 3], [2, 3, 9]) == RankCorrelation(pytest.approx(1.0), -1.0, 1.0, 3)
    perfect = RankCorrelation.from_values(range(6), range(6))
    assert (perfect.rho, perfect.high) == (pytest.approx(1), 1.0)
    assert perfect.low == pytest.approx(np.tanh(np.arctanh(33 / 35) - 1.959964 * np.sqrt((1 + (33 / 35) ** 2 / 2) / 3)))
    assert np.isnan(RankCorrelation.from_values([1, 1, 1, 1], [1, 2, 3, 4]).rho)
    rho, held = 0.6, 0
    true = 6 / np.pi * np.arcsin(rho / 2)  # Spearman's of a normal pair of correlation rho
    for _ in range(1000):
        pair = generator.multivariate_normal([0, 0], [[1, rho], [rho, 1]], 12)
        each = RankCorrelation.from_values(pair[:, 0], pair[:, 1])
        held += each.low <= true <= each.high
    assert 0.92 <= held / 1000 <= 0.98


def test_include_takes_modules_by_their_paths():
    names = {file.name for file in library_files(("json/*", "os.py"))}
    assert names == {"__init__.py", "decoder.py", "encoder.py", "scanner.py", "tool.py", "os.py"}
    assert main(["plan", "data=python", "data.sources.code.include=[nothing/*]"]) == 2
    assert main(["plan", "data=jsonl", "data.sources.jsonl.path=README.md", "data.sources.jsonl.include=[a]"]) == 2
