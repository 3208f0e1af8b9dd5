"""A path with any characters names one file; a folder's files are read or reported."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_llm.config.compose import compose_config
from lightning_llm.config.overrides import override
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.config.yaml_file import config_text
from lightning_llm.data.sources.files import find_files, matching_files
from lightning_llm.data.sources.source import Source
from lightning_llm.data.tokens.tokenizer import write_bytes_tokenizer

CHARACTERS = "ab1 [](){}*?!%#$&'\"`\\:;,=~^@+-_.\n\té漢"
NAMES = st.text(CHARACTERS, min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))


def texts_of(loader: str, path: Path | str, **keys: str) -> list[str]:
    return [each.text for each in Source("s", LOADERS[loader](loader=loader, path=str(path), **keys)).documents()]


def write_text(file: Path, text: str) -> None:
    file.write_text(text)


def write_jsonl(file: Path, text: str) -> None:
    file.write_text(json.dumps({"text": text}))


def write_parquet(file: Path, text: str) -> None:
    with file.open("wb") as opened:
        pyarrow.parquet.write_table(pyarrow.table({"text": [text]}), opened)


WRITERS: dict[str, tuple[str, Callable[[Path, str], None]]] = {
    "text": (".txt", write_text),
    "jsonl": (".jsonl", write_jsonl),
    "parquet": (".parquet", write_parquet),
}


@settings(max_examples=25, deadline=None)
@given(NAMES, NAMES)
@example("corpus [v1]", "notes[1]")
@example("%Y-{}", "a::b")
@example("~root", "-rf *")
def test_the_named_file_alone_is_read_whatever_its_name(folder: str, name: str) -> None:
    """Beside it are files that its name would match, were it a pattern."""
    with TemporaryDirectory() as root:
        inner = Path(root, folder)
        inner.mkdir()
        for loader, (ending, write) in WRITERS.items():
            for other in ("a", "b", "1", "notes1", "ab"):
                write(inner / f"{other}{ending}", "another")
            write(inner / f"{name}{ending}", "named")
            assert texts_of(loader, inner / f"{name}{ending}") == ["named"]


@settings(max_examples=15, deadline=None)
@given(NAMES.filter(lambda name: not name.startswith(".")))
@example("corpus [v1]")
@example("a::b*")
def test_a_folder_is_read_whatever_its_name(name: str) -> None:
    with TemporaryDirectory() as root:
        folder = Path(root, name)
        (folder / name).mkdir(parents=True)
        for loader, (ending, write) in WRITERS.items():
            write(folder / f"x{ending}", "upper")
            write(folder / name / f"y{ending}", "lower")
            assert sorted(texts_of(loader, folder)) == ["lower", "upper"]
            assert texts_of(loader, f"{folder}/x*{ending}") == ["upper"]  # the folder as it is, then a pattern


@pytest.fixture(scope="module")
def config() -> Config:
    return compose_config(["data=text", "data.sources.text.path=x"])


@settings(max_examples=20, deadline=None)
@given(st.text("\\${}ab:,?*[]%#'\" ", max_size=9))
@example("\\${oc.env:HOME}")
@example("a\\\\${b}")
def test_a_path_in_config_yaml_is_the_path(config: Config, path: str) -> None:
    sources = {"text": config.data.sources["text"].model_copy(update={"path": f"/{path}"})}
    saved = config_text(config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})}))
    read = OmegaConf.create(saved)
    assert OmegaConf.to_container(read.data.sources, resolve=True)["text"]["path"] == f"/{path}"


@settings(max_examples=15, deadline=None)
@given(st.text("\\${}ab:,?*[]%#'\" ", max_size=9))
@example("${oc.env:HOME} it's")
@example("a\\")
def test_a_path_becomes_an_override_that_gives_the_path(path: str) -> None:
    source, root = override("data.sources.text.path", f"/{path}"), override("run.root", f"/{path}")
    config = compose_config(["data=text", source, root])
    assert config.data.sources["text"].path == f"/{path}"
    assert config.run.root == f"/{path}"
    assert config.run.dir.startswith(f"/{path}/")


@pytest.mark.parametrize("name", ["it's ${oc.env:HOME}", "a,b\\${x}"])
def test_the_tokenizer_beside_weights_is_theirs_whatever_the_folders_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_bytes_tokenizer(folder / "tokenizer.json")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    other = {"vocab_size": 257, "max_position_embeddings": 4096, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape, **other}))
    config = compose_config(["data=text", "data.sources.text.path=x", override("model.init_from", str(folder))])
    assert (config.model.init_from, config.model.name) == (str(folder), name)
    assert config.data.tokenizer.path == str(folder / "tokenizer.json")


@pytest.mark.parametrize("name", ["it's [x]", "a,b\\", "${oc.env:HOME}"])
def test_a_config_dir_is_found_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name / "recipe").mkdir(parents=True)
    (tmp_path / name / "recipe" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    assert compose_config(["recipe=mine"], tmp_path / name).seed == 7


def test_datasets_reads_a_folder_whatever_its_name(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "corpus [v1]*::b"
    (tmp_path / "corpus v" / "x").mkdir(parents=True)
    (folder / ".git").mkdir(parents=True)
    write_jsonl(tmp_path / "corpus v" / "train.jsonl", "another")
    write_jsonl(folder / "train-a::[1]\n.jsonl", "named")
    write_jsonl(folder / ".git" / "train-b.jsonl", "hidden")
    write_jsonl(folder / "test.jsonl", "in test")
    source = Source("s", LOADERS["huggingface"](loader="huggingface", path=str(folder)))
    assert [each.text for each in source.documents()] == ["named"]
    assert source.reader.skipped == {str(folder / "test.jsonl"): "not of split 'train'"}
    saved = tmp_path / "saved [1]"
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": list("abcd")})}).save_to_disk(saved)
    assert texts_of("huggingface", saved) == list("abcd")
    assert texts_of("huggingface", saved, split="train[1:3]") == ["b", "c"]  # the notation of `datasets`


def test_a_name_that_exists_is_no_pattern_and_patterns_still_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "home [x]"
    (work / "deep").mkdir(parents=True)
    for name in ("a[1].txt", "a1.txt", "~b.txt", "deep/c.txt"):
        (work / name).write_text(name)
    monkeypatch.chdir(work)
    assert matching_files("a[1].txt", ()) == [work / "a[1].txt"]
    assert matching_files("a[12].txt", ()) == [work / "a1.txt"]
    assert matching_files("~b.txt", ()) == [work / "~b.txt"]
    assert matching_files("**/**/c.txt", ()) == [work / "deep" / "c.txt"]
    assert matching_files("nobody[1].txt", ()) == []
    assert find_files("*", ()).skipped == {str(work / "deep"): "a folder"}


@pytest.mark.parametrize("prefix", ["part[1]", "part{}%s"])
def test_a_megatron_prefix_is_literal(tmp_path: Path, prefix: str) -> None:
    for name in (prefix, "part1"):
        for ending in (".idx", ".bin"):
            (tmp_path / f"{name}{ending}").write_text("")
    source = LOADERS["megatron"](loader="megatron", path=str(tmp_path / prefix))
    assert [file.name for file in source.files()] == [f"{prefix}.bin", f"{prefix}.idx"]


def test_a_folder_s_files_are_read_through_links_once_or_reported(tmp_path: Path) -> None:
    corpus, store = tmp_path / "corpus", tmp_path / "store"
    for each in (corpus / "a", corpus / ".git", corpus / "_delta_log", store):
        each.mkdir(parents=True)
    for name in ("a/0.jsonl", "a/._0.jsonl", ".git/1.jsonl", "_delta_log/2.json", "a/notes.csv", "3.jsonl.br"):
        (corpus / name).write_text("{}")
    (store / "4.jsonl").write_text("{}")
    (corpus / "b").symlink_to(store)
    (corpus / "c").symlink_to(store)
    (corpus / "loop").symlink_to(corpus)
    (corpus / "5.jsonl").symlink_to(tmp_path / "gone.jsonl")
    found = find_files(str(corpus), (".jsonl", ".json"))
    assert found.read == [corpus / "a/0.jsonl", corpus / "b/4.jsonl"]
    assert {str(Path(path).relative_to(corpus)): reason for path, reason in found.skipped.items()} == {
        ".git": "hidden",
        "a/._0.jsonl": "hidden",
        "_delta_log": "a program's working folder",
        "a/notes.csv": "another ending",
        "3.jsonl.br": "another ending",
        "5.jsonl": "a link to nothing",
        "c": f"the same folder as {corpus / 'b'}",
        "loop": f"the same folder as {corpus}",
    }
