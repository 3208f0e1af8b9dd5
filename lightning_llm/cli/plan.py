"""The verb `plan`: a run, a sweep or every recipe on every GPU, described; one step of it, dry; a layout, searched."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError
from lightning_llm.config.schema import Config
from lightning_llm.plan.memory.accounting import ACCOUNTINGS, OURS
from lightning_llm.plan.resolve import matrix_of
from lightning_llm.plan.text.describe import matrix_facts, render_matrix
from lightning_llm.plan.text.notes import notes
from lightning_llm.plan.text.report import plan_facts, render
from lightning_llm.run.checked_plan import checked_plan

CONV1D = "GPT2", "OpenAIGPT"
"""Architectures of transformers whose linears, c_attn, c_proj and c_fc, keep [inputs, outputs]."""


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of one run; with --matrix, -m, --search or --tensor-axes, what these say.

    As text or, with --json, as data; with --dry-run, with what its ranks do in one step, counted.

    Raises:
        ConfigError: options that do not go together, or else what is wrong with the config.
    """
    if problems := list(_option_problems(arguments)):
        raise ConfigError(problems)
    if arguments.tensor_axes:
        return _print_tensor_axes(arguments.tensor_axes, _ranks(arguments.overrides), as_data=arguments.json)
    if arguments.search:
        from lightning_llm.cli.search import search_layouts

        return search_layouts(arguments)
    if arguments.multirun:
        from lightning_llm.sweep.outline import outline

        return outline(arguments)
    planned = checked_plan(arguments, to_train=False)
    if arguments.matrix:
        made = matrix_of(planned.config)
        print(json.dumps(matrix_facts(made), indent=1) if arguments.json else render_matrix(made))
        return 0
    if arguments.script:
        from lightning_llm.run.launch.slurm import script_problems

        if problems := script_problems(planned.config, arguments.script):
            raise ConfigError(problems)
    of_start, start_lines = _of_start(planned.config, None if arguments.config else arguments.overrides)
    facts = plan_facts(planned, ACCOUNTINGS[arguments.accounting]) | of_start
    lines = [*notes(planned, to_train=False), *start_lines]
    if arguments.dry_run:
        from lightning_llm.dry_run.ranks import dry_run, render_counts

        try:
            facts["dry_run"] = dry_run(planned)
        except RanksFailedError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.code
        lines.append(render_counts(facts))
    if arguments.script:
        from lightning_llm.run.launch.slurm import write_script

        seconds = facts["step_seconds"]["total"] * facts["max_steps"] if facts.get("step_seconds") else None
        lines += write_script(planned.config, arguments.script, seconds)
        facts["script"] = str(arguments.script.absolute())
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join([render(facts), *lines]))
    return 0


