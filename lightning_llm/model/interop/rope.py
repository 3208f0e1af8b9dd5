"""Conversion of rotary positions to and from config.json: transformers 5 has theta in the rope entry, 4 next to it."""

from collections.abc import Iterator, Mapping
from math import log
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig, RopeScaling

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
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
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
ENTRIES = ("rope_scaling", "rope_parameters")
"""The two names of the entry: of transformers 4, which 5 still takes first, and of transformers 5."""
MSCALES = ("mscale", "mscale_all_dim")
SCALING = tuple(dict.fromkeys(theirs for keys in KEYS.values() for theirs in keys.values()))


def rope_entries(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json about positions, for transformers 4 and 5."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if (scaling := config.rope_scaling) is not None:
        named = {theirs: getattr(scaling, ours) for ours, theirs in KEYS[scaling.name].items()}
        rope = {"rope_type": scaling.name, **{key: value for key, value in named.items() if value is not None}}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else rope,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


def read_rope(values: Mapping[str, Any], scales_scores: bool = False) -> dict[str, Any]:
    """Return the model's rope keys from a config.json in which `rope_problems` finds nothing.

    `scales_scores`: its class also multiplies scores by `mscale_all_dim`; of others only the ratio counts.
    """
    rope = _rope(values)
    theta = rope.get("rope_theta") or values.get("rope_theta") or THETA
    kind = _kind(rope)
    if kind == "default":
        return {"rope_theta": float(theta), "rope_scaling": None}
    given = dict(rope)
    if kind in ("llama3", "yarn"):  # as transformers fills it in
        given.setdefault("original_max_position_embeddings", _original(values))
    keys = {ours: theirs for ours, theirs in KEYS[kind].items() if theirs not in MSCALES}
    found = {ours: value for ours, theirs in keys.items() if (value := given.get(theirs)) is not None}
    typed = {k: value if k in WHOLE_NUMBERS or isinstance(value, bool) else float(value) for k, value in found.items()}
    if kind == "yarn" and scales_scores:
        typed |= _both_mscales(given, "attention_factor" in typed)
    elif kind == "yarn" and "attention_factor" not in typed:
        typed |= _mscale(given)
    # Llama 3.1's goes without a kind here, as in configs that were written before there were others.
    scaling = RopeScaling.model_validate(typed if kind == "llama3" else {"kind": kind, **typed})
    return {"rope_theta": float(theta), "rope_scaling": scaling.model_dump(exclude_none=True)}


def rope_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield contradictions and unsupported settings in the position keys of a config.json."""
    for key in ENTRIES:
        entry = values.get(key) or {}
        if not isinstance(entry, Mapping):
            yield Problem(f"config.json {key}", "must be an object or null.", repr(entry))
            return
        if nested := [name for name, each in entry.items() if isinstance(each, Mapping)]:
            text = f"has an entry for each of {', '.join(map(str, nested))}; read here is one for all blocks."
            yield Problem(f"config.json {key}", text)
            return
    if problems := list(_contradictions(values)):
        yield from problems
        return
    rope = _rope(values)
    kind = _kind(rope)
    for where in (values, rope):
        theta = where.get("rope_theta", THETA)
        if not _is_number(theta) or theta <= 0:
            yield Problem("config.json rope_theta", "must be a number above 0.", repr(theta))
    if (part := rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))) not in (None, 1, 1.0):
        yield Problem(
            "config.json partial_rotary_factor", f"is {part!r}. Only 1 is supported: the whole head is rotated."
        )
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
        if value is None and (needed or (theirs in filled and theirs in rope)):
            yield Problem(f"config.json rope_scaling.{theirs}", f"is missing: type {kind!r} requires it.")
        elif theirs == "truncate" and theirs in rope and not isinstance(value, bool):
            yield Problem("config.json rope_scaling.truncate", "must be true or false.", repr(value))
        elif value is not None and theirs not in ("truncate", *MSCALES) and (not _is_number(value) or value <= 0):
            yield Problem(f"config.json rope_scaling.{theirs}", "must be a number above 0.", repr(value))
    for key in MSCALES if kind == "yarn" else ():
        if (value := rope.get(key)) is not None and not _is_number(value):
            yield Problem(f"config.json rope_scaling.{key}", "must be a number.", repr(value))


def _contradictions(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem per entry given twice with different values: the one used depends on transformers' version."""
    entries = {key: values[key] for key in ENTRIES if values.get(key)}
    for name, entry in entries.items():
        if entry.get("type") is not None and entry.get("rope_type") not in (None, entry["type"]):
            text = f"is {entry['type']!r}, and {name}.rope_type {entry['rope_type']!r}. Remove the wrong one."
            yield Problem(f"config.json {name}.type", text)
        for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
            if key in entry and key in values and entry[key] != values[key]:
                text = f"is {entry[key]!r}, and {key} outside it is {values[key]!r}. Remove the wrong one."
                yield Problem(f"config.json {name}.{key}", text)
        if _kind(entry) == "default" and (idle := [key for key in SCALING if entry.get(key) is not None]):
            text = f"has {', '.join(idle)} and no type that uses them: transformers ignores them. Add rope_type, or"
            yield Problem(f"config.json {name}", f"{text} remove them.")
    if len(entries) == len(ENTRIES):
        scaling, parameters = (_meaning(values, entry) for entry in entries.values())
        if scaling != parameters:
            differ = [key for key in {**scaling, **parameters} if scaling.get(key) != parameters.get(key)]
            told = "; ".join(f"{key} {scaling.get(key)!r} and {parameters.get(key)!r}" for key in differ)
            text = f"and rope_parameters are both given and differ ({told}). Remove the one that is wrong."
            yield Problem("config.json rope_scaling", text)


def _meaning(values: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the meaning of one of the two entries, with the defaults of transformers."""
    kind = _kind(entry)
    used = KEYS.get(kind, {}).values()
    found = {key: entry[key] for key in used if entry.get(key) is not None}
    if "original_max_position_embeddings" in used:
        found.setdefault("original_max_position_embeddings", _original(values))
    return {"rope_type": kind, "rope_theta": entry.get("rope_theta", values.get("rope_theta", THETA)), **found}


def _original(values: Mapping[str, Any]) -> Any:
    return values.get("original_max_position_embeddings") or values.get("max_position_embeddings")


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return found


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _mscale(rope: Mapping[str, Any]) -> dict[str, float]:
    """Return YaRN's attention_factor where it is given by DeepSeek's two scales, as transformers computes it."""
    one, all_dims, factor = rope.get("mscale"), rope.get("mscale_all_dim"), rope["factor"]
    if not (one and all_dims):
        return {}
    return {
        "attention_factor": (0.1 * one * log(factor) + 1) / (0.1 * all_dims * log(factor) + 1) if factor > 1 else 1.0
    }


def _both_mscales(rope: Mapping[str, Any], has_factor: bool) -> dict[str, float]:
    """Return DeepSeek's two scales as transformers uses them: 0 and null are none, `attention_factor` overrides one."""
    one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    found = {"mscale_all_dim": float(all_dims)} if all_dims else {}
    return found | ({"mscale": float(one)} if one and all_dims and not has_factor else {})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
