"""The table of linear layers against every size built on the meta device: names, roles and shapes. 2 seconds."""

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.structure import block_linears, linear_names

FILES = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
FILES = [file for file in FILES if file.stem != "from_weights"]  # its shape comes from weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_names_are_those_of_the_model_built_on_meta(file, tied):
    config = ModelConfig(**yaml.safe_load(file.read_text())).model_copy(update={"tie_embeddings": tied})
    with torch.device("meta"):
        model = Decoder(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | GroupedLinear)]
    assert linear_names(config) == linears
    made = {name.removeprefix("layers.0."): module for name, module in model.named_modules()}
    for linear in block_linears(config, 0):
        assert list(made[linear.name].weight.shape) == [
            linear.groups * linear.outputs.length,
            linear.inputs.length,
        ]
        assert model.roles()[f"layers.0.{linear.name}"] == linear.role
