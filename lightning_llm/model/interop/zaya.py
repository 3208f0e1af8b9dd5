"""ZayaForCausalLM: convolved attention, scaled residual sums, and routers that hand a state to the next block."""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention.convolved_kind import ConvolvedAttention
from lightning_llm.model.experts.kinds import MoE, RouterConfig
from lightning_llm.model.interop.architecture import Architecture, StoredParameter, is_plain, read_shape, shape_entries

FIRST, BLOCK, LAYER = "first", "moe", "hybrid"
CONVOLUTIONS = ("attention.depthwise.weight", "attention.grouped.weight")
NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    "attention.o_proj.weight": "self_attn.o_proj.weight",
    "attention.q_proj.weight": "self_attn.qkv_proj.q_proj.weight",
    "attention.k_proj.weight": "self_attn.qkv_proj.k_proj.weight",
    "attention.v_proj.weight": "self_attn.qkv_proj.v_proj_current.weight",
    "attention.v_delayed_proj.weight": "self_attn.qkv_proj.v_proj_delayed.weight",
    "attention.key_scale.weight": "self_attn.qk_norm.temp",
    "feed_forward.router.norm.weight": "mlp.gate.router_mlp.norm.weight",
    "feed_forward.router.out_proj.weight": "mlp.gate.router_mlp.out_proj.weight",
    "feed_forward.router.state_scale.weight": "mlp.gate.router_states_scale",
    "attention.depthwise.weight": "self_attn.qkv_proj.conv_qk_depthwise.weight",
    "attention.depthwise.bias": "self_attn.qkv_proj.conv_qk_depthwise.bias",
    "attention.grouped.weight": "self_attn.qkv_proj.conv_qk_grouped.weight",
    "attention.grouped.bias": "self_attn.qkv_proj.conv_qk_grouped.bias",
    "feed_forward.router.down_proj.weight": "mlp.gate.down_proj.weight",
    "feed_forward.router.down_proj.bias": "mlp.gate.down_proj.bias",
    "feed_forward.router.fc1.weight": "mlp.gate.router_mlp.fc1.weight",
    "feed_forward.router.fc1.bias": "mlp.gate.router_mlp.fc1.bias",
    "feed_forward.router.fc2.weight": "mlp.gate.router_mlp.fc2.weight",
    "feed_forward.router.fc2.bias": "mlp.gate.router_mlp.fc2.bias",
    "attention_scale.weight": "post_attention_residual_scale.hidden_states_scale",
    "attention_scale.bias": "post_attention_residual_scale.hidden_states_bias",
    "attention_skip_scale.weight": "post_attention_residual_scale.residual_scale",
    "attention_skip_scale.bias": "post_attention_residual_scale.residual_bias",
    "feed_forward_scale.weight": "post_mlp_residual_scale.hidden_states_scale",
    "feed_forward_scale.bias": "post_mlp_residual_scale.hidden_states_bias",
    "feed_forward_skip_scale.weight": "post_mlp_residual_scale.residual_scale",
    "feed_forward_skip_scale.bias": "post_mlp_residual_scale.residual_bias",
}
"""Their names of the parameters of a block that they have as they are, by ours."""


