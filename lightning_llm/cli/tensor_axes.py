"""The verb `plan --tensor-axes`: how a Hugging Face folder's weights would be shared, whatever their architecture."""

import json
from pathlib import Path

from lightning_llm.model.weights.files import open_files
from lightning_llm.plan.search.tensor_axes import alike, style_of, tensor_axes

CONV1D = "GPT2", "OpenAIGPT"
"""Architectures of transformers whose linears, c_attn, c_proj and c_fc, keep [inputs, outputs]."""


def print_tensor_axes(folder: Path, ranks: int, *, as_data: bool) -> int:
    """Print which side of each weight in `folder` a tensor-parallel group of `ranks` would share. Return 0.

    Raises:
        ConfigError: there are no safetensors files, or damaged ones.
    """
    shapes = {name: entry.shape for name, entry in open_files(folder).entries.items()}
    modules = {name.rpartition(".")[0] for name in shapes} if _has_conv1d(folder) else set()
    axes = tensor_axes(shapes, ranks, [module for module in modules if module.rpartition(".")[2].startswith("c_")])
    if as_data:
        print(json.dumps({"tensor_parallel_axes": axes}, indent=1))
        return 0
    rows = [(name, axis, style_of(name, axis), f"{count}") for (name, axis), count in alike(axes).items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _has_conv1d(folder: Path) -> bool:
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("architectures") or [""]
    except (ValueError, AttributeError):
        return False
    return isinstance(named, list) and str(named[0]).startswith(CONV1D)
