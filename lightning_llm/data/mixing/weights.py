"""What weights of sources a mixture can hold."""

from collections.abc import Iterator, Mapping

from lightning_llm.base.errors import Problem
from lightning_llm.data.mixing.addressing import SMALLEST_SHARE


def weight_problems(weights: Mapping[str, float], keys: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each of `weights` that is too small a share to be drawn, but 0; `keys` says where it stands.

    Both are keyed by source.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if 0 < weight < SMALLEST_SHARE * total:
            text = (
                f"{weight} is a share of {weight / total:.1e} of the tokens; the smallest possible is "
                f"{SMALLEST_SHARE:.0e}. Raise it, or leave the source out."
            )
            yield Problem(keys[name], text)
