"""Mixtures of experts: MixtralForCausalLM and Qwen3MoeForCausalLM."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.experts.kinds import MoE, RouterConfig
from lightning_llm.model.interop.architecture import (
    LLAMA_SIZES,
    is_plain,
    kinds_of,
    read_shape,
    windows_of,
)
from lightning_llm.model.interop.llama import Llama, Qwen3

BLOCK = "moe"


def experts_of(config: ModelConfig) -> dict[int, MoE]:
    """Return the mixtures of experts by the index of their block."""
    blocks = {index: config.block_at(index).feed_forward for index in range(config.num_layers)}
    return {index: kind for index, kind in blocks.items() if isinstance(kind, MoE)}


def one_kind(config: ModelConfig) -> MoE | None:
    """Return the mixture that all blocks with experts share; None if they differ or drop choices."""
    kinds = list(experts_of(config).values())
    alike = bool(kinds) and all(kind == kinds[0] for kind in kinds) and kinds[0].capacity_factor is None
    return kinds[0] if alike else None


def coefficient(kind: MoE, num_layers: int) -> float:
    """Return `router_aux_loss_coef` for the balance loss of `num_layers` blocks.

    transformers multiplies counts per token, k times our shares, by means over all blocks, where ours are summed.
    """
    return round(kind.balance_loss * num_layers / kind.per_token, 12)


def balance_loss(values: Mapping[str, Any], default: float, per_token: int, num_layers: int) -> float:
    """Return our weight of the balance loss for the entry `router_aux_loss_coef`, see `coefficient`."""
    found = values.get("router_aux_loss_coef", default)
    return round((found or 0.0) * per_token / num_layers, 12)


def coefficient_problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem if `router_aux_loss_coef` is no weight of a loss."""
    found = values.get("router_aux_loss_coef")
    if found is not None and (type(found) not in (int, float) or not 0 <= found < inf):
        yield Problem("config.json router_aux_loss_coef", "must be a number of at least 0.", repr(found))


class Mixtral(Llama):
    """Llama's attention, and in each block a mixture of experts with softmax scores, normalized."""

    class_name: ClassVar[str] = "MixtralForCausalLM"
    model_type: ClassVar[str] = "mixtral"
    shape: ClassVar[str] = "Mixtral (Llama with a mixture of experts in each block, softmax scores, normalized)"
    switches: ClassVar[dict[str, bool]] = {}
    sizes: ClassVar[tuple[str, ...]] = (*LLAMA_SIZES, "num_local_experts", "num_experts_per_tok")
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "sliding_window": (None,),
        "router_jitter_noise": (0.0, 0),
        "scoring_func": ("softmax",),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "num_key_value_heads")
    heads_divide: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}

    def fits(self, config: ModelConfig) -> bool:
        alike = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False) and is_plain(config)
        kind = one_kind(config)
        if not alike or kind is None or kinds_of(config) != {(self.mixer, "moe", False)}:
            return False
        return windows_of(config) == {None} and kind.router == RouterConfig() and not kind.shared_experts

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        names = {key: name for key, name in super().block_names(config, index).items() if "mlp" not in name}
        names["feed_forward.router"] = "block_sparse_moe.gate"
        for ours, theirs in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
            names[f"feed_forward.experts.{ours}"] = f"block_sparse_moe.experts.{{}}.{theirs}"
        return names

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        kind = experts_of(config)[0]
        return {
            **super().entries(config),
            "intermediate_size": kind.inner(config),
            "num_local_experts": kind.experts,
            "num_experts_per_tok": kind.per_token,
            "router_aux_loss_coef": coefficient(kind, config.num_layers),
        }

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        yield from coefficient_problems(values)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        per_token, layers = values["num_experts_per_tok"], values["num_hidden_layers"]
        kind = {
            "kind": "moe",
            "experts": values["num_local_experts"],
            "per_token": per_token,
            "balance_loss": balance_loss(values, 0.001, per_token, layers),
            "z_loss": 0.0,
        }
        block = {"mixer": {"kind": self.mixer}, "feed_forward": kind}
        return {**read_shape(values, **self.defaults), "blocks": {BLOCK: block}, "layers": [BLOCK]}


