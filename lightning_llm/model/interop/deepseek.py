"""DeepseekV3ForCausalLM: latent attention, dense blocks first, then mixtures of experts with sigmoid scores."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.attention.latent_kind import LatentAttention
from lightning_llm.model.interop.architecture import (
    LLAMA_SIZES,
    PRE_NORM,
    Architecture,
    is_plain,
    kinds_of,
    read_shape,
    shape_entries,
    windows_of,
)
from lightning_llm.model.interop.experts import experts_of, one_kind, with_experts
from lightning_llm.model.interop.rope import read_rope, rope_entries

DENSE, BLOCK = "dense", "moe"
NORM_EPS = 1e-6
"""Of the latents' norms, whatever `rms_norm_eps` is: transformers' class, and DeepSeek's own, have no entry for it."""
LATENT_NAMES = {
    "attention.q_proj": "self_attn.q_proj",
    "attention.q_a_proj": "self_attn.q_a_proj",
    "attention.q_b_proj": "self_attn.q_b_proj",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_b_proj": "self_attn.kv_b_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
}


def latents_of(config: ModelConfig) -> LatentAttention | None:
    """Return the latent attention that all blocks share; None if they have another or differ."""
    kinds = [config.block_at(index).mixer for index in range(config.num_layers)]
    first = kinds[0]
    return first if isinstance(first, LatentAttention) and all(kind == first for kind in kinds) else None


