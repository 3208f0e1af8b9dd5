"""Entries of a config.json that contradict each other: two names for one thing, or a class that is not the one named.

transformers takes one of the two without a word. Which one differs between its versions, so the file is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_llm.base.errors import Problem

SWITCHES = ("tie_word_embeddings",)
"""Entries that must be true or false where they are given: transformers refuses text and null."""
UNUSUAL: Mapping[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None,),
    "fusion_config": (None,),
    "is_causal": (True,),
    "is_encoder_decoder": (False, None),
    "per_layer_config": (None, {}),
    "transformers_weights": (None,),
}
"""Entries of any class by which it computes something else or reads other files, and the values by which it does not.

The first is that of a file without the entry.
"""


def contradictions(
    values: Mapping[str, Any], model_type: str | None, aliases: Mapping[str, str], not_null: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield what in a config.json of an architecture contradicts itself; the arguments are `Architecture`'s."""
    found = values.get("model_type")
    if model_type is not None and found != model_type:
        what = "is missing" if found is None else f"is {found!r}"
        text = f"{what}, and architectures names a class of {model_type!r}. transformers goes by model_type. Set it."
        yield Problem("config.json model_type", text)
    for other, key in {"torch_dtype": "dtype", **aliases}.items():
        one, two = values.get(key), values.get(other)
        if one is not None and two is not None and one != two:
            text = f"is {two!r}, and {key}, which means the same, is {one!r}. Remove the wrong one."
            yield Problem(f"config.json {other}", text)
    for key in SWITCHES:
        if key in values and not isinstance(values[key], bool):
            yield Problem(f"config.json {key}", f"is {values[key]!r}, and must be true or false.")
    for key in not_null:
        if key in values and values[key] is None:
            yield Problem(f"config.json {key}", "is null, which transformers refuses. Give a value, or leave it out.")
    for key, usual in UNUSUAL.items():
        if (value := values.get(key, usual[0])) not in usual:
            text = f"is {value!r}, which is not done here. Take weights trained without it, or remove it if these were."
            yield Problem(f"config.json {key}", text)
