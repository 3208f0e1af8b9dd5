"""Loaders return the documents of files, and report the problems of wrong files."""

import bz2
import gzip
import inspect
import json
import json.encoder
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.data.check import check_data
from lightning_llm.data.prepare import scan
from lightning_llm.data.sources import python as python_loader
from lightning_llm.data.sources.files import matching_files
from lightning_llm.data.sources.source import Source, content_key


def source_of(loader: str, **keys: Any) -> Source:
    return Source("s", LOADERS[loader](**keys))


def texts_of(**keys: Any) -> list[str]:
    return [d.text for d in source_of(**keys).documents()]


def problem_of(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        texts_of(**keys)
    return str(caught.value)


def test_jsonl_plain_gzip_and_blank(tmp_path: Path) -> None:
    lines = [
        {"text": "lone \ud800 surrogate"},
        {"text": "één\u2028two", "n": 1},
        {"text": " \n"},
        {"text": None},
        {"other": [{}], "text": "b\nc"},
    ]
    body = "\n".join(map(json.dumps, lines[:3])) + "\n\n"
    (tmp_path / "1.jsonl").write_text(body)
    with gzip.open(tmp_path / "2.jsonl.gz", "wt") as opened:
        opened.write("\n".join(map(json.dumps, lines[3:])))
    (tmp_path / "notes.csv").write_text("not read")
    assert texts_of(loader="jsonl", path=str(tmp_path)) == ["lone ? surrogate", "één\u2028two", "b\nc"]
    assert texts_of(loader="jsonl", path=str(tmp_path / "1*")) == ["lone ? surrogate", "één\u2028two"]


@pytest.mark.parametrize("sample_by", ["document", "paragraph", "line"])
def test_text(tmp_path: Path, sample_by: str) -> None:
    text = "one\ntwo\n\nthree"
    (tmp_path / "a.txt").write_text(text)
    expected = {"document": [text], "paragraph": ["one\ntwo", "three"], "line": ["one", "two", "three"]}
    assert texts_of(loader="text", path=str(tmp_path), sample_by=sample_by) == expected[sample_by]


def test_parquet_and_saved_datasets(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["x", "y"], "n": [1, 2]})
    rows.to_parquet(tmp_path / "a.parquet")
    assert texts_of(loader="parquet", path=str(tmp_path), text_key="body") == ["x", "y"]
    problem = problem_of(loader="parquet", path=str(tmp_path))
    assert "data.sources.s.text_key" in problem
    assert "'text'" in problem
    assert "'body', 'n'" in problem
    assert "contains int" in problem_of(loader="parquet", path=str(tmp_path), text_key="n")

    rows.save_to_disk(tmp_path / "one")
    assert texts_of(loader="huggingface", path=str(tmp_path / "one"), text_key="body") == ["x", "y"]
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "splits")
    assert texts_of(loader="huggingface", path=str(tmp_path / "splits"), text_key="body", split="test") == ["y"]
    problem = problem_of(loader="huggingface", path=str(tmp_path / "splits"), text_key="body", split="tst")
    assert "Did you mean 'test'" in problem


def test_huggingface_folder_of_files(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "in train"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "in test"}\n')
    assert texts_of(loader="huggingface", path=str(tmp_path), split="test") == ["in test"]
    problem = problem_of(loader="huggingface", path=str(tmp_path), split="valid")
    assert "'valid'" in problem
    assert "'train'" in problem


