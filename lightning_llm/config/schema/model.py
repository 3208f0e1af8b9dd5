"""`model`: the shape of a decoder-only transformer, the registered kinds of its blocks, and its initial weights."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lightning_llm.base.errors import did_you_mean
from lightning_llm.base.registry import NameIn, Registry
from lightning_llm.config.schema.base import Group, PositiveFloat, PositiveInt

DEFAULT_LAYERS = ("attention",)

MIXERS: Registry[Group] = Registry(
    "mixer",
    "lightning_llm.model.attention.kinds",
    "lightning_llm.model.attention.latent_kind",
    "lightning_llm.model.attention.convolved_kind",
    "lightning_llm.model.kinds",
)
FEED_FORWARDS: Registry[Group] = Registry(
    "feed-forward network", "lightning_llm.model.kinds", "lightning_llm.model.experts.kinds"
)
NORMS: Registry[Group] = Registry("norm", "lightning_llm.model.kinds")
"""Their kinds are subclasses of `Mixer`, `FeedForward` and `Norm` of `model.spec`."""


class BlockConfig(Group):
    """One kind of block. Null: the mixer with the block's name, the feed-forward network of model.activation."""

    mixer: Annotated[Group, MIXERS] | None = Field(None, description="a registered mixer by `kind`, and its keys")
    feed_forward: Annotated[Group, FEED_FORWARDS] | None = Field(
        None, description="a registered feed-forward network by `kind`, and its keys"
    )
    post_norms: bool = Field(
        False, description="also normalize the outputs of mixer and feed-forward network before adding them"
    )
    residual_scaling: bool = Field(
        False,
        description="both terms of each residual sum, x and the part's output y, become (x + b) * w with learned "
        "vectors b and w (ZAYA1, arXiv 2511.17127)",
        exclude_if=lambda scaled: not scaled,  # models from before the key keep their hash
    )
    input_scaling: bool = Field(
        False,
        description="the block's input becomes (x + b) * w with learned vectors b and w: for the first block",
        exclude_if=lambda scaled: not scaled,
    )


class RopeScaling(Group):
    """Scaling of rotary frequencies for a longer context; the kinds are transformers' `rope_type`."""

    kind: Literal["llama3", "linear", "dynamic", "yarn"] | None = Field(
        None, description="null: llama3, Llama 3.1's (Meta's `apply_scaling`)"
    )
    factor: PositiveFloat = Field(description="divisor of the lowest frequencies")
    low_frequency_factor: PositiveFloat | None = Field(
        None, description="llama3: wavelengths above original length / this are scaled"
    )
    high_frequency_factor: PositiveFloat | None = Field(
        None, description="llama3: wavelengths below original length / this are kept"
    )
    original_sequence_length: PositiveInt | None = Field(
        None, description="llama3, yarn: sequence length of the original training"
    )
    beta_fast: PositiveFloat | None = Field(
        None, description="yarn: rotations above which frequencies are kept; null: 32"
    )
    beta_slow: PositiveFloat | None = Field(None, description="yarn: rotations below which they are divided; null: 1")
    attention_factor: PositiveFloat | None = Field(
        None, description="yarn: factor of cosine and sine; null: 0.1 ln(factor) + 1"
    )
    mscale: PositiveFloat | None = Field(
        None,
        description="yarn, with mscale_all_dim: cosine and sine are multiplied by the ratio of 0.1 m ln(factor) + 1 of "
        "both (DeepSeek-V2, arXiv 2405.04434)",
        exclude_if=lambda value: value is None,  # models from before the key keep their hash
    )
    mscale_all_dim: PositiveFloat | None = Field(
        None,
        description="yarn: m by which mixers of kind mla multiply their scores: (0.1 m ln(factor) + 1)^2; null: 1",
        exclude_if=lambda value: value is None,
    )
    truncate: bool | None = Field(None, description="yarn: round the ends of the ramp to integers; null: true")

    @property
    def name(self) -> str:
        """The kind; llama3 if it is null."""
        return self.kind or "llama3"

    @model_validator(mode="after")
    def _has_its_keys(self) -> Self:
        own = {
            "llama3": ("low_frequency_factor", "high_frequency_factor", "original_sequence_length"),
            "yarn": (
                "original_sequence_length",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ),
        }.get(self.name, ())
        needed = own if self.name == "llama3" else own[:1]
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(f"kind={self.name} needs {', '.join(missing)}")
        given = {key for key, value in self if value is not None} - {"kind", "factor", *own}
        if given:
            raise ValueError(f"kind={self.name} takes no {', '.join(sorted(given))}")
        if self.mscale is not None and (self.mscale_all_dim is None or self.attention_factor is not None):
            raise ValueError("mscale needs mscale_all_dim, and no attention_factor: together they give that factor")
        return self


