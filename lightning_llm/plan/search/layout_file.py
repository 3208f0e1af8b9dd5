"""Write a found layout as a file of the group `parallel`, for `train parallel=NAME --config-dir DIR`."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.folders import nearest_existing
from lightning_llm.base.hardware import GIB
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema.run import ParallelConfig
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.search.pricing import Priced
from lightning_llm.plan.search.report import layout_name

GROUP = "parallel"
NAME = re.compile(r"[\w-]{1,100}")


def layout_file_problems(file: Path, force: bool) -> Iterator[Problem]:
    """Yield why the layout cannot be written to `file`."""
    folder = nearest_existing(file.absolute().parent)
    if file.suffix != ".yaml" or file.parent.name != GROUP or not NAME.fullmatch(file.stem):
        yield Problem(
            "--write",
            f"must be DIR/{GROUP}/NAME.yaml, with NAME of letters, digits, - and _. Choose such a path.",
            file,
        )
    elif file.stem in option_files(GROUP):
        yield Problem("--write", f"{GROUP}={file.stem} is a shipped layout. Choose another name.", file)
    elif file.is_dir() or not folder.is_dir():
        yield Problem("--write", "cannot be created. Choose another folder or name.", file)
    elif file.exists() and not force:
        yield Problem("--write", "exists. Add --force to replace it, or choose another name.", file)
    elif not os.access(folder, os.W_OK):
        yield Problem("--write", f"{folder} is not writable. Choose another folder.", file)


def write_layout(file: Path, priced: Priced, planner: str) -> list[str]:
    """Write the layout to `file` atomically and return the overrides that select it.

    Raises:
        ConfigError: it cannot be written.
    """
    overrides = [f"{GROUP}={file.stem}", f"data.micro_batch_size={priced.choice.micro_batch_size}"]
    partial = file.with_name(f"{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(layout_text(file.stem, priced, planner, overrides), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise ConfigError(Problem("--write", f"cannot be written: {error}. Choose another.", file)) from error

    return overrides


def layout_text(name: str, priced: Priced, planner: str, overrides: list[str]) -> str:
    """Return the content of the file: a comment on the search, and every key that differs from the defaults."""
    config, cluster = priced.plan.config, priced.plan.config.cluster
    if cluster is None or priced.time is None:
        raise ValueError("the layout has no time")
    comment = [
        f"{layout_name(priced)}: found by `plan --search --planner {planner}`",
        f"for {config.model.name}, {config.data.global_batch_size} sequences of {config.data.sequence_length} tokens a "
        f"step, {config.precision.name}, on {priced.plan.degrees.world} ranks of {cluster.name}.",
        f"Planned: {priced.seconds:.4g} s a step at best, MFU {priced.time.mfu:.1%} of "
        f"{priced.time.needed.text()}, {priced.memory_bytes / GIB:.1f} GiB a rank.",
        f"Use it with: {' '.join(overrides)}",
    ]
    if priced.placement:
        comment.append(f"Machines in the order of ranks: {', '.join(priced.placement.order)}")
    body = "".join(_line(key, value) for key, value in _values(name, priced).items())
    own = config.parallel.compile != config.trainer.compile
    body += f"compile: {json.dumps(config.parallel.compile) if own else '${trainer.compile}'}\n"
    return "".join(f"# {line}\n" for line in comment) + body


def _values(name: str, priced: Priced) -> dict[str, Any]:
    """Return the keys that differ from the defaults, and always degrees, ZeRO stage and reduction."""
    parallel = priced.plan.config.parallel
    always = (*AXES, "zero_stage", "reduction")
    default = ParallelConfig(name=name).model_dump()
    values = parallel.model_dump(mode="json", exclude={"name", "compile"})
    return {"name": name} | {key: each for key, each in values.items() if key in always or each != default[key]}


def _line(key: str, value: Any) -> str:
    if isinstance(value, list):
        return fill(f"{key}: [{', '.join(value)}]", 120, subsequent_indent="  ") + "\n"
    return yaml.safe_dump({key: value})
