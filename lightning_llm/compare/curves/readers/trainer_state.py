"""Reader of `trainer_state.json`, which Hugging Face's Trainer writes into each checkpoint and on `save_state()`."""

import json
from pathlib import Path
from typing import Any

from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step
from lightning_llm.compare.curves.readers.cells import number, open_text
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader

FILE = "trainer_state.json"
SPEEDS = ("_runtime", "_per_second", "total_flos")
FILTER = (
    "The Trainer replaces losses that are not finite by the mean of the others, unless logging_nan_inf_filter is false."
)


def recognizes(source: LogSource) -> bool:
    """Return whether it is such a file, or a checkpoint or output folder of the Trainer."""
    if source.is_folder and source.path is not None:
        return bool(_files(source.path))
    return (
        source.first_line.strip().startswith("{") and '"log_history"' in source.head and '"global_step"' in source.head
    )


def read(source: LogSource) -> LoggedTable:
    """Return all numbers of `log_history`. Of the checkpoints of an output folder, the latest is read.

    Raises:
        ValueError: no such file, or it has no history.
    """
    if source.path is None:
        raise ValueError("it is not a file")
    files = _files(source.path) if source.is_folder else [source.path]
    states = [_state(file) for file in files]
    state = max(states, key=lambda each: each.get("global_step") or 0)
    log = Attempts()
    for at, entry in enumerate(state["log_history"], 1):
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            raise ValueError(f"entry {at} of log_history has no whole-numbered 'step'")
        if "train_loss" in entry and "loss" not in entry:  # summary of `train`, with the mean loss of all its steps
            continue
        values = {name: number(value) for name, value in entry.items() if name != "step" and not name.endswith(SPEEDS)}
        log.add(f"entry {at}", step, {name: value for name, value in values.items() if value is not None})
    if not log.rows:
        raise ValueError("its log_history is empty. Train with logging_steps=1, so that each step is logged.")
    settings, notes = {}, list(log.notes())
    for key, name in (("max_steps", "total_steps"), ("logging_steps", "logging_steps")):
        if isinstance(state.get(key), int | float):
            settings[name] = state[key]
    if settings.get("logging_steps", 1) != 1:
        notes.append(f"Each training loss is the mean over the last {settings['logging_steps']} steps (logging_steps).")
    return LoggedTable("trainer_state", source.address, columns_by_step(log.rows), settings, (*notes, FILTER))


def _files(folder: Path) -> list[Path]:
    own = folder / FILE
    return [own] if own.is_file() else sorted(folder.glob(f"checkpoint-*/{FILE}"))


def _state(file: Path) -> dict[str, Any]:
    with open_text(file) as opened:
        state = json.load(opened)
    if not isinstance(state, dict) or not isinstance(state.get("log_history"), list):
        raise ValueError(f"{file} has no list log_history")
    return state


READER = Reader("trainer_state", recognizes, read)
