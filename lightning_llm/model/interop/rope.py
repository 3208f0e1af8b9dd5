"""Rotary positions as config.json has them, and back: transformers 5 keeps theta in the rope entry, 4 beside it."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_llm.config.schema.model import ModelConfig, RopeScaling
from lightning_llm.errors import Problem

THETA = 10_000.0
"""Transformers' default of every family here."""
KEYS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_sequence_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
    "llama3": {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_sequence_length": "original_max_position_embeddings",
    },
}
"""Names of the entries in config.json, by our keys, of each kind that is computed here."""
REFUSED = {
    "longrope": "which of its two sets of frequencies holds depends on the length of each batch, so that training on "
    "short sequences and on long ones would not be of one model",
    "proportional": "it turns a part of each head alone",
}
WHOLE_NUMBERS = ("original_sequence_length",)


def rope_entries(config: ModelConfig) -> dict[str, Any]:
    """Return what config.json says of positions, for transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        named = {theirs: getattr(scaling, ours) for ours, theirs in KEYS[scaling.name].items()}
        rope = {"rope_type": scaling.name, **{key: value for key, value in named.items() if value is not None}}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


def read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's rope keys from a config.json in which `rope_problems` finds nothing."""
    rope = _rope(values)
    theta = rope.get("rope_theta") or values.get("rope_theta") or THETA
    kind = _kind(rope)
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    given = dict(rope)
    if kind in ("llama3", "yarn"):  # as transformers fills it in
        original = values.get("original_max_position_embeddings") or values.get("max_position_embeddings")
        given.setdefault("original_max_position_embeddings", original)
    found = {ours: value for ours, theirs in KEYS[kind].items() if (value := given.get(theirs)) is not None}
    typed = {k: value if k in WHOLE_NUMBERS or isinstance(value, bool) else float(value) for k, value in found.items()}
    if kind == "yarn" and "attention_factor" not in typed:
        typed |= _mscale(given)
    # Llama 3.1's goes without a kind here, as in configs that were written before there were others.
    scaling = RopeScaling.model_validate(typed if kind == "llama3" else {"kind": kind, **typed})
    return {"rope_theta": float(theta), "rope_scaling": scaling.model_dump(exclude_none=True)}


def rope_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield what of a config.json's positions this decoder does not compute."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(values.get(key) or {}, Mapping):
            yield Problem(f"config.json {key}", f"is {values[key]!r}, and must be an object or null.")
            return
    rope = _rope(values)
    kind = _kind(rope)
    theta = rope.get("rope_theta") or values.get("rope_theta") or THETA
    if not _is_number(theta) or theta <= 0:
        yield Problem("config.json rope_theta", f"is {theta!r}, and must be a number above 0.")
    if (part := rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) not in (None, 1, 1.0):
        yield Problem("config.json partial_rotary_factor", f"is {part!r}; whole heads are turned here.")
    if kind == "default":
        return
    if kind not in KEYS:
        why = f": {REFUSED[kind]}" if kind in REFUSED else ""
        text = f"is of type {kind!r}{why}. Known are default, {', '.join(KEYS)}."
        yield Problem("config.json rope_scaling", text)
        return
    filled = {"original_max_position_embeddings"}
    for ours, theirs in KEYS[kind].items():
        value = rope.get(theirs)
        needed = ours == "factor" or (kind == "llama3" and theirs not in filled)
        if value is None and needed:
            yield Problem(f"config.json rope_scaling.{theirs}", f"is missing, which type {kind!r} needs.")
        elif value is not None and ours != "truncate" and (not _is_number(value) or value <= 0):
            yield Problem(f"config.json rope_scaling.{theirs}", f"is {value!r}, and must be a number above 0.")


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return found


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _mscale(rope: Mapping[str, Any]) -> dict[str, float]:
    """Return YaRN's attention_factor where it is given by DeepSeek's two scales, as transformers computes it."""
    from math import log

    one, all_dims, factor = rope.get("mscale"), rope.get("mscale_all_dim"), rope["factor"]
    if not (one and all_dims):
        return {}
    return {
        "attention_factor": (0.1 * one * log(factor) + 1) / (0.1 * all_dims * log(factor) + 1) if factor > 1 else 1.0
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
