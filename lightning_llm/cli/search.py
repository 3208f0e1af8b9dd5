"""`plan --search`: find the fastest layout that fits in memory, and write it as a file of the group `parallel`."""

import argparse
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
from lightning_llm.config.compose import compose_tree
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.run import ParallelConfig
from lightning_llm.config.workspace import program
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.check import config_problems, layout_rule_problems
from lightning_llm.plan.degrees import checkpointing_problems
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.plan.search import SearchResult, search
from lightning_llm.plan.search.placement import place_fastest
from lightning_llm.plan.search.pricing import Priced, Pricer
from lightning_llm.plan.search.report import draw_front, layout_name, render_search, search_facts
from lightning_llm.plan.search.space import MICRO_BATCH, Space, no_layout_problems, typed_values
from lightning_llm.plan.time.links import LinkMatrix, read_links, uniform_links
from lightning_llm.run.checked_plan import read_arguments
from lightning_llm.run.resume.branch import with_branch_resolved

GROUP, BATCH = "parallel", "data.global_batch_size"
NAME = re.compile(r"[\w-]{1,100}")


PICTURES = (".png", ".svg")


def search_layouts(arguments: argparse.Namespace) -> int:
    """Print the layouts of the config's world that fit, the fastest first; write the first with --write. Return 0.

    Raises:
        ConfigError: the config is invalid under any layout, there is no layout, or none fits.
    """
    planner = arguments.planner or "exhaustive"
    config = with_branch_resolved(read_arguments(arguments)).checked()
    world = config.world or config.trainer.devices
    chosen, note = _batch_to_choose(arguments, config, world)
    if chosen:
        arguments.overrides = [*arguments.overrides, f"{BATCH}={chosen}"]
        config = read_arguments(arguments).checked()
    space = Space(config, world, typed_values(arguments.overrides, config))
    if problems := [*_output_problems(arguments), *_space_problems(space)]:
        raise ConfigError(problems)
    cluster = config.cluster
    if cluster is None:
        raise ConfigError(Problem("cluster", "is not set. Set cluster=h100_dgx (or a100_dgx, ...)."))
    matrix = _matrix(arguments.links, config, world) if planner == "pipette" else None
    if matrix is not None and len(matrix.names) < world:  # preselect layouts by the median bandwidth of the links
        between = cluster.between_nodes.model_copy(update={"gb_per_second": matrix.median_gb_per_second})
        cluster = cluster.model_copy(update={"between_nodes": between})
    pricer = Pricer(space, cluster)
    found = search(pricer, by_block=planner == "galvatron", every=arguments.pareto is not None)
    if matrix is not None and found.fitting:
        found.fitting = place_fastest(pricer, found.fitting, matrix)
    facts = search_facts(found, pricer, planner) | {"batch_note": note}
    if chosen:
        for each in (*facts["layouts"], *facts["too_large"]):
            each["overrides"] = {BATCH: chosen, **each["overrides"]}
    if found.fitting and arguments.write:
        facts["written"] = str(arguments.write)
        facts["words"] = write_layout(arguments.write, found.fitting[0], planner, chosen)
    if found.fitting and arguments.pareto:
        title = f"{config.model.name} on {world} ranks of {cluster.name}"
        draw_front(found.fitting, pricer.limit_bytes, title, arguments.pareto)
    print(json.dumps(facts, indent=1) if arguments.json else render_search(facts))
    if not found.fitting:
        if problems := list(_without_a_fastest(found, world, arguments)):
            raise ConfigError(problems)
        return 0
    if not arguments.json and arguments.write:
        folder = ["--config-dir", str(arguments.write.parent.parent)]
        print(f"written {arguments.write}: {' '.join([*program('lightning-llm', 'lightning_llm'), 'train', *folder])} "
              f"{' '.join(facts['words'])} ...")  # fmt: skip
    return 0


