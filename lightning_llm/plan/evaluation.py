"""Rules of evaluations: of the callback `evaluate`, and of tasks under a layout. Imports no torch."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.plan.degrees import Degrees

CALLBACK = "lightning_llm.evaluate.during_training.Evaluate"
INSTALL = "pip install 'lightning-llm[eval]'"


def evaluation_problems(config: Config, degrees: Degrees | None) -> Iterator[Problem]:
    """Yield the problems of each callback that evaluates during training."""
    for name, node in config.callbacks.items():
        if not node or node.get("_target_") != CALLBACK:
            continue
        key = f"callbacks.{name}"
        every, limit = node.get("every_steps"), node.get("limit")
        if isinstance(every, int) and every < 1:
            yield Problem(f"{key}.every_steps", "must be at least 1.", every)
        if isinstance(limit, int | float) and not (0 < limit < 1 or (limit >= 1 and limit % 1 == 0)):
            yield Problem(f"{key}.limit", "must be a number of samples, or a share of them between 0 and 1.", limit)
        if isinstance(size := node.get("batch_size"), int) and size < 1:
            yield Problem(f"{key}.batch_size", "must be at least 1.", size)
        yield from _nothing_to_evaluate(config, key, node)
        if tasks := node.get("tasks"):
            yield from _unknown_tasks(f"{key}.tasks", [str(each) for each in tasks])
            yield from task_problems(config, degrees) if degrees is not None else []


def _nothing_to_evaluate(config: Config, key: str, node: dict[str, object]) -> Iterator[Problem]:
    validates = node.get("validation", True)
    if validates and not config.data.validation.fraction and not config.data.watched:
        text = "is true, and data.validation.fraction=0 holds out nothing to validate on. Raise it, or set it to false."
        yield Problem(f"{key}.validation", text)
    if not validates and not node.get("tasks"):
        yield Problem(key, "evaluates nothing: validation=false and no tasks. Name tasks, or remove the callback.")


def _unknown_tasks(key: str, tasks: list[str]) -> Iterator[Problem]:
    files = [Path(each).expanduser() for each in tasks if each.endswith((".yaml", ".yml"))]
    yield from (Problem(key, f"{file} is not a file.") for file in files if not file.is_file())
    if find_spec("lm_eval") is None:
        yield Problem(key, f"needs lm-eval, which is not installed: {INSTALL}")


def task_problems(config: Config, degrees: Degrees) -> list[Problem]:
    """Return problems if the ranks that share a text cannot divide the tokens of the longest one equally."""
    length = config.model.max_sequence_length
    shares = (2 * degrees.sequence if degrees.sequence > 1 else 1) * (
        degrees.width if config.parallel.sequence_parallel else 1
    )
    if length % shares == 0:
        return []
    text = f"is {length}, not a multiple of the {shares} parts of a text shared by ranks. Change parallel.cp or tp."
    return [Problem("model.max_sequence_length", text)]