class Zaya(Architecture):
    """ZAYA1, in the layout of transformers 5: sums of Zyphra's alternating layers are blocks of both."""

    class_name: ClassVar[str] = "ZayaForCausalLM"
    model_type: ClassVar[str] = "zaya"
    shape: ClassVar[str] = "ZAYA1 (cca, one expert of each token by a router with a state, scaled residual sums)"
    scaled: ClassVar[bool] = True
    rotary: ClassVar[bool] = False
    sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "moe_intermediate_size",
        "num_experts",
        "router_hidden_size",
        "cca_time0",
        "cca_time1",
    )
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "lm_head_bias": (False,),
        "num_experts_per_tok": (1,),
        "sliding_window": (None,),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps",)

    def fits(self, config: ModelConfig) -> bool:
        alike = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False) and is_plain(config)
        return alike and config.rope_scaling is None and all(_fits(config, index) for index in range(config.num_layers))

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {}

    def stored(self, config: ModelConfig, name: str, shape: tuple[int, ...]) -> StoredParameter | None:
        if not name.startswith("layers."):
            return None
        _, index, within = name.split(".", 2)
        prefix, kind = f"{self.block_prefix}.{index}.", _experts(config)
        module, _, leaf = within.rpartition(".")
        if module == "input_scale":
            return StoredParameter(f"model.input_hidden_states_{'scale' if leaf == 'weight' else 'bias'}", shape, shape)
        if module == "feed_forward.router" and leaf in ("correction", "skip_correction"):
            first = 0 if leaf == "correction" else kind.experts
            return StoredParameter(f"{prefix}mlp.gate.balancing_biases", shape, (kind.experts + 1,), first)
        whole = shape
        if module.startswith("feed_forward.experts."):
            rows, columns = shape[0] // kind.experts, shape[1]
            down = module.endswith("down_proj")
            theirs = f"{prefix}mlp.experts.{'down_proj' if down else 'gate_up_proj'}"
            whole = (kind.experts, rows if down else 2 * rows, columns)
            first = rows if module.endswith("up_proj") else 0
            return StoredParameter(theirs, shape, whole, first, slices=kind.experts)
        if within in CONVOLUTIONS:
            width = config.attention_head_dim if "grouped" in within else 1
            whole = (shape[0], width, prod(shape[1:]) // width)
        return StoredParameter(f"{prefix}{NAMES[within]}", shape, whole)

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        kind, mixer = _experts(config), _mixer(config)
        factor = mixer.rope_width(config) / config.attention_head_dim
        shape = shape_entries(config)
        del shape["intermediate_size"]
        rope = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": factor}
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_act": "silu",
            **shape,
            "moe_intermediate_size": kind.inner(config),
            "num_experts": kind.experts,
            "num_experts_per_tok": 1,
            "router_hidden_size": kind.router.hidden_size,
            "cca_time0": mixer.depthwise_tokens,
            "cca_time1": mixer.grouped_tokens,
            "lm_head_bias": False,
            "layer_types": [LAYER] * config.num_layers,
            "rope_parameters": {LAYER: rope},
            "sliding_window": None,
        }

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        kinds = values.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or set(map(str, kinds)) - {LAYER}):
            yield Problem("config.json layer_types", f"is {kinds!r}. Only {LAYER} is supported, without a window.")
        every = values.get("rope_parameters")
        rope = every.get(LAYER) if isinstance(every, Mapping) else None
        if not isinstance(rope, Mapping):
            yield Problem(f"config.json rope_parameters.{LAYER}", "is missing. Use a folder saved by transformers 5.")
            return
        if (kind := rope.get("rope_type", "default")) != "default":
            yield Problem(f"config.json rope_parameters.{LAYER}.rope_type", f"is {kind!r}. Only default is supported.")
        for key in ("rope_theta", "partial_rotary_factor"):
            value = rope.get(key)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                yield Problem(f"config.json rope_parameters.{LAYER}.{key}", "must be a number above 0.", repr(value))

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        rope = values["rope_parameters"][LAYER]
        plain = {key: value for key, value in values.items() if key not in ("rope_parameters", "rope_scaling")}
        plain |= {"intermediate_size": values["moe_intermediate_size"], "rope_theta": rope["rope_theta"]}
        width = int(values["head_dim"] * rope["partial_rotary_factor"])
        tokens = {"depthwise_tokens": values["cca_time0"], "grouped_tokens": values["cca_time1"]}
        router = {
            "normalise": False,
            "bias_update_rate": 1e-3,
            "hidden_size": values["router_hidden_size"],
            "skip": True,
        }
        experts = {
            "kind": "moe",
            "experts": values["num_experts"],
            "per_token": 1,
            "ffn_hidden_size": values["moe_intermediate_size"],
            "balance_loss": 0.0,
            "z_loss": 0.0,
        }
        block = {"mixer": {"kind": "cca", "rope_dim": width, **tokens}, "residual_scaling": True}
        blocks = {
            FIRST: {**block, "feed_forward": {**experts, "router": router}, "input_scaling": True},
            BLOCK: {**block, "feed_forward": {**experts, "router": {**router, "depth_mixing": True}}},
        }
        layers = [FIRST, *[BLOCK] * (values["num_hidden_layers"] - 1)]
        shape = read_shape(plain, rms_norm_eps=1e-5, tie_word_embeddings=True)
        return {**shape, "blocks": {name: blocks[name] for name in dict.fromkeys(layers)}, "layers": layers}


def _experts(config: ModelConfig) -> MoE:
    kind = config.block_at(0).feed_forward
    if not isinstance(kind, MoE):
        raise ValueError("fits() holds for no other config")
    return kind


def _mixer(config: ModelConfig) -> ConvolvedAttention:
    mixer = config.block_at(0).mixer
    if not isinstance(mixer, ConvolvedAttention):
        raise ValueError("fits() holds for no other config")
    return mixer


def _fits(config: ModelConfig, index: int) -> bool:
    """Return whether block `index` is one of ZAYA1's: the first scales its input, later ones take a state."""
    block, first = config.block_at(index), config.block_at(0)
    kind, mixer = block.feed_forward, block.mixer
    if not isinstance(kind, MoE) or not isinstance(mixer, ConvolvedAttention) or not kind.router.hidden_size:
        return False
    size, rate = kind.router.hidden_size, kind.router.bias_update_rate
    router = RouterConfig(normalise=False, skip=True, depth_mixing=index > 0, hidden_size=size, bias_update_rate=rate)
    biased = rate is not None
    plain = (kind.per_token, kind.shared_experts, kind.capacity_factor) == (1, 0, None)
    scaled = (block.residual_scaling, block.input_scaling, block.post_norms) == (True, index == 0, False)
    sizes = isinstance(first.feed_forward, MoE) and _sizes(kind, config) == _sizes(first.feed_forward, config)
    return kind.router == router and biased and plain and scaled and sizes and mixer == first.mixer and not mixer.window


def _sizes(kind: MoE, config: ModelConfig) -> tuple[int, int, int | None]:
    return kind.experts, kind.inner(config), kind.router.hidden_size