def _batch_to_choose(arguments: argparse.Namespace, config: Config, world: int) -> tuple[int | None, str | None]:
    """Return (batch to plan with, note on it) if no batch was given and the default is not a multiple of the ranks.

    It is one sequence (or the given `data.micro_batch_size`) per rank, a multiple of every layout's data-parallel
    ranks. (None, None): keep the config's batch. A batch is given by an override, a file of a run, a parent run, or by
    a preset or file of `data` with another one than the default.
    """
    given = {each.key_or_group for each in parse_overrides(arguments.overrides)}
    if arguments.config or config.branch_from is not None or BATCH in given:
        return None, None
    size = config.data.micro_batch_size if MICRO_BATCH in given else 1
    default, batch = compose_tree([])[0].data.global_batch_size, world * size
    if default % batch == 0 or config.data.global_batch_size != default:
        return None, None
    return batch, (
        f"{BATCH} was not given: planned with {batch:,} sequences, {size} for each of {world:,} ranks, instead of "
        f"the default, {default}, which is not a multiple of that. Set {BATCH} to yours."
    )


def _output_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    if arguments.write:
        yield from layout_file_problems(arguments.write, arguments.force)
    picture: Path | None = arguments.pareto
    if picture and picture.suffix not in PICTURES:
        yield Problem("--pareto", f"must end with {' or '.join(PICTURES)}.", picture)
    elif picture and picture.is_dir():
        yield Problem("--pareto", "is a folder. Choose another name.", picture)
    elif picture and not picture.absolute().parent.is_dir():
        yield Problem("--pareto", f"the folder {picture.parent} does not exist. Create it first.", picture)


def _space_problems(space: Space) -> list[Problem]:
    """Return problems of any layout: no cluster, no layout of that many ranks, contradictory keys."""
    config = space.config
    if config.cluster is None:
        text = "is not set, but a search needs it to estimate step times. Set cluster=h100_dgx (or a100_dgx, ...)."
        return [Problem("cluster", text)]
    listed = list(checkpointing_problems(config.parallel, config.model.num_layers))  # the search keeps this key
    first = next(space.choices(), None)
    if first is None:
        return [*no_layout_problems(space), *listed]
    found = DerivedConfig(space.config_of(first))
    of_layout = set(layout_rule_problems(found))
    return [*listed, *(problem for problem in config_problems(found) if problem not in of_layout)]


def _matrix(file: Path | None, config: Config, world: int) -> LinkMatrix:
    per_node = ranks_per_node(config)
    if config.cluster is None or world % per_node:
        text = f"must be a multiple of the {per_node} ranks per machine, for --planner pipette."
        raise ConfigError(Problem("world", text, world))
    machines = world // per_node
    if file is None:
        return uniform_links(machines, config.cluster.between_nodes.gb_per_second)
    return read_links(file, machines, world)


def _without_a_fastest(found: SearchResult, world: int, arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield problems of a search that timed no layout: none fits, or --write or --pareto needs a time."""
    if not found.emulated:
        yield _nothing_fits(found, world)
        return
    for option in ("write", "pareto"):
        if getattr(arguments, option):
            text = (
                "needs a layout with a known step time, but all that fit are emulated (reasons above). Remove it, or "
                "choose a precision that runs natively there (see plan --matrix)."
            )
            yield Problem(f"--{option}", text)


def _nothing_fits(found: SearchResult, world: int) -> Problem:
    if not found.missing:
        return Problem("world", "every layout of that many ranks is rejected, see above. Use another number.", world)
    text = "no layout of that many ranks fits in memory; the closest are above. Use more or larger devices."
    return Problem("world", text, world)


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


def write_layout(file: Path, priced: Priced, planner: str, batch: int | None = None) -> list[str]:
    """Write the layout to `file` atomically and return the overrides that select it, with the chosen `batch` if any.

    Raises:
        ConfigError: it cannot be written.
    """
    overrides = [f"{GROUP}={file.stem}", f"data.micro_batch_size={priced.choice.micro_batch_size}"]
    overrides += [f"{BATCH}={batch}"] if batch else []
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
