"""Parts, linears and parameters of a decoder by name, without building it. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import DEFAULT_LAYERS, NORMS, ModelConfig
from lightning_llm.model.spec import Affine, Distribution, FeedForward, LinearSpec, Mixer, Norm, ParameterSpec, Part

Value = TypeVar("Value")

VOCABULARY = ("embedding.weight", "head.weight")
"""Parameters with one row per token id, including padding."""


def norm_of(model: ModelConfig) -> Norm:
    """Return the model's kind of norm.

    Raises:
        ValueError: it names auxiliary losses. Its forward pass is another's under tensor parallelism.
    """
    norm = _checked(NORMS[model.norm](), Norm)
    if norm.auxiliary_losses:
        text = f"model.norm={model.norm}: a norm makes no auxiliary loss, and its class names"
        raise ValueError(f"{text} {', '.join(norm.auxiliary_losses)}. Set it in the mixer or the feed-forward network.")
    return norm


def mixer_of(model: ModelConfig, index: int) -> Mixer:
    """Return the mixer of block `index`."""
    return _checked(block_parts(model, index)["attention"], Mixer)


def feed_forward_of(model: ModelConfig, index: int) -> FeedForward:
    """Return the feed-forward network of block `index`."""
    return _checked(block_parts(model, index)["feed_forward"], FeedForward)


def why_not_generated(model: ModelConfig) -> str | None:
    """Return why the model cannot generate (a block's result depends on other tokens of the batch); None if it can."""
    for index in range(len(model.layers or DEFAULT_LAYERS)):
        if (why := feed_forward_of(model, index).why_not_generated(model)) is not None:
            return f"block '{model.layer_name(index)}': {why}"
    return None


class Same:
    """Cache key that compares a (frozen) model by identity and keeps it alive."""

    __slots__ = ("model",)

    def __init__(self, model: ModelConfig):
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.model is self.model


def first_alike(model: ModelConfig, index: int) -> int:
    """Return the index of the first block of the same kind (name in `model.layers`) as block `index`."""
    return (model.layers or DEFAULT_LAYERS).index(model.layer_name(index))


def block_parts(model: ModelConfig, index: int) -> Mapping[str, Part]:
    """Return the parts of block `index` by their names in it, in module order.

    The mixer of any kind is called "attention", so that names and globs apply to all kinds.
    """
    return _block_parts(Same(model), first_alike(model, index))


@lru_cache(maxsize=256)
def _block_parts(same: Same, index: int) -> Mapping[str, Part]:
    model = same.model
    block, norm = model.block_at(index), norm_of(model)
    scale = Affine()
    parts: dict[str, Part] = {"input_scale": scale} if block.input_scaling else {}
    for name, part in {
        "attention": _checked(block.mixer, Mixer),
        "feed_forward": _checked(block.feed_forward, FeedForward),
    }.items():
        parts |= {f"{name}_norm": norm, name: part}
        parts |= {f"{name}_post_norm": norm} if block.post_norms else {}
        parts |= {f"{name}_scale": scale, f"{name}_skip_scale": scale} if block.residual_scaling else {}
    return MappingProxyType(parts)


PartClass = TypeVar("PartClass", bound=Part)


def _checked(part: object, kind: type[PartClass]) -> PartClass:
    if not isinstance(part, kind):
        raise TypeError(f"{type(part).__qualname__} is registered as a {kind.__name__}, but is not a subclass of it")
    return part


def replicated_within(part: Part, model: ModelConfig) -> list[ParameterSpec]:
    """Return the parameters of child modules of `part` that are replicated over tensor-parallel ranks."""
    return [each for each in part.own_parameters(model) if each.role == "replicate" and "." in each.name]


def block_parameters(model: ModelConfig, index: int) -> Sequence[ParameterSpec]:
    """Return the parameters of block `index`, by their names within it."""
    return _block_parameters(Same(model), first_alike(model, index))


@lru_cache(maxsize=256)
def _block_parameters(same: Same, index: int) -> Sequence[ParameterSpec]:
    model, found = same.model, []
    for part_name, part in block_parts(model, index).items():
        for linear in part.linears(model):
            name, shape = f"{part_name}.{linear.name}", linear.shape
            found.append(ParameterSpec(f"{name}.weight", shape, linear.role, None))
            if linear.bias:
                # A bias is split as the outputs are: ranks have all of it if the weight is split by its inputs.
                role = "replicate" if linear.role == "row" else linear.role
                found.append(ParameterSpec(f"{name}.bias", shape[:1], role, Distribution()))
        found += [each._replace(name=f"{part_name}.{each.name}") for each in part.own_parameters(model)]
    return tuple(found)


def frozen_names(model: ModelConfig, index: int) -> list[str]:
    """Return the full names of the parameters of block `index` that no gradient updates."""
    return [f"layers.{index}.{each.name}" for each in block_parameters(model, index) if not each.trained]


def for_layers(model: ModelConfig, layers: Iterable[int], value: Callable[[int], Value]) -> list[Value]:
    """Return [value(index) for index in layers], but call `value` only once per kind of block.

    `value` must depend only on the kind.
    """
    made: dict[str, Value] = {}
    for index in layers:
        name = model.layer_name(index)
        if name not in made:
            made[name] = value(index)
    return [made[model.layer_name(index)] for index in layers]


def block_linears(config: ModelConfig, index: int) -> list[LinearSpec]:
    """Return the linears of block `index` of `Decoder(config)`, in module order; names are those within the block."""
    return list(_block_linears(Same(config), first_alike(config, index)))


@lru_cache(maxsize=256)
def _block_linears(same: Same, index: int) -> tuple[LinearSpec, ...]:
    parts = block_parts(same.model, index).items()
    return tuple(
        linear._replace(name=f"{part_name}.{linear.name}")
        for part_name, part in parts
        for linear in part.linears(same.model)
    )


def linears_of(config: ModelConfig) -> dict[str, LinearSpec]:
    """Return the linears of all blocks by full name, in module order."""
    return dict(_linears_of(Same(config)))


@lru_cache(maxsize=64)
def _linears_of(same: Same) -> Mapping[str, LinearSpec]:
    layers = range(same.model.num_layers)
    return {f"layers.{index}.{linear.name}": linear for index in layers for linear in block_linears(same.model, index)}


def experts_by_linear(config: ModelConfig) -> dict[str, int]:
    """Return the number of experts of each linear that has one matrix per expert, by full name."""
    return {name: linear.groups for name, linear in linears_of(config).items() if linear.role == "expert"}


def linear_names(config: ModelConfig) -> list[str]:
    """Return the full name of every linear layer of `Decoder(config)`, in module order; a tied head is not one."""
    return [*linears_of(config), *([] if config.tie_embeddings else ["head"])]


def has_bias(config: ModelConfig) -> bool:
    """Return whether any linear within a block has a bias."""
    return any(linear.bias for linear in linears_of(config).values())


def linear_widths(config: ModelConfig) -> dict[str, int]:
    """Return {key: size} of all numbers of inputs and outputs of linear layers in blocks, by the keys that set them."""
    return dict(_widths(Same(config)))


@lru_cache(maxsize=64)
def _widths(same: Same) -> dict[str, int]:
    sides = (side for linear in linears_of(same.model).values() for side in (linear.inputs, linear.outputs))
    return {side.text: side.length for side in sides}


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of `Decoder(config)` by name, without rows that pad the vocabulary."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": table}
    if config.position == "learned":
        shapes["position_embedding.weight"] = (config.max_sequence_length, config.hidden_size)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{each.name}": each.shape for each in block_parameters(config, index)}
    shapes |= {f"norm.{name}": (config.hidden_size,) for name in norm_of(config).vectors(config)}
    return shapes if config.tie_embeddings else {**shapes, "head.weight": table}


