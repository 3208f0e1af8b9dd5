"""Tensor-parallel axes of any transformer from the names and shapes of its weights alone: Redco's two rules."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

Axis = Literal["outputs", "inputs", "vocabulary", "replicate"]
"""The side of a weight that ranks have parts of. `vocabulary`: rows are token ids."""

_NUMBER = re.compile(r"\.\d+\.")
_FUSED = re.compile(r"^(c_attn|qkv|query_key_value|qkv_proj|w_?qkv|in_proj|W_pack|gate_up_proj)$")
_LAST = re.compile(r"^(o|out|wo|dense|c_proj|o_proj|out_proj|down|down_proj|fc2|fc_out|w2|dense_4h_to_h|lin2)$")
_FIRST = re.compile(
    r"^([qkv]|[qkv]_proj|query|key|value|w[qkv]|q_lin|k_lin|v_lin|up|up_proj|gate|gate_proj|fc1|fc_in|c_fc|wi(_\d)?|w1|w3|"
    r"dense_h_to_4h|lin1)$"
)
_EMBEDDING = re.compile(r"(^|\.)(embedding|embed_tokens|wte|word_embeddings|tok_embeddings|shared|embed_in)$")
_HEAD = re.compile(r"(^|\.)(lm_head|head|embed_out|output)$")
_POSITIONS = re.compile(r"posi|wpe|relative_attention_bias|rotary")


def tensor_axes(
    shapes: Mapping[str, tuple[int, ...]], ranks: int = 1, transposed: Iterable[str] = ()
) -> dict[str, Axis]:
    """Return which side of each weight a tensor-parallel group of `ranks` shares, by the names of modules.

    Redco's two rules (Tan et al. 2023, arXiv 2310.16355, section 3.1; tanyuqian/redco, partition_utils): of attention's
    and the feed-forward network's matrices those that take the residual stream are cut by their outputs, those that
    give to it by their inputs; embeddings and the head by the vocabulary, vectors and tables of positions not at all.
    A matrix of no known name is cut by the side that the one before it in its block was not, in the order of `shapes`,
    so that what is cut is put together again. What `ranks` does not divide is not cut.

    Args:
        shapes: of every parameter, by its full name: "model.layers.0.self_attn.q_proj.weight": (outputs, inputs).
        ranks: how many share each weight.
        transposed: names of modules whose weight is [inputs, outputs], as GPT-2's Conv1D.
    """
    found: dict[str, Axis] = {}
    before: dict[str, Axis] = {}
    turned = set(transposed)
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight":  # a bias lies with its weight's outputs
            if module not in found and f"{module}.weight" not in shapes:
                found[module or name] = "replicate"
            continue
        numbered = _NUMBER.search(f"{module}.")
        block = module[: numbered.end()] if numbered else ""
        axis = _axis_of(module, shape, before.get(block))
        outputs, inputs = (shape[1], shape[0]) if module in turned and len(shape) == 2 else (*shape, 1)[:2]
        if axis != "replicate" and (inputs if axis == "inputs" else outputs) % ranks:
            axis = "replicate"
        if axis in ("outputs", "inputs"):
            before[block] = axis
        found[module] = axis
    return found


def _axis_of(module: str, shape: tuple[int, ...], before: Axis | None) -> Axis:
    last = module.rpartition(".")[2]
    if len(shape) != 2 or _POSITIONS.search(module):
        return "replicate"
    if _EMBEDDING.search(module) or _HEAD.search(module):
        return "vocabulary"
    if _FIRST.match(last) or _FUSED.match(last):
        return "outputs"
    if _LAST.match(last):
        return "inputs"
    return "inputs" if before == "outputs" else "outputs"


def style_of(module: str, axis: Axis) -> str:
    """Return what `torch.distributed.tensor.parallel.parallelize_module` calls the axis of `module`, "" for none.

    By the vocabulary an embedding is cut along its inputs, and the head, a linear, along its outputs.
    """
    if axis == "vocabulary":
        return "ColwiseParallel" if _HEAD.search(module) else "RowwiseParallel"
    return {"outputs": "ColwiseParallel", "inputs": "RowwiseParallel"}.get(axis, "")


def alike(axes: Mapping[str, Axis]) -> Counter[tuple[str, Axis]]:
    """Return how many modules there are of each name, block numbers as "*", and axis."""
    return Counter((_NUMBER.sub(".*.", f"{name}.").removesuffix("."), axis) for name, axis in axes.items())
