"""Routers of experts in a training step: figures of the experts' load, and biases that balance it without a loss.

Letters: E experts of a block, c their choices in a step over all micro-batches and ranks.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.experts.moe import MixtureOfExperts
from lightning_llm.model.structure import feed_forward_of
from lightning_llm.parallel.layout import Layout

FIGURES = ("load_max", "load_min", "entropy", "dropped", "dead", "bias_range")


class _Router(NamedTuple):
    """A block's mixture of experts on this rank, by the block's full name."""

    block: str
    module: MixtureOfExperts


class Routing:
    """All routers of this rank in a step: their counts, figures of them over all ranks, and updates of their biases.

    The figures of a block are, in the record as means over blocks by "moe/FIGURE":

    - `load_max`, `load_min`: the largest and smallest c over their mean
    - `entropy`: of the shares of c, over ln E: 1 if all experts have the same load
    - `dropped`: the share of choices that the capacity dropped
    - `dead`: experts without a token in this step
    - `bias_range`: the largest minus the smallest bias
    """

    def __init__(self, decoders: Iterable[Decoder], model: ModelConfig, layout: Layout):
        """`decoders`: this rank's stages; `model`: the whole model."""
        decoders = list(decoders)
        self._some_parameter = next(parameter for stage in decoders for parameter in stage.parameters())
        modules = ((name, block.feed_forward) for stage in decoders for name, block in stage.blocks.items())
        self.routers = [_Router(name, each) for name, each in modules if isinstance(each, MixtureOfExperts)]
        kinds = (feed_forward_of(model, index) for index in range(model.num_layers))
        self.blocks_in_all = sum(isinstance(kind, MoE) for kind in kinds)
        self.layout = layout
        self.by_block: dict[str, Tensor] = {}
        """This rank's figures of the last step by the block's name, `[FIGURES]`."""
        self._loads: list[Tensor] = []

    def begin_step(self) -> None:
        """Reset the counts of all routers before a step."""
        for router in self.routers:
            router.module.begin_step()

    @torch.no_grad()
    def figures(self) -> dict[str, Tensor]:
        """Return the step's figures for its record ("moe/load_max" and so on), the same on every rank. Collective.

        {} for a model without experts.
        """
        if not self.blocks_in_all:
            return {}
        counts = [self._counts(router.module) for router in self.routers]
        total = torch.zeros(len(FIGURES), device=self._some_parameter.device)
        self._loads = []
        if counts:
            summed = self.layout.reduce(torch.cat(counts), dist.ReduceOp.SUM, *self.layout.summed, "sequence")
            parts = summed.split([len(each) for each in counts])
            self._loads = [part[:-1] for part in parts]
            figures = [_figures(part, router.module) for part, router in zip(parts, self.routers, strict=True)]
            self.by_block = {router.block: each for router, each in zip(self.routers, figures, strict=True)}
            total += torch.stack(figures).sum(0)
        self.layout.reduce(total, dist.ReduceOp.SUM, *self.layout.left_out, "layers")
        means = total / (self.blocks_in_all * self.layout.sums)
        return {f"moe/{name}": mean for name, mean in zip(FIGURES, means, strict=True)}

    @torch.no_grad()
    def update_biases(self) -> None:
        """Raise the bias of experts with less than the mean load and lower that of others (arXiv 2408.15664, alg. 1).

        By DeepSeek-V3's rule, `b += u sign(mean(c) - c)`; torchtitan also subtracts the mean of the changes.
        """
        for router, load in zip(self.routers, self._loads, strict=True):
            bias, rate = router.module.router.bias_of_choice, router.module.kind.router.bias_update_rate
            if bias is not None and rate is not None:
                wide = load.to(torch.float64)
                bias.add_(torch.sign(wide.mean() - wide).to(bias.dtype), alpha=rate)

    @staticmethod
    def _counts(module: MixtureOfExperts) -> Tensor:
        """Return the choices of each expert and those dropped, int64 `[E + 1]`."""
        if module.step_loads is None or module.step_dropped is None:
            return torch.zeros(
                module.kind.experts + 1, dtype=torch.int64, device=next(module.router.parameters()).device
            )
        return torch.cat([module.step_loads, module.step_dropped[None]])


def _figures(counts: Tensor, module: MixtureOfExperts) -> Tensor:
    """Return `FIGURES` of a block, fp32, from its choices and the number dropped `[E + 1]`."""
    load, dropped, bias = counts[:-1].float(), counts[-1].float(), module.router.bias_of_choice
    all_choices = load.sum().clamp(min=1)
    shares = load / all_choices
    entropy = torch.special.entr(shares).sum() / math.log(len(load)) if len(load) > 1 else shares.sum()
    span = shares.new_zeros(()) if bias is None else (bias.max() - bias.min()).float()
    ends = (shares.max() * len(load), shares.min() * len(load))
    return torch.stack([*ends, entropy, dropped / all_choices, (load == 0).sum().float(), span])
