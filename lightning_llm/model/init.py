"""Initial weights: every element depends only on (seed, parameter name, element index).

So every layout and shard starts from the same numbers. A parameter is split row-major into chunks of 65,536 elements;
chunk c comes from a separate CPU generator, seeded by `hash_words(name_word(name), c, seed=seed)`, and is always drawn
whole. The numbers are those of torch's CPU sampler: the same for the same torch build and CPU instruction set.

Schemes (`model.init`), with std = `model.init_std` and l the layer's index from 0. Biases are 0; norms begin as the
identity; the kind initializes other parameters outside linears (`model.spec`):

- "gpt2": N(0, std) for every weight, embeddings of tokens and positions included; the two linears that write to the
  residual stream (`o_proj`, `down_proj`) N(0, std / sqrt(2 num_layers)). Radford et al. 2019 section 2.3, with the
  std of openai/gpt-2 `src/model.py`; as Megatron-LM and transformers' GPT2 do (openai's position table has 0.01).
- "llama": torchtitan's Llama 3 with `depth_init` (`torchtitan/models/llama3/model.py`), since Meta published none:
  token embedding N(0, 1); q, k, v and gate N(0, std); `o_proj`, `up_proj`, `down_proj` N(0, std / sqrt(2 (l + 1)));
  head N(0, 1 / sqrt(hidden_size)), cut at 3 of its standard deviations: a first loss of some ln V + 0.5. Where head
  and embedding are one tensor its std is the smaller of that and `init_std`, since a token's embedding, still there in
  the residual stream, meets itself in the head: its logit is std x hidden_size x its share of the stream, which with
  1 / sqrt(hidden_size) was a first loss of ln V + 5.8 in a narrow model (hidden_size 192, 4 blocks). With the smaller
  it is within ln V + 0.65 at any width (0.0 at 192, 0.2 at 1024, 0.5 at 2048, 0.6 at 4096); transformers, nanoGPT and
  OLMo 2 have N(0, 0.02) there at every width. A position table, which Llama lacks, takes N(0, std).

With `model.unit_scaling` every matrix takes N(0, 1).
"""

import math
import re

import torch
from torch import Tensor

from lightning_llm.base.keyed_hash import hash_words, name_word
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.spec import Distribution, LinearSpec
from lightning_llm.model.structure import block_linears, block_parameters, norm_of

CHUNK_ELEMENTS = 65_536


def distribution_of(config: ModelConfig, name: str) -> Distribution:
    """Return the distribution of parameter `name` (its full name in a `Decoder`). Raises KeyError for other names."""
    if (within := _IN_BLOCK.fullmatch(name)) is not None:
        return _in_block(config, int(within[1]), within[2])
    ends = {f"{end}.weight": _of_table(config, end) for end in ("embedding", "position_embedding", "head")}
    ends |= {f"norm.{key}": Distribution(mean=first) for key, first in norm_of(config).vectors(config).items()}
    if name not in ends:
        raise KeyError(f"{name} is not a parameter of a decoder")
    return ends[name]


_IN_BLOCK = re.compile(r"layers\.(\d+)\.(.+)")


def _in_block(config: ModelConfig, index: int, name: str) -> Distribution:
    for linear in block_linears(config, index):
        if name == f"{linear.name}.weight":
            return Distribution(std=_std(config, linear, index))
    for parameter in block_parameters(config, index):
        if parameter.name == name and parameter.distribution is not None:
            return parameter.distribution
    raise KeyError(f"layers.{index}.{name} is not a parameter of a decoder")


def _std(config: ModelConfig, linear: LinearSpec, index: int) -> float:
    if config.unit_scaling:
        return 1.0
    if config.init not in linear.depth_scaled:
        return config.init_std
    depth = config.num_layers if config.init == "gpt2" else index + 1
    return config.init_std / math.sqrt(2 * depth)


def _of_table(config: ModelConfig, end: str) -> Distribution:
    if config.unit_scaling:
        return Distribution(std=1.0)
    if config.init == "gpt2" or end == "position_embedding":
        return Distribution(std=config.init_std)
    if end == "head" or config.tie_embeddings:
        head = config.hidden_size**-0.5
        return Distribution(std=min(head, config.init_std) if config.tie_embeddings else head, cut=3.0)
    return Distribution(std=1.0)


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
    """Initialize every parameter of `model` in place, on any device but meta.

    Values depend on the seed and the parameter's name, which must be its name in the unsplit decoder.
    """
    for name, parameter in model.named_parameters():
        values = parameter_slice(model.config, seed, name, 0, parameter.numel())
        parameter.copy_(values.view_as(parameter))