def test_an_unreachable_hub_is_reported_at_once() -> None:
    """In a separate process, because HF_HUB_OFFLINE is read when huggingface_hub is imported."""
    program = (
        "import time\nfrom lightning_llm.data.sources.source import Source\n"
        "from lightning_llm.base.errors import ConfigError\n"
        "from lightning_llm.config.schema.data import LOADERS\nimport datasets\nstart = time.time()\n"
        "try:\n    list(Source('s', LOADERS['huggingface'](path='nobody/no-such-set')).documents())\n"
        "except ConfigError as error:\n    print(error)\nprint(time.time() - start < 10)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith(
        "data.sources.s.path: 'nobody/no-such-set' is not a local path, the hub cannot be reached"
    )
    assert done.stdout.endswith("True\n")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": \n')
    problem = problem_of(loader="jsonl", path=str(bad))
    assert str(bad) in problem
    assert "line 2" in problem
    bad.write_text('["a list"]\n')
    assert "not a JSON object" in problem_of(loader="jsonl", path=str(bad))
    bad.write_text('{"txt": "a"}\n')
    assert "no column 'text'; it has 'txt'" in problem_of(loader="jsonl", path=str(bad))
    bad.write_text('{"text": "a"}\n')
    (tmp_path / "stray.json").write_text("{}")
    assert f"line 1 of {tmp_path / 'stray.json'} has no column 'text'; it has none. Name the column" in problem_of(
        loader="jsonl", path=str(tmp_path)
    )
    (tmp_path / "stray.json").unlink()
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 10)
    assert f"line 1 of {latin}, byte 0xe9, is not UTF-8 text" in problem_of(loader="text", path=str(latin))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"not parquet at all")
    assert str(broken) in problem_of(loader="parquet", path=str(broken))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_the_line_that_is_no_utf8_is_named_and_a_byte_order_mark_is_none_of_the_text(
    tmp_path: Path, ending: str
) -> None:
    write = gzip.open if ending else open
    for loader, name, good, bad in (
        ("jsonl", "a.jsonl", b'\xef\xbb\xbf{"text": "a\xc3\xa9"}\n', b'{"text": "caf\xe9"}\n'),
        ("text", "a.txt", b"\xef\xbb\xbfa\xc3\xa9\n", b"caf\xe9\n"),
    ):
        file = tmp_path / f"{name}{ending}"
        with write(file, "wb") as opened:
            opened.write(good)
        assert [text.strip() for text in texts_of(loader=loader, path=str(file))] == ["aé"]
        with write(tmp_path / f"b{name}{ending}", "wb") as opened:
            opened.write(good * 3 + bad + good)
        problem = problem_of(loader=loader, path=f"{tmp_path}/*{name}{ending}")
        assert f"line 4 of {tmp_path}/b{name}{ending}, byte 0xe9, is not UTF-8 text" in problem


def test_records_without_text_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": null}\n{"text": "a"}\n\n{"text": " "}\n{"text": ""}\n')
    source = source_of("jsonl", path=str(file))
    for _ in range(2):
        assert [d.text for d in source.documents()] == ["a"]
        assert source.left_out == 3
    found = scan(source, tmp_path / "cache", shown=False)
    assert (found.documents, found.left_out) == (1, 3)
    assert scan(source, tmp_path / "cache", shown=False) == found


def test_a_path_that_no_file_system_takes_matches_no_file() -> None:
    for loader in ("jsonl", "huggingface"):
        config = compose_config(["data=jsonl", f"data.sources.jsonl.path=/{'x' * 5000}"]).data
        config = config.model_copy(update={"sources": {"s": LOADERS[loader](path=f"/{'x' * 5000}")}})
        assert [each.key for each in check_data(config, 1024, 1)] == ["data.sources.s.path"]


def test_files_are_sorted_and_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.md", "d.bin"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    expected = [tmp_path / name for name in ("a.txt", "b.txt", "sub/c.md")]
    assert matching_files(".", LOADERS["text"].suffixes) == expected
    assert matching_files("**/*.md", ()) == expected[2:]
    assert matching_files("nothing.txt", ()) == []


def test_identity_follows_the_files_and_not_the_weight(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")

    def identity(**keys: Any) -> Any:
        return source_of("text", path=str(file), **keys).identity()

    before = identity()
    assert identity(weight=3.0) == before
    assert identity(sample_by="line") != before
    file.write_text("four")
    assert identity() != before


def test_content_key_is_stable() -> None:
    # BLAKE2b-64, from another implementation: printf abc | b2sum -l 64
    assert content_key("abc") == int.from_bytes(bytes.fromhex("d8bb14d833d59559"), "little")


def test_library_leaves_out_tests_and_installed_packages() -> None:
    names = [file.as_posix() for file in python_loader.library_files()]
    assert len(names) > 350
    assert any(name.endswith("/json/decoder.py") for name in names)
    for part in ("/test/", "/tests/", "/site-packages/", "/idle_test/", "/pydoc_data/", "_sysconfigdata"):
        assert not any(part in name for name in names)


def test_docstrings_are_those_that_inspect_finds() -> None:
    source = (
        '"""Top."""\nclass A:\n    """Of A.\n\n        deep\n    """\n    def f(self):\n        "of f"\n    x = "no"\n'
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, "m", "exec"), namespace)
    made = namespace["A"]
    expected = [namespace["__doc__"], inspect.getdoc(made), inspect.getdoc(made.f)]
    assert python_loader.docstrings(source) == "\n\n".join(map(str, expected)) + "\n"
    assert python_loader.docstrings("x = 1\n") == ""


