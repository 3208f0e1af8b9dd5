"""Nothing that is loaded from a disk runs code: each kind of file is tried with a real exploit. 10 seconds."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.precision.cast import kernel_cache
from tests.security.exploits import (
    archive_of,
    object_array,
    object_arrays,
    pickled,
    python_code,
    python_yaml,
    torch_archive,
)
from tests.weight_folders import write_huggingface

EXPLOITS: dict[str, Callable[[Path], Any]] = {
    "pickle": lambda mark: pickle.loads(pickled(mark)),
    "torch": lambda mark: torch.load(_file(mark, torch_archive(mark)), weights_only=False),
    "numpy": lambda mark: np.load(_file(mark, object_array(mark)), allow_pickle=True),
    "numpy archive": lambda mark: np.load(_file(mark, object_arrays(mark, "a")), allow_pickle=True)["a"],
    "yaml": lambda mark: yaml.unsafe_load(python_yaml(mark)),
    "python": lambda mark: exec(python_code(mark)),
}


def _file(mark: Path, content: bytes) -> Path:
    mark.with_name("exploit").write_bytes(content)
    return mark.with_name("exploit")


@pytest.mark.parametrize("kind", EXPLOITS)
def test_the_exploits_are_some(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    with suppress(RuntimeError, TypeError, KeyError):  # torch wants more of its archive, once it has run
        EXPLOITS[kind](mark)
    assert mark.exists()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks" / "ran"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, small_run: Any) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert main(["train", *small_run(folder, "trainer.max_steps=1", "checkpoint.every_steps=1")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def some_in_full(every: Iterable[Any], *cheap: Any) -> list[Any]:
    """Parameters of a test that tries all of `every`, those but `cheap` in `make test-full` alone."""
    return [pytest.param(each, marks=() if each in cheap else pytest.mark.full) for each in every]


def refused(mark: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the messages of a refusal of `words`; fail if there is a traceback or if anything ran."""
    assert main(list(words)) in (1, 2), words
    said = capsys.readouterr().err
    assert "Traceback" not in said, words
    assert said.strip(), words
    assert not mark.exists(), words
    return said


