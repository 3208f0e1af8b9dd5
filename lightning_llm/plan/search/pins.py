"""Typed keys that leave a search no layout: which of them, and which values would leave some. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_llm.base.errors import Problem
from lightning_llm.plan.degrees import AXES, Degrees
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.search.space import Space, divisors, key_of


def no_layout_problems(space: Space) -> list[Problem]:
    """Return why `space` has no layout: under each typed key that alone leaves none, or that contradicts the others.

    Where no typed key is to blame, under `world`. Of a space that has layouts, nothing.
    """
    if _any(space):
        return []
    open_space = replace(space, typed={})
    if not _any(open_space):
        return [Problem("world", _of_world(space))]
    alone = [field for field in space.typed if not _any(_with(space, [field]))]
    if alone:
        return [problem for field in alone for problem in _impossible(space, field)]
    blamed = _contradicting(space)
    return [
        Problem(key_of(field), _sentence(space, field, [each for each in blamed if each != field])) for field in blamed
    ]


def _impossible(space: Space, field: str) -> Iterator[Problem]:
    """Yield what is wrong with a value that no layout has: where ranks divide by it, what of the model does not."""
    value = space.typed[field]
    if field in AXES and space.world % value == 0:
        found = list(sharding_problems(space.config, Degrees(**{field: value})))
        if found:
            yield from found
            return
    yield Problem(key_of(field), _sentence(space, field, []))


def _contradicting(space: Space) -> list[str]:
    """Return fields that together leave no layout, and without any one of them some."""
    kept = list(space.typed)
    for field in space.typed:
        fewer = [each for each in kept if each != field]
        kept = kept if _any(_with(space, fewer)) else fewer
    return kept


def _sentence(space: Space, field: str, others: list[str]) -> str:
    value, world = space.typed[field], f"world={space.world}"
    if field in AXES and space.world % value:
        text = f"is {value}, which does not divide {world}"
    else:
        beside = ", ".join(f"{key_of(other)}={space.typed[other]}" for other in others)
        text = f"is {value}, and no layout of {world} has that{f' beside {beside}' if others else ''}"
    allowed = sorted({getattr(choice, field) for choice in _with(space, others).choices()})
    change = f"Set it to {'one of ' if len(allowed) > 1 else ''}{', '.join(map(str, allowed))}, leave it out"
    return f"{text}. {change}, or change {'one of the others' if others else 'the number of ranks'}."


def _of_world(space: Space) -> str:
    batch, layers = space.config.data.global_batch_size, space.config.model.num_layers
    fitting = [each for each in divisors(space.world) if batch % each == 0]
    return (
        f"is {space.world}, and there is no layout of so many ranks: tp, cp and pp (of {layers} layers) have to leave "
        f"a number of data-parallel ranks that divides data.global_batch_size={batch}, which "
        f"{', '.join(map(str, fitting))} do{'es' if len(fitting) == 1 else ''}. Set that to a multiple of "
        f"{space.world}, or change the number of ranks."
    )


def _with(space: Space, fields: list[str]) -> Space:
    typed: dict[str, Any] = {field: space.typed[field] for field in fields}
    return replace(space, typed=typed)


def _any(space: Space) -> bool:
    return next(space.choices(), None) is not None
