"""The verb `plan`: describe a run, a sweep or every recipe on every GPU; dry-run one step; search for a layout."""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, RanksFailedError
from lightning_llm.config.schema import Config
from lightning_llm.plan.describe import matrix_facts, render_matrix
from lightning_llm.plan.memory import ACCOUNTINGS, OURS
from lightning_llm.plan.report import notes, plan_facts, render
from lightning_llm.plan.resolve import matrix_of
from lightning_llm.run.checked_plan import checked_plan

CONV1D = "GPT2", "OpenAIGPT"
"""Architectures of transformers that store the linears c_attn, c_proj and c_fc as [inputs, outputs]."""


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of one run, or the views of --matrix, -m, --search and --tensor-axes; return 0.

    Text, or JSON with --json. With --dry-run the plan includes the counts of one simulated step.

    Raises:
        ConfigError: the options exclude each other, or the config is invalid.
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


def _of_start(config: Config, overrides: Sequence[str] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the checkpoint that a run resumes or branches from, as data and as lines.

    Raises:
        ConfigError: `train` would reject it.
    """
    if config.resume is None and config.branch_from is None and not Path(config.run.dir).is_dir():
        return {}, []
    from lightning_llm.run.resume.branch import branch_facts  # slow imports that other plans do not need
    from lightning_llm.run.resume.resume_plan import branch_lines, planned_start

    start, lines = planned_start(config, overrides)
    if start.parent is None:
        return {}, lines
    return branch_facts(config, start), [*lines, *branch_lines(config, start)]


def _option_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield a problem for each pair of options that exclude each other."""
    many = "--matrix" if arguments.matrix else "-m" if arguments.multirun else None
    foreign = arguments.accounting != OURS.name
    if arguments.dry_run and many:
        yield Problem("--dry-run", f"needs a single run, but {many} covers several. Remove one of them.")
    if foreign and many:
        yield Problem("--accounting", f"needs a single run, but {many} covers several. Remove one of them.")
    if arguments.dry_run and foreign:
        text = f"cannot be used with --accounting {arguments.accounting}, another program. Remove one of them."
        yield Problem("--dry-run", text)
    others = {"-m": arguments.multirun, "--matrix": arguments.matrix, "--search": arguments.search}
    for option in [name for name, given in others.items() if given and arguments.script]:
        yield Problem("--script", f"needs a single run, but {option} covers several. Remove one of them.")
    yield from _search_problems(arguments)
    if arguments.tensor_axes:
        yield from _tensor_axes_problems(arguments, bool(foreign or many))


def _search_problems(arguments: argparse.Namespace) -> Iterator[Problem]:
    """Yield problems of the options of a search: options without --search, or of another planner."""
    given = {f"--{name}": getattr(arguments, name) for name in ("planner", "links", "write", "force", "pareto")}
    if not arguments.search:
        for option, value in given.items():
            if value:
                yield Problem(option, "has no effect without --search. Add --search, or remove it.")
        return
    for option, chosen in (
        ("--matrix", arguments.matrix),
        ("-m", arguments.multirun),
        ("--dry-run", arguments.dry_run),
        ("--accounting", arguments.accounting != OURS.name),
    ):
        if chosen:
            yield Problem("--search", f"cannot be used with {option}. Remove one of them.")
    if arguments.links and arguments.planner != "pipette":
        yield Problem("--links", "has no effect without --planner pipette. Add that, or remove it.")
    if arguments.pareto and arguments.planner == "pipette":
        text = "plots every layout that fits, but --planner pipette times only a few. Remove one of them."
        yield Problem("--pareto", text)
    if arguments.force and not arguments.write:
        yield Problem("--force", "has no effect without --write. Add that, or remove it.")


def _tensor_axes_problems(arguments: argparse.Namespace, others: bool) -> Iterator[Problem]:
    """Yield problems of options given together with --tensor-axes, which allows only parallel.tp=N."""
    further = [each for each in arguments.overrides if not each.startswith("parallel.tp=")]
    if further or others or arguments.search or arguments.dry_run or arguments.config or arguments.script:
        text = "allows only parallel.tp=N with it. Remove the other options and overrides."
        yield Problem("--tensor-axes", text)
    for each in arguments.overrides:
        if each.startswith("parallel.tp=") and not re.fullmatch(r"parallel\.tp=0*[1-9]\d*", each):
            yield Problem("parallel.tp", "must be an integer of at least 1.", each.removeprefix("parallel.tp="))


def _ranks(overrides: Sequence[str]) -> int:
    """Return the tensor-parallel degree given by `overrides`, which `_tensor_axes_problems` has checked."""
    return int(overrides[-1].removeprefix("parallel.tp=")) if overrides else 1


def _print_tensor_axes(folder: Path, ranks: int, *, as_data: bool) -> int:
    """Print the axis along which a tensor-parallel group of `ranks` splits each weight in `folder`; return 0.

    Raises:
        ConfigError: safetensors files are missing or damaged.
    """
    from lightning_llm.model.weights.files import open_files  # slow, and not needed by other plans
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