def verbs_on(run: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Every verb that reads a run's folder."""
    other = str(run)
    return {
        "train": ["train", "--config", f"{run}/config.yaml", "resume=auto", "trainer.max_steps=2"],
        "plan": ["plan", "--config", f"{run}/config.yaml"],
        "config": ["config", "--config", f"{run}/config.yaml"],
        "evaluate": ["evaluate", other],
        "generate": ["generate", other, "--prompt", "the"],
        "export": ["export", other, "--output", str(tmp_path / "exported"), "--no-parity"],
        "probe": ["probe", other],
        "compare": ["compare", other, other],
        "diff": ["diff", other, other],
        "branch": ["plan", f"branch_from={other}", "precision=bf16", f"run.root={tmp_path}"],
    }


VERBS = ["train", "plan", "config", "evaluate", "generate", "export", "probe", "compare", "diff", "branch"]
SOME = ("train", "compare")
"""Verbs that `make test` also tries with the other ways of naming code; the remaining verbs use the same reader."""


@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        pytest.param(kind, verb, marks=pytest.mark.full if kind == "_target_" and verb not in SOME else ())
        for kind in ("yaml", "_target_")
        for verb in VERBS
    ],
)
def test_a_config_yaml(
    verb: str, kind: str, run: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "config.yaml"
    if kind == "yaml":
        text = file.read_text().replace("seed: 0\n", f"seed: {python_yaml(mark)}\n")
    else:
        tree = yaml.safe_load(file.read_text())
        popen = {"_target_": "subprocess.Popen", "args": ["touch", str(mark)]}
        tree |= {"callbacks": {"x": popen}, "optim": {**tree["optim"], **popen}, "logger": popen}
        text = yaml.safe_dump(tree)
    assert text != file.read_text()
    file.write_text(text)
    if kind == "_target_" and verb in ("compare", "diff"):  # these verbs read any value there
        main(verbs_on(run, tmp_path)[verb])
        assert not mark.exists()
        return
    refused(mark, capsys, *verbs_on(run, tmp_path)[verb])


RECIPES = {
    "yaml": "# @package _global_\nseed: {yaml}\n",
    "callback": "# @package _global_\ncallbacks: {{x: {{_target_: subprocess.Popen, args: [touch, '{mark}']}}}}\n",
    "other target": "# @package _global_\noptim: {{_target_: subprocess.Popen, args: [touch, '{mark}']}}\n",
    "nested target": "# @package _global_\ndata: {{sources: {{x: {{_target_: os.system, command: touch {mark}}}}}}}\n",
    "logging": "# @package _global_\n"
    "hydra: {{job_logging: {{handlers: {{x: {{(): os.system, command: touch {mark}}}}}}}}}\n",
    "hydra's callbacks": "# @package _global_\nhydra: {{callbacks: {{x: {{_target_: os.system}}}}}}\n",
    "hydra's sweeper": "# @package _global_\nhydra: {{sweeper: {{_target_: os.system}}}}\n",
    "a resolver": '# @package _global_\nseed: ${{eval:\'__import__("os").system("touch {mark}")\'}}\n',
    "code beside it": "# @package _global_\ncallbacks: {{x: {{_target_: code_beside.Runs}}}}\n",
}


@pytest.mark.parametrize("name", some_in_full(RECIPES, "yaml", "callback", "logging", "code beside it"))
def test_a_recipe(name: str, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    (folder / "recipe").mkdir(parents=True)
    text = RECIPES[name].format(yaml=python_yaml(mark), mark=mark)
    (folder / "recipe" / "bad.yaml").write_text(text)
    for beside in (folder, folder / "recipe"):
        (beside / "code_beside.py").write_text(python_code(mark))
    words = ["--config-dir", str(folder), "recipe=bad", f"run.root={tmp_path}"]
    refused(mark, capsys, "train", *words)
    assert main(["recipes", "--config-dir", str(folder)]) in (0, 2)
    assert not mark.exists()


def test_a_recipe_cannot_name_code_of_a_folder_that_nobody_named(
    tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config_dir").mkdir()
    (tmp_path / "config_dir" / "mine.py").write_text(python_code(mark) + "class Mine: pass\n")
    monkeypatch.chdir(tmp_path)
    for target in ("config_dir.mine.Mine", "mine.Mine"):
        refused(mark, capsys, "plan", f"+callbacks.x={{_target_: {target}}}", f"run.root={tmp_path}")


def with_code(folder: Path, mark: Path) -> Path:
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "custom_generate/generate.py", "x.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(python_code(mark))
    return folder


CARD = "---\nconfigs:\n- config_name: default\n  data_files: {yaml}\nlicense: {yaml}\n---\n# A data set\n"


def script_and_card(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    (folder / f"{folder.name}.py").write_text(python_code(mark))
    (folder / "README.md").write_text(CARD.format(yaml=python_yaml(mark)))


def card_alone(folder: Path, mark: Path) -> None:
    (folder / "data.jsonl").write_text('{"text": "a"}\n')
    (folder / "README.md").write_text(CARD.format(yaml=python_yaml(mark)))


def saved_to_disk(folder: Path, mark: Path) -> None:
    """A data set of `save_to_disk` with pickles instead of JSON as description and state."""
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (folder / name).write_bytes(pickled(mark))


def arrow_extension(folder: Path, mark: Path) -> None:
    """A column of a type that pyarrow once unpickled (CVE-2023-47248)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickled(mark)}
    table = pa.table(
        [pa.array([f"a text {number} of some words" for number in range(200)])],
        schema=pa.schema([pa.field("text", pa.string(), metadata=about)]),
    )
    pq.write_table(table, folder / "data.parquet")


DATASETS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "a script and a card": ("huggingface", script_and_card),
    "a card": ("huggingface", card_alone),
    "an archive of samples": ("huggingface", archive_of),
    "saved to disk": ("huggingface", saved_to_disk),
    "an arrow type": ("parquet", arrow_extension),
    "an arrow type, by datasets": ("huggingface", arrow_extension),
    "a pickle for parquet": ("parquet", lambda folder, mark: (folder / "x.parquet").write_bytes(pickled(mark))),
    "a pickle for jsonl": ("jsonl", lambda folder, mark: (folder / "x.jsonl").write_bytes(pickled(mark))),
    "an array of objects": ("olmo", lambda folder, mark: (folder / "x.npy").write_bytes(object_array(mark))),
}


@pytest.mark.parametrize(
    "name", some_in_full(DATASETS, "a script and a card", "an archive of samples", "an arrow type")
)
def test_a_data_set(name: str, tmp_path: Path, small_run: Any, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader, plant = DATASETS[name]
    folder = tmp_path / "dataset"
    folder.mkdir()
    plant(folder, mark)
    source = f"+data.sources.x={{loader: {loader}, path: '{folder}', weight: 1.0}}"
    words = small_run(tmp_path, source, f"data.cache_dir={tmp_path}/cache", "trainer.max_steps=1")
    if name.startswith("an arrow type"):  # for pyarrow a plain column, despite its metadata
        assert main(["train", *words]) == 0
        assert not mark.exists()
        assert "Traceback" not in capsys.readouterr().err
    else:
        refused(mark, capsys, "train", *words)


def test_a_tokenizer(tmp_path: Path, small_run: Any, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = with_code(write_huggingface(tmp_path / "hf", shape), mark)
    about = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}, "tokenizer_class": "X"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    own = ["data.tokenizer.kind=file", f"data.tokenizer.path={folder}/tokenizer.json", "trainer.max_steps=1"]
    words = [word for word in small_run(tmp_path, *own) if not word.startswith("data.tokenizer.vocab_size")]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    assert not mark.exists()
    (folder / "tokenizer.json").write_bytes(pickled(mark))
    refused(mark, capsys, "train", *words, f"run.dir={tmp_path}/other")


def header_bomb(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def nested_header(folder: Path, mark: Path) -> None:
    header = b'{"a":' + b"[" * 200_000
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def huge_tensor(folder: Path, mark: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


def pickle_alone(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(torch_archive(mark))


def old_pickle_alone(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(mark))


def pickle_for_safetensors(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes(torch_archive(mark))


def code_of_its_own(folder: Path, mark: Path) -> None:
    with_code(folder, mark)
    values = json.loads((folder / "config.json").read_text())
    values["auto_map"] = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps(values))


WEIGHTS = [
    header_bomb, nested_header, huge_tensor, pickle_alone, old_pickle_alone, pickle_for_safetensors, code_of_its_own
]  # fmt: skip


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    return write_huggingface(tmp_path / "hf", shape)


@pytest.mark.parametrize("plant", some_in_full(WEIGHTS, header_bomb, pickle_alone, code_of_its_own))
def test_a_folder_of_weights(
    plant: Any, weights: Path, tmp_path: Path, corpus_folder: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(weights, mark)
    documents = f"jsonl={corpus_folder}/documents.jsonl"
    for words in (
        ["import", str(weights), "--output", str(tmp_path / "out")],
        ["evaluate", str(weights), "--data", documents],
        ["generate", str(weights), "--prompt", "the"],
        ["export", str(weights), "--output", str(tmp_path / "out")],
    ):
        refused(mark, capsys, *words)


@pytest.mark.full
def test_code_next_to_weights_is_not_run(
    weights: Path, tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here transformers loads the folder itself, to compare."""
    with_code(weights, mark)
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "adapter_model.bin", "rng_state.pth"):
        (weights / name).write_bytes(torch_archive(mark))
    auto = {"AutoTokenizer": ["tokenization_x.X", None], "AutoModelForCausalLM": "modeling_x.X"}
    for name in ("tokenizer_config.json", "generation_config.json", "processor_config.json"):
        (weights / name).write_text(json.dumps({"auto_map": auto, "trust_remote_code": True}))
    main(["import", str(weights), "--output", str(tmp_path / "out")])
    assert not mark.exists()
    main(["export", str(weights), "--output", str(tmp_path / "exported")])
    assert not mark.exists()


def test_vectors(tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "vectors"
    folder.mkdir()
    case = {"name": "c", "recipe": "element cast", "file": "v.npz", "arrays": ["x"], "format": "e4m3"}
    (folder / "manifest.json").write_text(json.dumps({"cases": [case]}))
    (folder / "v.npz").write_bytes(object_arrays(mark, "c__x"))
    assert "cannot be read: " in refused(mark, capsys, "conformance", str(folder))
    (folder / "v.npz").write_bytes(pickled(mark))
    refused(mark, capsys, "conformance", str(folder))


@pytest.mark.parametrize("name", ["golden", "looks", "least"])
def test_json_that_is_a_pickle(name: str, run: Path, tmp_path: Path, mark: Path, capsys: Any) -> None:
    file = tmp_path / f"{name}.json"
    file.write_bytes(pickled(mark))
    if name == "golden":
        refused(mark, capsys, "golden", "check", str(file))
    elif name == "least":
        refused(mark, capsys, "health", "trainer.accelerator=cpu", f"run.root={tmp_path}", "--fail-below", str(file))
    else:
        for known in ("looks.json", "metrics.jsonl", "summary.json"):
            (run / known).write_bytes(pickled(mark))
        refused(mark, capsys, "compare", str(run), str(run))


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_kernels_that_another_could_have_written(mode: int, tmp_path: Path, mark: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(kernel_cache.FOLDER, str(folder))
    body = json.dumps({}).encode() + b"\n" + pickled(mark)
    (folder / "x.kernel").write_bytes(kernel_cache._seal(b"key", body) + body)
    os.chmod(folder, mode)
    kernel_cache.folder.cache_clear()
    try:
        assert kernel_cache.folder() is None
    finally:
        kernel_cache.folder.cache_clear()
    assert not mark.exists()
