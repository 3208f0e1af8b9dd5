"""Hugging Face's architecture of a config and of a config.json, and each parameter's place in its tensors. No torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.registry import load_installed
from lightning_llm.config.schema.model import DEFAULT_LAYERS, ModelConfig
from lightning_llm.model.interop.architecture import Architecture, StoredParameter, is_scaled
from lightning_llm.model.interop.deepseek import DeepseekV3
from lightning_llm.model.interop.experts import Mixtral, Qwen3Moe
from lightning_llm.model.interop.gemma2 import Gemma2
from lightning_llm.model.interop.gpt2 import GPT2
from lightning_llm.model.interop.llama import Llama, Mistral, Qwen3
from lightning_llm.model.interop.zaya import Zaya
from lightning_llm.model.structure import linears_of, parameter_shapes

BUILT_IN: tuple[Architecture, ...] = (
    DeepseekV3(),
    Gemma2(),
    GPT2(),
    Llama(),
    Mistral(),
    Mixtral(),
    Qwen3(),
    Qwen3Moe(),
    Zaya(),
)
_FOUND: dict[str, Architecture] = {each.class_name: each for each in BUILT_IN}


def register(architecture: Architecture) -> None:
    """Register an installed package's architecture, for example for a mixer that transformers has, too.

    Raises:
        ValueError: another one reads that class.
    """
    if (known := _FOUND.setdefault(architecture.class_name, architecture)) is not architecture:
        raise ValueError(f"{architecture.class_name} is {type(known).__module__}.{type(known).__qualname__} already")


def architectures() -> list[Architecture]:
    """Return all known architectures, from this package and installed ones, sorted by class name."""
    load_installed()
    return [_FOUND[name] for name in sorted(_FOUND)]


def architecture(config: ModelConfig) -> Architecture:
    """Return the Hugging Face architecture that is equivalent to `config`. Raises ConfigError if there is none."""
    for each in architectures():
        if each.scaled == is_scaled(config) and each.fits(config):
            return each
    known = "; ".join(each.shape for each in architectures())
    raise ConfigError(Problem("model", f"{without_counterpart(config)}. Supported: {known}."))


def without_counterpart(config: ModelConfig) -> str:
    """Return the message that no Hugging Face class matches `config`, with the keys that decide."""
    return (
        f"{config.name} has no Hugging Face counterpart: norm={config.norm}, position={config.position}, "
        f"activation={config.activation}, bias={config.bias}, num_heads={config.num_heads} of "
        f"hidden_size={config.hidden_size}, layers={list(config.layers or DEFAULT_LAYERS)}"
    )


def architecture_named(values: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a `config.json`.

    Raises:
        ConfigError: the architecture is unknown, needs the model's own code, or is quantized.
    """
    problems = []
    known = {each.class_name: each for each in architectures()}
    named = _named(values)
    found = known.get(named[0]) if len(named) == 1 else None
    replaced = frozenset() if found is None else found.own_code
    code = values.get("auto_map")
    if code and not (isinstance(code, Mapping) and {str(each) for each in code.values()} <= replaced):
        text = (
            "names the model's own code (trust_remote_code), but code in a folder of weights is never run. Use a model "
            "with a class in transformers."
        )
        problems.append(Problem("config.json auto_map", text))
    if values.get("quantization_config") is not None:
        text = "is set: the weights are quantized. Use the unquantized weights, in bf16, fp16 or fp32."
        problems.append(Problem("config.json quantization_config", text))
    if found is None:
        text = (
            f"is {', '.join(named)}. Read here are {', '.join(known)}; another one needs an Architecture in "
            "lightning_llm/model/interop, and the kinds of blocks that it is made of."
        )
        problems.append(Problem("config.json architectures", text))
    if problems or found is None:
        raise ConfigError(problems)
    return found


def _named(values: Mapping[str, Any]) -> list[str]:
    """Return the names of classes in a `config.json`: its `architectures`, or those of its `model_type`."""
    by_type = [each.class_name for each in architectures() if each.model_type == values.get("model_type") is not None]
    named = values.get("architectures") or by_type or [f"model_type {values.get('model_type')}"]
    return [str(each) for each in named] if isinstance(named, list) else [str(named)]


def model_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return our `model` keys for a `config.json`.

    Raises:
        ConfigError: with every entry that this decoder does not support.
    """
    family = architecture_named(values)
    if problems := list(family.problems(values)):
        raise ConfigError(problems)
    try:
        keys = family.read(values)
        ModelConfig.model_validate({"name": "", **keys})
    except ValidationError as error:
        raise ConfigError(
            [
                Problem(
                    f"config.json ({'.'.join(map(str, each['loc']))} here)", f"is {each['input']!r}: {each['msg']}."
                )
                for each in error.errors()
            ]
        ) from error
    return keys


def model_config_of(values: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the shape that a `config.json` describes, under the name `name`. Raises ConfigError as `model_keys`."""
    return ModelConfig.model_validate({"name": name, **model_keys(values)})


def stored_as(config: ModelConfig, family: Architecture) -> dict[str, StoredParameter]:
    """Return the location of each of our parameters in a model of `family`, by our names, in order of the decoder."""
    linears, found = linears_of(config), {}
    for ours, shape in parameter_shapes(config).items():
        module, _, kind = ours.rpartition(".")
        turned = family.transposed and module in linears and kind == "weight"
        names, prefix, within = family.ends, "", module
        if module.startswith("layers."):
            _, index, within = module.split(".", 2)
            names, prefix = family.block_names(config, int(index)), f"{family.block_prefix}.{index}."
            for fused, several in family.fused.items():
                if within in several:
                    rows = [linears[f"layers.{index}.{each}"].outputs.length for each in several]
                    place = several.index(within)
                    whole = (sum(rows), *shape[1:])
                    name = f"{prefix}{fused}.{kind}"
                    found[ours] = StoredParameter(
                        name, shape, whole[::-1] if turned else whole, sum(rows[:place]), turned
                    )
        if (own := family.stored(config, ours, shape)) is not None:
            found[ours] = own
        if ours not in found:
            count = linears[module].groups if module in linears else 1
            whole = (shape[0] // count, *shape[1:])
            name = f"{prefix}{names[within]}.{family.leaves.get(kind, kind)}"
            found[ours] = StoredParameter(name, shape, whole[::-1] if turned else whole, 0, turned, count)
    return found
