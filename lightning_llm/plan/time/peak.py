"""The FLOPs that a step cannot do without, by number format: the numerator of a plan's MFU. Imports no torch.

MFU is the time of these FLOPs at the peaks of their formats over the time of the step. For one format that is the usual
quotient of rates (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B). For a mixture it is the quotient to the
mixture's peak, sum F_i / sum (F_i / P_i): rates of parts of one work are averaged by the harmonic mean, weighted by
work (J. E. Smith, "Characterizing computer performance with a single number", CACM 31 (1988) 1202-1206).

PaLM's count has all T x T scores of attention, of which causal kernels compute half: with long sequences its MFU passes
100 %. Here a token attends to itself and what comes before it within its window, as the kernels' time counts.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_llm.config.schema import Config
from lightning_llm.model.structure import block_linears, for_layers, mixer_of
from lightning_llm.plan.time.device import Device
from lightning_llm.plan.time.formats import GEMMS, Formats


@dataclass(frozen=True)
class NeededFlops:
    """FLOPs of training on one token by number format, and the device's peak in each, FLOP/s."""

    flops: Mapping[str, float]
    peaks: Mapping[str, float]

    @property
    def total(self) -> float:
        """FLOPs of all formats."""
        return sum(self.flops.values())

    @property
    def seconds(self) -> float:
        """Seconds of one device for one token at the peaks."""
        return sum(value / self.peaks[each] for each, value in self.flops.items())

    @property
    def peak(self) -> float:
        """The peak of the mixture, FLOP/s."""
        return self.total / self.seconds

    def text(self) -> str:
        """Return the peak in words: "the bf16 peak 989.5 TFLOP/s"; of a mixture with each format's share of FLOPs."""
        if len(self.flops) == 1:
            return f"the {next(iter(self.flops))} peak {self.peak / 1e12:,.4g} TFLOP/s"
        shares = (
            f"{value / self.total:.0%} of FLOPs {each} at {self.peaks[each] / 1e12:,.4g}"
            for each, value in sorted(self.flops.items(), key=lambda item: -item[1])
        )
        return f"the mixture's peak {self.peak / 1e12:,.4g} TFLOP/s ({', '.join(shares)})"


def needed_flops(config: Config, formats: Formats, device: Device) -> NeededFlops:
    """Return the needed FLOPs of a token of `config`, whose linears have `formats`.

    Raises ValueError where the device has no peak for one of them.
    """
    model, length = config.model, config.data.sequence_length
    flops: dict[str, float] = defaultdict(float)

    def add_linear(name: str, elements: int) -> None:
        made = formats.of(name)
        for gemm in GEMMS:
            flops[made.gemms[gemm]] += 2 * elements

    layers = range(model.num_layers)
    shapes = for_layers(model, layers, lambda at: [(each.name, each.elements) for each in block_linears(model, at)])
    for index, linears in zip(layers, shapes, strict=True):
        for name, elements in linears:
            add_linear(f"layers.{index}.{name}", elements)
    add_linear("head", model.vocab_size * model.hidden_size)
    for index in layers:
        mixer = mixer_of(model, index)
        share = 1.0
        if not mixer.recurrent:
            seen = min(mixer.window_tokens(model) or length, length)
            share = 1 - seen / (2 * length)
        number_format = device.mixer_format(config.precision.compute_dtype, recurrent=mixer.recurrent)
        flops[number_format] += share * mixer.flops_per_token(model, length)
    return NeededFlops(dict(flops), {each: _peak(device, each) for each in flops})


def _peak(device: Device, number_format: str) -> float:
    peak = device.peak(number_format)
    if peak is None:
        raise ValueError(f"{device.cluster.hardware} multiplies no {number_format}")
    return peak