def _of_start(config: Config, words: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return what a run goes on from, another's checkpoint or its own, as data and as lines.

    Raises:
        ConfigError: `train` refuses to.
    """
    if config.resume is None and config.branch_from is None and not Path(config.run.dir).is_dir():
        return {}, []
    from lightning_llm.run.resume.branch import branch_facts  # these import what other plans do without
    from lightning_llm.run.resume.resume_plan import branch_lines, planned_start

    start, lines = planned_start(config, words)
    if start.trunk is None:
        return {}, lines
    return branch_facts(config, start), [*lines, *branch_lines(config, start)]


def _option_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield which options do not go together: memory is of one run, a dry run of one of this trainer's."""
    many = "--matrix" if arguments.matrix else "-m" if arguments.multirun else None
    foreign = arguments.accounting != OURS.name
    if arguments.dry_run and many:
        yield Problem("--dry-run", f"is of one run, and {many} of many. Leave one of them out.")
    if foreign and many:
        yield Problem("--accounting", f"counts the memory of one run, and {many} is of many. Leave one of them out.")
    if arguments.dry_run and foreign:
        text = f"counts what this trainer does, and --accounting {arguments.accounting} is another's. Leave one out."
        yield Problem("--dry-run", text)
    others = {"-m": arguments.multirun, "--matrix": arguments.matrix, "--search": arguments.search}
    for option in [name for name, given in others.items() if given and arguments.script]:
        yield Problem("--script", f"writes the job of one run, and {option} is of many. Leave one of them out.")
    yield from _search_problems(arguments)
    if arguments.tensor_axes:
        yield from _tensor_axes_problems(arguments, bool(foreign or many))


def _search_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield which options go with a search, or with one planner, alone."""
    given = {f"--{name}": getattr(arguments, name) for name in ("planner", "links", "write", "force", "pareto")}
    if not arguments.search:
        for option, value in given.items():
            if value:
                yield Problem(option, "is of a search. Add --search, or leave it out.")
        return
    for option, chosen in (
        ("--matrix", arguments.matrix),
        ("-m", arguments.multirun),
        ("--dry-run", arguments.dry_run),
        ("--accounting", arguments.accounting != OURS.name),
    ):
        if chosen:
            yield Problem(
                "--search",
                f"looks for a layout of this trainer's, and {option} describes given ones. Leave one of them out.",
            )
    if arguments.links and arguments.planner != "pipette":
        yield Problem("--links", "has the links that --planner pipette places ranks on. Add that, or leave it out.")
    if arguments.pareto and arguments.planner == "pipette":
        text = "draws every layout that fits, and --planner pipette times but the few that it places. Leave one out."
        yield Problem("--pareto", text)
    if arguments.force and not arguments.write:
        yield Problem("--force", "replaces the file of --write. Add that, or leave it out.")


def _tensor_axes_problems(arguments: argparse.Namespace, others: bool) -> Iterator[Problem]:
    """Yield what goes not with --tensor-axes: all but a number of ranks."""
    words = [word for word in arguments.overrides if not word.startswith("parallel.tp=")]
    if words or others or arguments.search or arguments.dry_run or arguments.config or arguments.script:
        text = f"looks at the weights in {arguments.tensor_axes}, for parallel.tp=N ranks. Leave the rest out."
        yield Problem("--tensor-axes", text)
    for word in arguments.overrides:
        if word.startswith("parallel.tp=") and not re.fullmatch(r"parallel\.tp=0*[1-9]\d*", word):
            yield Problem(
                "parallel.tp", f"is {word.removeprefix('parallel.tp=')!r}, must be a whole number, at least 1."
            )


def _ranks(words: Sequence[str]) -> int:
    """Return how many ranks share each weight, of the words that `_tensor_axes_problems` lets pass."""
    return int(words[-1].removeprefix("parallel.tp=")) if words else 1


def _print_tensor_axes(folder: Path, ranks: int, *, as_data: bool) -> int:
    """Print which side of each weight in `folder` a tensor-parallel group of `ranks` would share. Return 0.

    Raises:
        ConfigError: there are no safetensors files, or damaged ones.
    """
    from lightning_llm.model.weights.files import open_files  # what other plans do without
    from lightning_llm.plan.axes.tp import alike, style_of, tensor_axes

    shapes = {name: entry.shape for name, entry in open_files(folder).entries.items()}
    modules = {name.rpartition(".")[0] for name in shapes} if _has_conv1d(folder) else set()
    axes = tensor_axes(shapes, ranks, [module for module in modules if module.rpartition(".")[2].startswith("c_")])
    if as_data:
        print(json.dumps({"tensor_parallel_axes": axes}, indent=1))
        return 0
    rows = [(name, axis, style_of(name, axis), f"{count}") for (name, axis), count in alike(axes).items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _has_conv1d(folder: Path) -> bool:
    file = folder / "config.json"
    if not file.is_file():
        return False
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("architectures") or [""]
    except (ValueError, AttributeError):
        return False
    return isinstance(named, list) and str(named[0]).startswith(CONV1D)
