"""Delayed scaling: a tensor's scale from earlier amaxes, and the state of a whole model's layers.

The rule is that of Transformer Engine's `delayed_scaling.cu`. `history` is [L, T] fp32 for T tensors: row 0 collects
the amax since the last update (of a step, or of a micro-batch), rows 1 .. L-1 hold earlier ones, oldest first. `scale`
is [T] fp32. `update` and `update_unfused` are pure functions.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.precision import CastConfig, DelayedConfig
from lightning_llm.precision.cast.rounding import FLOAT_MAX
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers
from lightning_llm.precision.linear.plan import ROLES


def update(history: Tensor, scale: Tensor, largest: Tensor, config: DelayedConfig) -> tuple[Tensor, Tensor]:
    """Return (amax history [H, T], scale [T]) after one update. `largest` [T]: largest number of each tensor's format.

    The fused kernel's rule: a tensor with 0 in row 0 was not used, so its history does not roll and its scale stays. A
    scale also stays while its amax is not finite, until that amax leaves the history.
    """
    last = history[0]
    rolled = torch.cat([history[1:], last[None]])
    seen = torch.where(torch.isnan(rolled), torch.zeros_like(rolled), rolled).amax(0)
    amax = seen if config.algorithm == "max" else last
    used = last != 0
    history = torch.where(used, torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]]), history)
    return history, torch.where(used & (amax > 0) & torch.isfinite(amax), _scale(amax, largest, config), scale)


def _scale(amax: Tensor, largest: Tensor, config: DelayedConfig) -> Tensor:
    """Return largest 2^-margin / amax by one true division, held to the largest fp32."""
    return torch.div(largest * 2.0**-config.margin, amax).clamp(max=FLOAT_MAX)


def update_unfused(history: Tensor, scale: Tensor, largest: Tensor, config: DelayedConfig) -> tuple[Tensor, Tensor]:
    """Return (amax history, scale) as `update`, by the rule of Transformer Engine's Python path.

    That path runs under `NVTE_UNFUSED_FP8_UPDATE=1`.

    It rolls always, lets NaN through the maximum, and divides by a reciprocal: up to one unit in the last place off.
    """
    amax = history.amax(0) if config.algorithm == "max" else history[0]
    rolled = history.roll(-1, 0)
    history = torch.cat([torch.zeros_like(rolled[:1]), rolled[1:]])
    new = torch.reciprocal(amax) * largest * 2.0**-config.margin
    new = torch.where(torch.isinf(new), torch.full_like(new, FLOAT_MAX), new)
    return history, torch.where((amax > 0) & torch.isfinite(amax), new, scale)


def update_delayed(
    model: nn.Module,
    reduce_max: Callable[[Tensor], Tensor] | None = None,
    after: Literal["step", "micro_batch"] | None = None,
) -> None:
    """Update amax histories and scales of the layers with `DelayedConfig.update` equal to `after`; None: of all layers.

    Call it once per optimizer step, after the last backward pass, or after each micro-batch's. `reduce_max` replaces a
    flat fp32 tensor by its elementwise maximum over the ranks that share the layers.
    """
    # In a phase without delayed casts histories are kept, and nothing is to be taken from them.
    delayed = [
        layer
        for layer in quantized_layers(model)
        if layer.plan.delayed_casts() and after in (None, layer.delayed_config().update)
    ]
    if reduce_max is not None:  # another rank may have run layers that this one has not run yet
        known = next((layer.amax_history.device for layer in delayed if layer.amax_history is not None), None)
        for layer in delayed:
            layer.materialise_state(known or layer.weight.device)
    layers = [layer for layer in delayed if layer.amax_history is not None]
    if not layers:
        return
    latest = torch.cat([layer.amax_history[0] for layer in layers if layer.amax_history is not None])
    if reduce_max is not None:
        latest = reduce_max(latest)
    # Layers of one recipe are updated as one tensor: a dozen kernels in all, not for each.
    alike: dict[tuple[DelayedConfig, tuple[CastConfig | None, ...]], list[tuple[QuantizedLinear, Tensor]]] = {}
    for layer, row in zip(layers, latest.split(len(ROLES)), strict=True):
        casts = layer.plan.delayed_casts()
        alike.setdefault((layer.delayed_config(), tuple(casts.get(role) for role in ROLES)), []).append((layer, row))
    for (config, casts_by_role), group in alike.items():
        _update_alike([layer for layer, _ in group], [row for _, row in group], casts_by_role, config)


def _update_alike(
    layers: list[QuantizedLinear], rows: list[Tensor], casts: tuple[CastConfig | None, ...], config: DelayedConfig
) -> None:
    """Update layers with the same casts; `rows` are their amaxes since the last update. Each gets its columns."""
    earlier = [layer.amax_history[1:] for layer in layers if layer.amax_history is not None]
    scales = [layer.scale for layer in layers if layer.scale is not None]
    history = torch.cat([torch.cat(rows)[None], torch.cat(earlier, 1)])  # [L, layers x ROLES]
    largest = _largest(casts, rows[0].device).repeat(len(layers))
    history, scale = update(history, torch.cat(scales), largest, config)
    for index, layer in enumerate(layers):
        own = slice(index * len(ROLES), (index + 1) * len(ROLES))
        layer.amax_history, layer.scale = history[:, own], scale[own]


@functools.cache
def _largest(casts: tuple[CastConfig | None, ...], device: torch.device) -> Tensor:
    """Return the largest number of each role's format, fp32 [len(ROLES)]; 1 for roles that are not delayed."""
    return torch.tensor([1.0 if cast is None else cast.number_format.max for cast in casts], device=device)


def delayed_state(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the state of delayed scaling for a checkpoint, by layer: `scale` and `amax_history`, columns x, w, dy."""
    state: dict[str, dict[str, Tensor]] = {}
    for layer in quantized_layers(model):
        if layer.scale is not None and layer.amax_history is not None:
            state[layer.name] = {"scale": layer.scale.clone(), "amax_history": layer.amax_history.clone()}
    return state


def load_delayed_state(model: nn.Module, state: dict[str, dict[str, Tensor]]) -> list[str]:
    """Restore the result of `delayed_state`; return the names of layers that it lacks, which start from scale 1.

    A history of another length keeps its newest rows. Layers without delayed scales in the current phase keep their
    entry for later phases and are not returned.
    """
    missing = []
    placed = next((each.device for each in model.parameters()), torch.device("cpu"))
    for layer in quantized_layers(model):
        layer.reset_delayed()
        delayed_now = bool(layer.plan.delayed_casts())
        if layer.name not in state:
            missing += [layer.name] if delayed_now else []
            continue
        device = placed if layer.weight.is_meta else layer.weight.device  # an expert's layer holds no weight
        old = state[layer.name]["amax_history"].to(device)
        if delayed_now:
            layer.materialise_state(device)
        else:
            layer.amax_history = torch.zeros_like(old)
        layer.scale = state[layer.name]["scale"].to(device).clone()
        if layer.amax_history is not None:
            kept = min(len(old), len(layer.amax_history)) - 1
            layer.amax_history[0] = old[0]
            layer.amax_history[len(layer.amax_history) - kept :] = old[len(old) - kept :]
    return missing
