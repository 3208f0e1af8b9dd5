"""Folders of weights that are not as they should be: each fault named with its file, and nothing in them run."""

import json
import os
import pickle
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_llm.base.errors import ConfigError
from lightning_llm.model.interop.families import model_config_of
from lightning_llm.model.weights.files import open_files, open_pickled
from lightning_llm.model.weights.folder import open_huggingface
from tests.model.huggingface_states import huggingface_config, to_huggingface
from tests.model.model_shapes import llama
from tests.weight_folders import random_weights, write_huggingface

CONFIG = llama(num_layers=1)
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return write_huggingface(tmp_path / "hf", CONFIG, shards=2)


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        open_huggingface(folder)
    return str(caught.value)


def reindexed(folder, change):
    listed = json.loads((folder / INDEX).read_text())
    change(listed["weight_map"])
    (folder / INDEX).write_text(json.dumps(listed))


def test_a_folder_without_its_index(sharded):
    (sharded / INDEX).unlink()
    assert "is missing, and model-00001-of-00002.safetensors" in refusal(sharded)


def test_missing_short_and_damaged_shards_are_named_together(tmp_path):
    folder = write_huggingface(tmp_path / "hf", CONFIG, shards=3)
    one, two, three = sorted(folder.glob("*.safetensors"))
    one.unlink()
    os.truncate(two, two.stat().st_size - 100)
    three.write_bytes(b"\xff" * 64)
    said = refusal(folder)
    assert f"{one}: is missing" in said
    assert f"{two}: is shorter or longer than its header declares" in said
    assert f"{three}: is no safetensors file, or a damaged one" in said


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", "\0", 3, None])
def test_an_index_that_leads_out_of_the_folder(sharded, name):
    reindexed(sharded, lambda listed: listed.update({"lm_head.weight": name}))
    assert "not in this folder" in refusal(sharded)


def test_an_index_that_says_another_file_than_holds_the_tensor(sharded):
    reindexed(sharded, lambda listed: listed.update({"lm_head.weight": "model-00002-of-00002.safetensors"}))
    reindexed(sharded, lambda listed: listed.update({"not.there": FIRST}))
    assert "gives a wrong file for" in refusal(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_is_none(sharded, content):
    (sharded / INDEX).write_text(content)
    assert "is not an index of weights" in refusal(sharded)


def test_links(tmp_path):
    folder = write_huggingface(tmp_path / "hf", CONFIG)
    file = folder / "model.safetensors"
    blob = tmp_path / "blob"
    file.rename(blob)
    file.symlink_to(blob)  # as in the hub's cache
    open_huggingface(folder)
    blob.unlink()
    assert "a link that leads nowhere" in refusal(folder)
    file.unlink()
    file.symlink_to(file)
    assert "a link that leads nowhere, or to itself" in refusal(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")
    assert "config.json: cannot be read" in refusal(folder)


def test_missing_extra_and_misshapen_tensors_and_dtypes_are_named_together(tmp_path):
    folder = write_huggingface(tmp_path / "hf", CONFIG)
    state = to_huggingface(random_weights(CONFIG), CONFIG)
    del state["model.norm.weight"]
    state["model.layers.7.mlp.up_proj.weight"] = torch.ones(2)
    state["lm_head.weight"] = torch.ones(3, 5)
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors")
    said = refusal(folder)
    for part in (
        "has no tensor model.norm.weight, which its config requires",
        "has the tensor model.layers.7.mlp.up_proj.weight, which its config does not define",
        "lm_head.weight has shape (3, 5) in model.safetensors, and (100, 64) by its config",
        "model.embed_tokens.weight (F8_E4M3); weights are read in fp32, bf16, fp16",
    ):
        assert part in said


class _Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_pickled_weights_are_read_as_tensors_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_huggingface(tmp_path / "hf", CONFIG)
    state = to_huggingface(random_weights(CONFIG), CONFIG)
    (folder / "model.safetensors").unlink()
    assert "is missing, so there are no weights" in refusal(folder)
    torch.save(state, folder / "pytorch_model.bin")
    assert "lightning-llm import" in refusal(folder)
    read = open_huggingface(folder, open_pickled)
    assert torch.equal(read.rows("head.weight", 3, 9), random_weights(CONFIG)["head.weight"][3:9])
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as before torch 1.6
    read = open_huggingface(folder, open_pickled)
    assert torch.equal(read.rows("head.weight", 3, 9), random_weights(CONFIG)["head.weight"][3:9])
    whole = (folder / "pytorch_model.bin").read_bytes()
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        (folder / "pytorch_model.bin").write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"can(not)? be read.*(again|whole)"):
            open_huggingface(folder, open_pickled)
    torch.save({"a": _Runs()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match=r"refers to \w+\.system, which is code; it was not run"):
        open_huggingface(folder, open_pickled)
    for content in ({"a": _Runs()}, ["no dict"], {"a": "text"}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"\.system, which is code|is not a dict of tensors"):
            open_huggingface(folder, open_pickled)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(ConfigError, match="contains no readable data"):
        open_huggingface(folder, open_pickled)
    assert not (tmp_path / "ran").exists()


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_bytes_changed_anywhere_in_the_header_or_cut_are_refused_or_change_no_rule(data, tmp_path_factory):
    folder = data.draw(st.just(_shared(tmp_path_factory)))
    content = bytearray((folder / "whole").read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    (folder / "model.safetensors").write_bytes(bytes(content))
    try:
        files = open_files(folder)
    except ConfigError:  # any other exception fails the test
        return
    for name, entry in files.entries.items():  # every accepted file can be read
        if entry.shape:
            files.part(name, 0, entry.shape[0])


_FOLDER = []


def _shared(factory):
    if not _FOLDER:
        folder = factory.mktemp("fuzz")
        tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(1)}
        save_file(tensors, folder / "whole")
        _FOLDER.append(folder)
    return _FOLDER[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


KEYS = [
    "architectures", "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings",
    "initializer_range", "auto_map", "quantization_config", "max_position_embeddings", "partial_rotary_factor",
]  # fmt: skip


@FUZZ
@given(key=st.sampled_from(KEYS), value=JSON)
def test_any_value_in_config_json_is_read_or_refused(key, value):
    with suppress(ConfigError):  # any other exception fails the test
        assert model_config_of({**huggingface_config(CONFIG), key: value}, "x").num_layers > 0


def test_a_config_with_an_impossible_shape_is_rejected_for_any_tensors(tmp_path):
    folder = write_huggingface(tmp_path / "hf", CONFIG.model_copy(update={"num_heads": 2, "num_kv_heads": 6}))
    assert "config.json: makes no model: model.num_kv_heads: model.num_heads=2 is not a multiple of 6" in refusal(
        folder
    )