class DeepseekV3(Architecture):
    """DeepSeek-V3 and R1, and models of their shape (Moonlight, Kimi K2)."""

    class_name: ClassVar[str] = "DeepseekV3ForCausalLM"
    model_type: ClassVar[str] = "deepseek_v3"
    shape: ClassVar[str] = "DeepSeek-V3 (mla, dense blocks, then sigmoid scores, a bias and shared experts)"
    own_code: ClassVar[frozenset[str]] = frozenset(
        {
            "configuration_deepseek.DeepseekV3Config",
            "modeling_deepseek.DeepseekV3Model",
            "modeling_deepseek.DeepseekV3ForCausalLM",
        }
    )
    sizes: ClassVar[tuple[str, ...]] = (
        *LLAMA_SIZES,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    )
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (True, False),
        "rope_interleave": (True, False),
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_mtp_layers": "num_nextn_predict_layers",
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps",)

    def fits(self, config: ModelConfig) -> bool:
        alike = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False) and is_plain(config)
        latents, kind = latents_of(config), one_kind(config)
        if not alike or latents is None or kind is None or windows_of(config) != {None}:
            return False
        if not kinds_of(config) <= {("mla", "moe", False), ("mla", "swiglu", False)}:
            return False
        dense_first = sorted(experts_of(config)) == list(range(_dense_blocks(config), config.num_layers))
        biased = kind.router.score == "sigmoid" and kind.router.bias_update_rate is not None
        biased = biased and kind.router.hidden_size is None and not kind.router.skip
        return dense_first and biased and kind.shared_experts > 0 and latents.normed(config).norm_eps == NORM_EPS

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        names = PRE_NORM | LATENT_NAMES
        if index not in experts_of(config):
            return names
        names = with_experts(names)
        for each in ("gate_proj", "up_proj", "down_proj"):
            names[f"feed_forward.shared.{each}"] = f"mlp.shared_experts.{each}"
        return names

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        latents, kind = latents_of(config), one_kind(config)
        if latents is None or kind is None:
            raise ValueError("fits() holds for no other config")
        shape = shape_entries(config) | {"num_key_value_heads": config.num_heads}
        del shape["head_dim"]  # qk_rope_head_dim for transformers
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_act": "silu",
            **shape,
            **rope_entries(config),
            "q_lora_rank": latents.q_rank,
            "kv_lora_rank": latents.kv_rank,
            "qk_nope_head_dim": latents.nope_dim,
            "qk_rope_head_dim": latents.rope_dim,
            "v_head_dim": latents.value_dim,
            "rope_interleave": latents.interleaved,
            "first_k_dense_replace": _dense_blocks(config),
            "moe_layer_freq": 1,
            "n_routed_experts": kind.experts,
            "n_shared_experts": kind.shared_experts,
            "num_experts_per_tok": kind.per_token,
            "moe_intermediate_size": kind.inner(config),
            "n_group": kind.router.groups or 1,
            "topk_group": kind.router.groups_chosen or 1,
            "norm_topk_prob": kind.router.normalise,
            "routed_scaling_factor": kind.router.scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }

    def further_blocks(self, values: Mapping[str, Any]) -> int:
        found = values.get("num_nextn_predict_layers", values.get("num_mtp_layers"))
        return found if type(found) is int else 0

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        heads, keys = values.get("num_attention_heads"), values.get("num_key_value_heads")
        if keys is not None and keys != heads:
            text = f"is {keys!r}, and latents are expanded to num_attention_heads={heads!r}. Set it to that number."
            yield Problem("config.json num_key_value_heads", text)
        for key, least, required in (
            ("first_k_dense_replace", 0, True),
            ("n_group", 1, True),
            ("topk_group", 1, True),
            ("q_lora_rank", 1, False),
            ("num_nextn_predict_layers", 0, False),
        ):
            value = values.get(key)
            if (required or value is not None) and (type(value) is not int or value < least):
                yield Problem(f"config.json {key}", f"must be a whole number of at least {least}.", repr(value))
        scale = values.get("routed_scaling_factor", 2.5)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or scale <= 0:
            yield Problem("config.json routed_scaling_factor", "must be a number above 0.", repr(scale))
        dense, layers = values.get("first_k_dense_replace"), values.get("num_hidden_layers")
        if type(dense) is int and type(layers) is int and dense >= layers:
            text = f"is {dense}, which leaves none of num_hidden_layers={layers} for experts. Use a dense class."
            yield Problem("config.json first_k_dense_replace", text)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        dense, groups = values["first_k_dense_replace"], values["n_group"]
        mixer = {
            "kind": "mla",
            "q_rank": values.get("q_lora_rank"),
            "kv_rank": values["kv_lora_rank"],
            "nope_dim": values["qk_nope_head_dim"],
            "rope_dim": values["qk_rope_head_dim"],
            "value_dim": values["v_head_dim"],
            "interleaved": values.get("rope_interleave", True),
        }
        shape = {**read_shape(values), **read_rope(values, scales_scores=True), "head_dim": None}
        shape["num_kv_heads"] = shape["num_heads"]
        if shape["norm_eps"] != NORM_EPS:
            mixer["norm_eps"] = NORM_EPS
        experts = {
            "kind": "moe",
            "experts": values["n_routed_experts"],
            "per_token": values["num_experts_per_tok"],
            "ffn_hidden_size": values["moe_intermediate_size"],
            "shared_experts": values["n_shared_experts"],
            "router": {
                "score": "sigmoid",
                "normalise": values.get("norm_topk_prob", True),
                "scale": float(values.get("routed_scaling_factor", 2.5)),
                "groups": groups if groups > 1 else None,
                "groups_chosen": values["topk_group"] if groups > 1 else None,
                "bias_update_rate": 0.001,  # DeepSeek-V3's (section 4.2), which its config.json does not have
            },
            "balance_loss": 0.0,
            "z_loss": 0.0,
        }
        blocks = {BLOCK: {"mixer": mixer, "feed_forward": experts}}
        if not dense:
            return {**shape, "blocks": blocks, "layers": [BLOCK]}
        blocks = {DENSE: {"mixer": mixer}, **blocks}
        return {**shape, "blocks": blocks, "layers": [DENSE] * dense + [BLOCK] * (shape["num_layers"] - dense)}


def _dense_blocks(config: ModelConfig) -> int:
    """Return the number of blocks without experts."""
    return config.num_layers - len(experts_of(config))
