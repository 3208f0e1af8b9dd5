"""A folder of weights with a fault, given to every verb that reads one: the message names fault and remedy."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from tests.weight_folders import write_huggingface

SECOND = "model-00002-of-00002.safetensors"
VERBS = "import", "train", "plan", "evaluate", "generate", "export"
READERS = VERBS[1:]
"""All verbs except `import`, which converts a folder for the others."""


class Code:
    def __reduce__(self):
        return print, ("this was run",)


def change_tensors(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors", {"format": "pt"})


def change_json(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def cut(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-100])


def lose_and_add(folder: Path) -> None:
    kept = "model.norm.weight"
    change_tensors(folder, lambda state: {k: v for k, v in state.items() if k != kept} | {"odd": torch.ones(2)})


def pickled(folder: Path, what) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(what, folder / "pytorch_model.bin")


FAULTS = {
    "no index": (2, lambda folder: (folder / "model.safetensors.index.json").unlink(), VERBS,
                 ["index.json: is missing", "Download the folder again, with its index"]),
    "a shard missing": (2, lambda folder: (folder / SECOND).unlink(), VERBS, [f"{SECOND}: is missing", "again"]),
    "a shard short": (2, cut, VERBS, [f"{SECOND}: is shorter or longer than its header declares", "again"]),
    "fp64": (1, lambda folder: change_tensors(folder, lambda state: {k: v.double() for k, v in state.items()}), VERBS,
             ["(F64)", "weights are read in fp32, bf16, fp16. Convert them first"]),
    "tensors missing and extra": (1, lose_and_add, VERBS, ["has no tensor model.norm.weight", "has the tensor odd"]),
    "code of its own": (1, lambda folder: change_json(folder / "config.json", auto_map={"AutoModel": "m.X"}), VERBS,
                        ["auto_map: names the model's own code (trust_remote_code)", "Use a model with a class"]),
    "pickled code": (1, lambda folder: pickled(folder, {"a": Code()}), ["import"], ["it was not run"]),
    "pickled": (1, lambda folder: pickled(folder, {}), READERS, ["lightning-llm import"]),
    "heads that do not share keys": (1, lambda folder: change_json(folder / "config.json", num_key_value_heads=4,
                                                                   num_attention_heads=6), VERBS, ["a multiple of 4"]),
    "no tokenizer at all": (1, lambda folder: (folder / "tokenizer.json").write_text("{}"), VERBS,
                            ["is not a tokenizer.json of the `tokenizers` library"]),
    "a tokenizer with more tokens than rows": (1, lambda folder: more_tokens(folder), VERBS, ["tokens"]),
    "two rope entries": (1, lambda folder: change_json(folder / "config.json", rope_scaling={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}), VERBS,
        ["rope_scaling: and rope_parameters are both given and differ (rope_type 'yarn' and 'default'"]),
    "an adapter": (1, lambda folder: (folder / "adapter_config.json").write_text("{}"), VERBS, ["Merge it into them"]),
    "two heads": (1, lambda folder: two_heads(folder), VERBS, ["tie_word_embeddings: is true or left out, which ties"]),
    "a key twice": (1, lambda folder: twice(folder / "config.json"), VERBS, ["'rope_theta' is given twice"]),
    "two sets of weights": (2, lambda folder: shutil.copyfile(folder / SECOND, folder / "model.safetensors"), VERBS,
                            ["model.safetensors: exists next to model.safetensors.index.json"]),
}  # fmt: skip


def two_heads(folder: Path) -> None:
    change_json(folder / "config.json", tie_word_embeddings=True)
    change_tensors(folder, lambda state: state | {"lm_head.weight": state["model.embed_tokens.weight"] + 1})


def twice(file: Path) -> None:
    file.write_text('{"rope_theta": 5.0, ' + file.read_text().removeprefix("{"))


def more_tokens(folder: Path) -> None:
    added = [{"id": 400, "content": "<more>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True}]  # fmt: skip
    change_json(folder / "tokenizer.json", added_tokens=added)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_verb_reports_damaged_weights_and_writes_nothing(fault, tmp_path, corpus_folder, monkeypatch, capsys):
    shards, break_it, verbs, said = FAULTS[fault]
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = write_huggingface(tmp_path / "hf", shape, shards=shards)
    break_it(folder)
    documents = corpus_folder / "documents.jsonl"
    data = ["data=jsonl", f"data.sources.jsonl.path={documents}", f"data.cache_dir={tmp_path}/cache"]
    commands = {
        "import": ["import", str(folder), "--output", str(tmp_path / "out"), "--no-parity"],
        "train": ["train", f"model.init_from={folder}", *data],
        "plan": ["plan", f"model.init_from={folder}", *data],
        "evaluate": ["evaluate", str(folder), "--data", f"jsonl={documents}"],
        "generate": ["generate", str(folder), "--prompt", "the"],
        "export": ["export", str(folder), "--output", str(tmp_path / "out"), "--no-parity"],
    }
    for verb in verbs:
        assert main(commands[verb]) == 2, verb
        printed = capsys.readouterr()
        for part in said:
            assert part in printed.err, verb
        assert "this was run" not in printed.out
        assert [each.name for each in tmp_path.iterdir()] == ["hf"], verb


def test_tensors_in_another_dtype_than_said_are_read_as_they_are_and_said(tmp_path, corpus_folder, capsys):
    shape = compose_config(["model=llama_tiny", "model.num_layers=1", "model.vocab_size=300"]).model
    folder = write_huggingface(tmp_path / "hf", shape, torch_dtype="bfloat16")
    said = f"config.json of {folder} declares bfloat16, but its tensors are fp32: they are read unchanged"
    data = ["data=jsonl", f"data.sources.jsonl.path={corpus_folder / 'documents.jsonl'}", "data.sequence_length=32"]
    run = [f"run.dir={tmp_path}/run", f"data.cache_dir={tmp_path}/cache", "logger=none", "callbacks=none"]
    steps = ["trainer.max_steps=1", "trainer.validate_every_steps=null", "trainer.accelerator=cpu"]
    for words in (
        ["import", str(folder), "--output", str(tmp_path / "base"), "--no-parity"],
        ["generate", str(folder), "--prompt", "the", "--max-new-tokens", "1"],
        ["train", f"model.init_from={folder}", *data, *run, *steps],
    ):
        assert main(words) == 0, words
        printed = capsys.readouterr()
        assert said in printed.out + printed.err, words
    assert load_file(tmp_path / "base" / "model.safetensors")["embedding.weight"].dtype == torch.float32
