"""Folders of weights for tests: Hugging Face's, of random numbers, as transformers and others leave them."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.data.tokens.tokenizer import write_bytes_tokenizer
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from tests.model.huggingface_states import huggingface_config, to_huggingface


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """A decoder's state dict, with norms and biases moved off 1 and 0."""
    model = Decoder(config)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    state = {name: p.detach() + torch.randn(p.shape, generator=generator) * 0.1 for name, p in model.named_parameters()}
    for name in {"embedding.weight", "head.weight"} & state.keys():
        state[name][config.vocab_size :] = 0
    return state


def write_huggingface(folder: Path, config: ModelConfig, shards: int = 1, dtype=torch.float32, **entries) -> Path:
    """Write `config` with random weights; several files get an index. `entries` go into config.json."""
    folder.mkdir(parents=True)
    state = {name: tensor.to(dtype) for name, tensor in to_huggingface(random_weights(config), config).items()}
    content = {**huggingface_config(config), **entries}
    (folder / "config.json").write_text(json.dumps({key: each for key, each in content.items() if each is not ...}))
    write_bytes_tokenizer(folder / "tokenizer.json")
    write_tensors(folder, state, shards)
    return folder


def write_tensors(folder: Path, state: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write `state` to one file, or in turn to several with their index."""
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    where = {name: names[number % shards] for number, name in enumerate(sorted(state))}
    for file in names:
        save_file({name: state[name] for name, its in where.items() if its == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