class ModelConfig(Group):
    """A decoder-only transformer. `conf/model/` has the sizes of Llama, GPT-3, Qwen3 and Gemma 2."""

    name: str = Field(description="name of its file, or your own")
    vocab_size: PositiveInt = Field(description="size of the vocabulary; token ids must be below it")
    vocab_multiple: PositiveInt = Field(
        128, description="embedding rows are padded to a multiple of this in every layout"
    )
    num_layers: int = Field(gt=0, le=2**14, description="number of blocks")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="query heads")
    num_kv_heads: PositiveInt = Field(description="key and value heads, shared evenly by query heads")
    head_dim: PositiveInt | None = Field(None, description="null: hidden_size / num_heads")
    ffn_hidden_size: PositiveInt = Field(description="inner width of the feed-forward network")
    max_sequence_length: PositiveInt = Field(
        description="longest sequence in tokens; rows of the table of learned positions"
    )
    norm: Annotated[str, NameIn(NORMS)] = Field("rmsnorm", description="a registered norm")
    norm_eps: PositiveFloat = Field(1e-5, description="epsilon added to the variance")
    position: Literal["rope", "learned"] = Field("rope", description="rotary embedding, or a learned table")
    rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="scaling of rotary frequencies for longer contexts")
    activation: Annotated[str, NameIn(FEED_FORWARDS)] = Field("swiglu", description="a registered feed-forward network")
    gelu: Literal["tanh", "exact"] = Field("tanh", description="variant of GELU, if the feed-forward network has one")
    bias: bool = Field(False, description="biases in linears and norms")
    tie_embeddings: bool = Field(False, description="use the embedding as the head")
    init: Literal["llama", "gpt2"] = Field(
        "llama", description="initialization scheme, see lightning_llm/model/init.py"
    )
    init_std: PositiveFloat = Field(0.02, description="standard deviation of initial weights")
    embedding_scale: Literal["sqrt_hidden_size"] | None = Field(
        None, description="factor of token embeddings at the first block's input; null: 1"
    )
    logit_cap: PositiveFloat | None = Field(None, description="soft cap: logits become cap x tanh(logits / cap)")
    unit_scaling: bool = Field(
        False,
        description="weights begin with variance 1, and fixed factors keep that of activations and gradients near 1 "
        "(arXiv 2303.11257, 2407.17465); init and init_std are ignored. Set optim.umup_depth to num_layers, too",
        exclude_if=lambda on: not on,  # models from before the key keep their hash
    )
    output_z_loss: PositiveFloat | None = Field(
        None,
        description="weight of the mean square of the logits' log-sum-exp in the objective (PaLM, arXiv 2204.02311); "
        "the recorded loss is without it; null: none",
        exclude_if=lambda weight: weight is None,  # models from before the key keep their hash
    )
    blocks: dict[str, BlockConfig] | None = Field(None, description="kinds of blocks by name, for `layers`")
    layers: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None,
        description="a pattern repeated over num_layers: names of `blocks`, or mixers with their defaults; null: "
        "[attention]",
    )
    init_from: str | None = Field(
        None,
        description="initial weights: a folder, a run or a checkpoint; without model=, also the model's shape; null: "
        "random; ???: must be given before training",
    )
    parameters_published: int | None = Field(None, gt=0, description="the published parameter count, for tests")

    @property
    def attention_head_dim(self) -> int:
        """Elements per attention head: `head_dim`, or `hidden_size / num_heads`."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of embedding and head: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def layer_name(self, index: int) -> str:
        """Return the name of block `index` (from 0). Blocks with equal names have equal structure."""
        pattern = self.layers or DEFAULT_LAYERS
        return pattern[index % len(pattern)]

    def block_at(self, index: int) -> BlockConfig:
        """Return the config of block `index`, with mixer and feed-forward network filled in."""
        name = self.layer_name(index)
        block = (self.blocks or {}).get(name, BlockConfig())
        mixer = block.mixer or MIXERS[name if name in MIXERS else "attention"]()
        return block.model_copy(
            update={"mixer": mixer, "feed_forward": block.feed_forward or FEED_FORWARDS[self.activation]()}
        )

    @field_validator("layers")
    @classmethod
    def _names_blocks(cls, layers: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        if "blocks" not in info.data:  # invalid, and reported already
            return layers
        blocks = info.data["blocks"] or {}
        for name in layers or ():
            if name in blocks:
                continue
            if name not in MIXERS:
                known = [*blocks, *MIXERS]
                raise ValueError(f"'{name}' is neither in model.blocks nor a mixer.{did_you_mean(name, known)}")
            MIXERS.default(name)
        return layers