def test_prose_of_a_module_is_held_out_with_its_code() -> None:
    code = [d.key for d in source_of("python", part="code").documents()]
    prose = list(source_of("python", part="prose").documents())
    encoder = inspect.getdoc(json.JSONEncoder)
    assert encoder
    document = next(d for d in prose if encoder in d.text)
    assert document.key == content_key(inspect.getsource(json.encoder))
    assert document.key in code
    assert len(code) > 350
    assert sum(d.key in code for d in prose) > 300
    assert any("For example" in d.text and d.key not in code for d in prose)  # the language reference's topics


def test_compressed_files_are_read_beside_plain_ones(tmp_path: Path) -> None:
    import pyarrow

    def line(text: str) -> bytes:
        return (json.dumps({"text": text}) + "\n").encode()

    (tmp_path / "0.jsonl").write_bytes(line("plain"))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(line("gz")))
    (tmp_path / "2.jsonl.bz2").write_bytes(bz2.compress(line("bz2")))
    (tmp_path / "3.jsonl.xz").write_bytes(lzma.compress(line("xz")))
    frames = [pyarrow.compress(line(f"zst {i}"), codec="zstd", asbytes=True) for i in range(2)]
    (tmp_path / "4.JSONL.ZST").write_bytes(b"".join(frames))  # as pzstd writes them
    (tmp_path / "5.json.lz4").write_bytes(pyarrow.compress(line("lz4"), codec="lz4", asbytes=True))
    assert texts_of(loader="jsonl", path=str(tmp_path)) == ["plain", "gz", "bz2", "xz", "zst 0", "zst 1", "lz4"]
    for file in sorted(tmp_path.iterdir())[1:]:
        whole = file.read_bytes()
        for damaged in (whole[:-9], whole[:8] + b"\0" * len(whole)):
            file.write_bytes(damaged)
            assert f"{file} " in problem_of(loader="jsonl", path=str(file))


def test_parquet_reads_one_column_for_any_other_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    nested = [{"a": 1}], [[1.5]]
    for number, (kind, others) in enumerate(
        (
            (pyarrow.string(), {"n": [1]}),
            (pyarrow.large_string(), {"n": [0.5], "language": ["en"]}),
            (pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), {"n": nested[0]}),
            (pyarrow.string(), {"n": nested[1], "text.more": ["x"]}),
        )
    ):
        text = pyarrow.array([f"shard {number}"], pyarrow.string()).cast(kind)
        table = pyarrow.table({**others, "text": text})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([None])}), tmp_path / "4.parquet")
    assert texts_of(loader="parquet", path=str(tmp_path)) == [f"shard {number}" for number in range(4)]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "5.parquet")
    assert f"{tmp_path / '5.parquet'} has no column 'text'; it has 'body'" in problem_of(
        loader="parquet", path=str(tmp_path)
    )


@pytest.mark.parametrize("replace", [False, True])
def test_a_file_that_changes_while_it_is_read_is_refused_by_name(tmp_path: Path, replace: bool) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    source = source_of("jsonl", path=str(file))
    found = scan(source, tmp_path / "cache", shown=False)
    its = file.stat()
    if replace:  # by a file of the same size and time, as cp -p and rsync -t leave it
        (tmp_path / "new").write_text('{"text": "six"}\n{"text": "ten"}\n')
        (tmp_path / "new").replace(file)
        os.utime(file, ns=(its.st_atime_ns, its.st_mtime_ns))
    else:
        with file.open("a") as opened:
            opened.write('{"text": "three"}\n')
    with pytest.raises(ConfigError, match=rf"data\.sources\.s\.path: {file} changed while it was read"):
        list(source.documents())
    again = source_of("jsonl", path=str(file))
    assert again.identity() != source.identity()
    assert scan(again, tmp_path / "cache", shown=False) != found
    documents = again.documents()
    next(documents)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="changed while it was read"):
        list(documents)