def shape_problems(model: ModelConfig) -> list[Problem]:
    """Return a problem for each contradiction in a model's shape; [] if there is none."""
    found: dict[Problem, None] = {}
    for index in range(len(model.layers or DEFAULT_LAYERS)):  # also reports it if num_layers is wrong
        for part in block_parts(model, index).values():
            found |= dict.fromkeys(part.problems(model))
    if model.rope_scaling is not None and model.position != "rope":
        text = f"is set, and model.position={model.position}. Set it to null, or position to rope."
        found[Problem("model.rope_scaling", text)] = None
    if model.unit_scaling and (other := _not_unit_scaled(model)):
        text = (
            f"has no factors for {', '.join(other)}. Use plain attention, swiglu, rope, an untied head and no biases."
        )
        found[Problem("model.unit_scaling", text, True)] = None
    return [*found, *_state_problems(model)]


def _not_unit_scaled(model: ModelConfig) -> list[str]:
    """Return the settings of a model for which `model.unit_scaling` has no factors."""
    wanted: dict[str, object] = {"bias": False, "tie_embeddings": False, "position": "rope", "rope_scaling": None}
    wanted |= {"embedding_scale": None, "logit_cap": None}
    found = [f"{key}={getattr(model, key)}" for key, value in wanted.items() if getattr(model, key) != value]
    for index in range(len(model.layers or DEFAULT_LAYERS)):
        block = model.block_at(index)
        mixer, feed_forward = block.mixer, block.feed_forward
        kinds = {"mixer": (getattr(mixer, "kind", None), "attention")}
        kinds |= {"feed_forward": (getattr(feed_forward, "kind", None), "swiglu")}
        found += [f"{key}={kind}" for key, (kind, known) in kinds.items() if kind != known]
        found += ["window"] if getattr(mixer, "window", None) else []
        found += [key for key in ("post_norms", "residual_scaling", "input_scaling") if getattr(block, key)]
    return list(dict.fromkeys(found))


def _state_problems(model: ModelConfig) -> Iterable[Problem]:
    """Return a problem for each kind of block that takes a state which the block before does not give."""
    found: dict[Problem, None] = {}
    pattern = range(len(model.layers or DEFAULT_LAYERS))
    takes_any = any(feed_forward_of(model, index).state_taken(model) for index in pattern)
    for index in range(model.num_layers if takes_any else 0):
        taken = feed_forward_of(model, index).state_taken(model)
        given = feed_forward_of(model, index - 1).state_given(model) if index else 0
        if taken and taken != given:
            text = f"is true for block {index}, and " + (
                f"block {index - 1} gives a state of {given} elements, not {taken}." if index else "none is before it."
            )
            remedy = "Start model.layers with a block whose router has the same hidden_size and no depth_mixing."
            key = f"model.blocks.{model.layer_name(index)}.feed_forward.router.depth_mixing"
            found.setdefault(Problem(key, f"{text} {remedy}"))
    return found
