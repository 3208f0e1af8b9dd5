"""A layout in words, and why it is slower than another."""

from lightning_llm.plan.nodes import SHARD_AXES, nodes_of_groups, ranks_per_node
from lightning_llm.plan.search.pricing import Priced
from lightning_llm.plan.search.space import CHECKPOINTING
from lightning_llm.plan.stages import INTERLEAVED

AXES = {"tensor_parallel": ("tp",), "context_parallel": ("cp",)}


def layout_words(priced: Priced) -> str:
    """Return a layout's degrees and choices as they are spoken of: "tp 8, pp 4 x 2, dp 8, ZeRO-2, selective, 1"."""
    choice = priced.choice
    words = [f"{axis} {size}" for axis in ("tp", "cp") if (size := getattr(choice, axis)) > 1]
    if choice.pp > 1:
        stages = f" x {choice.virtual_stages}" if choice.schedule == INTERLEAVED else ""
        words.append(f"pp {choice.pp}{stages}{' gpipe' if choice.schedule == 'gpipe' else ''}")
    if (dp := choice.dp_replicate * choice.dp_shard) > 1 or not words:
        words.append(f"dp {choice.dp_replicate} x {choice.dp_shard}" if 1 < choice.dp_shard < dp else f"dp {dp}")
    words += [f"ZeRO-{choice.zero_stage}"] if choice.zero_stage else []
    return ", ".join([*words, checkpointing_words(priced), f"micro-batch {choice.micro_batch_size}"])


def checkpointing_words(priced: Priced) -> str:
    """Return what blocks recompute: "selective", or "24 full, 8 none"."""
    modes = priced.plan.config.parallel.activation_checkpoint_layers
    if modes is None:
        mode = priced.choice.activation_checkpoint
        return "no recomputation" if mode == "none" else f"{mode} recomputation"
    return " + ".join(f"{modes.count(mode)} {mode}" for mode in reversed(CHECKPOINTING) if mode in modes)


def why_slower(priced: Priced, best: Priced) -> str:
    """Return the part of a step that a layout spends most more on than the fastest, in words; "" of that itself.

    Also "" where one of the two has no time.
    """
    if priced.time is None or best.time is None or priced is best:
        return ""
    more = {part: seconds - best.time.seconds.get(part, 0.0) for part, seconds in priced.time.seconds.items()}
    part = max(more, key=lambda each: more[each])
    if more[part] <= 1e-3 * priced.seconds:
        return "as fast"
    return f"+{more[part]:.3g} s {_part_words(part, priced, best)}"


def _part_words(part: str, priced: Priced, best: Priced) -> str:
    choice = priced.choice
    if part == "bubble" and priced.time is not None:
        return f"waiting for stages ({priced.time.bubble_fraction:.0%} of the step)"
    if part in ("gemm", "attention", "memory_bound") and _recomputed(priced) > _recomputed(best):
        return "recomputation"
    if part == "gemm":
        return f"smaller GEMMs (tp {choice.tp}, micro-batch {choice.micro_batch_size})"
    if part == "optimizer":
        return "update of a larger share of the optimizer"
    if part in AXES:
        return f"{part.replace('_', ' ')} collectives {_where(priced, AXES[part])}"
    if part == "gathers":
        return f"gathering weights {_where(priced, SHARD_AXES)}, unhidden"
    if part == "reductions":
        return f"summing gradients {_where(priced, ('dp_replicate', *SHARD_AXES))}, unhidden"
    return part.replace("_", " ") + " operators"


def _recomputed(priced: Priced) -> float:
    """Return how much is recomputed, for comparison: a block's mode as a number, their mean."""
    config = priced.plan.config
    modes = [config.parallel.checkpointing_of(index) for index in range(config.model.num_layers)]
    return sum(map(CHECKPOINTING.index, modes)) / len(modes)


def _where(priced: Priced, axes: tuple[str, ...]) -> str:
    crosses = nodes_of_groups(priced.plan.degrees, axes, ranks_per_node(priced.plan.config)) > 1
    return "between machines" if crosses else "within a machine"
