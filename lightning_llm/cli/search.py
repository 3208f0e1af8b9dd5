"""`plan --search`: find the fastest layout that fits in memory, and write it as a file of the group `parallel`."""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import program
from lightning_llm.plan.check import config_problems, layout_rule_problems
from lightning_llm.plan.degrees import checkpointing_problems
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.plan.search.galvatron import mix_by_block
from lightning_llm.plan.search.layout_file import layout_file_problems, write_layout
from lightning_llm.plan.search.placement import place_fastest
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.report import draw_front, render_search, search_facts
from lightning_llm.plan.search.search import SearchResult, search
from lightning_llm.plan.search.space import Space, no_layout_problems, typed_values
from lightning_llm.plan.time.links import LinkMatrix, read_links, uniform_links
from lightning_llm.run.checked_plan import read_arguments
from lightning_llm.run.resume.branch import with_branch_resolved

PICTURES = (".png", ".svg")


def search_layouts(arguments: argparse.Namespace) -> int:
    """Print the layouts of the config's world that fit, the fastest first; write the first with --write. Return 0.

    Raises:
        ConfigError: the config is invalid under any layout, there is no layout, or none fits.
    """
    planner = arguments.planner or "exhaustive"
    config = with_branch_resolved(read_arguments(arguments)).checked()
    world = config.world or config.trainer.devices
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
    mix = partial(mix_by_block, pricer) if planner == "galvatron" else None
    found = search(pricer, mix, every=arguments.pareto is not None)
    if matrix is not None and found.fitting:
        found.fitting = place_fastest(pricer, found.fitting, matrix)
    facts = search_facts(found, pricer, planner)
    if found.fitting and arguments.write:
        facts["written"] = str(arguments.write)
        facts["words"] = write_layout(arguments.write, found.fitting[0], planner)
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
        return Problem("world", "every layout of that many ranks is rejected; the reasons are above.", world)
    text = "no layout of that many ranks fits in memory; the closest are above. Use more or larger devices."
    return Problem("world", text, world)