def with_experts(names: dict[str, str]) -> dict[str, str]:
    """Return the names of a block's weights with those of a router and its experts in place of a dense network's."""
    found = {key: name for key, name in names.items() if not key.startswith("feed_forward.")}
    found["feed_forward.router"] = "mlp.gate"
    for each in ("gate_proj", "up_proj", "down_proj"):
        found[f"feed_forward.experts.{each}"] = f"mlp.experts.{{}}.{each}"
    return found


class Qwen3Moe(Qwen3):
    """Qwen3's attention; blocks have a mixture of experts or, where config.json says so, a dense network."""

    class_name: ClassVar[str] = "Qwen3MoeForCausalLM"
    model_type: ClassVar[str] = "qwen3_moe"
    shape: ClassVar[str] = "Qwen3-MoE (Qwen3 with mixtures of experts, softmax scores)"
    sizes: ClassVar[tuple[str, ...]] = (*LLAMA_SIZES, "num_experts_per_tok", "moe_intermediate_size")
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Qwen3.wanted, "scoring_func": ("softmax",)}
    aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "norm_topk_prob", "decoder_sparse_step")
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 4}

    def fits(self, config: ModelConfig) -> bool:
        alike = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False) and is_plain(config)
        kind = one_kind(config)
        allowed = {(self.mixer, "moe", False), (self.mixer, "swiglu", False)}
        if not alike or kind is None or not kinds_of(config) <= allowed:
            return False
        plain = kind.router.model_copy(update={"normalise": True}) == RouterConfig()
        return windows_of(config) == {None} and plain and not kind.shared_experts

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        names = super().block_names(config, index)
        if index not in experts_of(config):
            return names
        return with_experts(names)

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        found = experts_of(config)
        kind = next(iter(found.values()))
        return {
            **super().entries(config),
            "num_experts": kind.experts,
            "num_experts_per_tok": kind.per_token,
            "moe_intermediate_size": kind.inner(config),
            "norm_topk_prob": kind.router.normalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [index for index in range(config.num_layers) if index not in found],
            "router_aux_loss_coef": coefficient(kind, len(found)),
        }

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        yield from coefficient_problems(values)
        experts = values.get("num_experts", values.get("num_local_experts"))
        if type(experts) is not int or experts < 1:
            yield Problem("config.json num_experts", "must be a whole number.", repr(experts))
        step = values.get("decoder_sparse_step", 1)
        if type(step) is not int or step < 1:
            yield Problem("config.json decoder_sparse_step", "must be a whole number.", repr(step))
        dense = values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or any(type(each) is not int for each in dense):
            yield Problem("config.json mlp_only_layers", "must be a list of layer numbers.", repr(dense))

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
        dense = set(values.get("mlp_only_layers") or [])
        pattern = [self.mixer if index in dense or (index + 1) % step else BLOCK for index in range(layers)]
        per_token = values["num_experts_per_tok"]
        kind = {
            "kind": "moe",
            "experts": values.get("num_experts", values.get("num_local_experts")),
            "per_token": per_token,
            "ffn_hidden_size": values["moe_intermediate_size"],
            "router": {"normalise": bool(values.get("norm_topk_prob", False))},
            "balance_loss": balance_loss(values, 0.001, per_token, max(1, pattern.count(BLOCK))),
            "z_loss": 0.0,
        }
        block = {"mixer": {"kind": self.mixer}, "feed_forward": kind}
        kept = [BLOCK] if set(pattern) == {BLOCK} else pattern
        return {**read_shape(values, **self.defaults), "blocks": {BLOCK: block}, "layers": kept}
