"""Base class of Hugging Face architectures: names and config entries, to convert weights in both directions."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.rope import read_rope, rope_problems

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


@dataclass(frozen=True)
class StoredParameter:
    """Location of one of our parameters: tensor `name` from row `first` on, as [inputs, outputs] if `transposed`.

    `shape` is ours, without rows that pad the vocabulary; `whole` is the shape of their tensor. `count`: the tensors
    whose rows follow one another in ours, one per expert; "{}" in `name` is the expert's number. `slices`: instead the
    experts are slices of one tensor `[E, R, K]`, and ours are rows of each slice from `first` on.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    first: int = 0
    transposed: bool = False
    count: int = 1
    slices: int = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """Their names, in the order of our rows."""
        return tuple(self.name.replace("{}", str(number)) for number in range(self.count))

    def of_slices(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield (slice, first row, last row) of their tensor for our rows `first` to `last`."""
        rows = self.shape[0] // self.slices
        for number in range(first // rows, -(-last // rows)):
            start, stop = max(first - number * rows, 0), min(last - number * rows, rows)
            yield number, self.first + start, self.first + stop

    def parts(self, first: int, last: int) -> Iterator[tuple[str, int, int]]:
        """Yield (tensor, first row, last row) for our rows `first` to `last`."""
        if self.count == 1:
            yield self.tensors[0], self.first + first, self.first + last
            return
        rows = self.shape[0] // self.count
        for number, name in enumerate(self.tensors):
            start, stop = max(first - number * rows, 0), min(last - number * rows, rows)
            if start < stop:
                yield name, start, stop


class Architecture(ABC):
    """One of transformers' causal language models. `families.BUILT_IN` lists those of this package.

    An installed package adds its own by `families.register`, in the module that its entry point names.
    """

    class_name: ClassVar[str]
    model_type: ClassVar[str | None] = None
    """`model_type` of its config.json, by which transformers chooses the class; None: any value."""
    shape: ClassVar[str]
    """Description, for messages, of the configs that have this counterpart."""
    block_prefix: ClassVar[str] = "model.layers"
    base_prefix: ClassVar[str] = "model."
    """Prefix that names lack in a model saved without its head."""
    ends: ClassVar[Mapping[str, str]] = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    """Their names of the modules outside the blocks, by our names."""
    transposed: ClassVar[bool] = False
    """Whether weights of linears are stored as [inputs, outputs]."""
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Our linears with outputs concatenated in one of theirs, by its name within a block."""
    leaves: ClassVar[Mapping[str, str]] = {"correction": "e_score_correction_bias"}
    """Their last parts of the names of parameters, where ours are others."""
    buffers: ClassVar[tuple[str, ...]] = (".rotary_emb.inv_freq",)
    """Ends of names of tensors in old files that are no weights."""
    own_code: ClassVar[frozenset[str]] = frozenset()
    """Values of `auto_map` that name the code which this class of transformers replaces; such code is not run."""
    sizes: ClassVar[tuple[str, ...]] = ()
    """Entries of config.json that must be whole numbers."""
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Supported values of entries of config.json; the first is the default of a missing entry."""
    aliases: ClassVar[Mapping[str, str]] = {}
    """Entries of config.json by another name that transformers takes as well: they must agree."""
    not_null: ClassVar[tuple[str, ...]] = ()
    """Entries of config.json that may be left out, but not be null."""
    heads_divide: ClassVar[bool] = False
    """Whether transformers requires that the heads divide the width, even with `head_dim`."""
    rotary: ClassVar[bool] = True
    scaled: ClassVar[bool] = False
    """Whether its blocks scale residual sums."""

    def stored(self, config: ModelConfig, name: str, shape: tuple[int, ...]) -> StoredParameter | None:
        """Return the place of our parameter `name` of `shape`; None where `block_names` and `ends` give it."""
        return None

    def further_blocks(self, values: Mapping[str, Any]) -> int:
        """Return how many blocks behind the decoder's the files have, which are left out when weights are read."""
        return 0

    @abstractmethod
    def fits(self, config: ModelConfig) -> bool:
        """Return whether this class computes the same function as a model of `config`."""

    @abstractmethod
    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        """Return {our name: transformers' name} of the modules with parameters in block `index`, without fused ones."""

    @abstractmethod
    def entries(self, config: ModelConfig) -> dict[str, Any]:
        """Return the content of `config.json`."""

    @abstractmethod
    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return our `model` keys from a config.json in which `problems` finds nothing."""

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield a problem for each entry of a config.json of this class that is missing or not supported."""
        for key in self.sizes:
            if type(values.get(key)) is not int or values[key] < 1:
                yield Problem(f"config.json {key}", "must be a whole number.")
        yield from contradictions(values, self.model_type, self.aliases, self.not_null)
        if self.heads_divide and type(heads := values.get("num_attention_heads")) is int and heads > 0:
            width = values.get("hidden_size")
            if type(width) is int and width % heads:
                text = f"is {heads}, which does not divide hidden_size={width}, and {self.class_name} refuses that."
                yield Problem("config.json num_attention_heads", f"{text} Use a model that transformers can load.")
        for key, (first, *others) in self.wanted.items():
            found = values.get(key, first)
            if not any(type(found) is type(each) and found == each for each in (first, *others)):
                choice = " or ".join(repr(each) for each in (first, *others))
                yield Problem(f"config.json {key}", f"is {found!r}, but this decoder has {choice}.")
        if self.rotary:
            yield from rope_problems(values)


def contradictions(
    values: Mapping[str, Any], model_type: str | None, aliases: Mapping[str, str], not_null: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield the contradictions within a config.json; see `Architecture` for the arguments."""
    found = values.get("model_type")
    if model_type is not None and found != model_type:
        what = "is missing" if found is None else f"is {found!r}"
        text = f"{what}, and architectures names a class of {model_type!r}. transformers goes by model_type. Set it."
        yield Problem("config.json model_type", text)
    for other, key in {"torch_dtype": "dtype", **aliases}.items():
        one, two = values.get(key), values.get(other)
        if one is not None and two is not None and one != two:
            text = f"is {two!r}, but its synonym {key} is {one!r}. Remove the wrong one."
            yield Problem(f"config.json {other}", text)
    for key in SWITCHES:
        if key in values and not isinstance(values[key], bool):
            yield Problem(f"config.json {key}", "must be true or false.", repr(values[key]))
    for key in not_null:
        if key in values and values[key] is None:
            yield Problem(f"config.json {key}", "is null, which transformers rejects. Give a value, or remove it.")
    for key, usual in UNUSUAL.items():
        if (value := values.get(key, usual[0])) not in usual:
            text = f"is {value!r}, which is not supported. Use weights trained without it; if these were, remove it."
            yield Problem(f"config.json {key}", text)


PRE_NORM = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate_proj": "mlp.gate_proj",
    "feed_forward.up_proj": "mlp.up_proj",
    "feed_forward.down_proj": "mlp.down_proj",
}
"""Names in a block of Llama's, which most later architectures took."""

LLAMA_SIZES = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)


def kinds_of(config: ModelConfig) -> set[tuple[str, str, bool]]:
    """Return the (mixer, feed-forward, post_norms) of the blocks of `config`."""
    blocks: list[Any] = [config.block_at(index) for index in range(config.num_layers)]
    return {(block.mixer.kind, block.feed_forward.kind, block.post_norms) for block in blocks}


def windows_of(config: ModelConfig) -> set[int | None]:
    """Return the attention windows of the blocks in tokens; None for a block without a window."""
    return {getattr(config.block_at(index).mixer, "window", None) for index in range(config.num_layers)}


def is_plain(config: ModelConfig) -> bool:
    """Return whether nothing but attention scores is scaled or capped."""
    return config.embedding_scale is None and config.logit_cap is None and not config.unit_scaling


def is_scaled(config: ModelConfig) -> bool:
    """Return whether some block shifts and scales its input or its residual sums."""
    blocks = (config.block_at(index) for index in range(config.num_layers))
    return any(block.residual_scaling or block.input_scaling for block in blocks)


def has_dividing_heads(config: ModelConfig) -> bool:
    """Return whether query heads divide the width, which some classes of transformers require even with head_dim."""
    return config.hidden_size % config.num_heads == 0


def shape_entries(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes as Llama's config.json has them."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.attention_head_dim,
        "max_position_embeddings": config.max_sequence_length,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "attention_bias": config.bias,
        "tie_word_embeddings": config.tie_embeddings,
    }


def read_shape(values: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return our keys of the sizes in a config.json like Llama's; `defaults`: of its class, by config.json's names."""

    def entry(key: str, fallback: Any) -> Any:
        found = values.get(key, defaults.get(key))
        return fallback if found is None else found

    heads = values["num_attention_heads"]
    return {
        "vocab_size": values["vocab_size"],
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": entry("num_key_value_heads", heads),
        "head_dim": entry("head_dim", None),
        "ffn_hidden_size": values["intermediate_size"],
        "max_sequence_length": values["max_position_embeddings"],
        "norm_eps": entry("rms_norm_eps", 1e-6),
        "init_std": entry("initializer_range", 0.02),
        "tie_embeddings": bool(entry("tie_word_embeddings", False)),
        **read_rope(values),
    }
