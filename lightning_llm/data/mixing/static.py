"""mixture=static: each source's weight is its share of the training tokens."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import MIXTURES, MixtureConfig
from lightning_llm.data.mixing.addressing import SMALLEST_SHARE, Shares


@MIXTURES.register
class StaticMixture(MixtureConfig):
    """Each source's share of the training tokens is its weight, from the first step to the last."""

    kind: Literal["static"] = "static"

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
        if not any(weights.values()):
            yield Problem(
                f"data.sources.{next(iter(weights))}.weight",
                "is 0, like all others. Give at least one source a weight above 0.",
            )
        yield from weight_problems(weights, {name: f"data.sources.{name}.weight" for name in weights})

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(name for name, weight in weights.items() if weight)

    def identity(self) -> None:
        return None

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        return Shares(weights)


def weight_problems(weights: Mapping[str, float], keys: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each of `weights` that is above 0 and too small a share to be drawn.

    `keys`: the config key of each weight. Both are keyed by source.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if 0 < weight < SMALLEST_SHARE * total:
            text = (
                f"{weight} is a share of {weight / total:.1e} of the tokens; the smallest possible is "
                f"{SMALLEST_SHARE:.0e}. Raise it, or leave the source out."
            )
            yield Problem(keys[name], text)
