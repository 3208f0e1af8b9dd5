"""Every size in conf/model: its parameter count against the published one, and against the model built on meta."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import count_parameters, flops_per_token
from tests.model.model_shapes import gpt2, llama

FILES = sorted((Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))
FILES = [file for file in FILES if file.stem != "from_weights"]  # its shape comes from weights
SIZES = {path.stem: ModelConfig(**yaml.safe_load(path.read_text())) for path in FILES}
every_size = pytest.mark.parametrize("name", SIZES)

# As published: safetensors metadata of meta-llama, openai-community, Qwen (-Base) and google on the Hugging Face hub.
PUBLISHED = {
    "llama_1b": 1_235_814_400,
    "llama_3b": 3_212_749_824,
    "llama_8b": 8_030_261_248,
    "llama_70b": 70_553_706_496,
    "llama_405b": 405_853_388_800,
    "gpt3_345m": 354_823_168,
    "qwen3_0b6": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "zaya1": 8_840_489_464,  # of transformers' class with the biases of the choice; 8.3B without the embedding
    "deepseek_v3": 671_026_419_200,  # 671B in arXiv 2412.19437; of transformers' class with the bias of the choice
}
# Published rounded only: (millions, relative rounding of the source).
ROUNDED = {
    "llama_60m": (58, 0.01),  # ReLoRA, arXiv:2307.05695 table 2
    "llama_350m": (368, 0.01),  # the same
    "llama_160m": (162, 0.01),  # the model card
    "gpt3_1b3": (1_300, 0.04),  # GPT-3 table 2.1
    "gpt3_6b7": (6_700, 0.01),
    "gpt3_175b": (175_000, 0.01),
    "llama_20m": (20, 0.1),  # our own; the name's word
    "llama_micro": (0.42, 0.01),
    "moe_tiny": (5.71, 0.01),  # 2.17 of them active
    "moe_mla_tiny": (5.71, 0.01),  # as moe_tiny
    "ladder_240k": (0.24, 0.01),
    "ladder_690k": (0.69, 0.01),
    "ladder_1m": (1.1, 0.02),
    "unit_tiny": (2.2, 0.03),
    "ladder_8m": (8.3, 0.01),
    "ladder_20m": (20.4, 0.01),
}


def test_the_sizes_of_the_contract_are_there():
    llamas = ["tiny", "20m", "60m", "160m", "350m", "1b", "3b", "8b", "70b", "405b"]
    gpts = ["345m", "1b3", "6b7", "175b"]
    assert set(SIZES) >= {f"llama_{size}" for size in llamas} | {f"gpt3_{size}" for size in gpts}


@every_size
def test_name_is_the_file(name):
    assert SIZES[name].name == name


@every_size
def test_count_equals_the_published(name):
    config, count = SIZES[name], count_parameters(SIZES[name]).total
    assert config.parameters_published == PUBLISHED.get(name)
    if config.parameters_published is not None:
        assert count == config.parameters_published
    elif name in ROUNDED:
        millions, tolerance = ROUNDED[name]
        assert count / 1e6 == pytest.approx(millions, rel=tolerance)
    else:
        assert name.endswith("_tiny")
        assert 1_500_000 < count < 2_600_000


@pytest.mark.parametrize(("name", "billions"), [("mixtral_8x7b", 12.9), ("qwen3_30b_a3b", 3.35)])
def test_active_parameters_are_the_published_ones(name, billions):
    """Mixtral: arXiv 2401.04088 section 2.1; Qwen3: 3.3B in arXiv 2505.09388 table 2."""
    assert count_parameters(SIZES[name]).active / 1e9 == pytest.approx(billions, abs=0.05)


def test_deepseek_v3_multiplies_37_billion_parameters_with_each_token():
    """arXiv 2412.19437, section 4.2, rounded: without the input embedding, a look-up."""
    count = count_parameters(SIZES["deepseek_v3"])
    assert round((count.active - count.embedding) / 1e9) == 37


def test_zaya1_has_the_published_counts_without_its_embedding():
    """8.3B and 760M active: transformers' page of ZAYA and the model card; active to 1 %."""
    count = count_parameters(SIZES["zaya1"])
    assert round((count.total - count.embedding) / 1e9, 1) == 8.3
    assert count.active - count.embedding == pytest.approx(760e6, rel=0.01)


@every_size
def test_count_equals_the_model_built_on_meta(name):
    config = SIZES[name]
    with torch.device("meta"):
        model = Decoder(config)
    sizes = {key: parameter.numel() for key, parameter in model.named_parameters()}
    count = count_parameters(config, padded=True)
    assert count.total == sum(sizes.values())
    embeddings = ("embedding.weight", "position_embedding.weight", "head.weight")
    assert count.non_embedding == sum(size for key, size in sizes.items() if key not in embeddings)
    others = ("norm.", "router.", "_scale.", "depthwise.", "grouped.")
    assert count.norm == sum(size for key, size in sizes.items() if any(each in key for each in others))
    biases = (size for key, size in sizes.items() if key.endswith("_proj.bias") and "router." not in key)
    assert count.bias == sum(biases)


@pytest.mark.parametrize("config", [llama(vocab_multiple=1), gpt2(vocab_multiple=1)], ids=["llama", "gpt2"])
def test_flops_equal_those_counted_while_running(config):
    length = 32
    model = Decoder(config)
    mask_everything = torch.zeros(1, length, dtype=torch.long)  # the same ids: dense attention, no causal shortcut
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), document_ids=mask_everything).float().sum().backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    attention = 12 * config.num_layers * config.hidden_size * length
    assert flops_per_token(config, length) - attention == counted / length
    assert attention == 12 * 3 * 64 * 32


def test_llama_3_8b_flops_by_hand():
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert flops_per_token(SIZES["llama_8b"], 8192) == 6 * (32 * layer + 128256 * 4096) + 12 * 32 * 4096 * 8192
