"""Our parameters against Hugging Face's tensors: names, shapes, which way round, where in theirs. Without torch."""

from dataclasses import dataclass

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.block_spec import block_parameters, norm_of
from lightning_llm.model.interop.architecture import Architecture
from lightning_llm.model.linear_names import linears_of

VOCABULARY = ("embedding.weight", "head.weight")
"""Parameters whose rows are token ids, those of padding included."""


@dataclass(frozen=True)
class Stored:
    """Where one of our parameters lies: in tensor `name`, from row `first` on, there [inputs, outputs] if `transposed`.

    `shape` is ours, without rows that pad the vocabulary; `whole` theirs, of which it may be a part.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    first: int = 0
    transposed: bool = False


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


def stored_as(config: ModelConfig, family: Architecture) -> dict[str, Stored]:
    """Return where each of our parameters lies in a model of `family`, by our names, in order of the decoder."""
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
                    found[ours] = Stored(name, shape, whole[::-1] if turned else whole, sum(rows[:place]), turned)
        if ours not in found:
            whole = shape[::-1] if turned else shape
            found[ours] = Stored(f"{prefix}{names[within]}.{kind}", shape, whole, 0, turned)
    return found
