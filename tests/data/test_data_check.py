"""The cheap checks: every problem at once, quickly, without a heavy import; and the shipped files pass them."""

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.check import check_data
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.tokens.tokenizer import train_bpe
from tests.data.corpus_files import data_config

CODE = {"loader": "python", "part": "code"}


def keys_and_text(config: DataConfig, vocab_size: int = 300, world: int = 1) -> tuple[list[str], str]:
    problems = check_data(config, vocab_size, world)
    return sorted(p.key for p in problems), "\n".join(map(str, problems))


def test_all_problems_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sources = {
        "missing": {"loader": "jsonl", "path": str(tmp_path / "nothing.jsonl")},
        "folder": {"loader": "parquet", "path": str(tmp_path)},
        "unnamed": {"loader": "text"},
        "part": {"loader": "python"},
        "both": {"loader": "text", "part": "code", "path": str(tmp_path / "file")},
        "tiny": CODE | {"weight": 1e-7},
        "one": {"loader": "huggingface", "path": str(tmp_path / "file")},
        "hub": {"loader": "huggingface", "path": "/no/such/folder"},
    }
    keys = {
        "tokenizer": {"kind": "bpe", "vocab_size": 400, "path": "x"},
        "validation": {"fraction": 1.0},
        "global_batch_size": 7,
    }
    names, text = keys_and_text(data_config(tmp_path / "file" / "cache", sources, **keys), world=3)
    assert names == [
        "data.cache_dir",
        "data.global_batch_size",
        "data.sources.both.part",
        "data.sources.folder.path",
        "data.sources.hub.path",
        "data.sources.missing.path",
        "data.sources.one.path",
        "data.sources.part.part",
        "data.sources.tiny.weight",
        "data.sources.unnamed.path",
        "data.tokenizer.path",
        "data.tokenizer.vocab_size",
        "data.validation.fraction",
    ]
    assert "must be a multiple of 6; nearest: 6" in text
    assert "400 tokens do not fit model.vocab_size=300" in text
    assert str(tmp_path / "nothing.jsonl") in text


@pytest.mark.parametrize(
    ("loader", "name", "content", "named"),
    [
        ("jsonl", "a.txt", "Once upon", "data=text"),
        ("jsonl", "a.txt", '\ufeff {"text": "Once"}', None),
        ("jsonl", "a.parquet", "PAR1", "data=parquet"),
        ("text", "a.jsonl", "{}", "data=jsonl"),
        ("text", "a.json", "{}", None),
        ("text", "a.py", "pass", None),
        ("parquet", "a.JSONL.gz", "x", "data=jsonl"),
    ],
)
def test_files_of_another_format(tmp_path: Path, loader: str, name: str, content: str, named: str | None) -> None:
    (tmp_path / name).write_text(content)
    source = {"loader": loader, "path": str(tmp_path / name)}
    names, text = keys_and_text(data_config(tmp_path, {"mine": source}))
    assert names == (["data.sources.mine.path"] if named else [])
    assert named is None or f"Set {named} data.sources.{named[5:]}.path={tmp_path / name}." in text


def test_the_first_remedy_is_a_smaller_micro_batch(tmp_path: Path) -> None:
    keys = {"global_batch_size": 12, "micro_batch_size": 8}
    _, text = keys_and_text(data_config(tmp_path, {"code": CODE}, **keys), world=2)
    assert "Set data.micro_batch_size=6, or this to a multiple of 16; nearest: 16." in text


@pytest.mark.parametrize(("world", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_batch_sizes_divide(tmp_path: Path, world: int, fits: bool) -> None:
    names, _ = keys_and_text(data_config(tmp_path, {"code": CODE}), world=world)
    assert names == ([] if fits else ["data.global_batch_size"])


def test_tokenizer_files(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    train_bpe(["ab ab ab"], 259, file)

    def check(vocab_size: int, **keys: Any) -> tuple[list[str], str]:
        tokenizer = {"kind": "file", "path": str(tmp_path)} | keys
        return keys_and_text(data_config(tmp_path / "cache", {"code": CODE}, tokenizer=tokenizer), vocab_size)

    assert check(259) == ([], "")
    names, text = check(258)
    assert names == ["data.tokenizer.path"]
    assert "has 259 tokens, but model.vocab_size is 258" in text
    names, text = check(300, kind="bpe")
    assert names == ["data.tokenizer.path"]
    assert text.endswith("kind is bpe. Set data.tokenizer.kind=file, or remove this key.")
    names, text = check(300, end_of_document="</s>")
    assert names == ["data.tokenizer.end_of_document"]
    assert "it has <|endoftext|>" in text
    assert "no file" in check(300, path=str(tmp_path / "other.json"))[1]
    assert "needs the path" in check(300, path=None)[1]
    file.write_text(json.dumps({"model": {}}))
    assert "is not a tokenizer.json" in check(300)[1]


def test_small_vocabularies(tmp_path: Path) -> None:
    config = data_config(tmp_path, {"code": CODE})
    assert keys_and_text(config, 256)[0] == ["data.tokenizer.kind"]
    config = data_config(tmp_path, {"code": CODE}, tokenizer={"kind": "bpe"})
    assert keys_and_text(config, 256)[0] == ["data.tokenizer.vocab_size"]


def test_full_disk_is_reported_before_the_run_unless_all_is_cached(
    tmp_path: Path, cache: Path, two_files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data_config(tmp_path / "cache", two_files)
    warm = data_config(cache, two_files)
    open_corpus(warm, 0, 300)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    names, text = keys_and_text(config)
    assert names == ["data.cache_dir"]
    assert "has 1,000,000 free" in text
    assert keys_and_text(warm)[0] == []


def test_checks_import_nothing_heavy() -> None:
    program = (
        "import sys\nimport lightning_llm.data.check\n"
        "print([m for m in ('torch', 'datasets', 'tokenizers', 'lightning', 'hydra', 'pyarrow') if m in sys.modules])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "file", [f for f in resources.files("lightning_llm.conf").joinpath("data").iterdir() if f.name.endswith(".yaml")]
)
def test_shipped_files_fit_the_schema(file: Any, tmp_path: Path) -> None:
    content = yaml.safe_load(file.read_text().replace("${model.vocab_size}", "1024"))
    assert content["name"] == file.name.removesuffix(".yaml")
    missing = [
        f"data.sources.{name}.path"
        for name, source in content["sources"].items()
        if source.get("path") == "???" and source["loader"] != "huggingface"  # a hub's name, for all that is known
    ]
    tokenizer = ["data.tokenizer.path"] if content["tokenizer"].get("path") == "???" else []
    problems = check_data(DataConfig.model_validate(content | {"cache_dir": str(tmp_path)}), 1024, 1)
    scores = ["data.mixture.scores"] if content.get("mixture", {}).get("scores") == "???" else []
    assert [problem.key for problem in problems] == [*missing, *tokenizer, *scores]
