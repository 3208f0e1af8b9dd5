"""Reader of TensorBoard event files, which uses the package tensorboard."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_llm.compare.curves.named import logs_within
from lightning_llm.compare.curves.readers.attempts import Attempts, Rows, columns_by_step, merged
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader
from lightning_llm.config.config_hash import flatten

FIRST_EVENT = b"brain.Event:"
"""The first record of an event file has "brain.Event:2", its version."""
MARK = "tfevents"
"""TensorBoard itself reads only files with this in their names."""
VERSUS_SAMPLES = " vs samples"
"""Ending of tags of Megatron-LM with samples as steps; the same values are logged by step, too."""
LONGEST_SETTING = 200


@dataclass
class EventFile:
    """Content of one event file. `points`: (step, {tag: value}) in order; `settings`: hyperparameters in it.

    `purged_at`: {index of the point before which the program restarted: the step}; `first_time`, `last_time`: Unix
    times of its first and last event.
    """

    path: Path
    first_time: float = math.inf
    last_time: float = -math.inf
    points: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    purged_at: dict[int, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def recognizes(source: LogSource) -> bool:
    """Return whether `source` is an event file, or a folder with one at any depth."""
    if source.path is None:
        return False
    return next(_event_files(source.path), None) is not None


def _event_files(path: Path) -> Iterator[Path]:
    files = [path] if path.is_file() else (Path(at) / name for at, _, names in os.walk(path) for name in sorted(names))
    for file in files:
        if path.is_file() or MARK in file.name:
            with file.open("rb") as opened:
                if FIRST_EVENT in opened.read(64):
                    yield file


def read(source: LogSource) -> LoggedTable:
    """Return all scalars by step, with the tags as column names.

    Several event files in a folder, or folders that continue each other, are one run that resumed.

    Raises:
        ValueError: no scalars, several runs, or tensorboard is not installed.
    """
    if source.path is None:
        raise ValueError("it is not a folder")
    folders: dict[Path, list[EventFile]] = {}
    for path in _event_files(source.path):
        if (events := _read(path)).points:
            folders.setdefault(path.parent, []).append(events)
    if not folders:
        raise ValueError("it has no scalars. Log the loss with add_scalar, and flush or close the writer.")
    notes: list[str] = []
    if len(folders) > 1 and source.path in folders:
        others = len(folders) - 1
        notes.append(f"Scalars in {others} of its subfolders are left out.")
        folders = {source.path: folders[source.path]}
    elif len(folders) > 1 and not _continues(folders):
        names = ", ".join(sorted(str(each.relative_to(source.path)) for each in folders)[:8])
        raise ValueError(f"it has {len(folders)} runs: {names}. Name the folder of one. {logs_within(source.path)}")
    files = sorted((each for group in folders.values() for each in group), key=lambda each: each.first_time)
    rows, resumed = _rows(files)
    settings: dict[str, Any] = {}
    for each in files:
        settings |= each.settings
    if len(files) > 1:
        notes.append(f"It has {len(files)} event files, read in the order of their first events.")
    return LoggedTable("tensorboard", source.address, columns_by_step(rows), settings, (*resumed, *notes))


def _continues(folders: dict[Path, list[EventFile]]) -> bool:
    """Return whether each folder begins after the first step of the one before it, and after its last event."""
    order = sorted(folders.values(), key=lambda group: min(each.first_time for each in group))
    firsts = [min(step for each in group for step, _ in each.points) for group in order]
    begun = [min(each.first_time for each in group) for group in order]
    ended = [max(each.last_time for each in group) for group in order]
    return all(
        firsts[at] > firsts[at - 1] and begun[at] >= ended[at - 1] and _tags(order[at]) & _tags(order[at - 1])
        for at in range(1, len(order))
    )


def _tags(group: list[EventFile]) -> set[str]:
    return {tag for each in group for _, values in each.points for tag in values}


def _rows(files: list[EventFile]) -> tuple[Rows, tuple[str, ...]]:
    """Return the rows of files in order; files written at the same time are of several ranks and must agree."""
    at_once = any(later.first_time < earlier.last_time for earlier, later in pairwise(files))
    writers: dict[str, Attempts] = {}
    for file in files:
        log = writers.setdefault(file.path.name if at_once else "", Attempts())
        log.starts()
        for row, (step, values) in enumerate(file.points):
            if row in file.purged_at:
                log.starts()
            log.add(file.path.name, step, values)
    return merged(writers, "event file")


def _read(path: Path) -> EventFile:
    """Return the scalars of an event file; an incomplete last record is ignored.

    Raises:
        ValueError: tensorboard is not installed, or a record is damaged, at which tensorboard would end the file.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise ValueError("TensorBoard events need the package tensorboard. Run: pip install tensorboard") from error
    found, loaded = EventFile(path), 0
    for event in EventFileLoader(str(path)).Load():
        loaded += 1
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            found.purged_at[len(found.points)] = event.step
        for value in event.summary.value:
            plugin = value.metadata.plugin_data.plugin_name
            if not value.HasField("tensor") or plugin not in ("scalars", "text"):
                continue
            array = make_ndarray(value.tensor)
            if plugin == "text":
                _add_setting(found.settings, value.tag, array)
            elif array.size == 1 and not value.tag.endswith(VERSUS_SAMPLES):
                found.first_time = min(found.first_time, event.wall_time)
                found.last_time = max(found.last_time, event.wall_time)
                _add_point(found, event.step, value.tag, float(array.reshape(())))
    if loaded < (complete := _complete_records(path)):
        raise ValueError(f"record {loaded + 1} of {complete} in {path.name} is damaged. Copy the file again.")
    return found


def _complete_records(path: Path) -> int:
    """Return the number of complete records, by their lengths: uint64 length, CRC, data, CRC, with CRCs of 4 bytes."""
    count, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            end = file.tell() + int.from_bytes(head[:8], "little") + 4
            if end > size:
                break
            file.seek(end)
            count += 1
    return count


def _add_point(found: EventFile, step: int, tag: str, value: float) -> None:
    """Add a scalar to the row of its step, if that is the latest and has no value of the tag yet."""
    value = value if math.isfinite(value) else math.inf
    if found.points and found.points[-1][0] == step and tag not in found.points[-1][1]:
        found.points[-1][1][tag] = value
    else:
        found.points.append((step, {tag: value}))


def _add_setting(settings: dict[str, Any], tag: str, array: Any) -> None:
    """Add the text that a trainer logs: the Trainer's arguments as one JSON text, Megatron-LM's as one text each."""
    texts = [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
    text, name = texts[0] if len(texts) == 1 else "", tag.removesuffix("/text_summary")
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, dict):
        settings |= {key: value for key, value in flatten(values).items() if value is not None}
    elif text and len(text) <= LONGEST_SETTING:
        settings[name] = int(text) if text.isdigit() else text


READER = Reader("tensorboard", recognizes, read)
