"""Initial weights: every element is a function of (seed, parameter name, element index) alone.

So each layout, and each shard for itself, starts from the same numbers. A parameter is cut row-major into chunks of
65,536 elements; chunk c comes from a CPU generator of its own, seeded by `hash_words(name_word(name), c, seed=seed)`,
and is always drawn whole. The numbers are those of torch's CPU sampler: the same for the same torch build and CPU
instruction set.

Schemes (`model.init`), with std = `model.init_std` and l the layer's index from 0. Biases are 0 and norm weights 1:

- "gpt2": N(0, std) for every weight, embeddings of tokens and positions included; the two linears that write to the
  residual stream (`o_proj`, `down_proj`) N(0, std / sqrt(2 num_layers)). Radford et al. 2019 section 2.3, with the
  std of openai/gpt-2 `src/model.py`; as Megatron-LM and transformers' GPT2 do (openai's position table has 0.01).
- "llama": torchtitan's Llama 3 with `depth_init` (`torchtitan/models/llama3/model.py`), since Meta published none:
  token embedding N(0, 1); q, k, v and gate N(0, std); `o_proj`, `up_proj`, `down_proj` N(0, std / sqrt(2 (l + 1)));
  head N(0, 1 / sqrt(hidden_size)), cut at 3 of its standard deviations. Where head and embedding are one tensor, it
  takes the head's rule. A position table, which Llama lacks, takes N(0, std).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.keyed_hash import hash_words, name_word
from lightning_llm.model.decoder import Decoder

CHUNK_ELEMENTS = 65_536


@dataclass(frozen=True)
class Distribution:
    """What a parameter is drawn from: `mean` where `std` is 0, else a normal, cut at `cut` standard deviations."""

    mean: float = 0.0
    std: float = 0.0
    cut: float | None = None


def distribution_of(config: ModelConfig, name: str) -> Distribution:
    """Return what parameter `name` (its full name in a `Decoder`) is drawn from. Raises KeyError for other names."""
    *path, kind = name.split(".")
    module = path[-1] if path else ""
    if kind == "bias":
        return Distribution()
    if kind != "weight":
        raise KeyError(f"{name} is no parameter of a decoder")
    if module.endswith("norm"):
        return Distribution(mean=1.0)
    if module not in _WEIGHTS:
        raise KeyError(f"{name} is no parameter of a decoder")
    scale_of = _gpt2_distribution if config.init == "gpt2" else _llama_distribution
    return scale_of(config, module, layer=int(path[1]) if path[0] == "layers" else 0)


_WEIGHTS = {
    "embedding",
    "position_embedding",
    "head",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
}


def _gpt2_distribution(config: ModelConfig, module: str, layer: int) -> Distribution:
    if module in {"o_proj", "down_proj"}:
        return Distribution(std=config.init_std / math.sqrt(2 * config.num_layers))
    return Distribution(std=config.init_std)


def _llama_distribution(config: ModelConfig, module: str, layer: int) -> Distribution:
    if module == "head" or (module == "embedding" and config.tie_embeddings):
        return Distribution(std=config.hidden_size**-0.5, cut=3.0)
    if module == "embedding":
        return Distribution(std=1.0)
    if module in {"o_proj", "up_proj", "down_proj"}:
        return Distribution(std=config.init_std / math.sqrt(2 * (layer + 1)))
    return Distribution(std=config.init_std)


def parameter_slice(config: ModelConfig, seed: int, name: str, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of parameter `name`, counted row-major over the whole tensor: fp32, CPU.

    A shard of rows r0 to r1 of a `[rows, columns]` weight is `start = r0 * columns`, `stop = r1 * columns`.
    """
    distribution = distribution_of(config, name)
    if distribution.std == 0.0:
        return torch.full((stop - start,), distribution.mean)
    values = torch.empty(stop - start)
    first, word = start // CHUNK_ELEMENTS, name_word(name)
    for chunk in range(first, -(-stop // CHUNK_ELEMENTS)):
        drawn = _draw_chunk(distribution, hash_words(word, chunk, seed=seed))
        low, high = max(start, chunk * CHUNK_ELEMENTS), min(stop, (chunk + 1) * CHUNK_ELEMENTS)
        offset = chunk * CHUNK_ELEMENTS
        values[low - start : high - start] = drawn[low - offset : high - offset]
    return values


def _draw_chunk(distribution: Distribution, word: int) -> Tensor:
    generator = torch.Generator().manual_seed(word)
    if distribution.cut is None:
        return torch.randn(CHUNK_ELEMENTS, generator=generator) * distribution.std
    mass = math.erf(distribution.cut / math.sqrt(2))  # of the normal within the cut; inverse-transform sampling
    uniform = torch.rand(CHUNK_ELEMENTS, generator=generator, dtype=torch.float64) * 2 - 1
    return (torch.erfinv(uniform * mass) * (math.sqrt(2) * distribution.std)).float()


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter of `model` in place, on any device but meta. Names must be those of the whole decoder."""
    for name, parameter in model.named_parameters():
        values = parameter_slice(model.config, seed, name, 0, parameter.numel())
        parameter.copy_(values.view_as(parameter))
