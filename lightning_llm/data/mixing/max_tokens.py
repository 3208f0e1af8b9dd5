"""`data.max_tokens`: how many windows of each source there are, by its share of the tokens. No document is read."""

from collections.abc import Iterator

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.mixing.addressing import largest_remainder

KEY = "data.max_tokens"


def window_limits(config: DataConfig) -> dict[str, int] | None:
    """Return {source: maximum number of windows, at least 1} for the sources in use; None if there is no limit.

    Limits are proportional to the sources' weights, so that all sources get the same number of epochs.
    """
    if config.max_tokens is None:
        return None
    weights = {name: config.trained_weights[name] for name in config.drawn}
    counts = largest_remainder(list(weights.values()), config.max_tokens // config.sequence_length)
    return {name: max(1, count) for name, count in zip(weights, counts, strict=True)}


def bound_problems(config: DataConfig) -> Iterator[Problem]:
    """Yield why `data.max_tokens` cannot be divided among the sources, or why the length of an epoch is unknown."""
    if config.max_tokens is None:
        if config.epochs is not None:
            text = f"is {config.epochs:g}, but the length of an epoch is unknown before data is read: set {KEY}."
            yield Problem("data.epochs", text)
        return
    if config.chosen_mixture.chooses_documents:
        text = (
            f"limits sequences in stored order, but data.mixture.kind={config.chosen_mixture.kind} chooses documents. "
        )
        yield Problem(KEY, f"{text}Remove one of them.")
    drawn, length = config.drawn, config.sequence_length
    for name in drawn:
        if not config.trained_weights[name]:
            text = f"is 0, and {KEY} is shared out by the weights: give the source its share there, and 0 in the phase."
            yield Problem(f"data.sources.{name}.weight", text)
    if config.max_tokens < length * len(drawn):
        text = f"is {config.max_tokens:,}, but one sequence per source takes {length * len(drawn):,}. Raise it."
        yield Problem(KEY, text)


def limit_problem(name: str, limit: int, available_tokens: int, config: DataConfig) -> Problem | None:
    """Return a problem if a source has fewer windows than its share of `data.max_tokens`: it would repeat more."""
    length = config.sequence_length
    if max(0, available_tokens - 1) // length >= limit:
        return None
    text = (
        f"{config.max_tokens:,} needs {limit * length + 1:,} tokens of source {name!r} by its weight, which has "
        f"{available_tokens:,}. Lower it, or the source's weight."
    )
    return Problem(KEY, text)
